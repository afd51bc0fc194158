"""What goes wrong, and loudly, in the middle of a step of a fully sharded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mcore_snap import load, model_tree, snapshot
from mcore_snap.testing.fully_sharded import cpu_fully_sharded, train_step
from mcore_snap.testing.gpt import batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def load_before_backward(rank: int, build: Callable[[], list[nn.Module]]) -> None:
    """Load other weights between forward and backward, when the graph holds those computed with."""
    with cpu_fully_sharded():
        chunks = build()
        tree = model_tree(chunks)
        kept = snapshot(tree)

        def rewind(now: str) -> None:
            if now == "forward":
                load(tree, kept)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train_step(chunks, batch(0, rank), pause=rewind)
