"""Which tensors are leaves: against sets of bytes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap.coverage import Region, cover
from mcore_snap.errors import StructureMismatch
from mcore_snap.specs import contiguous_strides, element_offsets


def bytes_of(region):
    """Every byte of a region, with its storage."""
    return {
        (region.storage, region.start + offset * region.itemsize + byte)
        for offset in element_offsets(region.shape, region.stride)
        for byte in range(region.itemsize)
    }


@st.composite
def regions(draw):
    """A few tensors over two small storages, flat buffers, strided ones and views among them."""
    found = []
    for index in range(draw(st.integers(0, 5))):
        dtype, itemsize = draw(st.sampled_from([("int8", 1), ("int16", 2), ("float16", 2)]))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        stride = contiguous_strides(shape)
        if draw(st.booleans()):
            stride = tuple(draw(st.integers(0, 5)) for _ in shape)
        whole = draw(st.booleans()) and len(shape) == 1 and stride == (1,)
        start = draw(st.integers(0, 6)) * itemsize
        found.append(Region(f"t{index}", draw(st.integers(0, 1)), start, dtype, itemsize, shape, stride, whole))
    return found


@given(regions())
def test_every_byte_is_in_exactly_one_leaf(found):
    """Either leaves are disjoint and hold everything, or a pair that shares bytes in part is named."""
    try:
        owners = cover(found)
    except StructureMismatch as error:
        named = {line.split(":")[0] for line in error.problems}
        for name in named:
            region = next(one for one in found if one.name == name)
            assert any(bytes_of(region) & bytes_of(other) for other in found if other is not region)
        return
    leaves = [index for index, owner in enumerate(owners) if owner is None]
    for a, b in itertools.combinations(leaves, 2):
        assert not bytes_of(found[a]) & bytes_of(found[b])
    for index, owner in enumerate(owners):
        if owner is not None:
            assert owners[owner] is None
            assert bytes_of(found[index]) <= bytes_of(found[owner])
            assert found[index].dtype == found[owner].dtype


@given(st.integers(0, 5), st.integers(1, 4), st.booleans())
def test_a_flat_buffer_holds_its_parameters_wherever_it_is_listed(offset, count, first):
    """Also where a parameter is as large as the buffer and comes before it."""
    flat = Region("flat", 0, 0, "int16", 2, (9,), (1,), whole=True)
    part = Region("part", 0, 2 * offset, "int16", 2, (count,), (1,))
    same = Region("same", 0, 0, "int16", 2, (9,), (1,))
    order = [flat, part, same] if first else [same, part, flat]
    owners = cover(order)
    assert [owner for one, owner in zip(order, owners, strict=True) if one is not flat] == [order.index(flat)] * 2


@pytest.mark.parametrize("whole", [True, False])
def test_tied_tensors_are_one_leaf_under_the_first_name(whole):
    """Of equal regions the first listed is the leaf."""
    one = Region("one", 0, 0, "int8", 1, (2, 2), (2, 1), whole)
    two = Region("two", 0, 0, "int8", 1, (2, 2), (2, 1), whole)
    assert cover([one, two]) == [None, 0]


def test_columns_of_one_matrix_are_leaves_of_their_own():
    """Interleaved views share a span but no byte."""
    even = Region("even", 0, 0, "int16", 2, (3,), (2,))
    odd = Region("odd", 0, 2, "int16", 2, (3,), (2,))
    assert cover([even, odd]) == [None, None]


def test_a_dense_tensor_in_the_gap_of_another_is_a_leaf():
    """A span inside a gap is not overlap."""
    wide = Region("wide", 0, 0, "int8", 1, (2,), (8,))
    inside = Region("inside", 0, 2, "int8", 1, (4,), (1,))
    assert cover([wide, inside]) == [None, None]
    assert cover([inside, wide]) == [None, None]
    flat = Region("flat", 0, 2, "int8", 1, (4,), (1,), whole=True)
    assert cover([wide, flat]) == [None, None]


@pytest.mark.parametrize(
    ("start", "apart"),
    [(0, True), (1, False), (2, False), (3, False), (4, True), (6, True), (7, False), (9, False), (10, True)],
)
def test_a_pair_of_bytes_moved_past_the_elements_of_another(start, apart):
    """In the gaps and touching the ends they are apart; anywhere else they share."""
    wide = Region("wide", 0, 2, "int16", 2, (2,), (3,))  # bytes 2 3 and 8 9
    pair = Region("pair", 0, start, "int8", 1, (2,), (1,))
    assert wide.bytes_used() == {2, 3, 8, 9}
    for order in ([wide, pair], [pair, wide]):
        if not apart:
            with pytest.raises(StructureMismatch):
                cover(order)
        else:
            assert cover(order) == [None, None]


def test_one_neighbour_that_is_apart_does_not_hide_the_next():
    """Every leaf is asked, not only the first, and every pair at fault is told."""
    big = Region("big", 0, 0, "int8", 1, (8,), (1,))
    next_to_it = Region("next", 0, 8, "int8", 1, (6,), (1,))
    inside = Region("inside", 0, 9, "int8", 1, (5,), (1,))  # to the very end
    assert cover([big, next_to_it, inside]) == [None, None, 1]
    across = Region("across", 0, 13, "int8", 1, (2,), (1,))
    beside = Region("beside", 0, 7, "int8", 1, (2,), (1,))
    with pytest.raises(
        StructureMismatch, match=r"^some tensors share memory in part, so no leaf can hold them"
    ) as caught:
        cover([big, next_to_it, across, beside])
    assert [line.split(":")[0] for line in caught.value.problems] == ["across", "beside"]


def test_a_part_counts_from_its_holder():
    """Both lie on the grid of elements that begins with the holder, wherever that is."""
    holder = Region("holder", 0, 3, "int16", 2, (4,), (1,))
    assert cover([holder, Region("part", 0, 5, "int16", 2, (1,), (1,))]) == [None, 0]
    third = Region("holder", 0, 1, "f3", 3, (4,), (1,))
    with pytest.raises(StructureMismatch):
        cover([third, Region("off", 0, 5, "f3", 3, (1,), (1,))])


def test_equal_offsets_in_other_memory_are_apart():
    """Storage is part of where a tensor lies."""
    assert cover([Region("a", 1, 0, "int8", 1, (2,), (1,)), Region("b", 2, 0, "int8", 1, (2,), (1,))]) == [None, None]


@pytest.mark.parametrize(
    "other",
    [
        Region("other", 0, 2, "int8", 1, (4,), (1,)),  # in part
        Region("other", 0, 0, "float8_e5m2", 1, (2,), (1,)),  # inside, in another dtype
        Region("other", 0, 1, "int16", 2, (1,), (1,)),  # inside, in a wider dtype
    ],
)
def test_sharing_in_part_is_refused_by_name(other):
    """Neither leaf could hold both, so the message names both and says what to do."""
    with pytest.raises(StructureMismatch) as caught:
        cover([Region("one", 0, 0, "int8", 1, (4,), (1,)), other])
    (problem,) = caught.value.problems
    assert problem == (
        f"other: shares some bytes with one (int8[4]), found {other.dtype}{list(other.shape)}; expected the same "
        "memory, a part of it in the same dtype, or none of it; give one of them memory of its own"
    )


def test_parts_off_the_grid_of_elements_are_refused():
    """A view by bytes that begins inside an element cannot be named as elements."""
    with pytest.raises(StructureMismatch, match="some tensors share memory in part"):
        cover([Region("one", 0, 0, "int16", 2, (4,), (1,)), Region("off", 0, 1, "int16", 2, (2,), (1,))])


def test_parts_of_a_tensor_with_gaps_are_refused():
    """A copy closes the gaps, so parts could not be found in it again."""
    with pytest.raises(StructureMismatch):
        cover([Region("one", 0, 0, "int8", 1, (4,), (2,)), Region("part", 0, 2, "int8", 1, (2,), (2,))])


def test_empty_tensors_are_leaves():
    """They share no byte with anything, wherever they point."""
    empty = Region("empty", 0, 0, "int8", 1, (0,), (1,))
    within = Region("within", 0, 2, "int8", 1, (0,), (1,))
    assert cover([empty, Region("one", 0, 0, "int8", 1, (4,), (1,)), empty, within]) == [None] * 4
