"""The whole measurement: check every contender's bits once, then time them in turn."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from mcore_snap.bench import contenders, released_verl
from mcore_snap.bench.contenders import Contender, problem_of
from mcore_snap.bench.memory import peak_bytes
from mcore_snap.bench.results import Machine, Results
from mcore_snap.bench.stand_in import Subject, device_here, many_leaves, one_buffer
from mcore_snap.bench.timing import import_seconds, interleaved, seconds_of

__all__ = ["measure"]

_PEAKS: Final = ("snapshot_cold", "load", "look_back", "verl_snapshot", "dcp_stage", "deepcopy")


def measure(nbytes: int, small_leaves: int, rounds: int, *, with_verl: bool = True) -> Results:
    """Measure everything.

    Args:
        nbytes: Size of the model; at least `mcore_snap.bench.stand_in.SMALLEST`, and even.
        small_leaves: Number of leaves of 256 bytes in the model that has many.
        rounds: How many times everything runs.
        with_verl: Whether to measure verl's functions, which may have to be downloaded.

    Raises:
        UnavailableError: verl's package cannot be had. Nothing was measured.
    """
    theirs = contenders.VERL if with_verl else {}
    if with_verl:
        released_verl.wheel()
    load_before = os.getloadavg()
    # First, as long as this process holds no models: the peaks are measured with models of their own.
    peaks = peak_bytes([name for name in _PEAKS if with_verl or name not in contenders.VERL], nbytes)
    groups = {**contenders.LIMIT, **contenders.OURS, **contenders.ASYNC, **theirs, **contenders.OTHERS}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        seconds, wrong = _compare(groups, lambda: one_buffer(nbytes, device_here()), rounds)
        small_seconds, small_wrong = _compare(
            contenders.SMALL, lambda: many_leaves(small_leaves, device_here()), rounds
        )
    imports = interleaved({"import": import_seconds}, rounds)
    return Results(
        nbytes=nbytes,
        small_leaves=small_leaves,
        rounds=rounds,
        seconds={**seconds, **small_seconds, **imports},
        peaks=peaks,
        wrong={**wrong, **small_wrong},
        machine=_machine(load_before),
        missing={} if with_verl else dict.fromkeys(contenders.VERL, "left out on request"),
    )


def _compare(
    makers: Mapping[str, Callable[[Subject], Contender]], make_subject: Callable[[], Subject], rounds: int
) -> tuple[dict[str, tuple[float, ...]], dict[str, str]]:
    # The models live no longer than this: others may be as large.
    subject = make_subject()
    made = {name: make(subject) for name, make in makers.items()}
    problems = {name: problem_of(contender, subject) for name, contender in made.items()}
    runs = {name: partial(seconds_of, contender, subject) for name, contender in made.items()}
    return interleaved(runs, rounds), {name: problem for name, problem in problems.items() if problem}


def _machine(load_before: tuple[float, float, float]) -> Machine:
    return Machine(
        device=_name_of_device(),
        cpus=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        load_before=load_before,
        load_after=os.getloadavg(),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mcore-snap": _version("mcore-snap"),
            "verl": released_verl.VERSION,
        },
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # used from where it lies
        return "not installed"


def _name_of_device() -> str:
    device = device_here()
    return torch.cuda.get_device_name() if device.type == "cuda" else device.type
