"""What the demo measured, as plain data, and which promises that breaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["Run", "Step", "as_json", "broken_promises", "exit_status", "merge"]


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, and the look-back before it.

    The first step needs none: version 1 is still live. There, what a look-back gives is ``None``.

    Attributes:
        step: Its number, from 1.
        loss: Mean loss of its batch, in nats per byte of text.
        bytes: Size of the snapshot, in bytes; over all ranks.
        snapshot_ms: Time of one ``snapshot`` of the current weights, in milliseconds; slowest rank.
        load_ms: Time of one ``load``, in milliseconds; slowest rank.
        old_log_probs_bitwise: Whether the old log-probabilities had the bits that version 1 gave.
        weights_back_bitwise: Whether the current weights were bit for bit the same afterwards.
        distance: Mean absolute difference between the batch's current and old log-probabilities, in
            nats: how far training has moved.
    """

    step: int
    loss: float
    bytes: int
    snapshot_ms: float
    load_ms: float | None
    old_log_probs_bitwise: bool | None
    weights_back_bitwise: bool | None
    distance: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run.

    Attributes:
        moe: Whether the model is a mixture of experts.
        ranks: Number of ranks.
        device: Kind of device that held the model.
        versions: Package name to version.
        leaves: Leaves of the model's tree on one rank.
        dtypes: Their dtypes, sorted.
        ranks_agree: Whether all ranks held the same version 1; ``None`` with one rank.
        steps: What each step gave.
    """

    moe: bool
    ranks: int
    device: str
    versions: dict[str, str]
    leaves: int
    dtypes: tuple[str, ...]
    ranks_agree: bool | None
    steps: tuple[Step, ...]


def merge(runs: Sequence[Run]) -> Run:
    """Combine what the ranks saw: a promise holds if it holds on every rank.

    Args:
        runs: One or more, of the same steps, in rank order.
    """
    by_step = zip(*(run.steps for run in runs), strict=True)
    return replace(
        runs[0],
        ranks=len(runs),
        ranks_agree=_all([run.ranks_agree for run in runs]),
        steps=tuple(_merge_steps(steps) for steps in by_step),
    )


def broken_promises(run: Run) -> list[str]:
    """Say in words which promises the run breaks; an empty list if it keeps them all.

    A run that proves nothing counts as broken: without a look-back, or with weights that never moved.
    """
    problems = []
    looked_back = [step for step in run.steps if step.old_log_probs_bitwise is not None]
    if not looked_back:
        problems.append("no step looked back, so nothing was shown")
    if run.ranks > 1 and not run.ranks_agree:
        problems.append("the ranks do not hold the same version 1")
    for step in looked_back:
        if not step.old_log_probs_bitwise:
            problems.append(f"step {step.step}: the old log-probabilities are not bitwise those of version 1")
        if not step.weights_back_bitwise:
            problems.append(f"step {step.step}: the current weights did not come back bitwise")
        if not step.distance:
            problems.append(f"step {step.step}: training has not moved the model, so the look-back shows nothing")
    return problems


def exit_status(run: Run) -> int:
    """Return 0 if every promise was kept, else 1."""
    return 1 if broken_promises(run) else 0


def as_json(run: Run) -> dict[str, Any]:
    """Return the run as what JSON can hold, with the verdict."""
    problems = broken_promises(run)
    document = asdict(run)
    # JSON has no NaN and no infinity.
    document["steps"] = [{name: _finite(value) for name, value in step.items()} for step in document["steps"]]
    return document | {"ok": not problems, "broken": problems}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _merge_steps(steps: Sequence[Step]) -> Step:
    loads = [step.load_ms for step in steps if step.load_ms is not None]
    distances = [step.distance for step in steps if step.distance is not None]
    return Step(
        step=steps[0].step,
        loss=sum(step.loss for step in steps) / len(steps),
        bytes=sum(step.bytes for step in steps),
        snapshot_ms=max(step.snapshot_ms for step in steps),
        load_ms=max(loads, default=None),
        old_log_probs_bitwise=_all([step.old_log_probs_bitwise for step in steps]),
        weights_back_bitwise=_all([step.weights_back_bitwise for step in steps]),
        # The least, so that a rank whose weights stand still shows.
        distance=min(distances, default=None),
    )


def _all(answers: Sequence[bool | None]) -> bool | None:
    known = [answer for answer in answers if answer is not None]
    return all(known) if known else None
