"""Whether one tree may be loaded into another: decided by names, dtypes and shapes alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from mcore_snap.layouts import Placement
from mcore_snap.specs import LeafSpec

__all__ = ["Expected", "check_fit", "pair_paths", "pair_placements", "pair_slices"]

Path = tuple[Hashable, ...]

EXACT_WIDENING = frozenset({("bfloat16", "float32")})
"""The cast that Megatron-Core makes itself: routers promote ``expert_bias`` from bf16 at the first forward."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A live leaf that is to be written.

    Attributes:
        name: Its readable name.
        spec: Its dtype and shape.
        widens: Whether a snapshot of it may be of the narrower dtype that Megatron-Core promotes.
        sized: Whether the shape has to agree; extra state is rewritten whole, at any length.
    """

    name: str
    spec: LeafSpec
    widens: bool = False
    sized: bool = True


def pair_paths(live: Mapping[Path, str], kept: Mapping[Path, str]) -> list[str]:
    """Return what keeps two trees from having their leaves at the same paths, a line per leaf.

    Args:
        live: Path to leaf name of the tree to write to.
        kept: The same of the tree to read from.

    >>> for line in pair_paths({("a",): "['a']"}, {("b",): "['b']"}):
    ...     print(line)
    ['a']: expected in the snapshot, found nothing there; take the snapshot from this very model
    ['b']: expected in the model, found nothing there; load it into the model that it was taken from
    """
    missing = [
        f"{name}: expected in the snapshot, found nothing there; take the snapshot from this very model"
        for path, name in live.items()
        if path not in kept
    ]
    extra = [
        f"{name}: expected in the model, found nothing there; load it into the model that it was taken from"
        for path, name in kept.items()
        if path not in live
    ]
    return missing + extra


def pair_placements(live: Sequence[Sequence[Placement]], kept: Sequence[Sequence[Placement]]) -> list[str]:
    """Return which parameters lie elsewhere among the leaves of the other tree, a line per parameter.

    Flat buffers of one size may hold other parameters, or the same in another order or shape: the bytes would go
    where they do not belong. Chunks that one side lacks are left to `pair_paths`.

    Args:
        live: Placements of each chunk of the tree to write to, or of the first one to compare.
        kept: The same of the other tree.

    >>> tall, flat = (Placement("w", None, "buffers", 0, (0, shape, ())) for shape in ((4, 2), (8,)))
    >>> for line in pair_placements([[tall]], [[flat]]):
    ...     print(line)
    chunks[0], parameter w: expected [4, 2] from element 0 of buffers[0] on, found [8] from ...
    """
    lines = []
    for index, (mine, found) in enumerate(zip(live, kept, strict=False)):
        if mine == found:
            continue
        expected, actual = ({one.name: one._replace(expert=False) for one in side} for side in (mine, found))
        lines += [
            f"chunks[{index}], parameter {name}: expected {_place(expected.get(name))}, found "
            f"{_place(actual.get(name))}; use trees of one model, or of two that are built alike"
            for name in dict.fromkeys([*expected, *actual])
            if expected.get(name) != actual.get(name)
        ]
    return lines


def _place(placement: Placement | None) -> str:
    if placement is None:
        return "no such parameter"
    leaf = f"{placement.field}[{placement.key!r}]"
    if placement.chunk is not None:
        leaf = f"chunks[{placement.chunk}].{leaf}"
    if placement.view is None:
        return f"all of {leaf}"
    start, shape, _ = placement.view
    return f"{list(shape)} from element {start:,} of {leaf} on"


Slices = tuple[tuple[int, int], ...] | None
"""``(rank, size)`` per flat-buffer leaf of a chunk, or ``None`` where the buffers are whole."""


def pair_slices(live: Sequence[Slices], kept: Sequence[Slices]) -> list[str]:
    """Return what keeps data-parallel slices from going where they belong, a line per chunk.

    Slices of different ranks have the same shape, so nothing else tells them apart. Chunks that one
    side lacks are left to `pair_paths`.

    >>> pair_slices([((0, 2),)], [((0, 2),)])
    []
    >>> pair_slices([((0, 2),)], [((1, 2),)])
    ['chunks[0]: expected slices of rank 0 of 2, found slices of rank 1 of 2; load on each rank ...']
    """
    return [
        f"chunks[{index}]: expected {_slices(mine)}, found {_slices(found)}; load on each rank the snapshot that "
        "was taken on it, into a tree made with the same dp_sharded"
        for index, (mine, found) in enumerate(zip(live, kept, strict=False))
        if mine != found
    ]


def _slices(slices: Slices) -> str:
    if slices is None:
        return "whole flat buffers"
    ranks = dict.fromkeys(f"rank {rank} of {size}" for rank, size in slices)
    return f"slices of {', '.join(ranks)}"


def check_fit(expected: Expected, found: LeafSpec) -> str | None:
    """Return what is wrong with writing ``found`` into ``expected``, or ``None``.

    There is no broadcast and no cast but the exact one that Megatron-Core makes itself.

    >>> bias = Expected("bias", LeafSpec("float32", (4,)), widens=True)
    >>> check_fit(bias, LeafSpec("bfloat16", (4,)))
    >>> check_fit(bias, LeafSpec("float16", (4,)))
    'bias: expected float32[4], found float16[4] in the snapshot; nothing is cast or broadcast'
    """
    spec = expected.spec
    dtype_fits = spec.dtype == found.dtype or (expected.widens and (found.dtype, spec.dtype) in EXACT_WIDENING)
    shape_fits = spec.shape == found.shape or not expected.sized
    if dtype_fits and shape_fits:
        return None
    return f"{expected.name}: expected {spec}, found {found} in the snapshot; nothing is cast or broadcast"
