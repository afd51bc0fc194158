"""Memory that is made ready in the background, before a snapshot needs it."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from held_copies import TIMEOUT, finish, in_thread
from torch import nn

from mcore_snap import HostMemory, NotResident, OutOfHostMemory, StructureMismatch, model_tree, snapshot
from mcore_snap.slabs import Slab

MIB = 1 << 20


class Prefault:
    """Prefaulting that waits until it is let go, or fails at one of them."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.fail_at: int | None = None
        self.sizes: list[int] = []

    def bring(self, slab: Slab) -> None:
        """Wait, and fail or note the size."""
        self.begun.set()
        assert self.gate.wait(TIMEOUT)
        if len(self.sizes) == self.fail_at:
            raise OSError("the pages do not come")
        self.sizes.append(slab.nbytes)


@pytest.fixture
def prefault(monkeypatch: pytest.MonkeyPatch) -> Prefault:
    """Hold prefaulting back."""
    stand_in = Prefault()
    monkeypatch.setattr(Slab, "prefault", lambda slab: stand_in.bring(slab))  # noqa: PLW0108 - a method gets no slab
    return stand_in


def test_what_was_prepared_is_leased_and_kept() -> None:
    """As many slabs as asked for, also after they were leased and dropped; a trim ends that."""
    memory = HostMemory()
    assert memory.prepare(1000, 3).result(TIMEOUT) is None
    assert memory.stats().free == 3000
    held = [memory.lease(1000) for _ in range(4)]
    assert memory.stats().free == 0
    assert memory.stats().peak == 4000
    held.clear()
    assert memory.stats().free == 3000
    memory.trim()
    held = [memory.lease(1000) for _ in range(3)]
    held.clear()
    assert memory.stats().free == 1000


def test_what_is_there_already_counts() -> None:
    """Idle slabs of the size, and those that are coming."""
    memory = HostMemory()
    memory.lease(1000)
    assert memory.stats().free == 1000
    memory.prepare(1000, 1).result(TIMEOUT)
    assert memory.stats().free == 1000
    for future in [memory.prepare(1000, 2), memory.prepare(1000, 2)]:
        future.result(TIMEOUT)
    finish(*_preparing())
    assert memory.stats().free == 2000
    memory.prepare(1000, 0).result(TIMEOUT)
    memory.prepare(0, 5).result(TIMEOUT)
    assert memory.stats().free == 2000


def _preparing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mcore_snap-prepare"]


@pytest.mark.parametrize("kind", ["pageable", "shared"])
def test_for_snapshots_of_a_tree(kind: Any) -> None:
    """Of exactly their size: nothing is allocated when they are taken."""
    model = nn.Sequential(nn.Linear(70, 30), nn.Linear(30, 5, dtype=torch.float64))
    tree = model_tree(model)
    memory = HostMemory(kind=kind)
    memory.prepare({"both": [tree, torch.ones(3)]}, 2).result(TIMEOUT)
    free = memory.stats().free
    kept = [snapshot({"both": [tree, torch.ones(3)]}, memory=memory) for _ in range(2)]
    assert memory.stats().leased == free == memory.stats().peak
    assert memory.stats().free == 0
    del kept


def test_what_cannot_be_kept_cannot_be_prepared_for() -> None:
    """Told at once, as by a snapshot."""
    memory = HostMemory()
    with pytest.raises(StructureMismatch, match="step"):
        memory.prepare({"step": 3})
    with pytest.raises(NotResident, match="prepare"):
        memory.prepare({"w": torch.empty(3, device="meta")})
    assert not _preparing()


def test_the_pages_are_there() -> None:
    """In resident memory, before anything was copied."""
    size = 32 * MIB
    memory = HostMemory()
    start = _resident()
    memory.prepare(size).result(TIMEOUT)
    assert _resident() - start > 0.95 * size
    tensor = memory.lease(size)
    assert not tensor.any()
    del tensor
    memory.trim()
    assert _resident() - start < 0.1 * size


@pytest.mark.parametrize("size", [1, 4097, 9 * MIB + 5])
def test_on_a_system_that_cannot_populate(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The pages are written to instead."""
    monkeypatch.setattr(Slab, "_populate", lambda self, part: False)
    memory = HostMemory()
    start = _resident()
    memory.prepare(size).result(TIMEOUT)
    assert _resident() - start > 0.9 * size - MIB
    assert memory.lease(size).shape == (size,)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_it_happens_in_the_background_and_a_lease_waits(prefault: Prefault) -> None:
    """For one of its size, and no other; it gets the slab that was prepared."""
    memory = HostMemory()
    order: list[str] = []
    future = memory.prepare(1000)
    assert prefault.begun.wait(TIMEOUT)
    assert not future.done()
    other = memory.lease(500)
    thread = in_thread(lambda: (memory.lease(1000), order.append("leased")))
    thread.join(0.1)
    order.append("let go")
    prefault.gate.set()
    finish(thread)
    assert order == ["let go", "leased"]
    assert future.result(TIMEOUT) is None
    assert memory.stats().peak == 1500
    del other


def test_what_is_being_prepared_counts_against_the_limit(prefault: Prefault) -> None:
    """Or the limit would be passed by as much."""
    memory = HostMemory(limit=1500)
    future = memory.prepare(1000)
    assert prefault.begun.wait(TIMEOUT)
    with pytest.raises(OutOfHostMemory, match="1,000 held"):
        memory.lease(600)
    prefault.gate.set()
    future.result(TIMEOUT)
    assert memory.stats().free == 1000
    kept = memory.lease(600)
    assert memory.stats().free == 0
    del kept


def test_more_than_the_limit(prefault: Prefault) -> None:
    """Surfaces in the future; what was prepared before is there, and is not taken apart to make room for the rest."""
    prefault.gate.set()
    memory = HostMemory(limit=2500)
    other = memory.lease(400)
    del other
    future = memory.prepare(1000, 3)
    with pytest.raises(OutOfHostMemory, match="2,000 held and 1,000 more"):
        future.result(TIMEOUT)
    assert memory.stats().free == 2000
    held = [memory.lease(1000), memory.lease(1000)]
    held.clear()
    assert memory.stats().free == 2000


def test_more_than_the_system_has() -> None:
    """Surfaces in the future, and a lease of the size says it again instead of waiting for ever."""
    memory = HostMemory()
    with pytest.raises(OutOfHostMemory, match="the system has no"):
        memory.prepare(1 << 55, 2).result(TIMEOUT)
    with pytest.raises(OutOfHostMemory, match="the system has no"):
        memory.lease(1 << 55)


def test_a_failure_half_way(prefault: Prefault) -> None:
    """Surfaces in the future; what came before it is there, what failed is given back, and leases go on."""
    memory = HostMemory()
    prefault.fail_at = 1
    future = memory.prepare(1000, 3)
    assert prefault.begun.wait(TIMEOUT)
    held: list[torch.Tensor] = []
    threads = [in_thread(lambda: held.append(memory.lease(1000))) for _ in range(3)]
    prefault.gate.set()
    with pytest.raises(OSError, match="the pages do not come"):
        future.result(TIMEOUT)
    finish(*threads)
    assert len(held) == 3
    assert memory.stats().leased == 3000 == memory.stats().peak
    assert memory._held() == 3000


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is raised, and no lease waits for what never comes."""
    memory = HostMemory()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            memory.prepare(1000)
    finish(in_thread(lambda: memory.lease(1000)))
    assert memory.stats().peak == 1000


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_is_prepared_counts_towards_the_peak() -> None:
    """It is held, although nobody has leased it."""
    memory = HostMemory()
    memory.prepare(1000, 2).result()
    assert memory.stats().peak == 2000
