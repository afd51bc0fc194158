"""Law 2: nothing done to the model, to a copy or to a leaf handed out changes a snapshot."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import optree
import pytest
import torch
from hypothesis import given

from mcore_snap import NotResident, as_numpy, fingerprint, load, model_tree, named_leaves, snapshot, thaw, verify
from mcore_snap.testing.chunks import DDPLike, Layer
from mcore_snap.testing.model_state import model_tensors
from mcore_snap.testing.model_strategies import model_trees
from mcore_snap.testing.raw_bytes import flip, to_bytes
from mcore_snap.testing.strategies import trees

if TYPE_CHECKING:
    from mcore_snap.testing.model_strategies import Models


def _bytes(snap: Any) -> dict[str, bytes]:
    return {name: to_bytes(leaf) for name, leaf in named_leaves(snap).items()}


@given(trees())
def test_the_source_is_never_shared(tree: Any) -> None:
    """Flipping every byte of the live tree leaves the snapshot alone: no leaf is an alias."""
    snap = snapshot(tree)
    held, _ = _bytes(snap), fingerprint(snap)
    flip(optree.tree_leaves(tree))
    assert _bytes(snap) == held
    verify(snap)


@given(model_trees())
def test_the_model_is_never_shared(pair: tuple[Models, Any]) -> None:
    """The same for a model, also after a load, which must copy and not assign."""
    models, tree = pair
    snap = snapshot(tree)
    held, _ = _bytes(snap), fingerprint(snap)
    load(tree, snap)
    flip(tensor for _, tensor in model_tensors(models))
    assert _bytes(snap) == held
    verify(snap)


@given(trees())
def test_thawed_copies_are_copies(tree: Any) -> None:
    """What thaw gives is writable, has the same bits, and shares nothing with the snapshot or a second thaw."""
    snap = snapshot(tree)
    held = _bytes(snap)
    thawed, second = thaw(snap), thaw(snap)
    assert _bytes(thawed) == held
    flip(optree.tree_leaves(thawed))
    assert _bytes(snap) == held
    assert _bytes(second) == held
    for leaf in optree.tree_leaves(second):
        if leaf.dtype in {torch.float32, torch.int64}:
            leaf.zero_()
    assert _bytes(snap) == held


@given(trees(min_leaves=1))
def test_leaves_handed_out_refuse_writes(tree: Any) -> None:
    """In-place operations, views of leaves and leaves as targets are refused, and change nothing."""
    snap = snapshot(tree)
    held = _bytes(snap)
    for leaf in optree.tree_leaves(snap):
        if not leaf.numel():
            continue
        for target in (leaf, leaf.detach(), leaf.unsqueeze(0), leaf.data):
            with pytest.raises(RuntimeError):
                target.copy_(torch.empty_like(target, memory_format=torch.contiguous_format))
        with pytest.raises(RuntimeError):
            torch._foreach_copy_([leaf], [leaf.clone()])
        with pytest.raises(RuntimeError):
            leaf.data_ptr()
    assert _bytes(snap) == held


@given(model_trees())
def test_what_is_done_to_a_handle_stays_there(pair: tuple[Models, Any]) -> None:
    """Re-pointing a leaf of a model's snapshot does not reach the next one that is handed out."""
    snap = snapshot(pair[1])
    held = _bytes(snap)
    for leaf in optree.tree_leaves(snap):
        leaf.data = torch.empty(5, dtype=leaf.dtype)
        leaf.extra = "attribute"
    assert _bytes(snap) == held
    assert not any(hasattr(leaf, "extra") for leaf in optree.tree_leaves(snap))


@given(trees())
def test_a_handle_in_a_container_can_be_lost_but_not_what_it_stood_for(tree: Any) -> None:
    """In a dict of leaves the handles are the caller's; re-pointed, they still load what was taken."""
    leaves = optree.tree_leaves(tree)
    held = [to_bytes(leaf) for leaf in leaves]
    snap = snapshot(tree)
    for leaf in optree.tree_leaves(snap):
        leaf.data = torch.zeros(leaf.nbytes, dtype=torch.uint8).view(leaf.dtype).view(leaf.shape)
    flip(leaves)
    load(tree, snap)
    assert [to_bytes(leaf) for leaf in leaves] == held


@given(trees())
def test_arrays_are_read_only_for_good(tree: Any) -> None:
    """An array over a leaf cannot be written, and cannot be made writable again."""
    snap = snapshot(tree)
    held = _bytes(snap)
    for array in optree.tree_leaves(as_numpy(snap)):
        assert isinstance(array, np.ndarray)
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    assert _bytes(snap) == held


def test_neither_tree_nor_snapshot_keeps_a_model_alive() -> None:
    """The model and its flat buffer are gone when their owner lets go, and the tree then says so."""
    model: DDPLike | None = DDPLike(Layer())
    assert model is not None
    tree = model_tree(model)
    snap = snapshot(tree)
    fingerprint(snap)
    flat = model.buffers[0].param_data  # type: ignore[index]
    references = [weakref.ref(model), weakref.ref(model.module), weakref.ref(flat)]
    del model, flat
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
    with pytest.raises(NotResident):
        load(tree, snap)
    verify(snap)
