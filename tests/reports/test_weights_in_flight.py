"""Group I: parameter gathers that are due or under way, and copies that have not arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from pictures import DTYPES, change_everything, flat_buffers, picture
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_snap import bitwise_equal, compare, fingerprint, load, model_tree, named_leaves, snapshot, swapped, thaw
from mcore_snap.testing.chunks import DDPLike, GatherGroup, Layer
from mcore_snap.testing.raw_bytes import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

typed = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _gathering(dtype: torch.dtype, *, under_way: bool) -> tuple[DDPLike, list[GatherGroup]]:
    """Return a chunk of which each flat buffer's second half is still at other ranks: all nines."""
    chunk = DDPLike(Layer(3, dtype))
    chunk.use_forward_hook = not under_way
    lists: list[list[Any]] = [chunk.bucket_groups, chunk.expert_parallel_bucket_groups]
    for groups, buffer in zip(lists, flat_buffers(chunk), strict=True):
        half = buffer.param_data[buffer.param_data.numel() // 2 :]
        groups.append(GatherGroup((half, torch.full_like(half, 9))))
    groups = [group for each in lists for group in each]
    groups[0].next_param_gather_bucket_group = groups[1]
    if under_way:
        for group in groups:
            group.start_param_sync()
    return chunk, groups


def _arrived(chunk: DDPLike) -> bool:
    halves = [buffer.param_data[buffer.param_data.numel() // 2 :] for buffer in flat_buffers(chunk)]
    return all(bool((half == 9).all()) for half in halves)


READS: dict[str, Callable[[Any], object]] = {
    "snapshot": snapshot,
    "fingerprint": fingerprint,
    "thaw": thaw,
    "named_leaves": named_leaves,
    "compare": lambda tree: compare(tree, tree),
    "bitwise_equal": lambda tree: bitwise_equal(tree, tree),
}


@typed
@pytest.mark.parametrize("under_way", [True, False], ids=["under way", "due"])
@pytest.mark.parametrize("read", READS)
def test_a_read_waits_for_the_gather(read: str, under_way: bool, dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #6388: a reader of weights that are still arriving gets those of the last iteration."""
    chunk, groups = _gathering(dtype, under_way=under_way)
    tree = model_tree(chunk)
    assert not _arrived(chunk)
    assert [group.finished for group in groups] == [[], []]
    READS[read](tree)
    assert _arrived(chunk)
    assert all(
        set(group.finished) == {True} for group in groups
    )  # the next group's gather was left to the next forward
    assert all(group.param_gather_handle is None for group in groups)
    assert all(group.started == group.landed for group in groups)


@typed
@pytest.mark.parametrize("under_way", [True, False], ids=["under way", "due"])
def test_a_snapshot_has_what_arrives(under_way: bool, dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #6388: the snapshot holds the gathered values, and one gather was enough."""
    chunk, groups = _gathering(dtype, under_way=under_way)
    snap = snapshot(model_tree(chunk))
    for leaf, buffer in zip(
        (snap.chunks[0].buffers[0], snap.chunks[0].expert_parallel_buffers[0]), flat_buffers(chunk), strict=True
    ):
        assert to_bytes(leaf) == to_bytes(buffer.param_data)
        assert (leaf[leaf.numel() // 2 :] == 9).all()
    assert [group.landed for group in groups] == [1, 1]


@typed
@pytest.mark.parametrize("use", ["load", "swapped"])
def test_a_gather_under_way_does_not_land_on_what_was_written(use: str, dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #6388: waited for before the first write, so that nothing lands on top of it later."""
    chunk, groups = _gathering(dtype, under_way=False)
    chunk.use_forward_hook = False  # nothing is due: these are the weights
    tree = model_tree(chunk)
    first, snap = picture(chunk), snapshot(tree)
    for group in groups:
        group.start_param_sync()
    if use == "load":
        load(tree, snap)
        assert picture(chunk) == first
        for group in groups:
            group.finish_param_sync()
        assert picture(chunk) == first
    else:
        with swapped(tree, snap):
            for group in groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            assert picture(chunk) == first
        assert _arrived(chunk)
        assert picture(chunk) != first


@pytest.mark.parametrize("use", ["snapshot", "load", "swapped"])
def test_the_flags_are_given_back(use: str) -> None:
    """NVIDIA/Megatron-LM #6388, NVIDIA-NeMo/RL #2053: a gather that was due is due afterwards, or the next forward
    would not gather.
    """
    chunk, groups = _gathering(torch.float32, under_way=False)
    tree = model_tree(chunk)
    snap = snapshot(tree)
    groups[0].param_gather_dispatched = True  # one gathered, one due
    assert [group.param_gather_dispatched for group in groups] == [True, False]
    if use == "snapshot":
        snapshot(tree)
    elif use == "load":
        load(tree, snap)
    else:
        with swapped(tree, snap):
            for group in groups:  # what a forward pass in the body leaves behind
                group.finish_param_sync()
            assert [group.param_gather_dispatched for group in groups] == [True, True]
    assert [group.param_gather_dispatched for group in groups] == [True, False]


def test_the_flags_are_given_back_after_an_error() -> None:
    """NVIDIA-NeMo/RL #2053: also where the body of a look-back fails, hooks and flags are those of before."""
    chunk, groups = _gathering(torch.float32, under_way=False)
    tree = model_tree(chunk)
    snap = snapshot(tree)
    hook = chunk.use_forward_hook

    def forward_and_fail() -> None:
        for group in groups:
            group.finish_param_sync()
        raise KeyError

    with pytest.raises(KeyError), swapped(tree, snap):
        forward_and_fail()
    assert [group.param_gather_dispatched for group in groups] == [False, False]
    assert chunk.use_forward_hook == hook


def test_without_overlap_nothing_is_gathered() -> None:
    """NVIDIA/Megatron-LM #6388: where weights are current whatever the flags say, no collective is started."""
    chunk, groups = _gathering(torch.float32, under_way=False)
    chunk.use_forward_hook = False
    tree = model_tree(chunk)
    load(tree, snapshot(tree))
    assert [(group.started, group.finished) for group in groups] == [(0, []), (0, [])]


class Postponing(TorchDispatchMode):
    """Lets no asynchronous copy arrive before somebody waits for it."""

    def __init__(self) -> None:
        """Begin with nothing under way."""
        super().__init__()
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Postpone `copy_(..., non_blocking=True)`, of one tensor or of many."""
        if func is torch.ops.aten.copy_.default:
            self.copies += 1
            if (len(args) > 2 and args[2]) or (kwargs or {}).get("non_blocking"):
                self.waiting.append(args[:2])
                return args[0]
        if func is torch.ops.aten._foreach_copy_.default:
            self.copies += 1
            if (len(args) > 2 and args[2]) or (kwargs or {}).get("non_blocking"):
                self.waiting += zip(*args[:2], strict=True)
                return None
        return func(*args, **(kwargs or {}))

    def synchronize(self, *_: Any, **__: Any) -> None:
        """Let everything arrive."""
        for target, source in self.waiting:
            target.copy_(source)
        self.waiting.clear()


@typed
def test_a_copy_has_arrived_when_it_is_handed_out(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """PrimeIntellect-ai/prime-rl #1694, #3109, sgl-project/sglang #16493, pytorch/pytorch #86264: nobody can read
    bytes that are still under way.
    """
    chunk = DDPLike(Layer(3, dtype))
    tree = model_tree(chunk)
    mode = Postponing()
    monkeypatch.setattr(torch.cuda, "synchronize", mode.synchronize)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", mode.synchronize)
    before = picture(chunk)
    with mode:
        snap = snapshot(tree)
    assert mode.copies
    assert bitwise_equal(tree, snap)
    change_everything(chunk)
    mode.copies = 0
    with mode:
        load(tree, snap)
    assert mode.copies
    assert picture(chunk) == before
    assert not mode.waiting
