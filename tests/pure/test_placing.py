"""Which tensors of a model are leaves, and where every parameter lies among them: against the regions themselves."""

import math

from hypothesis import given
from hypothesis import strategies as st
from test_coverage import bytes_of
from test_coverage import regions as any_regions

from mcore_snap.coverage import Region, cover
from mcore_snap.errors import StructureMismatch
from mcore_snap.layouts import Placement
from mcore_snap.megatron.placing import Spot, place

FLAT = ("buffers", "expert_parallel_buffers")
SHAPES = st.sampled_from(
    [((), ()), ((1,), (1,)), ((3,), (1,)), ((2, 2), (2, 1)), ((2, 3), (1, 2)), ((2, 2), (1, 2)), ((0,), (1,))]
)


@st.composite
def flat_buffers(draw, chunks):
    """Flat buffers of some chunks, a few of them kept in slices, with where each lies."""
    found = []
    for chunk in range(chunks):
        for field in draw(st.sampled_from([FLAT[:1], FLAT, ()])):
            spot = Spot(chunk, field, draw(st.integers(0, 3)), sliced=draw(st.integers(0, 3)) == 0)
            start = 2 * draw(st.integers(0, 3))
            found.append((spot, Region("flat", len(found), start, "int16", 2, (12,), (1,), whole=True)))
    return found


@st.composite
def lying(draw, others, memory):
    """Where a tensor lies: inside another one, in the same place, in memory of its own, or in none to compare."""
    shape, stride = draw(SHAPES)
    size = math.prod(shape)
    kind = draw(st.sampled_from(["inside", "inside", "inside", "same", "own", "own", "none"]))
    homes = [one for one in others if one.dense and one.itemsize == 2 and math.prod(one.shape) >= size]
    if kind == "none":
        return None
    if kind == "same" and others:
        return draw(st.sampled_from(others))._replace(whole=False)
    if kind == "inside" and homes:
        home = draw(st.sampled_from(homes))
        start = home.start + 2 * draw(st.integers(0, math.prod(home.shape) - size))
        return Region("part", home.storage, start, "int16", 2, shape, stride)
    itemsize = draw(st.sampled_from([1, 2]))
    wide = tuple(draw(st.integers(1, 2)) * step for step in stride)
    return Region("own", memory, itemsize * draw(st.integers(0, 3)), f"int{8 * itemsize}", itemsize, shape, wide)


@st.composite
def models(draw):
    """Chunks with flat buffers, and parameters and registered buffers in them and beside them, in any order."""
    chunks = draw(st.integers(1, 3))
    found = draw(flat_buffers(chunks))
    for number in range(draw(st.integers(0, 6))):
        region = draw(lying([region for _, region in found if region is not None], 100 + number))
        field = draw(st.sampled_from(["parameters", "parameters", "parameters", "module_buffers"]))
        found.append((Spot(draw(st.integers(0, chunks - 1)), field, f"p{number}", draw(st.booleans())), region))
    found = draw(st.permutations(found))
    return [spot for spot, _ in found], [region for _, region in found], chunks


@st.composite
def anywhere(draw):
    """Regions of any kind, or none, each found as something."""
    found = [draw(st.sampled_from([one, one, one, None])) for one in draw(any_regions())]
    fields = st.sampled_from(["parameters", "module_buffers", *FLAT])
    spots = [Spot(draw(st.integers(0, 1)), draw(fields), number) for number in range(len(found))]
    return spots, found, 2


def attempted(decide):
    """What is decided, or the problems that were found."""
    try:
        return decide(), ()
    except StructureMismatch as error:
        return None, error.problems


@given(anywhere() | models())
def test_leaves_are_those_that_cover_all(model):
    """Of those that have memory; each of the others is one by itself, to be refused by name; errors are the same."""
    spots, regions, chunks = model
    sound = [index for index, region in enumerate(regions) if region is not None]
    owners, problems = attempted(lambda: cover([regions[index] for index in sound]))
    placing, found = attempted(lambda: place(spots, regions, chunks))
    assert found == problems
    if owners is not None:
        holders = {index: owner if owner is None else sound[owner] for index, owner in zip(sound, owners, strict=True)}
        assert placing.holders == tuple(holders.get(index) for index in range(len(spots)))


def holder(placing, index):
    """Which tensor is the leaf that holds this one."""
    return index if placing.holders[index] is None else placing.holders[index]


@given(models())
def test_every_parameter_is_placed_once_in_its_chunk(model):
    """In the order in which they were found, unless only slices are kept of what holds it; nothing else is placed."""
    spots, _, chunks = model
    placing = place(*model)
    assert len(placing.placements) == chunks
    for chunk, found in enumerate(placing.placements):
        assert [(one.name, one.expert) for one in found] == [
            (spot.key, spot.expert)
            for index, spot in enumerate(spots)
            if spot.chunk == chunk and spot.field == "parameters" and not spots[holder(placing, index)].sliced
        ]


@given(models())
def test_a_placement_leads_to_the_parameter(model):
    """By chunk, field and key to its leaf, and there by offset, shape and strides to its elements, in their order."""
    spots, regions, _ = model
    placing = place(*model)
    leaves = [index for index, owner in enumerate(placing.holders) if owner is None]
    for chunk, found in enumerate(placing.placements):
        for one in found:
            assert one.chunk != chunk
            where = (chunk if one.chunk is None else one.chunk, one.field, one.key)
            (index,) = [i for i, spot in enumerate(spots) if (spot.chunk, spot.key) == (chunk, one.name)]
            assert holder(placing, index) in [leaf for leaf in leaves if spots[leaf][:3] == where]
            leaf, parameter = regions[holder(placing, index)], regions[index]
            if parameter is None:
                assert (leaf, one.view) == (None, None)
                continue
            offset, shape, stride = one.view or (0, leaf.shape, leaf.stride)
            reached = leaf._replace(start=leaf.start + offset * leaf.itemsize, shape=shape, stride=stride)
            assert reached.same_elements(parameter)
            assert bytes_of(reached) == bytes_of(parameter) <= bytes_of(leaf)
            assert (one.view is None) == ((leaf.shape, leaf.stride) == (parameter.shape, parameter.stride))


def test_another_chunk_is_named():
    """Tied weights of the first and the last stage; and the first one's leaf is its own."""
    spots = [Spot(0, "parameters", "embedding"), Spot(1, "parameters", "head", expert=True)]
    region = Region("embedding", 0, 0, "int16", 2, (4, 2), (2, 1))
    placing = place(spots, [region, region._replace(name="head", start=0)], 2)
    assert placing.holders == (None, 0)
    assert placing.placements == (
        (Placement("embedding", None, "parameters", "embedding", None),),
        (Placement("head", 0, "parameters", "embedding", None, expert=True),),
    )


def test_a_transposed_tie_is_a_view():
    """Of the same shape, and other elements in each place."""
    spots = [Spot(0, "parameters", "one"), Spot(0, "parameters", "other")]
    one = Region("one", 0, 0, "int8", 1, (3, 3), (3, 1))
    found = place(spots, [one, one._replace(name="other", stride=(1, 3))], 1).placements[0]
    assert [placement.view for placement in found] == [None, (0, (3, 3), (1, 3))]


def test_of_what_is_kept_in_slices_nothing_is_placed():
    """A slice holds a part of a parameter at most; those beside it are where they were."""
    spots = [Spot(0, "buffers", 0, sliced=True), Spot(0, "parameters", "inside"), Spot(0, "parameters", "beside")]
    regions = [
        Region("flat", 0, 0, "int16", 2, (8,), (1,), whole=True),
        Region("inside", 0, 4, "int16", 2, (2,), (1,)),
        Region("beside", 1, 4, "int16", 2, (2,), (1,)),
    ]
    assert [one.name for one in place(spots, regions, 1).placements[0]] == ["beside"]
    whole = place([spots[0]._replace(sliced=False), *spots[1:]], regions, 1).placements[0]
    assert whole == (
        Placement("inside", None, "buffers", 0, (2, (2,), (1,))),
        Placement("beside", None, "parameters", "beside", None),
    )


def test_what_has_no_memory_to_compare_counts_all_the_same():
    """A stranger listed first moves nobody's leaf, and stays where it is, as a leaf of its own."""
    spots = [Spot(0, "parameters", "odd"), Spot(0, "buffers", 0), Spot(0, "parameters", "inside")]
    flat = Region("flat", 0, 0, "int8", 1, (8,), (1,), whole=True)
    placing = place(spots, [None, flat, Region("inside", 0, 3, "int8", 1, (2,), (1,))], 1)
    assert placing.holders == (None, None, 1)
    assert placing.placements[0] == (
        Placement("odd", None, "parameters", "odd", None),
        Placement("inside", None, "buffers", 0, (3, (2,), (1,))),
    )


def test_names_in_errors():
    """As they stand in the tree."""
    spots = [Spot(1, "buffers", 0), Spot(1, "parameters", "w")]
    assert [str(spot) for spot in spots] == ["chunks[1].buffers[0]", "chunks[1].parameters['w']"]
