"""Group E: shared memory stays shared, addresses stay, and nothing is kept or written twice."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import optree
import pytest
import torch
from pictures import DTYPES, WRAPPERS, change_everything, flat_buffers, gradients, layer_in, memory, picture, places
from torch import nn

from mcore_snap import StructureMismatch, as_numpy, load, model_tree, named_leaves, snapshot, swapped, thaw
from mcore_snap.testing.chunks import DDPLike, Layer
from mcore_snap.testing.raw_bytes import flip, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcore_snap.testing.chunks import Backing


class Tied(nn.Module):
    """Embeddings and the output layer over one weight."""

    def __init__(self, dtype: torch.dtype, *, one_object: bool) -> None:
        """Tie them, as one parameter or as two over the same memory."""
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3, dtype=dtype), nn.Linear(3, 5, bias=False, dtype=dtype)
        self.out.weight = self.embed.weight if one_object else nn.Parameter(self.embed.weight.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("one_object", [True, False])
@pytest.mark.parametrize("backing", [None, "flat", "none"])
def test_tied_weights_stay_tied(backing: Backing | None, one_object: bool, dtype: torch.dtype) -> None:
    """pytorch/pytorch #188346: one memory under two names is one leaf, and still one memory after a load."""
    module = Tied(dtype, one_object=one_object)
    models: nn.Module = module if backing is None else DDPLike(module, backing)
    snap = snapshot(model_tree(models))
    apart = backing == "flat" and not one_object  # wrapping moved each of two parameters to a place of its own
    assert sum(leaf.numel() for leaf in named_leaves(snap).values()) >= (30 if apart else 15)
    assert apart or len(named_leaves(snap)) == 1
    before, where = picture(models), places(models)
    change_everything(models)
    load(model_tree(models), snap)
    assert picture(models) == before
    assert places(models) == where
    assert (module.out.weight is module.embed.weight) == one_object
    assert (module.out.weight.data_ptr() == module.embed.weight.data_ptr()) == (not apart)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_parameters_keep_what_hangs_on_them(wrapper: str) -> None:
    """pytorch/pytorch #117275: `allreduce`, `main_grad` and tensor-parallel marks are gone where a parameter is made
    anew.
    """
    models = WRAPPERS[wrapper](Layer())
    weight = layer_in(models).fc.weight
    vars(weight)["tensor_model_parallel"] = True
    marks, where = dict(vars(weight)), places(models)
    snap = snapshot(model_tree(models))
    with swapped(model_tree(models), snap):
        change_everything(models)
    load(model_tree(models), snap)
    assert vars(layer_in(models).fc.weight) == marks
    assert places(models) == where


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_addresses_and_views_survive(wrapper: str, dtype: torch.dtype) -> None:
    """vllm-project/vllm #48941, #48312, vllm-project/vllm-ascend #7473: captured graphs and closures read the old
    addresses; these stay good.
    """
    models = WRAPPERS[wrapper](Layer(3, dtype))
    captured = [tensor.detach() for _, tensor in memory(models)]
    held = [to_bytes(tensor) for tensor in captured]
    where, snap = places(models), snapshot(model_tree(models))
    change_everything(models)
    load(model_tree(models), snap)
    assert places(models) == where
    assert [to_bytes(tensor) for tensor in captured] == held
    if wrapper == "flat buffers":
        flip(buffer.param_data for buffer in flat_buffers(models))
        assert to_bytes(layer_in(models).fc.weight) != held[0]


def test_a_chunk_whose_buffers_is_a_list() -> None:
    """pytorch/pytorch #139167: on a wrapped chunk `buffers` is a list that hides the method; registered buffers are
    found.
    """
    chunk = DDPLike(Layer())
    with pytest.raises(TypeError):
        chunk.buffers()
    names = {name for name in named_leaves(model_tree(chunk)) if "module_buffers" in name}
    assert names == {"chunks[0].module_buffers['module.scale']", "chunks[0].module_buffers['module.count']"}


OFFSETS: Final = [0, 1, 7]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_small_view_of_much_memory_is_kept_small(dtype: torch.dtype, offset: int) -> None:
    """pytorch/pytorch #40157, #1995, #95278: what is kept or written to a file are the leaves, not the storage they
    lie in.
    """
    much = torch.zeros(100_000, dtype=dtype)
    model = nn.Module()
    for i in range(3):
        start = offset + 10 * i
        model.register_parameter(f"w{i}", nn.Parameter(much[start : start + 10]))
    snap = snapshot(model_tree(model))
    assert sum(array.nbytes for array in _arrays(snap)) == 30 * dtype.itemsize
    assert max(_slabs(snap)) < 1024
    assert sum(leaf.untyped_storage().nbytes() for leaf in named_leaves(thaw(snap)).values()) == 30 * dtype.itemsize
    file = io.BytesIO()
    torch.save(dict(named_leaves(thaw(snap))), file)
    assert file.tell() < 20_000


def _arrays(snap: Any) -> list[Any]:
    return optree.tree_leaves(as_numpy(snap))


def _slabs(snap: Any) -> list[int]:
    return [leaf.untyped_storage().nbytes() for leaf in named_leaves(snap).values()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_flat_buffer_and_its_views_are_kept_once(tied: bool, dtype: torch.dtype) -> None:
    """safetensors/safetensors #379: the bytes kept are those of the flat buffer, and no more."""
    module = Tied(dtype, one_object=True) if tied else nn.Linear(20, 10, dtype=dtype)
    chunk = DDPLike(module)
    (buffer,) = flat_buffers(chunk)
    snap = snapshot(model_tree(chunk))
    assert [array.nbytes for array in _arrays(snap)] == [buffer.param_data.nbytes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("kind", ["side by side", "interleaved", "in one another"])
def test_views_of_one_storage_are_told_apart(kind: str, offset: int, dtype: torch.dtype) -> None:
    """safetensors/safetensors #379: the storage alone does not say what is a duplicate; offset, shape, strides and
    dtype do.
    """
    flat = torch.arange(24.0).to(dtype)
    cut: Callable[[int], torch.Tensor] = {
        "side by side": lambda i: flat[offset + 2 * i : offset + 2 * i + 2],
        "interleaved": lambda i: flat[offset + i : offset + 9 + i : 3],
        "in one another": lambda i: flat[offset + i : offset + 9 - i],
    }[kind]
    model = nn.Module()
    model.a, model.b, model.c = (nn.Parameter(cut(i)) for i in range(3))
    before, snap = picture(model), snapshot(model_tree(model))
    assert len(named_leaves(snap)) == (1 if kind == "in one another" else 3)
    flat.zero_()
    load(model_tree(model), snap)
    assert picture(model) == before


def test_one_memory_in_two_dtypes_is_refused() -> None:
    """safetensors/safetensors #379: a view of a weight as integers is no second weight, and no leaf could name both."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4))
    model.register_buffer("bits", model.w.detach().view(torch.int32)[:2])
    with pytest.raises(StructureMismatch, match=r"module_buffers\['bits'\]"):
        model_tree(model)


@pytest.mark.parametrize("use", ["load", "swapped", "a body that changes gradients"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_left_alone(wrapper: str, use: str) -> None:
    """NVIDIA/Megatron-LM #7383, NovaSky-AI/SkyRL #2063: gradients gathered so far go on, whatever is done to the
    weights in between.
    """
    models = WRAPPERS[wrapper](Layer())
    for buffer in flat_buffers(models):
        buffer.grad_data.fill_(7)
    layer = layer_in(models)
    layer.fc.bias.grad = torch.full((3,), float("nan"))
    snap = snapshot(model_tree(models))
    change_everything(models)
    held = gradients(models)
    if use == "load":
        load(model_tree(models), snap)
    else:
        with swapped(model_tree(models), snap):
            if use != "swapped":
                layer.fc.bias.grad.fill_(3)
                held = gradients(models)
    assert gradients(models) == held
