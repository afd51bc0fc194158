"""Blocks of bytes that lie one right behind the other, so that one copy can take them: pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

__all__ = ["Block", "runs"]


class Block(NamedTuple):
    """Bytes that one leaf occupies in one memory, and perhaps its copy in another.

    Attributes:
        kind: What its bytes are, such as its dtype.
        homes: Which memories; any key that is equal for equal ones.
        starts: Where it begins in each, in bytes.
        nbytes: How many bytes it is long.
    """

    kind: Hashable
    homes: tuple[Hashable, ...]
    starts: tuple[int, ...]
    nbytes: int


def runs(blocks: Sequence[Block]) -> list[list[int]]:
    """Return blocks of one kind that lie one right behind the other in every memory, so that one copy can take them.

    Blocks whose first memory has some that overlap are left alone: which of them is written last may matter.

    Returns:
        Indices of the blocks of each run, in the order in which they lie; every block is in one run, and
        runs come in the order of their first ones as listed.

    >>> runs([Block("int8", ("a",), (8,), 4), Block("int8", ("b",), (12,), 4), Block("int8", ("a",), (0,), 8)])
    [[2, 0], [1]]
    >>> runs([Block("int8", ("a",), (4,), 4), Block("int8", ("a",), (0,), 4), Block("int8", ("a",), (3,), 1)])
    [[0], [1], [2]]
    """
    groups: dict[Hashable, list[int]] = {}
    for index, block in enumerate(blocks):
        groups.setdefault(block.homes[0], []).append(index)
    found: list[list[int]] = []
    for members in groups.values():
        lying = sorted(members, key=lambda index: blocks[index].starts)
        pairs = list(itertools.pairwise(lying))
        if any(blocks[one].starts[0] + blocks[one].nbytes > blocks[other].starts[0] for one, other in pairs):
            found += [[index] for index in members]
            continue
        found.append(lying[:1])
        for one, other in pairs:
            if _follows(blocks[other], blocks[one]):
                found[-1].append(other)
            else:
                found.append([other])
    return sorted(found, key=min)


def _follows(block: Block, other: Block) -> bool:
    alike = (block.kind, block.homes) == (other.kind, other.homes)
    return alike and all(
        start == before + other.nbytes for start, before in zip(block.starts, other.starts, strict=True)
    )
