"""What is static about a model chunk: where each parameter lies among its leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["EMPTY", "Layout", "Placement"]


class Placement(NamedTuple):
    """Where a parameter lies.

    Attributes:
        name: Its first name in its chunk.
        chunk: The chunk whose leaf holds it if that is not its own: chunks may share memory.
        field: The field of that ChunkTree which holds the leaf.
        key: The leaf's index or name in that field.
        view: ``(offset, shape, stride)`` in elements from the leaf's first one, or ``None`` where
            the parameter is the whole leaf.
        expert: Whether it belongs to an expert, and so is replicated over fewer ranks.
    """

    name: str
    chunk: int | None
    field: str
    key: int | str
    view: tuple[int, tuple[int, ...], tuple[int, ...]] | None
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """What is static about a chunk.

    Attributes:
        placements: Where each parameter lies; none for what lies in a flat buffer of which only
            slices are kept.
        data_parallel: ``(rank, size)`` per leaf of ``buffers`` and ``expert_parallel_buffers`` if
            these are this rank's slices, else ``None``.
    """

    placements: tuple[Placement, ...] = ()
    data_parallel: tuple[tuple[int, int], ...] | None = None


EMPTY: Final = Layout()
