"""Law 8: what fails leaves the model as before, or says exactly which leaves it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_snap import SnapError, load, named_leaves, snapshot, swapped
from mcore_snap.testing.model_state import model_bytes, model_tensors
from mcore_snap.testing.model_strategies import model_trees
from mcore_snap.testing.raw_bytes import flip, to_bytes
from mcore_snap.testing.strategies import trees

if TYPE_CHECKING:
    from mcore_snap.testing.model_strategies import Models


class DeviceLostError(RuntimeError):
    """What the operation that fails raises."""


class FailAt(TorchDispatchMode):
    """Lets `writes` operations that write go through, and fails the next one."""

    def __init__(self, writes: int) -> None:
        """Count from here."""
        super().__init__()
        self.left = writes
        self.failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fail, or do what was asked."""
        if not self.failed and func._schema.is_mutable:
            self.left -= 1
            if self.left < 0:
                self.failed = True
                raise DeviceLostError
        return func(*args, **(kwargs or {}))


@given(trees(min_leaves=2, ties=False), st.integers(0, 5))
def test_a_load_that_fails_says_what_it_wrote(tree: Any, writes: int) -> None:
    """Leaves that the error does not name are as before; all others can be loaded again."""
    snap = snapshot(tree)
    kept = {name: to_bytes(leaf) for name, leaf in named_leaves(snap).items()}
    flip(optree.tree_leaves(tree))
    before = {name: to_bytes(leaf) for name, leaf in named_leaves(tree).items()}
    mode = FailAt(writes)
    said = None
    try:
        with mode:
            load(tree, snap)
    except (SnapError, DeviceLostError) as error:
        said = str(error)
    assert mode.failed == (said is not None)
    if said is not None:
        after = {name: to_bytes(leaf) for name, leaf in named_leaves(tree).items()}
        for name, content in kept.items():
            if name not in said:
                assert after[name] == before[name], name
            assert after[name] in {before[name], content}
    load(tree, snap)
    assert {name: to_bytes(leaf) for name, leaf in named_leaves(tree).items()} == kept


@given(model_trees(), st.integers(0, 5))
def test_a_snapshot_that_fails_changes_nothing(pair: tuple[Models, Any], writes: int) -> None:
    """The model is as before, and the next snapshot is complete."""
    models, tree = pair
    before = model_bytes(models)
    mode = FailAt(writes)
    try:
        with mode:
            snapshot(tree)
    except (SnapError, DeviceLostError):
        assert mode.failed
    assert model_bytes(models) == before
    snap = snapshot(tree)
    flip(tensor for _, tensor in model_tensors(models))
    load(tree, snap)
    after = model_bytes(models)
    assert {name: held for name, held in after.items() if ":extra:" not in name} == {
        name: held for name, held in before.items() if ":extra:" not in name
    }


@given(model_trees(), st.integers(0, 12))
def test_a_look_back_that_fails_to_begin_gives_the_weights_back(pair: tuple[Models, Any], writes: int) -> None:
    """Whatever write fails on the way in, the body does not run on a mixture and the weights are as before."""
    models, tree = pair
    snap = snapshot(tree)
    flip(tensor for _, tensor in model_tensors(models))
    before = model_bytes(models)
    mode = FailAt(writes)
    ran = False
    mode.__enter__()
    try:
        context = swapped(tree, snap)
        try:
            context.__enter__()
        finally:
            mode.__exit__(None, None, None)
        ran = True
        context.__exit__(None, None, None)
    except (SnapError, DeviceLostError):
        assert mode.failed
        assert not ran
    assert model_bytes(models) == before


def test_the_failures_are_felt() -> None:
    """The mode of these tests does reach the copies: a failure at the first write ends each operation."""
    tree = {"a": torch.ones(3), "b": torch.ones(2)}
    snap = snapshot(tree)
    with pytest.raises((SnapError, DeviceLostError)), FailAt(0):
        load(tree, snap)
    with pytest.raises((SnapError, DeviceLostError)), FailAt(0):
        snapshot(tree)
