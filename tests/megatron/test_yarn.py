"""Yarn's tables of sines, which grow with the longest sequence: registered buffers that nobody trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from mcore_snap import model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.asserts import assert_bitwise_equal
from mcore_snap.testing.ranks import run_ranks


def grow_within(rank: int) -> bool:
    """Use a longer sequence inside a look-back; whether this Megatron-Core has tables at all."""
    del rank
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    model = nn.Sequential(nn.Linear(2, 2), YarnRotaryEmbedding(8, use_cpu_initialization=True))
    yarn: Any = model[1]
    tree = model_tree(model)
    kept = snapshot(tree)
    has_tables = hasattr(yarn, "get_cached_cos_sin")
    names = {name for name, _ in yarn.named_buffers()}
    assert bool(names) == has_tables
    with swapped(tree, kept):
        if has_tables:
            before = yarn.cos_cached.shape
            yarn.get_cached_cos_sin(2 * before[0])
            assert yarn.cos_cached.shape != before
    assert_bitwise_equal(tree, kept)
    assert all("0." in name for name in named_leaves(tree)), "a table is in the tree"
    return has_tables


def test_a_table_may_grow_within_a_look_back() -> None:
    """It is made from the configuration, and what it is good for stands in attributes: so it is no weight."""
    from importlib.metadata import version

    (has_tables,) = run_ranks(grow_within, 1)
    assert has_tables == (tuple(map(int, version("megatron-core").split(".")[:2])) > (0, 12))
