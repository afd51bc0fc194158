"""Which tensors are leaves of their own, and which lie inside another leaf: pure byte arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from mcore_snap.errors import StructureMismatch
from mcore_snap.specs import dense_strides, element_offsets, span_of

__all__ = ["Region", "cover"]


class Region(NamedTuple):
    """Where one named tensor lies.

    Attributes:
        name: How errors call it.
        storage: Which memory it lies in; any key that is equal for equal memory.
        start: Byte offset of its first element in that memory.
        dtype: Name of its dtype.
        itemsize: Bytes of one element.
        shape: Its shape, in elements.
        stride: Its strides, in elements.
        whole: Whether it is a flat buffer, which comes before all that it contains.
    """

    name: str
    storage: int
    start: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: bool = False

    @property
    def end(self) -> int:
        """Byte offset behind the last element."""
        return self.start + _span(self.shape, self.stride) * self.itemsize

    @property
    def dense(self) -> bool:
        """Whether the elements fill the span without gaps."""
        return _is_dense(self.shape, self.stride)

    def same_elements(self, other: Region) -> bool:
        """Whether both address the same elements in the same order, in the same dtype."""
        return (self.start, self.dtype, self.shape, self.stride) == (
            other.start,
            other.dtype,
            other.shape,
            other.stride,
        )

    def bytes_used(self) -> set[int]:
        """Every byte that an element occupies, for the rare pair that interleaves."""
        return {
            self.start + offset * self.itemsize + byte
            for offset in set(element_offsets(self.shape, self.stride))
            for byte in range(self.itemsize)
        }


# Asked many times of few shapes: of a flat buffer once for each parameter in it, of a layer's in every layer.
_span = lru_cache(maxsize=1 << 12)(span_of)


@lru_cache(maxsize=1 << 12)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return dense_strides(shape, stride) is not None


def cover(regions: Sequence[Region]) -> list[int | None]:
    """Decide for each region whether it is a leaf or lies in one.

    Returns:
        Per region ``None`` if it is a leaf of its own, else the index of the leaf that holds every
        byte of it. Every byte of every region is in exactly one leaf.

    Raises:
        StructureMismatch: Two regions share some bytes but neither holds the other, or the one
            inside has another dtype, so that its bytes cannot be named as elements of the leaf.

    >>> flat = Region("flat", 0, 0, "int8", 1, (8,), (1,), whole=True)
    >>> part = Region("part", 0, 2, "int8", 1, (3,), (1,))
    >>> cover([part, flat])
    [1, None]
    """
    owners: list[int | None] = [None] * len(regions)
    problems: list[str] = []
    groups: defaultdict[int, list[int]] = defaultdict(list)
    ends = [region.end for region in regions]
    for index, region in enumerate(regions):
        if ends[index] > region.start:  # an empty tensor has no byte to share
            groups[region.storage].append(index)
    for members in groups.values():
        _cover_group(regions, ends, members, owners, problems)
    if problems:
        raise StructureMismatch("some tensors share memory in part, so no leaf can hold them", problems)
    return owners


def _cover_group(
    regions: Sequence[Region],
    ends: Sequence[int],
    members: list[int],
    owners: list[int | None],
    problems: list[str],
) -> None:
    # Flat buffers first, then by size, then as listed: whatever may hold another precedes it.
    order = sorted(members, key=lambda i: (not regions[i].whole, regions[i].start - ends[i], i))
    leaves: list[int] = []
    for index in order:
        region = regions[index]
        for leaf in leaves:
            holder = regions[leaf]
            if ends[index] <= holder.start or ends[leaf] <= region.start:
                continue
            if _holds(holder, region):
                owners[index] = leaf
                break
            if not _disjoint(holder, region):
                problems.append(
                    f"{region.name}: shares some bytes with {holder.name} ({holder.dtype}"
                    f"{list(holder.shape)}), found {region.dtype}{list(region.shape)}; expected the same "
                    "memory, a part of it in the same dtype, or none of it; give one of them memory of its own"
                )
                break
        else:
            leaves.append(index)


def _holds(holder: Region, region: Region) -> bool:
    if holder.same_elements(region):
        return True
    if holder.dtype != region.dtype or (region.start - holder.start) % holder.itemsize:
        return False
    if not (holder.start <= region.start and region.end <= holder.end):
        return False
    # A copy of a leaf with gaps closes them, so only a dense leaf can be asked for parts of it.
    return holder.dense


def _disjoint(a: Region, b: Region) -> bool:
    if a.dense or b.dense:
        # A dense one fills its span; the other has its first and last byte in its own. Only a gap
        # of the other that is wider than the dense span could still keep them apart.
        dense, other = (a, b) if a.dense else (b, a)
        if other.dense:
            return False
        return not any(dense.start <= byte < dense.end for byte in other.bytes_used())
    return a.bytes_used().isdisjoint(b.bytes_used())
