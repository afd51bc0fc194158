"""The benchmark's table, for people: plain text, so that it needs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

from mcore_snap.bench.results import Machine, Results, best, median

__all__ = ["LABELS", "table"]

LABELS: Final[Mapping[str, str]] = {
    "limit": "limit: one warm copy_ of the same bytes",
    "snapshot_recycled": "snapshot, recycled memory",
    "snapshot_cold": "snapshot, fresh memory",
    "load": "load",
    "look_back": "look-back (swapped)",
    "verl_snapshot": "verl copy_megatron_model_to_cpu",
    "verl_load": "verl restore_megatron_model_from_cpu",
    "verl_look_back": "verl look-back (save, restore, restore)",
    "dcp_stage": "torch checkpoint staging, fresh memory",
    "dcp_stage_reused": "torch checkpoint staging, over the last one",
    "deepcopy": "copy.deepcopy(state_dict)",
}
"""What the rows of times are called."""

_FIGURES: Final = {
    "async_stall_s": ("snapshot_async keeps the caller", 1e6, "us"),
    "small_leaf_us": ("a small leaf of a pytree, on top of its bytes", 1, "us"),
    "small_leaf_model_us": ("a small leaf of a model, on top of its bytes", 1, "us"),
    "import_s": ("import mcore_snap, on top of torch", 1e3, "ms"),
}
_WIDTH: Final = 46


def table(results: Results) -> str:
    """Return all of it as text: a row of times for every contender, and the other figures below.

    The last lines say which contenders gave wrong bits, if any did.
    """
    lines = [*_head(results), ""]
    fast, usual = best(results), median(results)
    lines.append(f"{'':{_WIDTH}}{'best s':>10}{'median s':>10}{'best x':>9}{'median x':>9}")
    for name, label in LABELS.items():
        if name in results.seconds:
            seconds = results.seconds[name]
            times = f"{min(seconds):10.4f}{statistics.median(seconds):10.4f}"
            ratios = f"{_number(fast.get(name, 1.0), 9)}{_number(usual.get(name, 1.0), 9)}"
            lines.append(f"{label:{_WIDTH}}{times}{ratios}{'  WRONG BITS' if name in results.wrong else ''}")
        else:
            lines.append(f"{label:{_WIDTH}}  {results.missing.get(name, 'not measured')}")
    lines += ["", f"{'':{_WIDTH}}{'best':>10}{'median':>10}"]
    for name, (label, factor, unit) in _FIGURES.items():
        values = (_number(value and value * factor, 10) for value in (fast[name], usual[name]))
        lines.append(f"{label:{_WIDTH}}{''.join(values)} {unit}")
    lines += ["", f"{'peak host memory, over the size of the model':{_WIDTH}}"]
    for name, peak in results.peaks.items():
        lines.append(f"  {LABELS[name]:{_WIDTH - 2}}{peak / results.nbytes:10.3f}")
    lines += [f"WRONG BITS: {name}: {problem}" for name, problem in results.wrong.items()]
    return "\n".join(lines)


def _head(results: Results) -> list[str]:
    rounds = "1 round" if results.rounds == 1 else f"{results.rounds} interleaved rounds"
    return [
        f"{results.nbytes:,} bytes in one flat buffer; {results.small_leaves:,} small leaves; {rounds}",
        *_state(results.machine),
    ]


def _state(machine: Machine) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    load = f"load average {machine.load_before[0]:.1f} before and {machine.load_after[0]:.1f} after"
    busy = "; it was busy with other work: read the best times" if machine.was_busy else ""
    return [
        versions,
        f"on {machine.device}: {machine.threads} threads on {machine.cpus} processors, {load}{busy}",
    ]


def _number(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"
