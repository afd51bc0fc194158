"""Times: every contender in every round, in turn, so that a busy minute falls on all of them alike."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from mcore_snap.bench.contenders import Contender
from mcore_snap.bench.stand_in import Subject
from mcore_snap.slabs import Slab

__all__ = ["import_seconds", "interleaved", "seconds_of"]

_IMPORT: Final = "import time, torch; t = time.perf_counter(); import mcore_snap; print(time.perf_counter() - t)"


def interleaved(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, ...]]:
    """Call everything once per round, each round beginning with the next, and return what each returned.

    >>> order = []
    >>> interleaved({"a": lambda: order.append("a") or 1.0, "b": lambda: order.append("b") or 2.0}, 2)
    {'a': (1.0, 1.0), 'b': (2.0, 2.0)}
    >>> order
    ['a', 'b', 'b', 'a']
    """
    names = list(runs)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            taken[name].append(runs[name]())
    return {name: tuple(seconds) for name, seconds in taken.items()}


def seconds_of(contender: Contender, subject: Subject) -> float:
    """Return how long one run takes, in seconds, from the current weights being live.

    The clock stops when the device is done, or, of a contender that finishes later, when the caller
    may go on. What it kept is dropped after that. No garbage is collected meanwhile.

    Before one that takes fresh memory, as much is taken and given back: a virtual machine returns idle
    memory to its host, and waiting for the host would else be in the time of whoever happens to take
    memory next. Any other one is run once untimed, so that each is measured in its steady state and not
    in the wake of what happened to come before it.
    """
    subject.reset()
    if contender.fresh:
        _have_memory_at_hand(subject.nbytes)
    else:
        _run(contender)
        subject.reset()
    _synchronize()
    collects = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        result = contender.run(_nothing)
        if contender.finish is None:
            _synchronize()
        taken = time.perf_counter() - start
    finally:
        if collects:
            gc.enable()
    if contender.finish is not None:
        contender.finish(result)
    return taken


def _run(contender: Contender) -> None:
    result = contender.run(_nothing)
    if contender.finish is not None:
        contender.finish(result)


def _have_memory_at_hand(nbytes: int) -> None:
    slab = Slab(nbytes)
    slab.prefault()
    slab.close()


def _nothing() -> None:
    pass


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def import_seconds() -> float:
    """Return how long ``import mcore_snap`` takes in a fresh interpreter that has imported torch."""
    done = subprocess.run(  # noqa: S603 - this interpreter, with a program of our own
        [sys.executable, "-W", "ignore", "-c", _IMPORT], capture_output=True, text=True, check=True
    )
    return float(done.stdout)
