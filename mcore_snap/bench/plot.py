"""The benchmark's picture. The only module that needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from mcore_snap.bench.report import LABELS
from mcore_snap.bench.results import RATIOS, Results, best, median

__all__ = ["draw", "has_matplotlib"]

_OURS: Final = ("snapshot_recycled", "snapshot_cold", "load", "look_back")


def has_matplotlib() -> bool:
    """Tell whether matplotlib can be imported."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Results, path: Path) -> None:
    """Write a picture of the ratios: a bar for the best of the run, a tick for the median.

    Args:
        results: What to draw.
        path: Where to; the format follows from its suffix.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    fast, usual = best(results), median(results)
    rows = [name for name in RATIOS if fast[name] is not None]
    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.5), layout="constrained")
    axes: Any = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [fast[name] for name in rows], color=["C0" if name in _OURS else "0.7" for name in rows])
    axes.scatter([usual[name] for name in rows], places, marker="|", s=200, color="black", label="median")
    axes.axvline(1, color="C3", label=LABELS["limit"])
    axes.set_yticks(places, [LABELS[name] for name in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"time over the limit, best of {results.rounds}")
    axes.set_title(f"{results.nbytes / 2**30:.3g} GiB on {results.machine.device}, {results.machine.threads} threads")
    axes.legend()
    figure.savefig(path, dpi=150)
