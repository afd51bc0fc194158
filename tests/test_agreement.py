"""What `agree` compares, and what it refuses before anything is exchanged; several ranks are in tests/megatron."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from mcore_snap import NotReady, NotResident, StructureMismatch, agree, fingerprint, snapshot
from mcore_snap.layouts import Layout, Placement
from mcore_snap.nodes import ChunkTree, ModelTree


@pytest.fixture
def group() -> Iterator[distributed.ProcessGroup]:
    """Be the only rank of a process group."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def chunk(**leaves: float) -> ModelTree:
    """Make a tree with one leaf of each kind, all zeros but those that are given."""
    flat, expert, weight, inner, bias, state = (
        torch.full((2,), leaves.get(name, 0.0)) for name in ("flat", "expert", "weight", "inner", "bias", "state")
    )
    places = (
        Placement("weight", None, "parameters", "weight", None),
        Placement("experts.0.w._data", None, "parameters", "experts.0.w._data", None, expert=True),
    )
    named = {"weight": weight, "experts.0.w._data": inner}
    return ModelTree((ChunkTree((flat,), (expert,), named, {"bias": bias}, {"state": state}, Layout(places)),))


def test_of_a_plain_tree_every_leaf_counts(group: distributed.ProcessGroup) -> None:
    """The digest is then the fingerprint, of a snapshot as of what it was taken from."""
    tree = {"w": torch.ones(2), "b": [torch.zeros(1)]}
    assert agree(tree, group) == agree(snapshot(tree), None) == fingerprint(tree)


@pytest.mark.parametrize(
    ("leaf", "counts", "counts_beside_experts"),
    [
        ("flat", True, True),
        ("weight", True, True),
        ("expert", True, False),
        ("inner", True, False),
        ("bias", False, False),
        ("state", False, False),
    ],
)
def test_which_leaves_of_a_model_count(
    group: distributed.ProcessGroup, leaf: str, counts: bool, counts_beside_experts: bool
) -> None:
    """Weights do, each rank's own state does not, experts only where no group of their own is given."""
    assert (agree(chunk(), group) != agree(chunk(**{leaf: 1.0}), group)) is counts
    digests = [agree(tree, group, expert_group=group) for tree in (chunk(), chunk(**{leaf: 1.0}))]
    assert (digests[0] != digests[1]) is counts_beside_experts


def test_a_chunk_inside_any_tree(group: distributed.ProcessGroup) -> None:
    """Trees of models are compared as models, and what stands beside them as it is."""
    assert agree({"m": chunk(bias=1.0), "x": torch.ones(1)}, group) == agree({"m": chunk(), "x": torch.ones(1)}, group)
    assert agree({"m": chunk(), "x": torch.ones(1)}, group) != agree({"m": chunk(), "x": torch.zeros(1)}, group)


class Key(str):
    """Be a key that reads like every other of its kind."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'k'"


def test_leaves_of_one_name_are_all_compared(group: distributed.ProcessGroup) -> None:
    """Paths tell leaves apart that names do not."""
    trees = [{Key("a"): torch.tensor(a), Key("b"): torch.tensor(b)} for a, b in ((0, 0), (1, 0), (0, 1))]
    assert len({agree(tree, group) for tree in trees}) == len(trees)


def test_what_no_rank_can_read_is_no_disagreement(group: distributed.ProcessGroup) -> None:
    """All of them raise what reading raised."""
    with pytest.raises(NotResident, match="meta tensor"):
        agree({"w": torch.ones(1, device="meta")}, group)
    with pytest.raises(StructureMismatch, match="expected a tensor, found int"):
        agree({"w": 3}, group, expert_group=group)


def test_slices_are_refused(group: distributed.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is exchanged: the other ranks refuse as well."""
    monkeypatch.setattr(distributed, "all_gather_object", None)
    (whole,) = chunk().chunks
    cut = ChunkTree(*whole.entries(), layout=Layout(whole.layout.placements, ((0, 2), (0, 2))))
    with pytest.raises(StructureMismatch, match="without dp_sharded") as caught:
        agree(ModelTree((whole, cut)), group)
    assert [line.split(":")[0] for line in caught.value.problems] == ["chunk 1"]


def test_no_process_group_is_said() -> None:
    """One process has nobody to agree with."""
    with pytest.raises(NotReady, match="init_process_group"):
        agree({"w": torch.ones(1)}, None)


@pytest.mark.parametrize("which", ["group", "expert_group"])
def test_a_group_of_others_is_refused(group: distributed.ProcessGroup, which: str) -> None:
    """Megatron-Core hands out groups by rank; another rank's is a mistake."""
    stranger = distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(StructureMismatch, match="belongs to"):
        agree({"w": torch.ones(1)}, **{"group": group, which: stranger})
