"""Snapshots travel whole: by pickle with their bytes out of band, and by copy as themselves."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given

from mcore_snap import bitwise_equal, fingerprint, load, model_tree, named_leaves, named_parameters, snapshot, verify
from mcore_snap.testing.asserts import assert_bitwise_equal
from mcore_snap.testing.chunks import DDPLike, Layer
from mcore_snap.testing.model_state import model_bytes, model_tensors
from mcore_snap.testing.model_strategies import model_trees
from mcore_snap.testing.raw_bytes import flip, to_bytes

if TYPE_CHECKING:
    from mcore_snap.testing.model_strategies import Models


@given(model_trees())
def test_pickles_of_every_protocol_are_the_snapshot(pair: tuple[Models, Any]) -> None:
    """All dtypes, shapes and bits survive, as do names and the names of parameters; float8 too, which torch cannot."""
    snap = snapshot(pair[1])
    digest = fingerprint(snap)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(snap, protocol=protocol))
        assert type(back) is type(snap)
        assert_bitwise_equal(back, snap)
        verify(back)  # against the digest that came with it
        assert fingerprint(back) == digest
        assert list(named_parameters(back)) == list(named_parameters(snap))


@given(model_trees())
def test_protocol_5_takes_the_bytes_out_of_band(pair: tuple[Models, Any]) -> None:
    """The pickle itself is small, and its buffers are all the bytes, without a copy of them in between."""
    models, tree = pair
    snap = snapshot(tree)
    before = model_bytes(models)
    buffers: list[pickle.PickleBuffer] = []
    small = pickle.dumps(snap, protocol=5, buffer_callback=buffers.append)
    total = sum(leaf.nbytes for leaf in named_leaves(snap).values())
    assert sum(buffer.raw().nbytes for buffer in buffers) == total
    back = pickle.loads(small, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert_bitwise_equal(back, snap)
    flip(tensor for _, tensor in model_tensors(models))
    load(tree, back)
    after = model_bytes(models)
    assert after == before


def test_out_of_band_buffers_are_not_trusted_to_stay() -> None:
    """A receiver may reuse its buffers: what was unpickled from them has its own bytes."""
    model = Layer()
    snap = snapshot(model_tree(model))
    buffers: list[pickle.PickleBuffer] = []
    small = pickle.dumps(snap, protocol=5, buffer_callback=buffers.append)
    assert all(buffer.raw().readonly for buffer in buffers)
    received = [bytearray(buffer.raw()) for buffer in buffers]
    back = pickle.loads(small, buffers=received)
    for raw in received:
        raw[:] = b"\xff" * len(raw)
    assert_bitwise_equal(back, snap)


def test_what_was_unpickled_is_frozen() -> None:
    """A snapshot from another process refuses writes as one from this does."""
    model = Layer()
    back = pickle.loads(pickle.dumps(snapshot(model_tree(model))))
    leaf = back.chunks[0].parameters["fc.weight"]
    held = to_bytes(leaf)
    with pytest.raises(RuntimeError):
        leaf.add_(1)
    assert to_bytes(back.chunks[0].parameters["fc.weight"]) == held


@given(model_trees())
def test_copies_of_a_snapshot_are_the_snapshot(pair: tuple[Models, Any]) -> None:
    """What cannot change need not be copied."""
    snap = snapshot(pair[1])
    assert copy.copy(snap) is snap
    assert copy.deepcopy(snap) is snap
    nested = copy.deepcopy({"version": 3, "weights": snap})
    assert nested["weights"] is snap


def test_a_live_tree_is_not_copied_by_accident() -> None:
    """A pickle or deep copy of a live tree would be neither live nor frozen: it is refused with what to do."""
    model = DDPLike(Layer())
    tree = model_tree(model)
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="snapshot"):
            attempt(tree)
    assert bitwise_equal(tree, snapshot(tree))


def test_the_repr_says_what_it_is_and_no_more() -> None:
    """One line with kind, size and dtypes, in place of all the numbers."""
    model = DDPLike(Layer(dtype=torch.bfloat16))
    tree = model_tree(model)
    snap = snapshot(tree)
    for each, kind in ((tree, "live"), (snap, "frozen")):
        text = repr(each)
        assert text.startswith("ModelTree(")
        assert kind in text
        assert "bfloat16" in text
        assert "\n" not in text
        assert len(text) < 200
    for part in (snap.chunks[0], snap.chunks[0].parameters):
        assert "\n" not in repr(part)
        assert "tensor(" not in repr(part)
