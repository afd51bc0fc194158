"""Copies that are under way in the background, and the memory that they read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

from torch import Tensor

__all__ = ["reading", "wait_for_readers"]

# No lock, which a fork could leave taken: each step on the dict is one that no other thread gets into.
_readers: Final[dict[Future[Any], frozenset[int]]] = {}


def reading(future: Future[Any], leaves: Iterable[Tensor]) -> None:
    """Remember that these leaves are read until the future is done."""
    _readers[future] = _storages(leaves)
    future.add_done_callback(_forget)


def wait_for_readers(leaves: Sequence[Tensor]) -> None:
    """Wait until no copy in the background reads the memory of these leaves.

    How a copy ended is for whoever asks for its result.
    """
    if not _readers:
        return
    mine = _storages(leaves)
    wait([future for future, storages in _readers.copy().items() if storages & mine])


def _storages(leaves: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(leaf.untyped_storage()._cdata for leaf in leaves)


def _forget(future: Future[Any]) -> None:
    _readers.pop(future, None)


# A forked child has no thread that would ever end the copies of its parent, and memory of its own.
os.register_at_fork(after_in_child=_readers.clear)
