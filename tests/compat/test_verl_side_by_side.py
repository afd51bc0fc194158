"""verl's two functions as released and ours, one configuration after the other, by what comes back."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import released_verl
import torch
from kinds import KINDS, Kind
from verl_cases import CASES, Case

from mcore_snap.compat import verl as ours
from mcore_snap.testing.gpt import batch, logits
from mcore_snap.testing.ranks import run_ranks


@pytest.fixture(autouse=True, scope="module")
def released() -> None:
    """Have the wheel before any rank reads it, and fail where it cannot be had."""
    released_verl.wheel()


class Outcome(NamedTuple):
    """What became of one model.

    Attributes:
        verdict: "right", "wrong", or the name of an exception.
        before: The model's bits before the restore.
        restored: Its bits after the restore and the next forward pass.
        trained: Its bits one training step later.
    """

    verdict: str
    before: dict[str, Any]
    restored: dict[str, Any]
    trained: dict[str, Any]


def go_back(rank: int, case: Case, functions: Any) -> Outcome:
    """Train, keep the weights, train on, restore them, and train one step more."""
    with KINDS[case.kind].around():
        return _go_back(rank, case, KINDS[case.kind], functions)


def _go_back(rank: int, case: Case, kind: Kind, functions: Any) -> Outcome:
    chunks = kind.build(**case.options)
    trainable = any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())
    adam = kind.optimizer(chunks) if trainable else None
    case.prepare(chunks)

    def train(*steps: int) -> None:
        for step in steps if trainable else ():
            kind.step(chunks, adam, batch(step, rank))

    train(0)
    expected = logits(chunks, batch(9)) if case.forward_before_copy else None
    target, before = chunks, {}
    try:
        with case.around[0](chunks):
            state = functions.copy_megatron_model_to_cpu(case.copied(chunks))
        expected = logits(chunks, batch(9)) if expected is None else expected
        train(1, 2)
        case.disturb(chunks)
        if case.forward_before_restore:
            assert not torch.equal(logits(chunks, batch(9)), expected), "nothing had changed: nothing is tested"
        target = case.restored(chunks)
        before = kind.bits(target)
        with case.around[1](target):
            functions.restore_megatron_model_from_cpu(target, state)
    except AssertionError:
        raise
    except Exception as error:
        return Outcome(type(error).__name__, before, kind.bits(target) if before else {}, {})
    # A part or another wrapper of the model is judged by the model; another model by itself.
    seen = target if case.anew else chunks
    verdict = "right" if torch.equal(logits(seen, batch(9)), expected) else "wrong"
    restored = kind.bits(seen)
    train(3)
    return Outcome(verdict, before, restored, kind.bits(chunks))


def side_by_side(rank: int, name: str) -> tuple[Outcome | None, Outcome]:
    """Do the same with verl's functions and with ours."""
    case = CASES[name]
    theirs = None if case.theirs is None else go_back(rank, case, released_verl.megatron_utils())
    return theirs, go_back(rank, case, ours)


def joined(outcomes: list[Outcome | None]) -> str | None:
    """One verdict of all ranks: an exception before "wrong" before "right"."""
    verdicts = {one.verdict for one in outcomes if one is not None}
    exceptions = verdicts - {"right", "wrong"}
    return min(exceptions) if exceptions else max(verdicts, default=None)


@pytest.mark.parametrize("name", CASES)
def test_ours_is_theirs_where_theirs_is_right_and_right_elsewhere(name: str) -> None:
    """Verdicts are as the table says; where both are right, the models agree in every bit, also one step later."""
    case = CASES[name]
    parallel = {"expert_model_parallel_size": case.options.get("expert_parallel", 1)}
    outcomes = run_ranks(side_by_side, case.world, name, parallel=parallel)
    theirs, our = joined([one for one, _ in outcomes]), joined([one for _, one in outcomes])
    assert our == case.ours
    assert (theirs if theirs in {"right", "wrong", None} else "crash") == case.theirs, theirs
    for their_outcome, our_outcome in outcomes:
        if case.ours != "right":
            assert our_outcome.before == our_outcome.restored, "something was written before it was refused"
        elif case.theirs == "right":
            assert their_outcome is not None
            assert their_outcome.restored == our_outcome.restored
            assert their_outcome.trained == our_outcome.trained
