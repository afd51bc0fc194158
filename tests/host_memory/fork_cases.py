"""What processes do that fork with snapshots at every stage; `end_cases` has those that end.

Run as a script, this file runs each case of both in a forked child of a process that has computed nothing, lets it
end as any interpreter ends, and prints what it left: exit status, output, names in shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import end_cases
import pytest
import torch
from end_cases import filled, holds
from held_copies import TIMEOUT, Held, copying_with, in_thread

from mcore_snap import HostMemory, SnapError, default_memory, fence, load, snapshot, snapshot_async, swapped


def _fork(function: Callable[[], object]) -> Callable[[], None]:
    """Run a function in a forked child; what is returned waits for it, and raises if it failed."""
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT)
        try:
            function()
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
        os._exit(0)

    def wait() -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"the child ended with {status}"

    return wait


def a_child_that_drops_what_it_inherited() -> None:
    """Touches nothing of its parent, and uses the memory again for itself."""
    memory = HostMemory(keep=2)
    held = {"old": snapshot(filled(1), memory=memory), "new": snapshot(filled(2), memory=memory)}
    idle = snapshot(filled(3), memory=memory)
    del idle
    before = memory.stats()

    def child() -> None:
        assert memory.stats().leased == before.leased
        assert memory.stats().free == 0, "idle memory of the parent is not the child's"
        assert holds(held["old"], 1)
        del held["old"]
        mine = [snapshot(filled(value), memory=memory) for value in (7, 8, 9)]
        assert [holds(one, value) for one, value in zip(mine, (7, 8, 9), strict=True)] == [True] * 3
        assert holds(held["new"], 2)
        held.clear()
        mine.clear()
        assert memory.stats().leased == 0
        memory.trim()

    _fork(child)()
    assert memory.stats() == before
    assert holds(held["old"], 1)
    assert holds(held["new"], 2)
    assert holds(snapshot(filled(4), memory=memory), 4)


def a_child_keeps_its_snapshots_in_shared_memory() -> None:
    """While its parent drops its own, and takes others that would lie in the same memory."""
    memory = HostMemory(kind="shared", keep=3)
    held = [snapshot(filled(1), memory=memory)]
    idle = snapshot(filled(6), memory=memory)
    del idle
    (reader, writer), (back, answer) = os.pipe(), os.pipe()

    def child() -> None:
        assert os.read(reader, 1)
        assert holds(held[0], 1), "the parent wrote to what the child has"
        held.clear()
        mine = snapshot(filled(5), memory=memory)
        os.write(answer, b"x")
        assert os.read(reader, 1)
        assert holds(mine, 5)
        del mine
        memory.trim()

    wait = _fork(child)
    os.close(answer)  # so that a child that fails ends the wait for it
    held.clear()
    others = [snapshot(filled(value), memory=memory) for value in (2, 3, 4)]
    os.write(writer, b"x")
    assert os.read(back, 1)
    assert [holds(one, value) for one, value in zip(others, (2, 3, 4), strict=True)] == [True] * 3
    os.write(writer, b"x")
    wait()
    assert [holds(one, value) for one, value in zip(others, (2, 3, 4), strict=True)] == [True] * 3
    count = len(list(Path("/dev/shm").glob(f"mcore_snap-{os.getpid()}-*")))
    assert count == 3, f"{count} names for 3 snapshots"
    one: Any = snapshot(filled(1), memory=memory)
    peak = memory.stats().peak
    for value in range(5):
        one = None
        one = snapshot(filled(value), memory=memory)
        assert holds(one, value)
    assert memory.stats().peak == peak, "memory leased after the fork is used again"


def snapshots_in_the_background_of_a_child() -> None:
    """Also if the parent has a thread for its own, which the child has not."""
    live = filled(1)
    assert holds(snapshot_async(live).result(TIMEOUT), 1)

    def child() -> None:
        for value in (2, 3, 4):
            pending = snapshot_async(filled(value))
            assert holds(pending.result(TIMEOUT), value)

    wait = _fork(child)
    assert holds(snapshot_async(live).result(TIMEOUT), 1)
    wait()


def a_fork_while_a_snapshot_is_under_way() -> None:
    """The child waits for nobody: it can change its model, and is told that the snapshot is the parent's."""
    live = filled(1)
    kept = snapshot(filled(5))
    copies = Held()
    with copying_with(copies):
        pending = [snapshot_async(live), snapshot_async(live)]
    assert copies.begun.wait(TIMEOUT)

    def child() -> None:
        fence(live)
        load(live, kept)
        assert holds(live, 5)
        with swapped(live, snapshot(filled(6))):
            assert holds(live, 6)
        for ask in (pending[0].result, pending[1].wait):
            with pytest.raises(SnapError, match="only the parent"):
                ask()
        more = [snapshot_async(live) for _ in range(3)]
        assert all(holds(one.result(TIMEOUT), 5) for one in more)

    wait = _fork(child)
    wait()
    assert not pending[0].done()
    copies.let_go()
    assert all(holds(one.result(TIMEOUT), 1) for one in pending)


def forks_while_other_threads_lease() -> None:
    """No child finds a lock that is taken for ever."""
    memory = HostMemory(kind="shared")
    stop = threading.Event()

    def work(value: float) -> None:
        live = filled(value)
        while not stop.is_set():
            assert holds(snapshot(live, memory=memory), value)
            assert holds(snapshot_async(live).result(TIMEOUT), value)
            memory.stats()

    threads = [in_thread(lambda value=value: work(value)) for value in (1.0, 2.0)]  # type: ignore[misc]

    def child() -> None:
        live = filled(9)
        for home in (memory, default_memory()):
            assert holds(snapshot(live, memory=home), 9)
        assert holds(snapshot_async(live).result(TIMEOUT), 9)
        load(live, filled(8))
        memory.trim()

    for _ in range(15):
        _fork(child)()
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def a_fork_while_memory_is_being_prepared() -> None:
    """The child has nobody who would bring it, and does not wait."""
    memory = HostMemory()
    future = memory.prepare(1 << 26, 2)

    def child() -> None:
        assert memory.lease(1 << 26).nbytes == 1 << 26

    _fork(child)()
    future.result(TIMEOUT)
    assert memory.stats().free == 2 << 26


CASES: Final[tuple[Callable[[], None], ...]] = (
    a_child_that_drops_what_it_inherited,
    a_child_keeps_its_snapshots_in_shared_memory,
    snapshots_in_the_background_of_a_child,
    a_fork_while_a_snapshot_is_under_way,
    forks_while_other_threads_lease,
    a_fork_while_memory_is_being_prepared,
    *end_cases.CASES,
)


def main() -> None:
    """Run all cases at once, each in a child that ends as an interpreter does."""
    torch.set_num_threads(1)
    started = []
    for case in CASES:
        output, errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - read below
        child = os.fork()
        if child == 0:
            signal.alarm(TIMEOUT)
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            case()
            sys.stdout.write("ok")
            return
        started.append((case.__name__, child, output, errors))
    outcomes = {}
    for name, child, output, errors in started:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        errors.seek(0)
        left = [path.name for path in Path("/dev/shm").glob(f"mcore_snap-{child}-*")]
        outcomes[name] = {"status": status, "out": output.read(), "err": errors.read(), "left": left}
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
