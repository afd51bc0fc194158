"""Law 8: what fails leaves the model as before, or says exactly which leaves it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_snap import NotResident, SnapError, StructureMismatch, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.chunks import ExtraState
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


class Refusing(ExtraState):
    """A module that does not take its extra state back."""

    def set_extra_state(self, state: Any) -> None:
        """Refuse."""
        raise DeviceLostError


def test_a_module_that_refuses_its_extra_state_is_named_with_what_was_written() -> None:
    """Extra state comes after the weights: the error has the module's leaf and every leaf written before."""
    model = nn.ModuleDict({"fc": nn.Linear(2, 2), "fp8": Refusing()})
    tree = model_tree(model)
    snap = snapshot(tree)
    before = model_bytes(model)
    flip(model["fc"].parameters())
    model["fp8"].history = [9]
    with pytest.raises(SnapError, match=r"extra_state\['fp8'\]") as caught:
        load(tree, snap)
    for name, held in model_bytes(model).items():
        if ":extra:" not in name:
            assert held == before[name]
            assert f"chunks[0].parameters['{name.removeprefix('0:')}']" in str(caught.value)


def test_the_failures_are_felt() -> None:
    """The mode of these tests does reach the copies: a failure at the first write ends each operation."""
    tree = {"a": torch.ones(3), "b": torch.ones(2)}
    snap = snapshot(tree)
    with pytest.raises((SnapError, DeviceLostError)), FailAt(0):
        load(tree, snap)
    with pytest.raises((SnapError, DeviceLostError)), FailAt(0):
        snapshot(tree)


def test_weights_that_cannot_be_put_back_are_handed_over() -> None:
    """Where the body freed memory, the error names the leaf and carries the kept weights, to be loaded later."""
    live = {"w": torch.arange(4.0), "v": torch.ones(2)}
    zeros = snapshot({"w": torch.zeros(4), "v": torch.zeros(2)})
    with pytest.raises(NotResident, match=r"kept weights could not be put back") as caught, swapped(live, zeros):
        live["w"].untyped_storage().resize_(0)
    assert [line.split(":")[0] for line in caught.value.problems] == ["['w']"]
    assert live["v"].tolist() == [0.0, 0.0]
    live["w"].untyped_storage().resize_(16)
    load(live, caught.value.kept)
    assert live["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert live["v"].tolist() == [1.0, 1.0]


def test_extra_state_that_cannot_be_set_is_refused_before_anything_is_written() -> None:
    """A module that gives extra state but defines no way to take it back is a problem of the plan."""

    class OneWay(nn.Linear):
        step = 1

        def get_extra_state(self) -> int:
            return self.step

    model = OneWay(2, 2)
    tree = model_tree(model)
    kept = snapshot(tree)
    load(tree, kept)  # nothing to hand over
    model.step = 2
    model.weight.data.fill_(5.0)
    with pytest.raises(StructureMismatch, match="set_extra_state"):
        load(tree, kept)
    assert model.weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]
