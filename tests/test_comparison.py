"""What compare reports: counts by bits, differences by value."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap import bitwise_equal, compare, snapshot
from mcore_snap.testing import tensors
from mcore_snap.testing.raw_bytes import to_bytes


@given(st.data(), tensors(shape=(3, 2)))
def test_it_counts_the_elements_in_which_any_bit_differs(data, one):
    """Against the bytes, for every dtype and layout; a tensor never differs from itself, NaN or not."""
    assert not compare([one], snapshot([one]))
    width = one.itemsize
    raw = np.frombuffer(to_bytes(one), dtype=np.uint8).reshape(6, width).copy()
    chosen = data.draw(st.sets(st.integers(0, 5)))
    for index in chosen:
        raw[index, data.draw(st.integers(0, width - 1))] ^= 1
    other = torch.from_numpy(raw.reshape(-1)).view(one.dtype).reshape(3, 2)
    found = compare([one], [other])
    assert bitwise_equal([one], [other]) == (not chosen)
    assert [leaf.differing for leaf in found.differences] == ([len(chosen)] if chosen else [])
    assert all(leaf.elements == 6 for leaf in found.differences)


@pytest.mark.parametrize(
    ("a", "b", "differing", "largest"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 1.0], 2, 2.0),
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0),
        ([math.nan, 1.0], [0.0, 1.0], 1, math.nan),
        ([math.nan, 1.0], [0.0, 4.0], 2, 3.0),
        ([math.inf], [1.0], 1, math.inf),
    ],
)
def test_the_largest_difference_is_by_value(a, b, differing, largest):
    """NaN only where nothing else differs; signed zeros differ by nothing."""
    (leaf,) = compare([torch.tensor(a)], [torch.tensor(b)]).differences
    assert (leaf.name, leaf.dtype, leaf.elements, leaf.differing) == ("[0]", "float32", len(a), differing)
    assert leaf.largest == largest or (math.isnan(largest) and math.isnan(leaf.largest))


def test_dtypes_without_values_have_no_largest_difference():
    """Integers are counted; packed float4 is counted by the byte."""
    (leaf,) = compare([torch.tensor([1, 2])], [torch.tensor([1, 3])]).differences
    assert leaf.largest is None
    packed = torch.tensor([1, 2], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    (leaf,) = compare([packed], [packed.view(torch.uint8).flip(0).view(torch.float4_e2m1fn_x2)]).differences
    assert (leaf.differing, leaf.largest) == (2, None)


def test_complex_numbers_differ_by_their_distance():
    """A complex element counts once, whichever part differs."""
    (leaf,) = compare([torch.tensor([1 + 1j, 2j])], [torch.tensor([4 + 5j, 2j])]).differences
    assert (leaf.differing, leaf.largest) == (1, 5.0)


def test_the_report_is_a_table():
    """Columns line up, and equal trees say so in words."""
    a = {"long name": torch.zeros(3), "b": torch.zeros(1200, dtype=torch.int64), "same": torch.ones(1)}
    b = {"long name": torch.ones(3), "b": torch.ones(1200, dtype=torch.int64), "same": torch.ones(1)}
    lines = str(compare(a, b)).splitlines()
    assert lines == [
        "leaf           dtype    differing     of  largest difference",
        "['b']          int64        1,200  1,200                   -",
        "['long name']  float32          3      3                   1",
        "2 of 3 leaves differ",
    ]
    assert str(compare(a, a)) == "all 3 leaves are bitwise equal"
