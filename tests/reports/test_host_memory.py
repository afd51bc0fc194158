"""Group H: a snapshot allocates what it keeps, once, and gives it back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pictures import DTYPES, WRAPPERS, change_everything, flat_buffers, picture
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_snap import HostMemory, as_numpy, default_memory, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.chunks import DDPLike, Layer

if TYPE_CHECKING:
    from collections.abc import Callable


class Allocations(TorchDispatchMode):
    """Counts the storages that are made, in bytes."""

    def __init__(self) -> None:
        """Begin at nothing."""
        super().__init__()
        self.made: list[int] = []
        self._known: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look for storages in the result that no argument has."""
        kwargs = kwargs or {}
        for tensor in self._tensors((args, kwargs)):
            self._known.setdefault(tensor.untyped_storage()._cdata, tensor)
        result = func(*args, **kwargs)
        for tensor in self._tensors(result):
            storage = tensor.untyped_storage()
            if self._known.setdefault(storage._cdata, tensor) is tensor and storage.nbytes():
                self.made.append(storage.nbytes())
        return result

    @staticmethod
    def _tensors(tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


MODELS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "flat buffer": lambda dtype: DDPLike(nn.Linear(200, 100, dtype=dtype)),
    "no flat buffer": lambda dtype: DDPLike(nn.Linear(200, 100, dtype=dtype), "none"),
    "many leaves": lambda dtype: nn.Sequential(*(nn.Linear(50, 50, dtype=dtype) for _ in range(12))),
    "strided": lambda dtype: nn.ParameterDict({"w": nn.Parameter(torch.ones(400, 200, dtype=dtype)[:, ::2])}),
    "transposed": lambda dtype: nn.ParameterDict({"w": nn.Parameter(torch.ones(200, 100, dtype=dtype).t())}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_every_byte_is_allocated_once(kind: str, dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #7007, verl-project/verl #6193: no pageable copy before a second one, and one allocation for
    the whole snapshot.
    """
    model = MODELS[kind](dtype)
    tree = model_tree(model)
    need = sum(leaf.nbytes for leaf in named_leaves(tree).values())
    memory = HostMemory()
    with Allocations() as counted:
        snap = snapshot(tree, memory=memory)
    assert counted.made == []
    assert need <= memory.stats().leased <= 1.05 * need
    assert memory.stats().peak == memory.stats().leased
    assert len(memory.stats().leases) == 1
    assert sum(array.nbytes for array in tree_leaves(as_numpy(snap))) == need


@pytest.mark.parametrize("kind", MODELS)
def test_a_load_allocates_nothing(kind: str) -> None:
    """verl-project/verl #6193: no second copy on the way back."""
    model = MODELS[kind](torch.bfloat16)
    tree = model_tree(model)
    snap = snapshot(tree)
    with Allocations() as counted:
        load(tree, snap)
    assert counted.made == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_look_back_keeps_one_copy(dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #7007: the current weights are kept once while another version is live, and
    nothing else is.
    """
    model = MODELS["flat buffer"](dtype)
    tree = model_tree(model)
    (buffer,) = flat_buffers(model)
    snap = snapshot(tree)
    before = default_memory().stats().leased
    with Allocations() as counted, swapped(tree, snap):
        within = default_memory().stats().leased
    made = counted.made
    del counted  # it holds on to what it has seen
    assert made == []
    assert buffer.param_data.nbytes <= within - before <= 1.05 * buffer.param_data.nbytes
    assert default_memory().stats().leased == before


@pytest.mark.parametrize("bytes_each", [9 << 10, 12 << 10, (8 << 10) + 1])
def test_sizes_are_not_rounded_up(bytes_each: int) -> None:
    """pytorch/pytorch #95823, #171662, sgl-project/sglang #36562, vllm-project/vllm #56410, wtdcode/vllm-backport #67:
    one exact slab, not a power of two a leaf.
    """
    model = nn.Module()
    for i in range(16):
        model.register_buffer(f"w{i}", torch.zeros(bytes_each, dtype=torch.uint8))
    memory = HostMemory()
    _kept = snapshot(model_tree(model), memory=memory)
    assert memory.stats().leased <= 16 * (bytes_each + 64)
    rounded = sum(1 << (bytes_each - 1).bit_length() for _ in range(16))
    assert rounded > 1.3 * memory.stats().leased  # what an allocator that rounds would have needed, leaf by leaf


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_machine_that_cannot_pin(wrapper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch #159740: without an accelerator every attempt to pin raises; nothing here makes one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Cannot access accelerator device when none is available")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    models = WRAPPERS[wrapper](Layer())
    before, snap = picture(models), snapshot(model_tree(models))
    change_everything(models)
    load(model_tree(models), snap)
    assert picture(models) == before
    assert not any(leaf.is_pinned() for leaf in named_leaves(snap).values())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.parametrize("use", ["snapshot", "look-back", "failed load"])
def test_what_nobody_reads_is_given_back(use: str) -> None:
    """verl-project/verl #7567: a hundred snapshots that nobody keeps cost a copy each, and no memory afterwards."""
    model = nn.Linear(512, 1024)  # 2 MiB
    tree = model_tree(model)
    other = nn.Linear(3, 3)
    snap, wrong = snapshot(tree), snapshot(model_tree(other))
    gc.collect()
    before = _resident_bytes()
    for _ in range(40):
        if use == "snapshot":
            snapshot(tree)
        elif use == "look-back":
            with swapped(tree, snap):
                pass
        else:
            with pytest.raises(ValueError, match="weight"):
                load(tree, wrong)
    assert _resident_bytes() - before < 24 << 20  # of 80 MiB that were allocated
