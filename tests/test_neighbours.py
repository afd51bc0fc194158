"""Leaves that lie side by side are copied as one, and are what they would be if they were not."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcore_snap
from mcore_snap import HostMemory, SnapError, load, snapshot, streams, swapped
from mcore_snap.neighbours import neighbours
from mcore_snap.testing.bit_patterns import DTYPES
from mcore_snap.testing.fake_device import late_copies
from mcore_snap.testing.raw_bytes import flip, to_bytes


@st.composite
def cut_up(draw):
    """A flat tensor and views of it in any order: neighbours, with gaps, empty, twice, or of another dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    step = 64 // dtype.itemsize
    raw = torch.arange(1024) % (2 if dtype is torch.bool else 251)
    flat = raw.to(torch.uint8).view(dtype)
    cuts = sorted(draw(st.sets(st.integers(0, flat.numel() // (step // 2)), min_size=2, max_size=8)))
    views = [flat[a * (step // 2) : b * (step // 2)] for a, b in itertools.pairwise(cuts)]
    kept = draw(st.lists(st.sampled_from(views), unique_by=id, min_size=1))
    if draw(st.booleans()):
        kept.append(draw(st.sampled_from(kept)))
    return flat, draw(st.permutations(kept))


@given(cut_up())
def test_neighbours_make_the_round_trip(drawn):
    """Each of them has its bytes, what lies between them keeps its own, and every version moves."""
    flat, views = drawn
    before, held = to_bytes(flat), [to_bytes(view) for view in views]
    kept = snapshot(views)
    assert [to_bytes(leaf) for leaf in kept] == held
    flip([flat])
    changed = to_bytes(flat)
    versions = [view._version for view in views]
    with swapped(views, kept):
        assert [to_bytes(view) for view in views] == held
    assert to_bytes(flat) == changed
    assert [view._version for view in views] == versions
    load(views, kept)
    assert [to_bytes(view) for view in views] == held
    assert all(view._version > version for view, version in zip(views, versions, strict=True) if view.numel())
    expected = bytearray(changed)
    for view in views:
        part = slice(view.storage_offset() * view.itemsize, view.storage_offset() * view.itemsize + view.nbytes)
        expected[part] = before[part]
    assert to_bytes(flat) == expected


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("own_counter", [False, True])
def test_views_of_a_flat_tensor_are_one_copy(order, own_counter):
    """Listed in the order in which they lie or in that of Megatron-Core, which is the other one; and each one's
    version moves, whether it shares its counter with the flat tensor or not.
    """
    flat = torch.arange(512, dtype=torch.float32)
    views = [part.data if own_counter else part for part in flat.split(64)][::order]
    tree = {f"{number}": view for number, view in enumerate(views)}
    with late_copies() as device:
        kept = snapshot(tree)
        assert device.taken == 1
        flat.zero_()
        versions = [view._version for view in views]
        load(tree, kept)
        assert device.taken == 2
    assert torch.equal(flat, torch.arange(512, dtype=torch.float32))
    assert all(view._version > version for view, version in zip(views, versions, strict=True))


def test_a_gap_in_live_memory_is_not_written():
    """Neighbours in the slab that are none in live memory, and the other way round, are copied one by one."""
    flat = torch.arange(256, dtype=torch.float32)
    tree = [flat[:64], flat[80:144], flat[144:150], flat[150:256]]
    with late_copies() as device:
        kept = snapshot(tree)
        assert device.taken == 3  # the third one's size leaves a gap behind it in the slab
        flat.zero_()
        load(tree, kept)
        assert device.taken == 6
    assert flat[64:80].tolist() == [0] * 16
    assert torch.equal(flat[80:], torch.arange(80, 256, dtype=torch.float32))


def test_neighbours_of_other_layouts_and_dtypes_are_none():
    """One copy moves elements of one size, and no gaps."""
    raw = torch.arange(256).to(torch.uint8)
    views = [raw[:128:2], raw[64:128], raw[128:192].view(torch.float64), raw[192:]]
    assert neighbours([(view,) for view in views]) == []
    held = [to_bytes(view) for view in views[1:]]
    kept = snapshot(views[1:])
    flip([raw])
    load(views[1:], kept)
    assert [to_bytes(view) for view in views[1:]] == held


def test_where_leaves_overlap_the_last_one_listed_wins():
    """As if they were copied one after another, in a tree of averages, say, which differ where they overlap."""
    for order in itertools.permutations(range(3)):
        flat = torch.zeros(192)
        views = [flat[:64], flat[64:128], flat[32:96]]
        load([views[index] for index in order], [torch.full((64,), float(index + 1)) for index in order])
        expected = torch.zeros(192)
        for index in order:
            expected[[slice(0, 64), slice(64, 128), slice(32, 96)][index]] = index + 1
        assert torch.equal(flat, expected), order
    flat = torch.arange(192.0)
    kept = snapshot([flat[:64], flat[64:128]])
    load([flat[::2], flat[:64], flat[64:128]], [torch.zeros(96), *kept])
    assert torch.equal(flat[:128], torch.arange(128.0))


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_copy_names_all_the_leaves_that_it_took(monkeypatch, failing):
    """Any of them may have been written; so they have, if a later one fails."""
    flat = torch.zeros(1 << 16)
    tree = {"a": flat[: 1 << 15], "b": flat[1 << 15 :], "c": torch.zeros(1 << 15)}
    kept = snapshot(tree)
    copy, calls = streams.HostCopies.copy, []

    def fail(*args):
        calls.append(args)
        if len(calls) == failing:
            raise RuntimeError("no more")
        copy(*args)

    monkeypatch.setattr(streams.HostCopies, "copy", fail)
    with pytest.raises(
        SnapError, match=[r"into \['a'\] and 1 more failed", r"into \['c'\] failed"][failing - 1]
    ) as caught:
        load(tree, kept)
    assert list(caught.value.problems) == ["['a']", "['b']", "['c']"][: failing + 1]


@given(cut_up())
def test_what_was_prepared_is_what_is_leased(drawn):
    """The size of a snapshot depends on the sizes of its leaves alone, wherever they lie."""
    _, views = drawn
    memory = HostMemory()
    memory.prepare(views).result()
    free = memory.stats().free
    kept = snapshot(views, memory=memory)
    assert memory.stats().leased == free
    memory.prepare([view.clone() for view in views]).result()
    assert memory.stats().free in {0, free}
    assert mcore_snap.bitwise_equal(kept, views)
