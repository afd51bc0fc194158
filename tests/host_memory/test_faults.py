"""What fails half-way leaves nothing behind: no lease, no half snapshot, nothing page-locked, and a clear error."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from held_copies import Failing, copying_with

from mcore_snap import HostMemory, HostMemoryStats, OutOfHostMemory, load, pinning, snapshot, snapshot_async, swapped
from mcore_snap import slabs as slabs_module
from mcore_snap.slabs import Slab
from mcore_snap.testing.asserts import assert_bitwise_equal

NOTHING = HostMemoryStats(0, 0, 0, ())


def _live() -> dict[str, torch.Tensor]:
    return {name: torch.rand(5, 3) for name in "abcde"}


def _pending(live: Any, memory: HostMemory) -> Any:
    return snapshot_async(live, memory=memory).result()


TAKING = pytest.mark.parametrize(
    "take",
    [lambda live, memory: snapshot(live, memory=memory), _pending],
    ids=["snapshot", "snapshot_async"],
)


# --- memory


@TAKING
def test_an_allocation_that_fails(take: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told with what is held; the next snapshot is taken as if nothing had been."""
    memory = HostMemory()
    live = _live()
    kept = snapshot(live, memory=memory)
    size = memory.stats().leased

    def refuse(nbytes: int, flags: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(slabs_module, "_map", refuse)
        with pytest.raises(OutOfHostMemory, match=f"no {size:,} bytes of pageable .*Cannot allocate") as caught:
            take(live, memory)
        assert caught.value.problems == (f"a snapshot of 5 leaves: {size:,} bytes",)
    assert memory.stats() == HostMemoryStats(size, 0, size, ((f"a snapshot of {len(live)} leaves", size),))
    assert_bitwise_equal(take(live, memory), kept)


def test_a_full_shared_memory_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is found out when memory is leased, not by a signal in the middle of a copy; no file is left."""
    before = set(Path("/dev/shm").iterdir())

    def full(handle: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory = HostMemory(kind="shared")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutOfHostMemory, match=r"of shared host memory.*No space left"):
            snapshot(_live(), memory=memory)
    assert set(Path("/dev/shm").iterdir()) == before
    assert memory.stats() == NOTHING


# --- copies


@pytest.mark.parametrize("leaf", range(5))
@TAKING
def test_a_copy_that_fails_at_a_leaf(take: Callable[..., Any], leaf: int) -> None:
    """Raises, gives the memory back at once, and leaves no half snapshot; the live tree is untouched."""
    memory = HostMemory()
    live = _live()
    before = snapshot(live)
    copies = Failing(leaf, RuntimeError("the bus is on fire"))
    said = ""
    with copying_with(copies):
        try:
            take(live, memory)
        except RuntimeError as error:
            said = str(error)
    assert said == "the bus is on fire"
    assert copies.copied == leaf
    stats = memory.stats()
    assert (stats.leased, stats.leases) == (0, ())
    assert stats.free == stats.peak > 0
    assert_bitwise_equal(live, before)
    assert_bitwise_equal(take(live, memory), before)
    assert memory.stats().peak == stats.peak


def test_memory_is_given_back_while_the_failure_is_still_held() -> None:
    """A handle, its error and the traceback may be kept for a log; the memory and the model are not kept with them."""
    memory = HostMemory()
    live = _live()
    with copying_with(Failing(3, RuntimeError("the bus is on fire"))):
        pending = snapshot_async(live, memory=memory)
        assert pending.wait()
    assert repr(pending) == "PendingSnapshot(failed)"
    assert memory.stats().leased == 0
    with pytest.raises(RuntimeError, match="on fire") as caught:
        pending.result()
    assert caught.value.__traceback__ is not None
    assert memory.stats().leased == 0
    assert memory.stats().free > 0


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_would_end_the_worker_thread(error: BaseException) -> None:
    """Surfaces in the result; the next snapshot is taken."""
    memory = HostMemory()
    live = _live()
    with copying_with(Failing(1, error)):
        pending = snapshot_async(live, memory=memory)
        with pytest.raises(type(error)):
            pending.result()
    assert memory.stats().leased == 0
    for _ in range(3):
        assert_bitwise_equal(snapshot_async(live, memory=memory).result(), live)


def test_a_look_back_that_cannot_keep_the_current_weights_does_not_begin() -> None:
    """Nothing was written, and there is nothing to put back."""
    live = _live()
    kept = snapshot(live)
    for tensor in live.values():
        tensor.zero_()
    entered = False
    with copying_with(Failing(2, RuntimeError("the bus is on fire"))), pytest.raises(RuntimeError, match="on fire"):  # noqa: SIM117
        with swapped(live, kept):
            entered = True
    assert not entered
    assert not any(bool(tensor.any()) for tensor in live.values())
    load(live, kept)
    assert_bitwise_equal(live, kept)


# --- page-locking


class Driver:
    """Page-locks ranges, and fails where it is told to."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.calls = 0
        self.fail_at: int | None = None
        self.stuck = False

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range, once."""
        if self.calls == self.fail_at:
            raise RuntimeError("the driver has no more")
        self.calls += 1
        assert address not in self.ranges
        assert _mapped(address)
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        """Let go of a range that is mapped."""
        if self.stuck:
            raise RuntimeError("the driver does not let go")
        assert _mapped(address), "it was unmapped while it was page-locked"
        del self.ranges[address]


def _mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Give a driver that page-locks 64 KiB at a time."""
    stand_in = Driver()
    monkeypatch.setattr(pinning, "CHUNK", 1 << 16)
    monkeypatch.setattr(pinning, "_runtime", lambda: stand_in)
    return stand_in


def test_pinned_memory_is_page_locked_for_as_long_as_it_is_mapped(driver: Driver) -> None:
    """Also while idle; the ranges are those of the slab, exactly."""
    memory = HostMemory(kind="pinned")
    tensor = memory.lease(200_000)
    assert sum(driver.ranges.values()) == 200_000
    assert min(driver.ranges) == tensor.data_ptr()
    del tensor
    again = memory.lease(200_000)
    calls = driver.calls
    other = memory.lease(10)
    assert driver.calls == calls + 1
    del again, other
    assert sum(driver.ranges.values()) == 200_010
    memory.trim()
    assert driver.ranges == {}


def test_pinned_memory_that_is_dropped_with_its_host_memory(driver: Driver) -> None:
    """Is unregistered before it is unmapped: idle memory at once, leased memory with its last tensor."""
    memory = HostMemory(kind="pinned")
    held = [memory.lease(100_000), memory.lease(50_000)]
    held.pop()
    del memory
    held.clear()
    assert driver.ranges == {}


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_registration_that_fails_half_way(driver: Driver, fail_at: int) -> None:
    """Falls back to pageable memory, with one warning that says why and for good; nothing stays registered."""
    driver.fail_at = fail_at
    memory = HostMemory(kind="pinned")
    live = {"w": torch.rand(70_000)}
    with pytest.warns(RuntimeWarning, match="stays pageable.*the driver has no more") as caught:
        kept = snapshot(live, memory=memory)
    assert len(caught) == 1
    assert driver.ranges == {}
    driver.fail_at = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = [snapshot(live, memory=memory), memory.lease(99), snapshot_async(live, memory=memory).result()]
    assert driver.calls == fail_at
    assert_bitwise_equal(kept, live)
    assert memory.stats().leased == 3 * 280_000 + 99
    del kept, more
    assert memory.stats().leased == 0
    memory.trim()


def test_memory_that_the_driver_does_not_let_go_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stays mapped, since a device may still write to it; a warning says so, and the rest goes on."""
    monkeypatch.setattr(slabs_module, "_STUCK", [])
    memory = HostMemory(kind="pinned")
    tensor = memory.lease(100_000)
    address = tensor.data_ptr()
    del tensor
    driver.stuck = True
    with pytest.warns(RuntimeWarning, match="100,000 bytes of host memory are lost.*does not let go"):
        memory.trim()
    gc.collect()
    assert _mapped(address)
    assert memory.stats().free == 0
    driver.stuck = False
    assert memory.lease(100_000).data_ptr() != address


def test_closing_twice_is_closing_once() -> None:
    """And a slab that failed to be made can be dropped."""
    slab = Slab(5000, "shared")
    name = slab.name
    assert Path(f"/dev/shm/{name}").exists()
    slab.close()
    slab.close()
    assert not Path(f"/dev/shm/{name}").exists()
    with pytest.raises(MemoryError):
        Slab(1 << 60)
