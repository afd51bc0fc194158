"""Which blocks of bytes one copy can take."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mcore_snap.runs import Block, runs

SIZES = st.integers(0, 4)
BLOCKS = st.builds(
    Block,
    st.sampled_from(["int8", "int16"]),
    st.tuples(st.sampled_from("ab"), st.sampled_from("xy")),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    SIZES,
)


@st.composite
def lying(draw):
    """Blocks as snapshots have them: many right behind one another, in any order, some apart."""
    found, start, other = [], 0, draw(st.integers(0, 3))
    for size in draw(st.lists(SIZES, max_size=8)):
        second = draw(st.sampled_from("xxxxxy"))
        found.append(Block("int8", ("a", second), (start, other), size))
        start += size + draw(st.sampled_from([0, 0, 0, 1]))
        other += size + draw(st.sampled_from([0, 0, 0, 1]))
    return draw(st.permutations([*found, *draw(st.lists(BLOCKS, max_size=2))]))


def follows(one, other):
    """Whether the second is the first one's neighbour, on every side."""
    return (one.kind, one.homes) == (other.kind, other.homes) and all(
        start + one.nbytes == after for start, after in zip(one.starts, other.starts, strict=True)
    )


def overlap(one, other):
    """Whether they share a byte of their first memory."""
    return one.homes[0] == other.homes[0] and (
        max(one.starts[0], other.starts[0]) < min(one.starts[0] + one.nbytes, other.starts[0] + other.nbytes)
    )


@given(lying())
def test_every_block_is_in_one_run_of_neighbours(blocks):
    """In the order in which they lie; and runs are in the order of their first ones as listed."""
    found = runs(blocks)
    assert sorted(index for run in found for index in run) == list(range(len(blocks)))
    for run in found:
        assert all(follows(blocks[one], blocks[other]) for one, other in itertools.pairwise(run))
    assert [min(run) for run in found] == sorted(min(run) for run in found)


@given(lying())
def test_runs_are_as_long_as_they_can_be(blocks):
    """Unless two blocks of the memory overlap: then each is alone."""
    ends = {run[-1] for run in runs(blocks)}
    starts = {run[0] for run in runs(blocks)}
    for home in {block.homes[0] for block in blocks}:
        members = [index for index, block in enumerate(blocks) if block.homes[0] == home]
        overlapping = any(overlap(blocks[one], blocks[other]) for one, other in itertools.combinations(members, 2))
        if overlapping:
            assert ends >= set(members)
        elif all(blocks[index].nbytes for index in members):
            for one, other in itertools.permutations(members, 2):
                assert not (one in ends and other in starts and follows(blocks[one], blocks[other]))


def test_all_of_a_flat_buffer_is_one_run():
    """In whatever order its parts are listed."""
    blocks = [Block("int8", (0,), (8 * place,), 8) for place in range(5)]
    assert runs(blocks[::-1]) == [[4, 3, 2, 1, 0]]
    assert runs(blocks[::2]) == [[0], [1], [2]]
