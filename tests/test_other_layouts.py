"""A model of the same sizes in which the parameters lie elsewhere is another model."""

import pytest
import torch
from torch import nn

from mcore_snap import StructureMismatch, bitwise_equal, compare, load, model_tree, snapshot, swapped
from mcore_snap.layouts import Placement
from mcore_snap.plans import pair_placements
from mcore_snap.testing.chunks import DDPLike
from mcore_snap.testing.model_state import model_bytes


class Two(nn.Module):
    """Two layers of any shape, whose flat buffer has the same size in either order."""

    def __init__(self, *shapes: tuple[str, int, int]) -> None:
        super().__init__()
        for name, inputs, outputs in shapes:
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))


OTHERS = {
    "another order": Two(("b", 8, 4), ("a", 4, 8)),
    "other shapes": Two(("a", 8, 4), ("b", 4, 8)),
    "other sizes": Two(("a", 4, 4), ("b", 8, 6)),
    "other names": Two(("a", 4, 8), ("c", 8, 4)),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_model_of_another_layout_is_refused(which):
    """Its flat buffer has the same name, dtype and size; the bytes would land in parameters that they are not of."""
    mine, other = DDPLike(Two(("a", 4, 8), ("b", 8, 4)), gap=0), DDPLike(OTHERS[which], gap=0)
    tree, theirs = model_tree(mine), snapshot(model_tree(other))
    assert theirs.chunks[0].buffers[0].shape == tree.chunks[0].buffers[0].shape
    before = model_bytes(mine)
    for refused in (load, compare, lambda *trees: swapped(*trees).__enter__()):
        with pytest.raises(
            StructureMismatch, match=r"chunks\[0\], parameter module\.[abc]\.weight: expected "
        ) as caught:
            refused(tree, theirs)
        assert all("use trees of one model" in line for line in caught.value.problems)
    assert not bitwise_equal(tree, theirs)
    assert model_bytes(mine) == before


def test_a_model_that_is_built_alike_is_not():
    """The policy of one process and that of another, or the reference beside it."""
    mine, other = (DDPLike(Two(("a", 4, 8), ("b", 8, 4))) for _ in range(2))
    load(model_tree(mine), snapshot(model_tree(other)))
    assert bitwise_equal(model_tree(mine), model_tree(other))


def test_whether_a_parameter_is_an_expert_s_does_not_count():
    """It says who has replicas, not where it lies."""
    mine = Placement("w", None, "buffers", 0, None)
    assert pair_placements([[mine]], [[mine._replace(expert=True)]]) == []
    assert pair_placements([[mine], []], [[mine]]) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Placement("w", None, "parameters", "w", None), "all of parameters['w']"),
        (Placement("w", 1, "buffers", 0, None), "all of chunks[1].buffers[0]"),
        (Placement("w", None, "buffers", 0, (2, (3,), (1,))), "[3] from element 2 of buffers[0] on"),
        (Placement("w", None, "buffers", 0, (2, (3,), (2,))), "[3] from element 2 of buffers[0] on"),
    ],
)
def test_the_line_says_where_it_lies(found, said):
    """On both sides, by leaf."""
    mine = Placement("w", None, "buffers", 0, (0, (4, 2), (2, 1)))
    (line,) = pair_placements([[mine]], [[found]])
    assert line.startswith("chunks[0], parameter w: expected [4, 2] from element 0 of buffers[0] on, found " + said)


def test_the_first_argument_is_the_live_tree():
    """The other way round, nothing is written, and the error says which is which."""
    live, kept = {"a": torch.ones(2), "b": torch.ones(2)}, snapshot({"a": torch.zeros(2), "b": torch.zeros(2)})
    mixed = {"a": live["a"], "b": kept["b"]}
    for tree, snap, names in ((kept, live, ["['a']", "['b']"]), (mixed, kept, ["['b']"])):
        for refused in (load, lambda *trees: swapped(*trees).__enter__()):
            with pytest.raises(StructureMismatch, match="the live tree comes first") as caught:
                refused(tree, snap)
            assert [line.partition(":")[0] for line in caught.value.problems] == names
    assert live["a"].tolist() == [1, 1]


@pytest.mark.parametrize("wrong", [lambda model: model, lambda model: [model], lambda model: {"policy": model}])
def test_a_model_is_not_its_tree(wrong):
    """The likeliest slip of those who come from other libraries."""
    model = nn.Linear(2, 2)
    kept = snapshot(model_tree(model))
    for refused in (load, lambda *trees: swapped(*trees).__enter__()):
        with pytest.raises(StructureMismatch, match=r"found the module Linear; pass model_tree\(model\)"):
            refused(wrong(model), kept)
