"""Which tensors of a model are leaves, and where every parameter lies among them: decided by plain data alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mcore_snap.coverage import Region, cover
from mcore_snap.layouts import Placement

__all__ = ["Placing", "Spot", "place"]


class Spot(NamedTuple):
    """Where in a model one tensor was found.

    Attributes:
        chunk: Index of its chunk.
        field: Field of the ChunkTree.
        key: Index or name in the field.
        expert: Whether it is a parameter of an expert.
        sliced: Whether only parts of it are kept.
    """

    chunk: int
    field: str
    key: int | str
    expert: bool = False
    sliced: bool = False

    def __str__(self) -> str:
        """Return how errors call it.

        >>> str(Spot(0, "parameters", "norm.weight"))
        "chunks[0].parameters['norm.weight']"
        """
        return f"chunks[{self.chunk}].{self.field}[{self.key!r}]"


class Placing(NamedTuple):
    """What was decided for the tensors of a model.

    Attributes:
        holders: Per tensor ``None`` if it is a leaf of its own, else the index of the one that is its leaf.
        placements: Per chunk, where each of its parameters lies; none for what only slices are kept of.
    """

    holders: tuple[int | None, ...]
    placements: tuple[tuple[Placement, ...], ...]


def place(spots: Sequence[Spot], regions: Sequence[Region | None], chunks: int) -> Placing:
    """Decide which tensors of a model are leaves, and where its parameters lie among these.

    Args:
        spots: Where every tensor of the model was found.
        regions: Where each lies; ``None`` if it is of a kind that has no memory to compare.
        chunks: How many chunks there are.

    Raises:
        StructureMismatch: Two tensors share memory in part.

    >>> spots = [Spot(0, "buffers", 0), Spot(0, "parameters", "norm")]
    >>> flat = Region("flat", 0, 0, "int8", 1, (8,), (1,), whole=True)
    >>> norm = Region("norm", 0, 2, "int8", 1, (3,), (1,))
    >>> placing = place(spots, [flat, norm], 1)
    >>> placing.holders
    (None, 0)
    >>> placing.placements[0][0].view
    (2, (3,), (1,))
    """
    # What cannot be a leaf has no memory to compare; it stays, for the reader to be refused by name.
    sound = [(index, region) for index, region in enumerate(regions) if region is not None]
    holders: list[int | None] = [None] * len(spots)
    for (index, _), owner in zip(sound, cover([region for _, region in sound]), strict=True):
        holders[index] = None if owner is None else sound[owner][0]
    placements: list[list[Placement]] = [[] for _ in range(chunks)]
    for index, spot in enumerate(spots):
        owner = holders[index]
        leaf = index if owner is None else owner
        if spot.field == "parameters" and not spots[leaf].sliced:
            placements[spot.chunk].append(_placement(spot, spots[leaf], _view(regions[index], regions[leaf])))
    return Placing(tuple(holders), tuple(map(tuple, placements)))


def _placement(spot: Spot, leaf: Spot, view: tuple[int, tuple[int, ...], tuple[int, ...]] | None) -> Placement:
    elsewhere = None if leaf.chunk == spot.chunk else leaf.chunk
    return Placement(str(spot.key), elsewhere, leaf.field, leaf.key, view, spot.expert)


def _view(one: Region | None, leaf: Region | None) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    if one is None or leaf is None or (one.shape, one.stride) == (leaf.shape, leaf.stride):
        return None
    return (one.start - leaf.start) // leaf.itemsize, one.shape, one.stride
