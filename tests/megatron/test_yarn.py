"""Yarn's tables of sines, which grow with the longest sequence: registered buffers that nobody trains."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

from mcore_snap import model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.asserts import assert_bitwise_equal
from mcore_snap.testing.ranks import run_ranks

_VERSION = tuple(map(int, version("megatron-core").split(".")[:2]))


class Tables(nn.Module):
    """Keeps tables as Megatron-Core's class does, which has none in 0.12 and cannot be built in 0.14."""

    def __init__(self) -> None:
        """Begin with tables for four places."""
        super().__init__()
        self.get_cached_cos_sin(4)

    def get_cached_cos_sin(self, length: int) -> None:
        """Make the tables anew."""
        self.max_seq_len_cached = length
        self.register_buffer("cos_cached", torch.arange(length).cos(), persistent=False)
        self.register_buffer("sin_cached", torch.arange(length).sin(), persistent=False)


def grow_within(rank: int, kind: str) -> None:
    """Use a longer sequence inside a look-back."""
    del rank
    yarn: Any = Tables()
    if kind == "megatron-core" and _VERSION > (0, 14):
        from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

        yarn = YarnRotaryEmbedding(8, use_cpu_initialization=True)
    tree = model_tree(model := nn.Sequential(nn.Linear(2, 2), yarn))
    kept = snapshot(tree)
    assert {name for name, _ in model.named_buffers()} == {"1.cos_cached", "1.sin_cached"}
    assert all("0." in name for name in named_leaves(tree)), "a table is in the tree"
    with swapped(tree, kept):
        before = yarn.cos_cached.shape
        yarn.get_cached_cos_sin(2 * before[0])
        assert yarn.cos_cached.shape != before
    assert_bitwise_equal(tree, kept)


@pytest.mark.parametrize("kind", ["megatron-core", "stand-in"])
def test_a_table_may_grow_within_a_look_back(kind: str) -> None:
    """It is made from the configuration, and what it is good for stands in attributes: so it is no weight."""
    run_ranks(grow_within, 1, kind)
