"""Leaves that are neighbours in memory, as views of one flat tensor are: copied together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from mcore_snap.runs import Block, runs

__all__ = ["as_one", "neighbours"]

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Target and source of a copy."""


def neighbours(leaves: Sequence[tuple[Tensor, ...]]) -> list[list[int]]:
    """Return which contiguous leaves lie one right behind the other, so that one copy can take them.

    Args:
        leaves: Per leaf its tensor; or several of one dtype and shape, such as target and source, which
            have to be neighbours alike.

    Returns:
        Runs of two and more: indices, in the order in which they lie.

    >>> import torch
    >>> a, b = torch.zeros(6), torch.ones(6)
    >>> neighbours([(a[2:4], b[3:5]), (a[:2], b[1:3]), (a[4:], b[:2])])
    [[1, 0]]
    """
    # What fills its memory has no neighbour there: nearly every leaf, told without looking any further.
    parts = [index for index, tensors in enumerate(leaves) if all(map(_is_part, tensors))]
    if len(parts) < 2:  # noqa: PLR2004 - a run
        return []
    found = runs([_block(leaves[part]) for part in parts])
    return [[parts[index] for index in run] for run in found if len(run) > 1]


def as_one(pairs: Sequence[Pair]) -> Pair:
    """Return pairs that are neighbours, in the order in which they lie, as one pair, 1-D."""
    target, source = pairs[0]
    run = (sum(one.numel() for one, _ in pairs),)
    return target.as_strided(run, (1,)), source.as_strided(run, (1,))


def _is_part(tensor: Tensor) -> bool:
    return tensor.nbytes < tensor.untyped_storage().nbytes() and tensor.is_contiguous()


def _block(tensors: tuple[Tensor, ...]) -> Block:
    homes = tuple(one.untyped_storage()._cdata for one in tensors)
    starts = tuple(int(one.storage_offset()) * one.itemsize for one in tensors)
    return Block(tensors[0].dtype, homes, starts, tensors[0].nbytes)
