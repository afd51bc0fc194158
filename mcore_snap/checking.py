"""Which leaves of a tree can be read or written: every problem at once, by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mcore_snap.errors import NotResident, StructureMismatch
from mcore_snap.words import problem_with

__all__ = ["check_leaves", "refuse", "refuse_models"]

Problem = tuple[str, str]
"""A kind, ``"absent"`` for memory that is not there or another, and a sentence about one leaf."""


def check_leaves(leaves: Sequence[object], names: Sequence[str], what: str) -> None:
    """Check that every leaf is a plain tensor whose memory is there.

    Args:
        leaves: The leaves.
        names: Their names; looked at only if something is wrong.
        what: What was being done, for the message.

    Raises:
        StructureMismatch: Some leaf is of a kind that cannot be kept.
        NotResident: Every leaf is of a good kind, but the memory of some is not there.

    >>> check_leaves([3], ["['step']"], "snapshot")
    Traceback (most recent call last):
        ...
    mcore_snap.errors.StructureMismatch: snapshot: some leaves cannot be used
      - ['step']: expected a tensor, found int; keep other values elsewhere
    """
    found = [(index, problem) for index, leaf in enumerate(leaves) if (problem := problem_with(leaf))]
    if found:
        problems = [(kind, f"{names[index]}: {sentence}") for index, (kind, sentence) in found]
        refuse(f"{what}: some leaves cannot be used", problems)


def refuse_models(leaves: Sequence[object], names: Sequence[str], message: str) -> None:
    """Refuse modules where their trees belong: they are leaves to optree, and would be passed over without a word.

    Args:
        leaves: The leaves.
        names: Their names; looked at only if something is wrong.
        message: What the error begins with.

    Raises:
        StructureMismatch: Some leaf is a module.

    >>> refuse_models([3], ["['step']"], "fence")
    """
    found = [
        (problem[0], f"{names[index]}: {problem[1]}")
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, nn.Module) and (problem := problem_with(leaf))
    ]
    refuse(message, found)


def refuse(message: str, problems: Sequence[Problem]) -> None:
    """Raise one error that lists all problems; nothing if there are none.

    Raises:
        NotResident: All that is wrong is that memory is not there.
        StructureMismatch: Anything else is wrong.
    """
    if problems:
        error = NotResident if all(kind == "absent" for kind, _ in problems) else StructureMismatch
        raise error(message, [line for _, line in problems])
