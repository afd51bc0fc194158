"""Batches of a real text that comes with Python: the help pages of its own language."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VOCABULARY", "batches", "text"]

VOCABULARY = 256
"""Tokens: one for each value of a byte."""


@cache
def text() -> bytes:
    """Return Python's help pages, one after the other, as UTF-8.

    >>> len(text()) > 100_000
    True
    """
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def batches(steps: int, *, size: int, seq: int, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    """Cut the text into one batch per step, each rank having its own.

    Args:
        steps: Number of batches.
        size: Sequences in a batch.
        seq: Length of a sequence, in bytes of text.
        rank: Whose batches.
        ranks: Among how many ranks the text is dealt out.

    Returns:
        Byte values as int64, each batch shaped (size, seq). A text that is used up starts again.

    >>> first, second = batches(2, size=3, seq=5)
    >>> first.shape, bytes(first.flatten().tolist()) == text()[:15]
    (torch.Size([3, 5]), True)
    >>> bytes(second.flatten().tolist()) == text()[15:30]
    True
    """
    length = size * seq
    whole = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    starts = [(step * ranks + rank) * length for step in range(steps)]
    return [whole[torch.arange(start, start + length) % len(whole)].reshape(size, seq) for start in starts]
