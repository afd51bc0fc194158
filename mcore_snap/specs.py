"""What a leaf is, as plain data: dtype, shape, strides and the bytes that they span."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "ALIGNMENT",
    "LeafSpec",
    "aligned_offsets",
    "contiguous_strides",
    "dense_strides",
    "element_offsets",
    "overlaps_itself",
    "span_of",
]

ALIGNMENT = 64
"""Bytes to which leaves are aligned inside a slab: a cache line, and the widest vector load."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The identity of a leaf's contents.

    Attributes:
        dtype: The dtype's name without ``torch.``.
        shape: The shape, in elements.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return the form that error messages use.

        >>> str(LeafSpec("bfloat16", (2, 3)))
        'bfloat16[2, 3]'
        """
        return f"{self.dtype}{list(self.shape)}"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides, in elements.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of the same dimension order without gaps, if there are none already.

    ``None`` means that the elements leave gaps or overlap, so that no permutation of the
    dimensions is row-major.

    >>> dense_strides((2, 3), (1, 2))
    (1, 2)
    >>> dense_strides((2, 3), (6, 2)) is None
    True
    """
    if 0 in shape:
        return contiguous_strides(shape)
    step = 1
    found = list(contiguous_strides(shape))
    for dim in sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: (stride[d], d)):
        if stride[dim] != step:
            return None
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


def span_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements lie between the first and the last one, both included.

    >>> span_of((2, 3), (10, 1)), span_of((0, 3), (3, 1))
    (13, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Tell whether two indices may address the same element.

    Sufficient proof of the contrary: sorted by stride, each dimension steps over all that the
    smaller ones reach. What this cannot prove counts as overlapping, which is slower, never wrong.

    >>> overlaps_itself((2, 3), (0, 1)), overlaps_itself((2, 3), (3, 1)), overlaps_itself((3,), (2,))
    (True, False, False)
    """
    if 0 in shape:
        return False
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def element_offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> Iterator[int]:
    """Yield the offset of every element, in elements from the first one, in row-major order.

    >>> list(element_offsets((2, 2), (3, 1)))
    [0, 1, 3, 4]
    """
    for index in itertools.product(*map(range, shape)):
        yield sum(i * step for i, step in zip(index, stride, strict=True))


def aligned_offsets(sizes: Sequence[int], order: Sequence[int] = ()) -> tuple[tuple[int, ...], int]:
    """Return where leaves of these sizes begin in one slab, and the slab's size, all in bytes.

    The size is the same in any order.

    Args:
        sizes: Sizes of the leaves.
        order: In which order they are to lie, by index; those that it leaves out come behind. As listed by
            default.

    >>> aligned_offsets([3, 64, 1])
    ((0, 64, 128), 129)
    >>> aligned_offsets([3, 64, 1], [2, 1, 0])
    ((64, 0, 128), 129)
    """
    lying: Iterable[int] = range(len(sizes))
    last = len(sizes) - 1
    if order:
        # The last one listed stays the last, unless it needs no padding, so that the size stays the same.
        first = [index for index in order if index != last or sizes[last] % ALIGNMENT == 0]
        lying = [*first, *sorted(set(lying).difference(first))]
    offsets, end = [0] * len(sizes), 0
    for index in lying:
        offsets[index] = end
        end += _aligned(sizes[index])
    return tuple(offsets), end - (_aligned(sizes[last]) - sizes[last] if sizes else 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
