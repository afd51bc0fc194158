"""What cannot be done is refused by name, before a byte is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from configurations import differing, everything, places

from mcore_snap import NotResident, SnapError, StructureMismatch, load, model_tree, snapshot, swapped
from mcore_snap.testing.gpt import batch, gpt, optimizer, train_step
from mcore_snap.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def trained(rank: int, **options: Any) -> list[Any]:
    """Build a model and train it one step."""
    chunks = gpt(**options)
    train_step(chunks, optimizer(chunks), batch(0, rank))
    return chunks


def _enter(tree: Any, snap: Any) -> None:
    with swapped(tree, snap):
        raise AssertionError("the body was entered")


_USES: dict[str, Callable[[Any, Any], object]] = {
    "load": load,
    "swapped": _enter,
    "snapshot": lambda tree, _: snapshot(tree),
}


def give_wrong_snapshot(rank: int, theirs: Any, ours: Any, use: str) -> list[str]:
    """Load a snapshot of one model into another; the problems that were told."""
    other = trained(rank, **theirs)
    foreign = snapshot(model_tree(other))
    chunks = trained(rank, **ours)
    tree = model_tree(chunks)
    before, where = everything(chunks), places(chunks)
    with pytest.raises(StructureMismatch) as caught:
        _USES[use](tree, foreign)
    assert differing(everything(chunks), before) == []
    assert places(chunks) == where
    assert isinstance(caught.value, SnapError)
    assert isinstance(caught.value, ValueError)
    problems = [str(problem) for problem in caught.value.problems]
    assert problems
    for problem in problems:
        assert problem in str(caught.value)
    return problems


_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bare into DDP": ({"ddp": False}, {}, "chunks[0].buffers[0]"),
    "DDP into bare": ({}, {"ddp": False}, "chunks[0].buffers[0]"),
    "own storage into flat": ({"distributed_optimizer": False}, {}, "chunks[0].buffers[0]"),
    "missing chunk": ({}, {"chunks": 2}, "chunks[1]"),
    "extra chunk": ({"chunks": 2}, {}, "chunks[1]"),
    "other dtype": ({"bf16": False}, {}, "chunks[0].buffers[0]"),
    "other shapes": ({"ddp": False, "hidden": 16}, {"ddp": False}, "linear_qkv"),
    "fewer layers": ({"ddp": False, "layers": 1}, {"ddp": False}, "layers.1"),
    "dense into mixture": ({"ddp": False}, {"ddp": False, "moe": True}, "expert_bias"),
    "no expert buffers": ({"moe": True}, {"moe": True, "expert_buffers": True}, "chunks[0].expert_parallel_buffers[0]"),
}


@pytest.mark.parametrize("use", ["load", "swapped"])
@pytest.mark.parametrize("case", _CASES)
def test_a_snapshot_of_another_model_is_refused(case: str, use: str) -> None:
    """One error lists the problems by name, and the model is as it was."""
    theirs, ours, named = _CASES[case]
    (problems,) = run_ranks(give_wrong_snapshot, 1, theirs, ours, use)
    assert any(named in problem for problem in problems), problems


def all_problems(rank: int) -> list[str]:
    """Load a narrower model, in which every weight has another shape."""
    return give_wrong_snapshot(rank, {"ddp": False, "hidden": 16}, {"ddp": False}, "load")


def test_all_problems_are_told_at_once() -> None:
    """Each of the model's parameters is named, not only the first."""
    (problems,) = run_ranks(all_problems, 1)
    for layer in (0, 1):
        for weight in ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2"):
            assert any(f"layers.{layer}." in problem and weight in problem for problem in problems), (layer, weight)


def use_offloaded(rank: int) -> list[str]:
    """Use a tree whose flat buffer has been given back to the system, with no host copy."""
    chunks = trained(rank)
    tree = model_tree(chunks)
    kept = snapshot(tree)
    chunks[0].buffers[0].param_data.untyped_storage().resize_(0)
    messages = []
    for use in _USES.values():
        with pytest.raises(NotResident) as caught:
            use(tree, kept)
        messages.append(str(caught.value))
    return messages


def test_memory_that_is_gone_is_refused() -> None:
    """An offloaded buffer is named; it is neither skipped nor read."""
    (messages,) = run_ranks(use_offloaded, 1)
    assert all("chunks[0].buffers[0]" in message for message in messages), messages
