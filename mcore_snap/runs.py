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
    groups: dict[Hashable, list[tuple[tuple[int, ...], int]]] = {}
    for index, block in enumerate(blocks):
        groups.setdefault(block.homes[0], []).append((block.starts, index))
    found: list[list[int]] = []
    for lying in groups.values():
        listed = [index for _, index in lying]
        lying.sort()
        members = [(starts, index, blocks[index]) for starts, index in lying]
        pairs = list(itertools.pairwise(members))
        if any(starts[0] + block.nbytes > after[0] for (starts, _, block), (after, _, _) in pairs):
            found += [[index] for index in listed]
            continue
        found.append([members[0][1]])
        for (starts, _, block), (after, index, other) in pairs:
            alike = block.kind == other.kind and block.homes == other.homes
            if alike and all(one + block.nbytes == behind for one, behind in zip(starts, after, strict=True)):
                found[-1].append(index)
            else:
                found.append([index])
    return sorted(found, key=min)
