"""Which leaves of a tree can be read: every problem at once, by name, before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_snap.errors import NotResident, StructureMismatch
from mcore_snap.words import problem_with

__all__ = ["check_leaves"]


def check_leaves(leaves: Sequence[object], names: Callable[[], Sequence[str]], what: str) -> None:
    """Check that every leaf is a plain tensor whose memory is there.

    Args:
        leaves: The leaves.
        names: Gives their names; called only if something is wrong.
        what: What was being done, for the message.

    Raises:
        StructureMismatch: Some leaf is of a kind that cannot be kept.
        NotResident: Every leaf is of a good kind, but the memory of some is not there.

    >>> check_leaves([3], lambda: ["['step']"], "snapshot")
    Traceback (most recent call last):
        ...
    mcore_snap.errors.StructureMismatch: snapshot: some leaves cannot be used; nothing was written
      - ['step']: expected a tensor, found int; keep other values elsewhere
    """
    found = [(index, problem) for index, leaf in enumerate(leaves) if (problem := problem_with(leaf))]
    if not found:
        return
    called = names()
    lines = [f"{called[index]}: {sentence}" for index, (_, sentence) in found]
    error = NotResident if all(kind == "absent" for _, (kind, _) in found) else StructureMismatch
    raise error(f"{what}: some leaves cannot be used; nothing was written", lines)
