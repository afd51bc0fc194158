"""Whether a snapshot fits: by paths, dtypes and shapes."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap.errors import Corrupt, FrozenError, NotReady, NotResident, SnapError, StructureMismatch
from mcore_snap.plans import Expected, check_fit, pair_paths, pair_slices
from mcore_snap.specs import LeafSpec

specs = st.builds(
    LeafSpec,
    st.sampled_from(["float32", "bfloat16", "float16", "int32"]),
    st.lists(st.integers(0, 2), max_size=2).map(tuple),
)
trees = st.dictionaries(st.tuples(st.sampled_from("abc")), st.sampled_from("xyz"), max_size=3)


@given(specs, specs)
def test_only_the_same_dtype_and_shape_fit(expected, found):
    """No broadcast, no cast."""
    problem = check_fit(Expected("w", expected), found)
    assert (problem is None) == (expected == found)
    if problem is not None:
        assert problem == f"w: expected {expected}, found {found} in the snapshot; nothing is cast or broadcast"


@given(specs, specs)
def test_only_bf16_widens_and_only_where_megatron_promotes(expected, found):
    """The one cast is bf16 to fp32, of the same shape."""
    fits = check_fit(Expected("bias", expected, widens=True), found) is None
    assert fits == (
        expected.shape == found.shape
        and (expected.dtype == found.dtype or (found.dtype, expected.dtype) == ("bfloat16", "float32"))
    )


@given(specs, specs)
def test_extra_state_may_change_its_length(expected, found):
    """What is handed over whole has no fixed size, but its dtype is still bytes."""
    assert (check_fit(Expected("extra", expected, sized=False), found) is None) == (expected.dtype == found.dtype)


@given(trees, trees)
def test_every_missing_and_every_extra_leaf_is_named(live, kept):
    """One line each, missing ones first."""
    missing = [name for path, name in live.items() if path not in kept]
    extra = [name for path, name in kept.items() if path not in live]
    lines = pair_paths(live, kept)
    assert lines == [
        *(
            f"{name}: expected in the snapshot, found nothing there; take the snapshot from this very model"
            for name in missing
        ),
        *(
            f"{name}: expected in the model, found nothing there; load it into the model that it was taken from"
            for name in extra
        ),
    ]


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (StructureMismatch, ValueError),
        (FrozenError, RuntimeError),
        (NotResident, RuntimeError),
        (NotReady, RuntimeError),
        (Corrupt, ValueError),
    ],
)
def test_errors_are_caught_as_builtins_and_cross_processes(error, builtin):
    """Each derives from what a caller would catch, prints its problems, and pickles whole."""
    made = error("cannot load", ["a: wrong", "b: wrong"])
    assert isinstance(made, builtin)
    assert isinstance(made, SnapError)
    assert str(made) == "cannot load\n  - a: wrong\n  - b: wrong"
    back = pickle.loads(pickle.dumps(made))
    assert (type(back), str(back), back.problems) == (error, str(made), ("a: wrong", "b: wrong"))
    assert str(error("alone")) == "alone"


@pytest.mark.parametrize(
    ("live", "kept", "said"),
    [
        ([None], [None], []),
        ([((1, 4), (0, 2))], [((1, 4), (0, 2))], []),
        ([((1, 4),)], [((2, 4),)], ["expected slices of rank 1 of 4, found slices of rank 2 of 4"]),
        ([((0, 2),)], [((0, 4),)], ["expected slices of rank 0 of 2, found slices of rank 0 of 4"]),
        ([((0, 2),)], [None], ["expected slices of rank 0 of 2, found whole flat buffers"]),
        ([None], [((0, 2),)], ["expected whole flat buffers, found slices of rank 0 of 2"]),
        ([None, ((0, 2), (0, 1))], [None, ((1, 2), (0, 1))], ["found slices of rank 1 of 2, rank 0 of 1"]),
        ([None, None], [None], []),
    ],
)
def test_slices_go_back_to_the_rank_that_they_are_of(live, kept, said) -> None:
    """Slices of all ranks have the same shape, so only this tells them apart."""
    found = pair_slices(live, kept)
    assert len(found) == len(said)
    for line, part in zip(found, said, strict=True):
        assert part in line
        assert line.startswith(f"chunks[{len(live) - 1}]: ")


def test_a_message_shows_fifty_problems_and_the_error_has_them_all():
    """Also after it crossed a process."""
    lines = [f"leaf {number}" for number in range(60)]
    error = pickle.loads(pickle.dumps(StructureMismatch("no", lines)))
    assert error.problems == tuple(lines)
    further = "  and 10 more, all in the error's `problems`"
    assert str(error).splitlines() == ["no", *(f"  - {line}" for line in lines[:50]), further]
    assert "more" not in str(StructureMismatch("no", lines[:50]))
