"""What is kept, what is given back, and what is refused before anything is allocated."""

from __future__ import annotations

import mmap
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_snap import (
    HostMemory,
    HostMemoryStats,
    OutOfHostMemory,
    SnapError,
    default_memory,
    load,
    snapshot,
    snapshot_async,
    swapped,
)
from mcore_snap.slabs import Slab

MIB = 1 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the sizes of all slabs that are allocated."""
    sizes: list[int] = []
    made = Slab.__init__

    def count(self: Slab, nbytes: int, *args: Any) -> None:
        sizes.append(nbytes)
        made(self, nbytes, *args)

    monkeypatch.setattr(Slab, "__init__", count)
    return sizes


def test_one_idle_slab_of_each_size_is_kept(allocated: list[int]) -> None:
    """By default; the rest goes back as it becomes free, and trim gives back what is left."""
    memory = HostMemory()
    held = [memory.lease(size) for size in (100, 100, 100, 300)]
    assert memory.stats() == HostMemoryStats(600, 0, 600, tuple(("a lease", n) for n in (100, 100, 100, 300)))
    held.clear()
    assert memory.stats() == HostMemoryStats(0, 400, 600, ())
    again = [memory.lease(100), memory.lease(300)]
    assert allocated == [100, 100, 100, 300]
    more = memory.lease(100)
    assert allocated == [100, 100, 100, 300, 100]
    del again, more
    assert memory.trim() == 400
    assert memory.trim() == 0
    assert memory.stats() == HostMemoryStats(0, 0, 600, ())


@pytest.mark.parametrize("keep", [0, 2, 3])
def test_as_many_idle_slabs_as_asked_for(keep: int) -> None:
    """None, or several."""
    memory = HostMemory(keep=keep)
    held = [memory.lease(100) for _ in range(3)]
    held.clear()
    assert memory.stats().free == 100 * keep


def test_only_the_exact_size_is_used_again(allocated: list[int]) -> None:
    """Nothing is rounded up, and nothing cut from what is larger."""
    memory = HostMemory()
    for size in (4097, 4096, 4097, 1):
        assert memory.lease(size).untyped_storage().nbytes() == size
    assert allocated == [4097, 4096, 1]


def test_the_same_memory_comes_back(allocated: list[int]) -> None:
    """Snapshot after snapshot of one tree into the default memory allocates once."""
    live = {"a": torch.rand(33_333), "b": [torch.rand(7, 3)]}
    before = default_memory().stats()
    for _ in range(5):
        kept = snapshot(live)
        now = default_memory().stats()
        assert now.leases[-1] == ("a snapshot of 2 leaves", allocated[0])
        assert torch.equal(kept["a"], live["a"])
        del kept
    assert len(allocated) == 1
    after = default_memory().stats()
    assert after.leased == before.leased
    assert after.free == before.free + allocated[0]
    assert default_memory().trim() >= allocated[0]


def test_memory_of_ones_own_is_used_and_no_other() -> None:
    """By snapshot and snapshot_async; a second HostMemory is another."""
    mine, other = HostMemory(), HostMemory()
    before = default_memory().stats()
    one = snapshot([torch.ones(10)], memory=mine)
    two = snapshot_async([torch.ones(10)], memory=mine).result()
    assert len(mine.stats().leases) == 2
    assert other.stats() == HostMemoryStats(0, 0, 0, ())
    assert default_memory().stats() == before
    del one, two
    assert mine.stats().leased == 0


def test_dropping_versions_shows_in_resident_memory() -> None:
    """Of five versions of 32 MiB one stays as idle memory, and none after a trim."""
    size = 32 * MIB
    live = [torch.ones(size, dtype=torch.uint8)]
    memory = HostMemory()
    start = _resident()
    versions = [snapshot(live, memory=memory) for _ in range(5)]
    assert _resident() - start > 4.9 * size
    versions.clear()
    assert _resident() - start < 1.1 * size
    memory.trim()
    assert _resident() - start < 0.1 * size


def test_dropping_the_memory_itself_shows_in_resident_memory() -> None:
    """Idle memory goes with it, leased memory with its last tensor."""
    size = 32 * MIB
    start = _resident()
    memory = HostMemory(keep=2)
    held = [snapshot([torch.full((size,), 7, dtype=torch.uint8)], memory=memory) for _ in range(2)]
    held.pop()
    assert _resident() - start > 1.9 * size
    del memory
    assert bool((held[0][0] == 7).all())
    held.clear()
    assert _resident() - start < 0.1 * size


def test_a_snapshot_holds_the_bytes_of_its_leaves_and_no_more() -> None:
    """At its peak too: the mapping is of the exact size, where an allocator would round up."""
    size = 33 * MIB + 12_345
    memory = HostMemory()
    kept = snapshot([torch.ones(size, dtype=torch.uint8)], memory=memory)
    assert memory.stats().peak == memory.stats().leased == size
    assert kept[0].nbytes == size


# --- limits


def test_the_limit_is_told_before_anything_is_allocated(allocated: list[int]) -> None:
    """With who holds the memory; what is exactly the limit is allowed, and what is dropped makes room."""
    memory = HostMemory(limit=1000)
    one = memory.lease(600, "version 1")
    two = memory.lease(400, "version 2")
    allocated.clear()
    for nbytes in (1, 600, 5000):
        with pytest.raises(OutOfHostMemory, match=f"at most 1,000 .* 1,000 held and {nbytes:,} more") as caught:
            memory.lease(nbytes)
        assert caught.value.problems == ("version 1: 600 bytes", "version 2: 400 bytes")
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, SnapError)
    assert allocated == []
    assert memory.stats() == HostMemoryStats(1000, 0, 1000, (("version 1", 600), ("version 2", 400)))
    del one
    three = memory.lease(600)
    assert allocated == []
    del two, three


def test_snapshots_obey_the_limit_and_name_each_other() -> None:
    """The error crosses process boundaries with its lines, and a look-back that has no room does not begin."""
    live = {"w": torch.ones(100), "b": torch.zeros(100)}
    memory = HostMemory(limit=1000)
    kept = snapshot(live, memory=memory)
    with pytest.raises(OutOfHostMemory) as caught:
        snapshot(live, memory=memory)
    size = memory.stats().leased
    assert caught.value.problems == (f"a snapshot of 2 leaves: {size:,} bytes",)
    back = pickle.loads(pickle.dumps(caught.value))
    assert (back.message, back.problems) == (caught.value.message, caught.value.problems)
    pending = snapshot_async(live, memory=memory)
    with pytest.raises(OutOfHostMemory):
        pending.result()
    live["w"].zero_()
    load(live, kept)
    assert bool(live["w"].all())
    with swapped(live, kept):  # of the default memory
        assert memory.stats().leased == size


def test_snapshots_are_told_apart_by_their_labels() -> None:
    """Versions of one model all have the same size and number of leaves."""
    live = {"w": torch.ones(100)}
    memory = HostMemory(limit=1000)
    kept = [
        snapshot(live, memory=memory, label="version 1"),
        snapshot_async(live, memory=memory, label="version 2").result(),
    ]
    with pytest.raises(OutOfHostMemory) as caught, swapped(live, kept[0], memory=memory):
        pass
    assert caught.value.problems == ("version 1 of 1 leaves: 400 bytes", "version 2 of 1 leaves: 400 bytes")


def test_idle_memory_of_other_sizes_makes_room(allocated: list[int]) -> None:
    """Before a limit is told."""
    memory = HostMemory(limit=1000, keep=2)
    held = [memory.lease(300), memory.lease(300), memory.lease(100)]
    del held[:2]
    assert memory.stats().free == 600
    big = memory.lease(900)
    assert memory.stats() == HostMemoryStats(1000, 0, 1000, (("a lease", 100), ("a lease", 900)))
    del big
    assert allocated == [300, 300, 100, 900]


def test_no_memory_at_all() -> None:
    """A limit of nothing allows snapshots of nothing."""
    memory = HostMemory(limit=0)
    assert memory.lease(0).shape == (0,)
    assert snapshot([torch.empty(0, 3)], memory=memory)[0].shape == (0, 3)
    with pytest.raises(OutOfHostMemory):
        memory.lease(1)
    assert memory.stats() == HostMemoryStats(0, 0, 0, ())


@pytest.mark.parametrize("kind", ["pageable", "pinned", "shared"])
@pytest.mark.parametrize("nbytes", [1 << 55, 1 << 63, 1 << 80])
def test_more_than_the_system_has(kind: Any, nbytes: int) -> None:
    """Is an error that says so and who holds what; nothing is left behind, and smaller leases go on."""
    memory = HostMemory(kind=kind if kind != "pinned" else "pageable")
    before = set(Path("/dev/shm").iterdir())
    kept = memory.lease(10, "what is held")
    memory._kind = kind
    with pytest.raises(OutOfHostMemory, match=f"the system has no {nbytes:,} bytes of {kind} host memory") as caught:
        memory.lease(nbytes)
    assert caught.value.problems == ("what is held: 10 bytes",)
    assert memory.stats() == HostMemoryStats(10, 0, 10, (("what is held", 10),))
    del kept
    if kind == "shared":
        memory.trim()
        assert set(Path("/dev/shm").iterdir()) == before


def test_a_snapshot_that_the_system_has_no_memory_for() -> None:
    """A leaf that repeats one element for ever is kept with all its elements, if there is room."""
    live = {"w": torch.ones(1).expand(1 << 53)}
    memory = HostMemory()
    with pytest.raises(OutOfHostMemory, match="the system has no"):
        snapshot(live, memory=memory)
    with pytest.raises(OutOfHostMemory, match="the system has no"):
        snapshot_async(live, memory=memory).result()
    assert memory.stats() == HostMemoryStats(0, 0, 0, ())


@pytest.mark.parametrize("wrong", [{"kind": "gpu"}, {"limit": -1}, {"keep": -1}])
def test_arguments_out_of_range(wrong: dict[str, Any]) -> None:
    """Are told at once."""
    with pytest.raises(ValueError, match="expected"):
        HostMemory(**wrong)
