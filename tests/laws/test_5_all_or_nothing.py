"""Law 5: a load checks everything first; if anything is wrong it names everything that is, and writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap import (
    NotResident,
    SnapError,
    StructureMismatch,
    load,
    model_tree,
    named_leaves,
    snapshot,
    swapped,
    thaw,
)
from mcore_snap.testing.model_state import model_bytes
from mcore_snap.testing.model_strategies import model_trees, models
from mcore_snap.testing.raw_bytes import flip, to_bytes
from mcore_snap.testing.strategies import trees

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcore_snap.testing.model_strategies import Models

_BROKEN: Final[dict[str, Callable[[torch.Tensor], Any]]] = {
    "other dtype": lambda t: torch.zeros(t.shape, dtype=torch.int16 if t.dtype is not torch.int16 else torch.float32),
    "other shape": lambda t: torch.empty((*t.shape, 5), dtype=t.dtype),
    "broadcastable": lambda t: torch.empty((1, *t.shape), dtype=t.dtype),
    "expanded": lambda t: torch.empty((7, *t.shape), dtype=t.dtype),
    "no tensor": lambda t: t.shape.numel(),
    "text": lambda _: "text",
}


def _refuses(tree: Any, wrong: Any, names: set[str]) -> None:
    """Assert that load and swapped refuse, in one error with exactly the problems named, and write nothing."""
    leaves = optree.tree_leaves(tree)
    before = [to_bytes(leaf) for leaf in leaves]
    with pytest.raises(StructureMismatch) as caught:
        load(tree, wrong)
    assert isinstance(caught.value, SnapError)
    assert isinstance(caught.value, ValueError)
    assert len(caught.value.problems) == len(names)
    for name in names:
        assert any(name in str(problem) for problem in caught.value.problems), name
        assert name in str(caught.value)
    with pytest.raises(StructureMismatch), swapped(tree, wrong):
        pytest.fail("the body ran")
    assert [to_bytes(leaf) for leaf in leaves] == before


def _damage(data: st.DataObject, snap: Any) -> tuple[Any, set[str]]:
    """Break some leaves of a snapshot; return the broken tree and the names of what was broken."""
    names = list(named_leaves(snap))
    broken = data.draw(st.sets(st.sampled_from(names), min_size=1))
    leaves, spec = optree.tree_flatten(snap)
    for i, name in enumerate(names):
        if name in broken:
            leaves[i] = _BROKEN[data.draw(st.sampled_from(sorted(_BROKEN)))](leaves[i])
    return optree.tree_unflatten(spec, leaves), broken


@given(st.data(), trees(min_leaves=3))
def test_all_broken_leaves_of_a_tree_are_named(data: st.DataObject, tree: Any) -> None:
    """Whichever leaves have another dtype or shape, broadcast or not, or are no tensors: all are named at once."""
    snap = snapshot(tree)
    flip(optree.tree_leaves(tree))
    wrong, names = _damage(data, snap)
    _refuses(tree, wrong, names)


@given(st.data(), model_trees())
def test_all_broken_leaves_of_a_model_are_named(data: st.DataObject, pair: tuple[Models, Any]) -> None:
    """The same for models, by names such as chunks[0].parameters['fc.weight']."""
    _, tree = pair
    snap = snapshot(tree)
    names = [name for name in named_leaves(snap) if "module_buffers" not in name and "extra_state" not in name]
    leaves = named_leaves(snap)
    broken = data.draw(st.sets(st.sampled_from(names), min_size=1))
    kind = data.draw(st.sampled_from(sorted(_BROKEN)))
    wrong = optree.tree_unflatten(
        optree.tree_structure(snap),
        [_BROKEN[kind](leaf) if name in broken else leaf for name, leaf in leaves.items()],
    )
    _refuses(tree, wrong, broken)


@given(trees(min_leaves=2), trees(min_leaves=1))
def test_leaves_missing_and_leaves_too_many_are_named(left: Any, right: Any) -> None:
    """Every leaf that the snapshot lacks, and every one that it has in excess, is named."""
    have, lack = {"a": left, "b": right}, {"a": left}
    snap, short = snapshot(have), snapshot(lack)
    names = {name for name in named_leaves(have) if name not in named_leaves(lack)}
    flip(optree.tree_leaves(have))
    _refuses(have, short, names)
    _refuses(lack, snap, names)


@given(models(), models())
def test_a_snapshot_of_another_model_is_refused_or_the_same(one: Models, other: Models) -> None:
    """Between two models either all names, dtypes and shapes agree, or nothing is written."""
    tree, snap = model_tree(one), snapshot(model_tree(other))
    before = model_bytes(one)
    mine = {name: (leaf.dtype, leaf.shape) for name, leaf in named_leaves(tree).items() if "extra_state" not in name}
    theirs = {name: (leaf.dtype, leaf.shape) for name, leaf in named_leaves(snap).items() if "extra_state" not in name}
    if mine != theirs:
        with pytest.raises(StructureMismatch):
            load(tree, snap)
        assert model_bytes(one) == before


@given(st.data(), trees(min_leaves=2))
def test_memory_that_is_gone_is_named(data: st.DataObject, tree: Any) -> None:
    """Leaves whose memory was freed or that are on the meta device are named, and the others are not written."""
    leaves, spec = optree.tree_flatten(tree)
    snap = snapshot(tree)
    names = list(named_leaves(tree))
    gone = data.draw(st.sets(st.sampled_from(range(len(names))), min_size=1))
    flip(leaves)
    partly = optree.tree_unflatten(spec, [leaf.to("meta") if i in gone else leaf for i, leaf in enumerate(leaves)])
    before = [to_bytes(leaf) for leaf in leaves]
    with pytest.raises(NotResident) as caught:
        load(partly, snap)
    assert all(names[i] in str(caught.value) for i in gone)
    with pytest.raises(NotResident) as caught:
        snapshot(partly)
    assert all(names[i] in str(caught.value) for i in gone)
    assert [to_bytes(leaf) for leaf in leaves] == before


@given(trees(min_leaves=1))
def test_what_is_refused_is_refused_for_its_reason(tree: Any) -> None:
    """The same trees load when nothing is wrong with them, from a snapshot and from a thawed copy."""
    snap = snapshot(tree)
    held = [to_bytes(leaf) for leaf in optree.tree_leaves(tree)]
    for source in (snap, thaw(snap)):
        flip(optree.tree_leaves(tree))
        load(tree, source)
        assert [to_bytes(leaf) for leaf in optree.tree_leaves(tree)] == held
