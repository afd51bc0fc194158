"""Shapes and strides: the arithmetic against plain enumeration."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap.specs import (
    ALIGNMENT,
    LeafSpec,
    aligned_offsets,
    contiguous_strides,
    dense_strides,
    element_offsets,
    overlaps_itself,
    span_of,
)

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def layouts(draw):
    """A shape, and any strides for it."""
    shape = draw(shapes)
    return shape, tuple(draw(st.integers(0, 13)) for _ in shape)


@st.composite
def permuted(draw):
    """A shape, and the strides of a row-major tensor with its dimensions permuted."""
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    steps = contiguous_strides(tuple(shape[dim] for dim in order))
    stride = [0] * len(shape)
    for dim, step in zip(order, steps, strict=True):
        stride[dim] = step
    return shape, tuple(stride)


@given(layouts())
def test_the_span_ends_at_the_last_element(layout):
    """The span is one more than the largest offset, or nothing."""
    assert span_of(*layout) == max(element_offsets(*layout), default=-1) + 1


@given(layouts())
def test_there_is_one_offset_per_element(layout):
    """Row-major enumeration visits each index once."""
    assert len(list(element_offsets(*layout))) == prod(layout[0])


@given(layouts())
def test_dense_means_without_gaps_or_overlap(layout):
    """Dense strides are given exactly where the offsets are all of 0 to n-1; they address the same elements."""
    offsets = list(element_offsets(*layout))
    found = dense_strides(*layout)
    assert (found is not None) == (sorted(offsets) == list(range(len(offsets))))
    if found is not None:
        assert list(element_offsets(layout[0], found)) == offsets


@given(permuted())
def test_permuted_tensors_are_dense(layout):
    """Permuting the dimensions of a row-major tensor leaves no gap."""
    shape, stride = layout
    found = dense_strides(shape, stride)
    assert found is not None
    assert len(found) == len(shape)


@given(shapes)
def test_row_major_strides_enumerate_in_order(shape):
    """The elements of a row-major tensor lie in the order of their indices."""
    assert list(element_offsets(shape, contiguous_strides(shape))) == list(range(prod(shape)))


@given(layouts())
def test_no_overlap_goes_unseen(layout):
    """Whatever addresses an element twice is told to overlap itself."""
    offsets = list(element_offsets(*layout))
    if len(set(offsets)) < len(offsets):
        assert overlaps_itself(*layout)


@given(permuted(), st.integers(1, 3))
def test_steps_over_gaps_do_not_overlap(layout, factor):
    """Strides that step over all that the smaller ones reach are not told to overlap."""
    shape, stride = layout
    assert not overlaps_itself(shape, tuple(step * factor for step in stride))


@given(st.lists(st.integers(0, 300), max_size=8))
def test_leaves_in_a_slab_are_aligned_apart_and_tight(sizes):
    """Each leaf begins at the first aligned byte behind the one before it."""
    offsets, total = aligned_offsets(sizes)
    end = 0
    for start, size in zip(offsets, sizes, strict=True):
        assert start % ALIGNMENT == 0
        assert 0 <= start - end < ALIGNMENT
        end = start + size
    assert total == end


@given(st.lists(st.one_of(st.integers(0, 300), st.sampled_from([64, 128])), max_size=8), st.data())
def test_leaves_lie_in_any_order_in_a_slab_of_the_same_size(sizes, data):
    """As asked for, one behind the other, but for the last one listed; none of them reaches beyond the slab."""
    order = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)) if sizes else []
    offsets, total = aligned_offsets(sizes, order)
    assert total == aligned_offsets(sizes)[1]
    lying = sorted(range(len(sizes)), key=lambda index: (offsets[index], sizes[index]))
    end = 0
    for index in lying:
        assert offsets[index] % ALIGNMENT == 0
        assert end <= offsets[index] <= total - sizes[index]
        end = offsets[index] + sizes[index]
    free = [index for index in order if index != len(sizes) - 1 or sizes[index] % ALIGNMENT == 0]
    starts = [offsets[index] for index in free]
    assert starts == sorted(starts)
    assert all(offsets[index] == 0 for index in free[:1])


def test_a_spec_reads_as_dtype_and_shape():
    """Errors show specs in this form."""
    assert str(LeafSpec("float8_e4m3fn", ())) == "float8_e4m3fn[]"


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((), (), False),
        ((1,), (0,), False),
        ((2,), (0,), True),
        ((2,), (1,), False),
        ((1, 2), (0, 1), False),
        ((2, 2), (1, 1), True),  # a step onto the last element that the smaller one reaches
        ((2, 2), (2, 1), False),
        ((3, 2), (2, 3), True),  # 0 2 4 and 3 5 7 do not meet, but that is beyond the proof
        ((2, 2, 2), (3, 2, 1), True),  # 0 1 2 3, then 3
        ((2, 2, 2), (4, 2, 1), False),
        ((0, 2), (0, 0), False),
    ],
)
def test_overlap_by_example(shape, stride, expected):
    """The edges of the proof, one by one."""
    assert overlaps_itself(shape, stride) == expected


def test_dense_strides_of_three_dimensions():
    """Steps multiply up through the dimensions in the order of their strides."""
    assert dense_strides((2, 3, 4), (1, 8, 2)) == (1, 8, 2)
    assert dense_strides((2, 3, 4), (1, 9, 2)) is None
    assert dense_strides((2, 1, 4), (1, 77, 2)) == (1, 4, 2)


@pytest.mark.parametrize("measure", [span_of, overlaps_itself, lambda *layout: list(element_offsets(*layout))])
def test_shapes_and_strides_of_other_lengths_are_a_mistake(measure):
    """Whoever mixes up two tensors hears of it."""
    with pytest.raises(ValueError, match="zip"):
        measure((2, 2), (1,))
