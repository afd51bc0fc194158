"""Law 10: what a tree_map makes of snapshots can be loaded like any snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import pytest
import torch
from hypothesis import given
from torch.utils import _pytree as torch_pytree

from mcore_snap import bitwise_equal, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.asserts import assert_bitwise_equal
from mcore_snap.testing.bit_patterns import MATH_DTYPES
from mcore_snap.testing.model_state import model_bytes, model_tensors
from mcore_snap.testing.model_strategies import model_trees, trainable_models
from mcore_snap.testing.raw_bytes import flip, to_bytes
from mcore_snap.testing.strategies import trees

if TYPE_CHECKING:
    from mcore_snap.testing.model_strategies import Models


def mean(a: Any, b: Any) -> Any:
    """Return the average where there is one, and the first leaf elsewhere: for torch's pytrees None is a leaf."""
    if a is None or a.dtype not in MATH_DTYPES:
        return a
    return (a.float() * 0.5 + b.float() * 0.5).to(a.dtype)


@given(trees())
def test_an_average_of_any_tree_loads(tree: Any) -> None:
    """What was averaged leaf by leaf is what the tree then holds, bit for bit, ties and views included."""
    snap1 = snapshot(tree)
    flip(optree.tree_leaves(tree))
    snap2 = snapshot(tree)
    for library in (optree, torch_pytree):
        average = library.tree_map(mean, snap1, snap2)
        wanted = [to_bytes(leaf) for leaf in optree.tree_leaves(average)]
        load(tree, average)
        assert [to_bytes(leaf) for leaf in optree.tree_leaves(tree)] == wanted


@given(model_trees())
def test_the_identity_map_of_a_snapshot_is_the_snapshot(pair: tuple[Models, Any]) -> None:
    """A computed tree of frozen leaves, or of clones of them, puts the model back."""
    models, tree = pair
    before, snap = model_bytes(models), snapshot(tree)
    for library in (optree, torch_pytree):
        for compute in (torch.Tensor.detach, torch.Tensor.clone):
            flip(tensor for _, tensor in model_tensors(models))
            computed = library.tree_map(compute, snap)
            assert type(computed) is type(snap)
            load(tree, computed)
            assert model_bytes(models) == before


@given(trainable_models())
def test_an_average_of_models_loads_and_swaps(models: Models) -> None:
    """Two versions of the weights, averaged, are live after a load and inside a look-back."""
    tree = model_tree(models)
    snap1 = snapshot(tree)
    with torch.no_grad():
        for name, tensor in model_tensors(models):
            if ":buffer:" not in name and "buffers[" not in name:
                tensor.add_(1)
    snap2 = snapshot(tree)
    average = optree.tree_map(mean, snap1, snap2)
    current = model_bytes(models)
    with swapped(tree, average):
        assert_bitwise_equal(named_leaves(tree), named_leaves(average))
    assert model_bytes(models) == current
    load(tree, average)
    assert bitwise_equal(tree, average)
    assert not bitwise_equal(tree, snap1)
    assert not bitwise_equal(tree, snap2)


def test_a_computed_tree_of_another_dtype_is_refused() -> None:
    """An average kept in float64 is not what the model holds: no cast, no write."""
    live = {"w": torch.ones(3), "b": torch.zeros(2)}
    wide = optree.tree_map(torch.Tensor.double, snapshot(live))
    with pytest.raises(ValueError, match="float64"):
        load(live, wide)
    assert_bitwise_equal(live, {"w": torch.ones(3), "b": torch.zeros(2)})
