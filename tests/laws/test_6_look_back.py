"""Law 6: after a look-back every byte is what it was, and training goes on as if there had been none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap import FrozenError, bitwise_equal, load, model_tree, snapshot, swapped
from mcore_snap.testing.model_state import chunks_of, model_bytes, model_tensors
from mcore_snap.testing.model_strategies import Models, model_trees, trainable_models
from mcore_snap.testing.raw_bytes import flip, storages, to_bytes
from mcore_snap.testing.strategies import trees

Hook: TypeAlias = Callable[[str, int], None]
MOMENTS: Final = ("before forward", "before backward", "before step", "after step")


class BodyError(Exception):
    """What a body raises that fails."""


def _fail_if(fails: bool) -> None:
    if fails:
        raise BodyError


def _flip_model(models: Models) -> None:
    flip(tensor for _, tensor in model_tensors(models))


@given(trees(), st.booleans())
def test_any_tree_is_itself_again(tree: Any, fails: bool) -> None:
    """Inside are the snapshot's bits, outside the tree's own, also when the body writes and raises."""
    leaves = optree.tree_leaves(tree)
    old, snap = [to_bytes(leaf) for leaf in leaves], snapshot(tree)
    flip(leaves)
    new = [to_bytes(leaf) for leaf in leaves]
    try:
        with swapped(tree, snap):
            assert [to_bytes(leaf) for leaf in leaves] == old
            flip(leaves)
            _fail_if(fails)
    except BodyError:
        assert fails
    assert [to_bytes(leaf) for leaf in leaves] == new
    load(tree, snap)
    assert [to_bytes(leaf) for leaf in leaves] == old


@given(model_trees(), st.booleans())
def test_any_model_is_itself_again(pair: tuple[Models, Any], fails: bool) -> None:
    """The same for models."""
    models, tree = pair
    old, snap = model_bytes(models), snapshot(tree)
    _flip_model(models)
    new = model_bytes(models)
    try:
        with swapped(tree, snap):
            assert model_bytes(models) == old
            _flip_model(models)
            _fail_if(fails)
    except BodyError:
        assert fails
    assert model_bytes(models) == new


@given(model_trees())
def test_look_backs_nest_and_are_re_entered(pair: tuple[Models, Any]) -> None:
    """A look-back in a look-back, to another version or to the same, gives back what it found."""
    models, tree = pair
    first, snap1 = model_bytes(models), snapshot(tree)
    _flip_model(models)
    second, snap2 = model_bytes(models), snapshot(tree)
    for _ in range(2):
        with swapped(tree, snap1):
            with swapped(tree, snap2):
                assert model_bytes(models) == second
                with swapped(tree, snap1):
                    assert model_bytes(models) == first
                assert model_bytes(models) == second
            with swapped(tree, snap1):
                assert model_bytes(models) == first
            assert model_bytes(models) == first
        assert model_bytes(models) == second
    assert bitwise_equal(tree, snap2)


@given(trees(min_leaves=1), st.booleans())
def test_check_finds_what_the_body_changed(tree: Any, changes: bool) -> None:
    """With check=True a body that changed a bit is told so, once the tree is itself again; another is not."""
    leaves = optree.tree_leaves(tree)
    snap = snapshot(tree)
    flip(leaves)
    new = [to_bytes(leaf) for leaf in leaves]
    changes = changes and any(leaf.numel() for leaf in leaves)
    if changes:
        with pytest.raises(FrozenError), swapped(tree, snap, check=True):
            flip(leaves)
    else:
        with swapped(tree, snap, check=True):
            flip(leaves)
            flip(leaves)
    assert [to_bytes(leaf) for leaf in leaves] == new


@given(model_trees(), st.data())
def test_check_names_the_weights_but_lets_buffers_move(pair: tuple[Models, Any], data: st.DataObject) -> None:
    """Counters and caches move in any forward pass: check is about parameters, and names those that changed."""
    models, tree = pair
    snap = snapshot(tree)
    before = model_bytes(models)
    weights = [t for name, t in model_tensors(models) if ":buffer:" not in name and t.numel()]
    addresses = set(storages(weights))
    others = [t for _, t in model_tensors(models) if t.untyped_storage().data_ptr() not in addresses]
    with swapped(tree, snap, check=True):
        flip(others)
    assert model_bytes(models) == before
    if weights:
        changed = data.draw(st.sampled_from(weights))
        names = r"chunks\[\d\]\.(parameters|buffers|expert_parallel_buffers)"
        with pytest.raises(FrozenError, match=names), swapped(tree, snap, check=True):
            flip([changed])
    assert model_bytes(models) == before


def _train(models: Models, dtype: torch.dtype, hook: Hook) -> list[bytes]:
    """Do three steps, call `hook` at every moment, and return every loss and every gradient in bytes."""
    chunks = chunks_of(models)
    optimizer = torch.optim.SGD([p for c in chunks for p in c.parameters() if p.requires_grad], lr=0.25, momentum=0.5)
    seen = []
    for step in range(3):
        x = torch.linspace(-1, 1, 6).reshape(2, 3).to(dtype)
        optimizer.zero_grad(set_to_none=True)
        hook(MOMENTS[0], step)
        for chunk in chunks:
            x = chunk(x)
        loss = x.square().sum()
        hook(MOMENTS[1], step)
        loss.backward()
        hook(MOMENTS[2], step)
        optimizer.step()
        hook(MOMENTS[3], step)
        seen += [to_bytes(loss), *(to_bytes(p.grad) for c in chunks for p in c.parameters() if p.grad is not None)]
    return seen


@given(trainable_models(), st.sets(st.tuples(st.sampled_from(MOMENTS), st.integers(0, 2)), min_size=1))
def test_training_is_the_training_without_the_look_back(models: Models, when: set[tuple[str, int]]) -> None:
    """Losses, gradients and weights agree bit for bit, wherever in a step the look-backs come."""
    tree = model_tree(models)
    start, saved = snapshot(tree), [memory.clone() for memory in _weights(models)]
    dtype = next(chunks_of(models)[0].parameters()).dtype
    plain, end = _train(models, dtype, lambda *_: None), model_bytes(models)
    for memory, was in zip(_weights(models), saved, strict=True):
        memory.copy_(was)
    versions = [start]
    looks = []

    def look_back(moment: str, step: int) -> None:
        if (moment, step) in when:
            with torch.no_grad(), swapped(tree, versions[0]):
                looks.append(to_bytes(chunks_of(models)[0](torch.ones(1, 3, dtype=dtype))))

    assert _train(models, dtype, look_back) == plain
    assert model_bytes(models) == end
    assert len(looks) == len(when)
    assert len(set(looks)) == 1


def _weights(models: Models) -> list[torch.Tensor]:
    return list(storages(tensor for _, tensor in model_tensors(models)).values())
