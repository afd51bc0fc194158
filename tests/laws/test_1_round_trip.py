"""Law 1: a load brings every bit back, and touches no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap import load, model_tree, snapshot
from mcore_snap.testing.asserts import assert_bitwise_equal
from mcore_snap.testing.bit_patterns import DTYPES, special_words
from mcore_snap.testing.chunks import ExtraState
from mcore_snap.testing.model_state import chunks_of, model_bytes, model_tensors
from mcore_snap.testing.model_strategies import Models, model_trees
from mcore_snap.testing.raw_bytes import covered, flip, storages, to_bytes
from mcore_snap.testing.strategies import Layout, tensors, trees


def _memory(tree: Any) -> dict[int, bytes]:
    return {at: bytes(memory.numpy().tobytes()) for at, memory in storages(optree.tree_leaves(tree)).items()}


@given(trees())
def test_loading_what_was_just_taken_changes_no_byte(tree: Any) -> None:
    """Not even the bytes beside the leaves change when nothing changed in between."""
    before = _memory(tree)
    load(tree, snapshot(tree))
    assert _memory(tree) == before


@given(trees())
def test_load_brings_every_bit_back_and_writes_nothing_else(tree: Any) -> None:
    """After every byte was flipped the leaves are as before, and padding and gaps are still flipped."""
    leaves = optree.tree_leaves(tree)
    held = [to_bytes(leaf) for leaf in leaves]
    before = _memory(tree)
    snap = snapshot(tree)
    flip(leaves)
    flipped = _memory(tree)
    assert load(tree, snap) is tree
    assert [to_bytes(leaf) for leaf in leaves] == held
    inside = {at: np.zeros(len(content), dtype=bool) for at, content in before.items()}
    for leaf in leaves:
        if leaf.numel():
            inside[leaf.untyped_storage().data_ptr()] |= covered(leaf)
    for at, content in _memory(tree).items():
        old, new = (np.frombuffer(x[at], dtype=np.uint8) for x in (before, flipped))
        assert content == np.where(inside[at], old, new).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_makes_the_round_trip(dtype: torch.dtype) -> None:
    """No dtype that torch can hold as plain bytes is refused, and every special pattern and every byte survives."""
    part = {torch.complex32: torch.float16, torch.complex64: torch.float32}.get(dtype, dtype)
    words = special_words(torch.float64 if dtype is torch.complex128 else part)
    width = 8 if dtype is torch.complex128 else part.itemsize
    special = b"".join(word.to_bytes(width, "little") for word in words)
    raw = special if dtype is torch.bool else special + bytes(range(256)) * dtype.itemsize
    raw += bytes(-len(raw) % dtype.itemsize)
    leaf = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype)
    snap = snapshot({"leaf": leaf})
    assert to_bytes(snap["leaf"]) == raw
    flip([leaf])
    assert to_bytes(leaf) != raw
    load({"leaf": leaf}, snap)
    assert to_bytes(leaf) == raw


@given(st.data(), st.sampled_from(["dense", "permuted", "strided", "offset", "expanded"]), st.sampled_from(DTYPES))
def test_every_layout_makes_the_round_trip(data: st.DataObject, layout: Layout, dtype: torch.dtype) -> None:
    """Two leaves of one shape and different layouts: the bits go to the right elements, not to the right offsets."""
    leaf = data.draw(tensors(dtype, shape=(3, 2), layout=layout))
    held, snap = to_bytes(leaf), snapshot([leaf])
    dense = torch.empty_like(leaf, memory_format=torch.contiguous_format)
    load([dense], snap)
    assert to_bytes(dense) == held
    flip([leaf])
    load([leaf], snapshot([dense]))
    assert to_bytes(leaf) == held


@given(model_trees())
def test_load_brings_a_model_back(pair: tuple[Models, Any]) -> None:
    """Every parameter, buffer, flat buffer and extra state of any model comes back, also into a tree made later."""
    models, tree = pair
    before = model_bytes(models)
    snap = snapshot(tree)
    assert model_bytes(models) == before
    _change(models)
    load(tree, snap)
    assert model_bytes(models) == before
    _change(models)
    load(model_tree(models), snap)
    assert model_bytes(models) == before
    assert_bitwise_equal(snapshot(tree), snap)


def _change(models: Models) -> None:
    """Flip every bit that the model holds, and change extra state in value and in length."""
    flip(tensor for _, tensor in model_tensors(models))
    for chunk in chunks_of(models):
        for module in chunk.modules():
            if isinstance(module, ExtraState):
                module.history = [*module.history, 1 << 50, 7]
                module.scale = torch.ones(5)
