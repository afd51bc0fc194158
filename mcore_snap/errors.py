"""What can go wrong, as exceptions that name the leaf, the finding and the cure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

__all__ = [
    "Corrupt",
    "FrozenError",
    "NotReady",
    "NotResident",
    "OutOfHostMemory",
    "SnapError",
    "StructureMismatch",
]


_MOST_SHOWN: Final = 50
"""Problems in a message: a model has thousands of leaves, and every rank prints its own."""


class SnapError(Exception):
    """Base of every error that mcore_snap raises on purpose.

    Attributes:
        problems: One line per leaf at fault, each beginning with the leaf's name. All of them; the message
            shows the first fifty.
        kept: Where `swapped` could not put the kept weights back: their snapshot, for `load` once the
            cause is mended; else ``None``.

    >>> SnapError("cannot load", ["a: expected 3, found 4"]).problems
    ('a: expected 3, found 4',)
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        self.message = message
        self.problems: tuple[str, ...] = tuple(problems)
        self.kept: Any = None
        shown = [f"  - {line}" for line in self.problems[:_MOST_SHOWN]]
        if len(self.problems) > _MOST_SHOWN:
            shown.append(f"  and {len(self.problems) - _MOST_SHOWN:,} more, all in the error's `problems`")
        super().__init__("\n".join([message, *shown]))

    def __reduce__(self) -> tuple[type[SnapError], tuple[str, tuple[str, ...]]]:
        """Pickle by the two arguments, so that an error crosses process boundaries whole."""
        return type(self), (self.message, self.problems)


class StructureMismatch(SnapError, ValueError):  # noqa: N818 - the name is the contract's
    """Two trees do not fit each other, or a leaf is of a kind that cannot be kept."""


class FrozenError(SnapError, RuntimeError):
    """Something wrote, or would have to write, to weights that must not change."""


class NotResident(SnapError, RuntimeError):  # noqa: N818 - the name is the contract's
    """The memory of a leaf is not there: freed, on the meta device, or its model is gone."""


class NotReady(SnapError, RuntimeError):  # noqa: N818 - the name is the contract's
    """Weights are in flight and cannot be settled from here; the message says what to call first."""


class OutOfHostMemory(SnapError, MemoryError):  # noqa: N818 - like the builtin
    """A limit would be passed, or the system has no more; ``problems`` lists who holds what."""


class Corrupt(SnapError, ValueError):  # noqa: N818 - the name is the contract's
    """The bytes of a snapshot are not those that its digest was made of."""
