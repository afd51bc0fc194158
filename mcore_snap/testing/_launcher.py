"""The process that forks ranks for :func:`mcore_snap.testing.ranks.run_ranks`."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Failed", "Finished", "Job", "serve"]

# Peers of a dead rank fail too, a moment later. Wait this many seconds to see who was first.
_GRACE: Final = 0.05


@dataclass(frozen=True)
class Job:
    """One call of ``run_ranks``."""

    call: bytes  # pickled (fn, args)
    world: int
    parallel: Mapping[str, int]
    timeout: float  # seconds
    path: Sequence[str]  # the caller's sys.path, where `fn` can be imported


@dataclass(frozen=True)
class Finished:
    """All ranks returned; their pickled results, in rank order."""

    results: Sequence[bytes]


@dataclass(frozen=True)
class Failed:
    """The first rank that failed, and how."""

    rank: int | None
    details: str
    when: float = 0.0  # seconds on the monotonic clock, which all processes share


@dataclass(frozen=True)
class _Rank:
    rank: int
    pid: int
    connection: Connection[object, bytes | Failed]


def serve(handle: int) -> None:
    """Answer jobs on the connection `handle` until the other end closes it."""
    import torch

    import mcore_snap.testing.gpt  # noqa: F401 - imports Megatron-Core once, for all ranks

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    client: Connection[Failed | Finished, Job] = Connection(handle)
    while True:
        try:
            job = client.recv()
        except EOFError:
            return
        client.send(_run(job, client))


def _run(job: Job, client: Connection[Failed | Finished, Job]) -> Finished | Failed:
    sys.path[:] = job.path
    try:
        # Modules of the caller are imported here once, not again in every rank.
        pickle.loads(job.call)
    except Exception:  # noqa: BLE001 - reported to the caller
        return Failed(None, f"the function or its arguments cannot be unpickled\n{traceback.format_exc()}")
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="mcore_snap_ranks_") as folder:
        try:
            for number in range(job.world):
                # One by one: if a fork fails, those before it have to be killed.
                ranks.append(_fork(number, job, Path(folder)))  # noqa: PERF401
            return _collect(ranks, job.timeout, client)
        finally:
            for rank in ranks:
                os.kill(rank.pid, signal.SIGKILL)
            for rank in ranks:
                _reap(rank)


def _collect(ranks: Sequence[_Rank], timeout: float, client: Connection[Failed | Finished, Job]) -> Finished | Failed:
    deadline = time.monotonic() + timeout
    waiting: dict[object, _Rank] = {rank.connection: rank for rank in ranks}
    results: dict[int, bytes] = {}
    while waiting:
        ready = wait(
            [client, *(rank.connection for rank in waiting.values())], timeout=max(0.0, deadline - time.monotonic())
        )
        if client in ready:
            # The caller is gone (it sends nothing while it waits).
            raise SystemExit(1)
        if not ready:
            late = sorted(rank.rank for rank in waiting.values())
            return Failed(late[0], f"no result after {timeout} seconds (unfinished ranks: {late})")
        failures: list[Failed] = []
        while ready:
            for connection in ready:
                rank = waiting.pop(connection)
                answer = _answer(rank)
                if isinstance(answer, Failed):
                    failures.append(answer)
                else:
                    results[rank.rank] = answer
            ready = wait([rank.connection for rank in waiting.values()], timeout=_GRACE) if failures else []
        if failures:
            return min(failures, key=lambda failure: failure.when)
    return Finished([results[rank.rank] for rank in ranks])


def _answer(rank: _Rank) -> bytes | Failed:
    try:
        return rank.connection.recv()
    except EOFError:
        # Dead without a word. It comes first: a rank that raises stays until it is killed, so
        # nothing that another rank reported can be the cause.
        return Failed(rank.rank, f"it died ({_status(rank.pid)})", when=float("-inf"))


def _status(pid: int) -> str:
    # WNOWAIT leaves the dead process in the table for `_reap`.
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if status is not None and status.si_code in {os.CLD_KILLED, os.CLD_DUMPED}:
        return f"signal {signal.Signals(status.si_status).name}"
    return f"exit status {status.si_status if status else None}"


def _reap(rank: _Rank) -> None:
    os.waitpid(rank.pid, 0)
    rank.connection.close()


def _fork(rank: int, job: Job, folder: Path) -> _Rank:
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_rank(rank, job, folder, theirs)
    # Closed here before the next fork, so that only the rank holds it and its death shows.
    theirs.close()
    return _Rank(rank, pid, ours)


def _be_rank(rank: int, job: Job, folder: Path, connection: Connection[bytes | Failed, object]) -> NoReturn:
    try:
        faulthandler.enable()
        answer: bytes | Failed = _call(rank, job, folder)
    except BaseException:  # noqa: BLE001 - reported to the caller
        answer = Failed(rank, f"it raised\n{traceback.format_exc()}", when=time.monotonic())
    try:
        connection.send(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        # Leaving now could break a collective that another rank is still in: wait to be killed.
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _call(rank: int, job: Job, folder: Path) -> bytes:
    # Not at the top: the process that asks for ranks imports this module and needs none of these.
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from mcore_snap.testing.cpu import cpu_megatron

    os.environ["LOCAL_RANK"] = str(rank)
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with cpu_megatron():
        torch.distributed.init_process_group(
            backend, init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=job.world
        )
        parallel_state.initialize_model_parallel(**job.parallel)
        # The tracker for inference forks no CUDA generator, which a CPU does not have.
        initialize_rng_tracker(inference_rng_tracker=True)
        fn, args = pickle.loads(job.call)
        return pickle.dumps(fn(rank, *args))
