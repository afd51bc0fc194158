"""What processes do that end with snapshots at every stage: `fork_cases` runs them."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from held_copies import TIMEOUT, Held, copying_with

from mcore_snap import HostMemory, default_memory, snapshot, snapshot_async

SIZE: Final = 5000

_LEFT: Final[list[Any]] = []


def filled(value: float) -> dict[str, torch.Tensor]:
    """Make a tree with this value everywhere."""
    return {"w": torch.full((SIZE,), value), "b": torch.full((3,), value)}


def holds(tree: Any, value: float) -> bool:
    """Tell whether a tree has this value everywhere."""
    return all(bool((leaf == value).all()) for leaf in tree.values())


def _keep_in_shared_memory() -> None:
    _LEFT.append(snapshot(filled(1), memory=HostMemory(kind="shared")))


def processes_of_multiprocessing_end_with_snapshots() -> None:
    """They leave without `atexit`, and leave no names."""
    for _ in range(2):
        _keep_in_shared_memory()
        process = multiprocessing.get_context("fork").Process(target=_keep_in_shared_memory)
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode == 0
        assert list(Path("/dev/shm").glob(f"mcore_snap-{process.pid}-*")) == []
        assert holds(_LEFT[0], 1)


def it_ends_with_snapshots_in_shared_memory() -> None:
    """Leased, idle, and of a memory that is gone."""
    memory = HostMemory(kind="shared", keep=2)
    _LEFT.extend([snapshot(filled(1), memory=memory), memory])
    _keep_in_shared_memory()
    memory.lease(99)


def it_ends_with_snapshots_under_way() -> None:
    """They are finished first: nothing is lost."""
    live = filled(1)
    memory = HostMemory()
    copies = Held()
    with copying_with(copies):
        pending = [snapshot_async(live, memory=memory) for _ in range(2)]

    def later() -> None:
        time.sleep(0.2)
        copies.let_go()

    threading.Thread(target=later, daemon=True).start()

    def check() -> None:
        assert all(one.done() and holds(one.result(), 1) for one in pending)
        sys.stdout.write("finished ")

    atexit.register(check)


def it_ends_with_failed_snapshots_that_nobody_asked_for() -> None:
    """Silently: whoever wants to know asks for the result."""
    for _ in range(2):
        snapshot_async(filled(1), memory=HostMemory(limit=5))


def it_ends_while_memory_is_being_prepared() -> None:
    """And nothing is said."""
    default_memory().prepare(1 << 28, 2)


def it_ends_by_an_error() -> None:
    """Which is all that is said; no names are left."""
    _keep_in_shared_memory()
    raise RuntimeError("as planned")


def it_ends_while_daemon_threads_take_snapshots() -> None:
    """They are stopped wherever they are."""
    memory = HostMemory(kind="shared")

    def work() -> None:
        with contextlib.suppress(Exception):  # libraries fall apart under it
            while True:
                _LEFT[:] = [snapshot(filled(1), memory=memory)]

    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.1)


CASES: Final[tuple[Callable[[], None], ...]] = (
    processes_of_multiprocessing_end_with_snapshots,
    it_ends_with_snapshots_in_shared_memory,
    it_ends_with_snapshots_under_way,
    it_ends_with_failed_snapshots_that_nobody_asked_for,
    it_ends_while_memory_is_being_prepared,
    it_ends_by_an_error,
    it_ends_while_daemon_threads_take_snapshots,
)
