"""Group F: memory that was released, moved, re-pointed or never made."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pictures import DTYPES, change_everything, flat_buffers, picture, places
from torch import nn

from mcore_snap import (
    NotResident,
    bitwise_equal,
    fingerprint,
    load,
    model_tree,
    named_leaves,
    named_parameters,
    snapshot,
    swapped,
)
from mcore_snap.testing.chunks import DDPLike, Layer
from mcore_snap.testing.raw_bytes import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcore_snap.testing.chunks import HostCopy

kept_in = pytest.mark.parametrize("host", ["param_data_cpu", "cpu_data"])
typed = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _offload(models: Any, host: HostCopy, which: slice = slice(None)) -> None:
    for buffer in list(flat_buffers(models))[which]:
        buffer.offload(host)


def _reload(models: Any) -> None:
    for buffer in flat_buffers(models):
        buffer.reload()


@kept_in
@typed
@pytest.mark.parametrize("which", [slice(None), slice(0, 1), slice(1, 2)], ids=["all", "dense", "experts"])
def test_a_snapshot_of_an_offloaded_model(host: HostCopy, dtype: torch.dtype, which: slice) -> None:
    """verl-project/verl #6026, #6095, Megatron-LM `offload_to_cpu`: the weights are in the host copy, and are read
    there.
    """
    chunk = DDPLike(Layer(3, dtype))
    tree = model_tree(chunk)
    before, digest = picture(chunk), fingerprint(tree)
    _offload(chunk, host, which)
    snap = snapshot(tree)
    assert fingerprint(tree) == digest == fingerprint(snap)
    assert bitwise_equal(tree, snap)
    assert all(not buffer.param_data.untyped_storage().nbytes() for buffer in list(flat_buffers(chunk))[which])
    _reload(chunk)
    change_everything(chunk)
    load(tree, snap)
    assert picture(chunk) == before


@kept_in
@typed
def test_a_load_into_an_offloaded_model(host: HostCopy, dtype: torch.dtype) -> None:
    """verl-project/verl #6095: written to the host copy, so that the model has it when its memory comes back; a look-
    back as well.
    """
    chunk = DDPLike(Layer(3, dtype))
    tree = model_tree(chunk)
    before, snap = picture(chunk), snapshot(tree)
    change_everything(chunk)
    changed = picture(chunk)
    _offload(chunk, host)
    where = places(chunk)
    with swapped(tree, snap):
        assert picture(chunk) == before
    assert picture(chunk) == changed
    load(tree, snap)
    assert picture(chunk) == before
    assert places(chunk) == where
    _reload(chunk)
    assert picture(chunk) == before


@kept_in
def test_a_host_copy_of_long_ago_is_not_the_weights(host: HostCopy) -> None:
    """verl-project/verl #5406, #6095: the host copy stays after a reload; it counts only while the memory itself is
    away.
    """
    chunk = DDPLike(Layer())
    _offload(chunk, host)
    _reload(chunk)
    change_everything(chunk)
    now, snap = picture(chunk), snapshot(model_tree(chunk))
    change_everything(chunk)
    load(model_tree(chunk), snap)
    assert picture(chunk) == now


@kept_in
def test_parameters_by_name_while_offloaded(host: HostCopy) -> None:
    """verl-project/verl #6026: views of the host copy, for export and comparison without bringing anything back."""
    chunk = DDPLike(Layer())
    held = {f"chunks[0].{name}": to_bytes(param) for name, param in chunk.named_parameters()}
    _offload(chunk, host)
    assert {name: to_bytes(param) for name, param in named_parameters(model_tree(chunk)).items()} == held


@typed
def test_released_without_a_host_copy(dtype: torch.dtype) -> None:
    """verl-project/verl #6026: a refusal that names every buffer that is away, and nothing is written to the rest."""
    chunk = DDPLike(Layer(3, dtype))
    tree = model_tree(chunk)
    snap = snapshot(tree)
    base = chunk.module.base.weight  # type: ignore[union-attr]
    base.data.zero_()  # type: ignore[union-attr, operator]
    _offload(chunk, "nowhere")
    for use in (snapshot, fingerprint, lambda each: load(each, snap), lambda each: swapped(each, snap).__enter__()):
        with pytest.raises(NotResident) as caught:
            use(tree)
        told = [problem.partition(":")[0] for problem in caught.value.problems]
        assert told == ["chunks[0].buffers[0]", "chunks[0].expert_parallel_buffers[0]"]
        assert not base.any()  # type: ignore[union-attr, operator]


def test_two_host_copies_that_differ() -> None:
    """verl-project/verl #6095: where both conventions left a copy nothing tells which one will come back, so neither
    is guessed.
    """
    chunk = DDPLike(Layer())
    (dense, _) = flat_buffers(chunk)
    dense.offload("cpu_data")
    dense.param_data_cpu = torch.zeros_like(dense.param_data.cpu_data)
    with pytest.raises(NotResident, match=r"chunks\[0\]\.buffers\[0\]"):
        snapshot(model_tree(chunk))


ATTRIBUTES = ["param_data_cpu", "param_data_size", "buckets", "numel", "param_index_map", "grad_data"]


@pytest.mark.parametrize("missing", ATTRIBUTES)
def test_attributes_that_another_version_does_not_have(missing: str) -> None:
    """verl-project/verl #4004: nothing relies on what only an earlier offload, or another version of Megatron-Core,
    made.
    """
    chunk = DDPLike(Layer())
    for buffer in flat_buffers(chunk):
        delattr(buffer, missing)
    before, snap = picture(chunk), snapshot(model_tree(chunk))
    change_everything(chunk)
    load(model_tree(chunk), snap)
    assert picture(chunk) == before


CRASH = """
import faulthandler, sys
faulthandler.enable()
import torch
from mcore_snap import NotResident, compare, load, model_tree, named_leaves, snapshot, swapped, thaw
from mcore_snap.testing.chunks import DDPLike, Layer
chunk = DDPLike(Layer())
tree = model_tree(chunk)
snap = snapshot(tree)
chunk.buffers[0].offload("nowhere")
both = (compare, load, lambda tree, snap: swapped(tree, snap).__enter__())
for use in (snapshot, thaw, *(lambda tree, each=each: each(tree, snap) for each in both)):
    try:
        use(tree)
    except NotResident as error:
        print("buffers[0]" in str(error))
named_leaves(tree)
repr(tree)
"""


def test_released_memory_does_not_crash_the_process() -> None:
    """verl-project/verl #6095: any touch of a view whose storage was resized to 0 is a segmentation fault; here it is
    an error.
    """
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 5), done.stderr


ABSENT: dict[str, Callable[[], nn.Module]] = {
    "weight": lambda: nn.Linear(2, 2, device="meta"),
    "buffer": lambda: nn.BatchNorm1d(2, affine=False, device="meta"),
}


@pytest.mark.parametrize("kind", ABSENT)
@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: [Layer(), DDPLike(module, "none")]])
def test_memory_that_was_never_made(kind: str, wrap: Callable[[nn.Module], Any]) -> None:
    """huggingface/transformers #28972: meta tensors are refused by name, all of them, by snapshot and by load."""
    models = wrap(nn.Sequential(nn.Linear(2, 2), ABSENT[kind]()))
    last = models[-1] if isinstance(models, list) else models
    chunk = len(models) - 1 if isinstance(models, list) else 0
    names = [f"parameters['{name}']" for name, param in last.named_parameters() if param.is_meta]
    names += [f"module_buffers['{name}']" for name, buffer in last.named_buffers() if buffer.is_meta]
    with pytest.raises(NotResident) as caught:
        snapshot(model_tree(models))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [f"chunks[{chunk}].{n}" for n in names]


def test_memory_that_moved_is_found_again() -> None:
    """verl-project/verl #4004, NeMo-RL swaps by `.data =`: a tree made before a move reads and writes where the
    weights are now.
    """
    chunk = DDPLike(Layer())
    tree = model_tree(chunk)
    before, snap = picture(chunk), snapshot(tree)
    old = [buffer.param_data for buffer in flat_buffers(chunk)]
    for buffer in flat_buffers(chunk):
        buffer.param_data = buffer.param_data.clone()
        for param, (start, stop, _) in buffer.param_index_map.items():
            param.data = buffer.param_data[start:stop].view(param.shape)
    chunk.module.base.weight.data = chunk.module.base.weight.data.clone()  # type: ignore[union-attr, operator]
    stale = [to_bytes(data) for data in old]
    change_everything(chunk)
    load(tree, snap)
    assert picture(chunk) == before
    assert [to_bytes(data) for data in old] == stale
    leaves = named_leaves(tree)
    (dense, _) = flat_buffers(chunk)
    assert leaves["chunks[0].buffers[0]"].data_ptr() == dense.param_data.data_ptr()
