"""Leaves that are neighbours in memory, as views of one flat tensor are: copied together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from mcore_snap.runs import Block, runs

__all__ = ["Pair", "as_one", "neighbours"]

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Target and source of a copy."""


def neighbours(leaves: Sequence[tuple[Tensor, ...]], apart: Iterable[Tensor] = ()) -> list[list[int]]:
    """Return which contiguous leaves lie one right behind the other, so that one copy can take them.

    Leaves are left alone if their memory holds some that overlap, or a source, or a tensor that is copied apart:
    which of them comes last may matter.

    Args:
        leaves: Per leaf its tensor; or target and source, of one dtype and shape, which have to be neighbours
            alike.
        apart: What is copied apart from these.

    Returns:
        Runs of two and more: indices, in the order in which they lie.

    >>> import torch
    >>> a, b = torch.zeros(6), torch.ones(6)
    >>> neighbours([(a[2:4], b[3:5]), (a[:2], b[1:3]), (a[4:], b[:2])])
    [[1, 0]]
    >>> neighbours([(a[2:4],), (a[:2],)], [a[::2]])
    []
    """
    # What fills its memory has no neighbour there: nearly every leaf, told without looking any further.
    parts = [index for index, tensors in enumerate(leaves) if all(map(_is_part, tensors))]
    if len(parts) < 2:  # noqa: PLR2004 - a run
        return []
    others = set(range(len(leaves))).difference(parts)
    sources = (source for tensors in leaves for source in tensors[1:])
    beside = (*apart, *(leaves[index][0] for index in others), *sources)
    odd = {_home(tensor) for tensor in beside if tensor.numel()}
    blocks = {index: _block(leaves[index]) for index in parts}
    free = [index for index, block in blocks.items() if block.homes[0] not in odd]
    return [[free[index] for index in run] for run in runs([blocks[index] for index in free]) if len(run) > 1]


def as_one(pairs: Sequence[Pair]) -> Pair:
    """Return pairs that are neighbours, in the order in which they lie, as one pair, 1-D; a single one as it is."""
    target, source = pairs[0]
    if len(pairs) == 1:
        return target, source
    run = (sum(one.numel() for one, _ in pairs),)
    return target.as_strided(run, (1,)), source.as_strided(run, (1,))


def _is_part(tensor: Tensor) -> bool:
    return 0 < tensor.nbytes < tensor.untyped_storage().nbytes() and tensor.is_contiguous()


def _home(tensor: Tensor) -> int:
    home: int = tensor.untyped_storage()._cdata
    return home


def _block(tensors: tuple[Tensor, ...]) -> Block:
    first = tensors[0]
    starts = tuple([int(one.storage_offset()) * first.itemsize for one in tensors])
    return Block(first.dtype, tuple(map(_home, tensors)), starts, first.nbytes)
