"""Group B: state that a walk over flat buffers, trainable weights or a state dict misses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from pictures import DTYPES, WRAPPERS, change_everything, flat_buffers, layer_in, picture
from torch import nn

from mcore_snap import load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.chunks import DDPLike, Layer
from mcore_snap.testing.raw_bytes import flip, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcore_snap.testing.chunks import Backing

wrapped = pytest.mark.parametrize("wrapper", WRAPPERS)
typed = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@wrapped
@typed
def test_expert_weights_come_back(wrapper: str, dtype: torch.dtype) -> None:
    """verl-project/verl #1766: experts are in a list of flat buffers of their own."""
    models = WRAPPERS[wrapper](Layer(3, dtype))
    expert = layer_in(models).out.weight
    held, snap = to_bytes(expert), snapshot(model_tree(models))
    change_everything(models)
    load(model_tree(models), snap)
    assert to_bytes(expert) == held


def test_a_chunk_of_experts_only_comes_back() -> None:
    """verl-project/verl #1766: the dense list is empty then, and the expert list has one buffer per dtype."""
    module = nn.ModuleList(nn.Linear(2, 2, bias=False, dtype=dtype) for dtype in DTYPES)
    for param in module.parameters():
        vars(param)["allreduce"] = False
    chunk = DDPLike(module)
    names = list(named_leaves(model_tree(chunk)))
    assert names == [f"chunks[0].expert_parallel_buffers[{i}]" for i in range(len(DTYPES))]
    before, snap = picture(chunk), snapshot(model_tree(chunk))
    change_everything(chunk)
    load(model_tree(chunk), snap)
    assert picture(chunk) == before


@wrapped
@typed
def test_a_frozen_base_comes_back(wrapper: str, dtype: torch.dtype) -> None:
    """verl-project/verl #5412, NovaSky-AI/SkyRL #2206: DDP buckets what is trained, but an adapter may be merged into
    what is not.
    """
    models = WRAPPERS[wrapper](Layer(3, dtype))
    before, snap = picture(models), snapshot(model_tree(models))
    with torch.no_grad():
        layer_in(models).base.weight.add_(1)
    assert picture(models) != before
    load(model_tree(models), snap)
    assert picture(models) == before


@pytest.mark.parametrize("backing", ["flat", "none"])
def test_a_chunk_with_nothing_to_train_comes_back(backing: Backing) -> None:
    """NovaSky-AI/SkyRL #2062: a reference model is all frozen, so that no flat buffer holds anything of it."""
    chunk = DDPLike(Layer().requires_grad_(requires_grad=False), backing)
    assert not list(flat_buffers(chunk))
    before, snap = picture(chunk), snapshot(model_tree(chunk))
    change_everything(chunk)
    load(model_tree(chunk), snap)
    assert picture(chunk) == before


@typed
def test_without_a_flat_buffer_every_weight_is_a_leaf(dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #2164, radixark/miles #2042: `param_data` is None without the distributed optimizer; weights
    are then leaves.
    """
    chunk = DDPLike(Layer(3, dtype), "none")
    assert all(buffer.param_data is None for buffer in flat_buffers(chunk))
    leaves = named_leaves(model_tree(chunk))
    for name, param in chunk.named_parameters():
        assert leaves[f"chunks[0].parameters['{name}']"].data_ptr() == param.data_ptr()
    before, snap = picture(chunk), snapshot(model_tree(chunk))
    change_everything(chunk)
    load(model_tree(chunk), snap)
    assert picture(chunk) == before


def test_a_flat_buffer_counts_for_the_weights_that_it_holds() -> None:
    """radixark/miles #2042: which weights lie in a flat buffer is read from their memory, one by one."""
    chunk = DDPLike(Layer())
    moved = chunk.module.fc.weight  # type: ignore[union-attr]
    moved.data = moved.data.clone()  # type: ignore[union-attr, operator]
    names = [name for name in named_leaves(model_tree(chunk)) if "parameters" in name or "buffers[0]" in name]
    assert [name.split(".", 1)[1] for name in names] == [
        "buffers[0]",
        "expert_parallel_buffers[0]",
        "parameters['module.fc.weight']",
        "parameters['module.base.weight']",
    ]
    before, snap = picture(chunk), snapshot(model_tree(chunk))
    change_everything(chunk)
    load(model_tree(chunk), snap)
    assert picture(chunk) == before


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "rotary table": lambda: torch.linspace(0, 1, 6).view(2, 3),
    "expert bias": lambda: torch.tensor([0.5, -0.0]).bfloat16(),
    "counter": lambda: torch.tensor(5),
    "token counts": lambda: torch.tensor([3, 1], dtype=torch.int32),
    "mask": lambda: torch.tensor([True, False]),
    "fp8 scale": lambda: torch.tensor([1.0]).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("wrapper", ["bare", "flat buffers", "no flat buffers"])
def test_registered_buffers_come_back(wrapper: str, kind: str, persistent: bool) -> None:
    """vllm-project/vllm #16564, #16889, pytorch/torchtitan #1403, flagos-ai/FlagScale #412: also those that no state
    dict lists, of any dtype.
    """
    layer = Layer()
    layer.fc.register_buffer("odd", BUFFERS[kind](), persistent=persistent)
    models = WRAPPERS[wrapper](layer)
    before, snap = picture(models), snapshot(model_tree(models))
    change_everything(models)
    with swapped(model_tree(models), snap):
        assert picture(models) == before
    load(model_tree(models), snap)
    assert picture(models) == before


class Rotary(nn.Module):
    """Makes its table of sines anew, with another shape, when a sequence is longer."""

    def __init__(self) -> None:
        """Start with a short table, and with frequencies that do not follow from the length."""
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1]), persistent=False)
        self.grow(2)

    def grow(self, length: int) -> None:
        """Make the table."""
        self.max_seq_len_cached = length
        self.register_buffer("cos_cached", torch.outer(torch.arange(length), self.inv_freq).cos(), persistent=False)


def test_a_table_that_grew_is_not_taken_back() -> None:
    """vllm-project/vllm #16564: tables that are made anew by length are no weights, and one that grew does not stop a
    load.
    """
    model = nn.ModuleDict({"rotary": Rotary(), "fc": nn.Linear(2, 2)})
    tree = model_tree(model)
    held, snap = to_bytes(model["fc"].weight), snapshot(tree)
    model["rotary"].grow(5)
    table = to_bytes(model["rotary"].cos_cached)
    flip([model["fc"].weight, model["rotary"].inv_freq])
    with swapped(tree, snap):
        assert to_bytes(model["fc"].weight) == held
    load(tree, snap)
    assert to_bytes(model["fc"].weight) == held
    assert to_bytes(model["rotary"].inv_freq) == to_bytes(torch.tensor([1.0, 0.1]))
    assert to_bytes(model["rotary"].cos_cached) == table


@pytest.mark.parametrize("at_load", [True, False])
@pytest.mark.parametrize("at_snapshot", [True, False])
def test_every_chunk_counts_whatever_is_trained(at_snapshot: bool, at_load: bool) -> None:
    """vllm-project/vllm #49774, NovaSky-AI/SkyRL #2206: a draft model beside the main one, and weights frozen or
    thawed in between.
    """
    models = [DDPLike(Layer(3, torch.bfloat16)), Layer(2), DDPLike(Layer(2), "none")]
    names = set(named_leaves(model_tree(models)))
    before = picture(models)
    models[1].requires_grad_(at_snapshot)
    models[0].module.base.requires_grad_(at_snapshot)  # type: ignore[union-attr]
    snap = snapshot(model_tree(models))
    for model in models:
        model.requires_grad_(at_load)
    assert set(named_leaves(model_tree(models))) == names == set(named_leaves(snap))
    change_everything(models)
    load(model_tree(models), snap)
    assert picture(models) == before


def test_tensors_of_ones_own_go_beside_the_tree() -> None:
    """vllm-project/vllm-ascend #17217, #13352, #15208: plain attributes and globals cannot be found, but any pytree
    takes them along.
    """
    layer = Layer()
    layer.cache = torch.arange(3.0)  # type: ignore[assignment]
    helper = SimpleNamespace(
        rotations=[torch.eye(2), torch.ones(2, dtype=torch.float16)], expert_map=torch.tensor([1, 0])
    )
    assert not any("cache" in name for name in named_leaves(model_tree(layer)))
    own = {"model": model_tree(layer), "cache": layer.cache, "helper": [*helper.rotations, helper.expert_map]}
    held, before = [to_bytes(t) for t in (own["cache"], *own["helper"])], picture(layer)
    snap = snapshot(own)
    assert "['cache']" in named_leaves(snap)

    def change() -> None:
        change_everything(layer)
        for tensor in (own["cache"], *own["helper"]):
            tensor.add_(1)

    change()
    with swapped(own, snap):
        assert [to_bytes(t) for t in (layer.cache, *helper.rotations, helper.expert_map)] == held
        assert picture(layer) == before
    assert [to_bytes(t) for t in (layer.cache, *helper.rotations, helper.expert_map)] != held
    load(own, snap)
    assert [to_bytes(t) for t in (layer.cache, *helper.rotations, helper.expert_map)] == held
    assert picture(layer) == before
