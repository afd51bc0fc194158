"""What the benchmark measured, as plain data, and the ratios that follow from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

__all__ = ["FIGURES", "RATIOS", "Figures", "Machine", "Results", "as_json", "best", "figures", "median"]

RATIOS: Final = (
    "snapshot_recycled",
    "snapshot_cold",
    "load",
    "look_back",
    "verl_snapshot",
    "verl_load",
    "verl_look_back",
    "dcp_stage",
    "dcp_stage_reused",
    "deepcopy",
)
"""Keys that are times over that of `limit`."""

FIGURES: Final = ("async_stall_s", "small_leaf_us", "small_leaf_model_us", "import_s", "peak_bytes_over_s")
"""Keys that are not: seconds, microseconds a leaf, seconds, and bytes over the bytes of the model."""

Figures: TypeAlias = dict[str, float | None]
"""By key; ``None`` was not measured."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran, and how busy that was.

    Attributes:
        device: What holds the weights.
        cpus: Processors that this process may use.
        threads: Threads that torch copies with.
        load_before: Load averages of the system over 1, 5 and 15 minutes, when it began.
        load_after: The same when it ended; the benchmark itself is in it.
        versions: Package name to version.
    """

    device: str
    cpus: int
    threads: int
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]
    versions: Mapping[str, str]

    @property
    def was_busy(self) -> bool:
        """Whether there was more to run than processors, before the benchmark began."""
        return self.load_before[0] > self.cpus


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run.

    Attributes:
        nbytes: Size of the model, in bytes.
        small_leaves: Number of small leaves.
        rounds: How many times everything ran.
        seconds: Contender to its times, in the order of the rounds.
        peaks: Contender to the resident bytes that it took at its peak.
        wrong: Contender to what is wrong with its bits; empty if all is well.
        missing: Contender to why it was not measured.
        machine: Where it ran.
    """

    nbytes: int
    small_leaves: int
    rounds: int
    seconds: Mapping[str, Sequence[float]]
    peaks: Mapping[str, int]
    wrong: Mapping[str, str]
    machine: Machine
    missing: Mapping[str, str] = field(default_factory=dict)


def figures(results: Results, pick: Callable[[Sequence[float]], float]) -> Figures:
    """Return every figure, each time being what `pick` makes of the rounds, such as `min`.

    Each ratio is of two picked times. That a leaf costs is what a tree of many takes on top of one copy
    of the same bytes.
    """
    times = {name: pick(seconds) for name, seconds in results.seconds.items()}

    def over(name: str, base: float) -> float | None:
        return times[name] / base if name in times else None

    def per_leaf(name: str) -> float | None:
        if name not in times:
            return None
        return (times[name] - times["small_limit"]) / results.small_leaves * 1e6

    found: Figures = {name: over(name, times["limit"]) for name in RATIOS}
    found["async_stall_s"] = over("async_stall", 1)
    found["small_leaf_us"] = per_leaf("small_pytree")
    found["small_leaf_model_us"] = per_leaf("small_model")
    found["import_s"] = over("import", 1)
    peak = results.peaks.get("snapshot_cold")
    found["peak_bytes_over_s"] = None if peak is None else peak / results.nbytes
    return found


def best(results: Results) -> Figures:
    """Return every figure from the best of its rounds."""
    return figures(results, min)


def median(results: Results) -> Figures:
    """Return every figure from the median of its rounds."""
    return figures(results, statistics.median)


def as_json(results: Results) -> dict[str, Any]:
    """Return all of it as one JSON document: the best figures on top, the medians and the raw times below."""
    return {
        "size_bytes": results.nbytes,
        "small_leaves": results.small_leaves,
        "rounds": results.rounds,
        "ok": not results.wrong,
        "wrong": dict(results.wrong),
        "missing": dict(results.missing),
        **best(results),
        "median": median(results),
        "seconds": {name: list(seconds) for name, seconds in results.seconds.items()},
        "peak_bytes": dict(results.peaks),
        "machine": {
            **asdict(results.machine),
            "load_before": list(results.machine.load_before),
            "load_after": list(results.machine.load_after),
        },
    }
