"""Run a function on several ranks, each a forked process with Megatron-Core initialised.

Importing Megatron-Core takes seconds, and a process that has run autograd must not fork (the
children crash). So one clean *launcher* process imports Megatron-Core once and forks all ranks;
it never computes anything itself. It starts with the first call and ends with this process.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Concatenate, Final, TypeVar

from mcore_snap.testing._launcher import Failed, Finished, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["RankFailure", "run_ranks"]

_R = TypeVar("_R")


class RankFailure(RuntimeError):  # noqa: N818 - "failure" is what the field calls it
    """A rank raised, died, or did not finish in time.

    Attributes:
        rank: The rank that failed first, or None if the launcher itself died.
        details: The rank's traceback, or how it died.
    """

    def __init__(self, rank: int | None, details: str) -> None:
        """Describe the failure of `rank`."""
        self.rank = rank
        self.details = details
        where = "the launcher" if rank is None else f"rank {rank}"
        super().__init__(f"{where} failed: {details}")

    def __reduce__(self) -> tuple[type[RankFailure], tuple[int | None, str]]:
        """Pickle by the arguments, so that it survives a process boundary."""
        return type(self), (self.rank, self.details)


def run_ranks(
    fn: Callable[Concatenate[int, ...], _R],
    world: int = 1,
    *args: object,
    parallel: Mapping[str, int] | None = None,
    timeout: float = 120.0,
) -> list[_R]:
    """Call ``fn(rank, *args)`` on `world` ranks and return their results in rank order.

    Each rank is a fresh process with one torch thread, a default process group (gloo, and nccl for
    CUDA tensors where CUDA is available), Megatron's parallel state, its random-number tracker,
    and :func:`mcore_snap.testing.cpu.cpu_megatron` active.

    Ranks that a signal ends are started once more: gloo itself crashes about once in two thousand
    process starts, in plain training too. What crashes by its own fault crashes again.

    Args:
        fn: A function that pickle finds by name: at the top level of an importable module.
        world: Number of ranks.
        *args: Picklable arguments, the same on every rank.
        parallel: Arguments of ``parallel_state.initialize_model_parallel``, such as
            ``{"expert_model_parallel_size": 2}``.
        timeout: Seconds that all ranks together may take.

    Returns:
        What `fn` returned on rank 0, 1, and so on. Results travel by pickle: return
        plain values or ordinary tensors.

    Raises:
        RankFailure: A rank raised an exception, was killed, or ran out of time; the message has
            its rank and its traceback. All other ranks have been killed by then.
        ValueError: `world` is less than one, or `fn` belongs to the script being run, which a rank
            cannot import.
    """
    if world < 1:
        msg = f"expected at least one rank, got world={world}"
        raise ValueError(msg)
    if fn.__module__ == "__main__":
        msg = f"expected a function from an importable module, got {fn.__qualname__} from __main__"
        raise ValueError(msg)
    job = Job(call=pickle.dumps((fn, args)), world=world, parallel=dict(parallel or {}), timeout=timeout, path=sys.path)
    outcome = _LAUNCHER.submit(job)
    if isinstance(outcome, Failed) and outcome.details.startswith("it died (signal"):
        outcome = _LAUNCHER.submit(job)
    if isinstance(outcome, Failed):
        raise RankFailure(outcome.rank, outcome.details)
    return [pickle.loads(result) for result in outcome.results]


class _Launcher:
    """The launcher process, started when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Job, Finished | Failed] | None = None

    def submit(self, job: Job) -> Finished | Failed:
        with self._lock:
            connection = self._connection or self._start()
            try:
                connection.send(job)
                return connection.recv()
            except (EOFError, OSError) as error:
                status = self._process.wait() if self._process else None
                self.stop()
                return Failed(None, f"it ended with status {status} ({error!r})")
            except BaseException:
                # Interrupted: the answer that is still to come belongs to no one.
                self.stop()
                raise

    def _start(self) -> Connection[Job, Finished | Failed]:
        ours, theirs = Pipe()
        environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", _SERVE.format(handle=theirs.fileno())]
        # A session of its own, so that the launcher and its ranks can be killed as one group.
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own code
            command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._connection = ours
        return ours

    def stop(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_SERVE: Final = "from mcore_snap.testing._launcher import serve; serve({handle})"
_ENVIRONMENT: Final = {
    # Compiling Megatron's fused MoE functions takes seconds in every rank.
    "TORCH_COMPILE_DISABLE": "1",
    # A thread pool would not survive the fork.
    "OMP_NUM_THREADS": "1",
    # Counting devices through the CUDA runtime would make the launcher unfit to fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Megatron-Core warns about every optional package that is absent.
    "PYTHONWARNINGS": "ignore",
}
_LAUNCHER: Final = _Launcher()
atexit.register(_LAUNCHER.stop)
