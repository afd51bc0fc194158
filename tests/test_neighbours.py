"""Leaves that lie side by side are copied as one, and are what they would be if they were not."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcore_snap
from mcore_snap import HostMemory, SnapError, load, snapshot, streams, swapped
from mcore_snap.neighbours import neighbours
from mcore_snap.testing.bit_patterns import DTYPES, MATH_DTYPES
from mcore_snap.testing.fake_device import late_copies
from mcore_snap.testing.raw_bytes import flip, to_bytes

DENSE = [dtype for dtype in DTYPES if dtype is not torch.bool]  # those that any bytes are elements of
LINE = 64
"""Bytes to which a slab aligns its leaves: neighbours of such sizes are so in the slab, too."""


@st.composite
def cut_up(draw):
    """A flat tensor and views of it in any order: neighbours, with gaps, empty, twice, or of another dtype."""
    dtype = draw(st.sampled_from(DTYPES if rarely(draw, 4) else [*MATH_DTYPES, torch.int64, torch.uint8]))
    raw = torch.arange(16 * LINE) % (2 if dtype is torch.bool else 251)
    flat = raw.to(torch.uint8).view(dtype)
    lines = draw(st.lists(st.integers(0, 16), unique=True, min_size=4, max_size=9).map(sorted))
    off = [LINE // 2 * (rarely(draw, 12) and 0 < line < 16) for line in lines]
    cuts = [(LINE * line + more) // dtype.itemsize for line, more in zip(lines, off, strict=True)]
    views = [flat[start:stop] for start, stop in itertools.pairwise(cuts)]
    if rarely(draw, 3):
        views = draw(st.lists(st.sampled_from(views), unique_by=id, min_size=1))
    if rarely(draw, 4):
        views = [view.view(draw(st.sampled_from(DENSE))) if rarely(draw, 3) else view for view in views]
    if rarely(draw, 3):
        views.append(flat[draw(st.sampled_from(cuts)) :][:0])
    if rarely(draw):
        views.append(draw(st.sampled_from(views)))
    return flat, draw(st.permutations(views))


def rarely(draw, one_in=8):
    """Whether to do something that is to be done in one of so many examples."""
    return draw(st.sampled_from(range(one_in))) == one_in - 1


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


OVERLAPPING = {
    "all of it": lambda flat: flat,
    "all of both": lambda flat: flat[:128],
    "one of them": lambda flat: flat[64:128],
    "every other element": lambda flat: flat[::2],
    "another dtype": lambda flat: flat[32:96].view(torch.uint32),
    "another order": lambda flat: flat[32:96].as_strided((32, 2), (1, 32)),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("across", OVERLAPPING.values(), ids=OVERLAPPING)
def test_what_overlaps_neighbours_keeps_its_turn(across, place):
    """A leaf across two neighbours, first, between or last: each byte is that of the last one listed that has it."""
    flat, values = torch.zeros(192), torch.arange(1.0, 193.0)
    *sources, other = snapshot([*with_another(values, 2, across)[:2], flip_copy(across(values))])
    sources.insert(place, other)
    expected = flat.clone()
    for view, source in zip(with_another(expected, place, across), sources, strict=True):
        view.copy_(source)
    load(with_another(flat, place, across), sources)
    assert to_bytes(flat) == to_bytes(expected)


def with_another(flat, place, across):
    """Two neighbours, and what lies across them in this place of the list."""
    views = [flat[:64], flat[64:128]]
    views.insert(place, across(flat))
    return views


def flip_copy(tensor):
    """A copy with other bits."""
    return (tensor.contiguous().view(torch.int32) ^ 1).view(tensor.dtype)


def test_a_negated_view_is_no_neighbour():
    """Its values are not the bits that lie in memory."""
    flat = torch.arange(1.0, 65.0)
    leaves = [torch._neg_view(flat)[:32], flat[32:]]
    kept = snapshot(leaves)
    assert kept[0].tolist() == [-value for value in range(1, 33)]
    assert kept[1].tolist() == list(range(33, 65))
    flat.mul_(3)
    with swapped(leaves, kept):
        assert flat.tolist() == list(range(1, 65))
    assert flat.tolist() == list(range(3, 193, 3))
    load(leaves, kept)
    assert flat.tolist() == list(range(1, 65))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("by", [64, -64])
def test_sources_beside_targets_are_copied_one_after_another(order, by):
    """Parts of a tensor moved within it: what the second one reads may be what the first one wrote."""
    flat = torch.arange(256.0)
    expected = flat.clone()
    places = [64, 128][::order]
    for place in places:
        expected[place : place + 64] = expected[place + by : place + by + 64].clone()
    load([flat[place : place + 64] for place in places], [flat[place + by : place + by + 64] for place in places])
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_reads_a_neighbour_keeps_its_turn(place, read):
    """A leaf that is copied from one of two neighbours, before, between or after these are written."""
    flat, other = torch.zeros(128), torch.full((64,), -1.0)
    views, sources = [flat[:64], flat[64:]], [*snapshot(list(torch.arange(1.0, 129.0).split(64)))]
    expected = torch.full((64,), 0.0) if place <= read else sources[read].clone()
    views.insert(place, other)
    sources.insert(place, flat[64 * read :][:64])
    load(views, sources)
    assert torch.equal(other, expected)
    assert torch.equal(flat, torch.arange(1.0, 129.0))


@pytest.mark.parametrize("where", ["first", "last"])
def test_an_empty_leaf_keeps_no_others_apart(where):
    """It has no byte that could be written before or after another's."""
    flat = torch.arange(640.0)
    views = list(flat.split(64))
    views.insert(0 if where == "first" else 10, flat[192:192])
    with late_copies() as device:
        kept = snapshot(views)
        assert device.taken <= 2  # of the empty one there may be a copy of nothing
        flat.zero_()
        taken = device.taken
        load(views, kept)
        assert device.taken - taken <= 2
    assert torch.equal(flat, torch.arange(640.0))


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
    assert (memory.stats().leased, memory.stats().free) == (free, 0)
    memory.prepare([view.clone() for view in views]).result()
    assert memory.stats().free == free
    assert mcore_snap.bitwise_equal(kept, views)


def test_something_was_prepared():
    """As much as the leaves are, and the gap that one of an odd size leaves before the last."""
    flat = torch.zeros(256, dtype=torch.uint8)
    memory = HostMemory()
    for views in ([flat[:64], flat[64:]], [flat[:65], flat[65:]], [flat[65:], flat[:65]]):
        memory.prepare(views).result()
        before = memory.stats()
        assert (before.leased, before.free) == (0, 256 if len(views[0]) == 64 else sum(padded(views)))
        kept = snapshot(views, memory=memory)
        assert (memory.stats().leased, memory.stats().free) == (before.free, 0)
        del kept
        memory.trim()


def padded(views):
    """How many bytes each leaf takes of a slab: whole lines, but for the last."""
    return [-(-view.nbytes // LINE) * LINE for view in views[:-1]] + [views[-1].nbytes]
