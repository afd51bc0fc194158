"""Fingerprints see names, dtypes, shapes and every bit, and nothing else; verify finds decay."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap import Corrupt, StructureMismatch, fingerprint, snapshot, thaw, verify
from mcore_snap.snapshots import frozen_entries
from mcore_snap.testing import tensors, trees


@given(trees())
def test_layout_does_not_count(tree):
    """A live tree, its snapshot and a thawed copy have one fingerprint."""
    kept = snapshot(tree)
    assert fingerprint(tree) == fingerprint(kept) == fingerprint(thaw(kept)) == verify(kept)


@given(st.data(), tensors(shape=(5,), layout="dense"))
def test_every_bit_counts(data, leaf):
    """Flipping any one bit gives another fingerprint."""
    before = fingerprint([leaf])
    raw = leaf.view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint([leaf]) != before


def test_names_dtypes_shapes_and_boundaries_count():
    """The same bytes under another name, dtype, shape or division are another tree."""
    flat = torch.zeros(4)
    others = [
        {"w": flat},
        {"v": flat},
        {"w": flat.view(2, 2)},
        {"w": flat.view(torch.int32)},
        [flat],
        [flat[:2], flat[2:]],
    ]
    assert len({fingerprint(tree) for tree in others}) == len(others)


def test_large_leaves_are_read_to_the_end():
    """More elements than one piece, and not a multiple of it."""
    leaf = torch.zeros((1 << 16) + 5, dtype=torch.bfloat16)
    before = fingerprint([leaf])
    leaf[-1] = 1
    assert fingerprint([leaf]) != before


def test_decay_is_found_by_name_also_after_pickling():
    """The record is made by fingerprint and travels with the snapshot."""
    from mcore_snap import model_tree

    model = torch.nn.Linear(3, 2)
    kept = snapshot(model_tree(model))
    with pytest.raises(StructureMismatch, match="call fingerprint"):
        verify(kept)
    print_of = fingerprint(kept)
    back = pickle.loads(pickle.dumps(kept))
    assert verify(back) == print_of
    for snap in (kept, back):
        frozen_entries(snap)[1].private.view(torch.uint8)[0] ^= 1  # as cosmic rays or DMA would
        with pytest.raises(Corrupt) as caught:
            verify(snap)
        assert [line.split(":")[0] for line in caught.value.problems] == ["chunks[0].parameters['bias']"]
