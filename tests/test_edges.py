"""Where a user strays from the path: what is asked in part, in the wrong mode, or of what is gone."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import nn

from mcore_snap import (
    StructureMismatch,
    as_numpy,
    bitwise_equal,
    fence,
    fingerprint,
    load,
    model_tree,
    named_leaves,
    named_parameters,
    snapshot,
    snapshot_async,
    thaw,
    verify,
)
from mcore_snap.layouts import Layout
from mcore_snap.nodes import ChunkTree, ModelTree
from mcore_snap.testing.chunks import AnyState, DDPLike, ExtraState, GatherGroup, Layer
from mcore_snap.testing.raw_bytes import flip

DOCS = Path(__file__).parents[1] / "docs"


def with_optimizer(module: nn.Module, rank: int = 0, size: int = 2) -> DDPLike:
    """Wrap a module as the distributed optimizer finds it: one bucket per flat buffer, and a group that gathers it."""
    ddp = DDPLike(module, gap=4)
    for flats, groups in (
        (ddp.buffers, ddp.bucket_groups),
        (ddp.expert_parallel_buffers, ddp.expert_parallel_bucket_groups),
    ):
        for flat in flats:  # type: ignore[union-attr]  # a list, as Megatron-Core has it
            flat.ddp_config = SimpleNamespace(use_distributed_optimizer=True)
            flat.buckets = [SimpleNamespace(param_data=flat.param_data)]
            group: Any = GatherGroup()
            group.buckets = flat.buckets
            group.intra_distributed_optimizer_instance_rank = rank
            group.intra_distributed_optimizer_instance_size = size
            groups.append(group)
    return ddp


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_slices_have_no_parameters(kept: bool, part: bool) -> None:
    """A dp_sharded tree cannot give every parameter, so it gives none: functional_call would use current weights."""
    model = with_optimizer(Layer())
    tree = model_tree(model, dp_sharded=True)
    tree = snapshot(tree) if kept else tree
    where = "" if part else "chunks[0]."
    with pytest.raises(StructureMismatch, match="without dp_sharded") as caught:
        named_parameters(tree.chunks[0] if part else tree)
    what = "expected a whole flat buffer, found slice 0 of 2; take model_tree(models) without dp_sharded"
    assert caught.value.problems == (f"{where}buffers[0]: {what}", f"{where}expert_parallel_buffers[0]: {what}")
    assert set(named_parameters(model_tree(model).chunks[0])) == {name for name, _ in model.named_parameters()}


def test_every_sliced_chunk_is_named() -> None:
    """One error, with the chunks by their index."""
    models = [with_optimizer(nn.Linear(2, 2), rank=1), with_optimizer(nn.Linear(2, 2), rank=1)]
    with pytest.raises(StructureMismatch) as caught:
        named_parameters(snapshot(model_tree(models, dp_sharded=True)))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "chunks[0].buffers[0]",
        "chunks[1].buffers[0]",
    ]
    assert "slice 1 of 2" in caught.value.problems[0]


def test_a_frozen_chunk_has_no_slices() -> None:
    """Where no flat buffer is, nothing is sliced, and all parameters are there."""
    model = with_optimizer(nn.Linear(2, 1).requires_grad_(requires_grad=False))
    assert list(named_parameters(model_tree(model, dp_sharded=True).chunks[0])) == ["module.weight", "module.bias"]


def test_buffers_that_tell_no_parameters() -> None:
    """Megatron-FSDP's weight buffers come without names: nothing is not an answer."""
    chunk = ChunkTree((torch.ones(4),), layout=Layout())
    with pytest.raises(StructureMismatch, match=r"chunks\[0\]\.buffers\[0\].*Megatron-FSDP"):
        named_parameters(ModelTree((chunk,)))
    assert named_parameters(ChunkTree()) == {}


class Router(nn.Module):
    """Computes with a buffer, as a router with an expert bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 4)
        self.expert_bias: torch.Tensor
        self.register_buffer("expert_bias", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Bias the scores."""
        return self.gate(x) + self.expert_bias


@pytest.mark.parametrize("wrap", [lambda net: net, DDPLike])
def test_the_documented_functional_call(wrap: Any) -> None:
    """The row in docs/index.md, as it stands there, computes with version 1 alone."""
    row = next(line for line in (DOCS / "index.md").read_text().splitlines() if "functional_call(" in line)
    setting, call = re.findall(r"`([^`]+)`", row)[:2]
    model, args = wrap(Router()), (torch.randn(2, 3),)
    expected = model(*args)
    v1 = snapshot(model_tree(model))
    flip([*model.parameters(), *(buffer for _, buffer in model.named_buffers())])
    names = {"torch": torch, "named_parameters": named_parameters, "model": model, "args": args, "v1": v1}
    exec(f"{setting}\nresult = {call}", names)
    assert torch.equal(names["result"], expected)


def test_repr_of_a_tree_whose_model_is_gone() -> None:
    """Debuggers and pytest ask for it at any moment, so it never raises."""
    tree = model_tree(nn.Linear(2, 1))
    assert repr(tree) == "ModelTree(live, model freed)"


def test_repr_of_a_model_that_cannot_be_read() -> None:
    """Memory shared in part, extra state that fails, a kind of tensor without a size: a few words each."""
    model, memory = nn.Module(), torch.ones(8)
    model.a, model.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    tree = model_tree(model)
    model.a.data, model.b.data = memory[:5], memory[3:]
    assert repr(tree) == (
        "ModelTree(live, cannot be read: some tensors share memory in part, so no leaf can hold them)"
    )
    stateful = AnyState()
    tree = model_tree(stateful)
    stateful.get_extra_state = lambda: 1 // 0  # type: ignore[method-assign]
    assert repr(tree).startswith("ModelTree(live, cannot be read: ")
    sparse = nn.Module()
    sparse.register_buffer("eye", torch.eye(2).to_sparse())
    assert repr(model_tree(sparse)) == "ModelTree(live, cannot be read: RuntimeError)"


def test_repr_counts_what_is_there() -> None:
    """None is no leaf, in optree as here."""
    model = nn.Linear(2, 1)
    gone = optree.tree_map(lambda leaf: None if leaf.dim() == 1 else leaf, snapshot(model_tree(model)))
    assert repr(gone) == "ModelTree(computed, 1 chunk(s), 1 leaves, 8 bytes, float32)"


@pytest.mark.parametrize("use", [load, bitwise_equal, lambda _, snap: as_numpy(snap), lambda _, snap: verify(snap)])
@pytest.mark.parametrize("made", [lambda _: None, lambda leaf: (leaf, leaf), lambda leaf: [None, {"x": leaf}]])
def test_what_a_map_left_in_place_of_leaves(use: Any, made: Any) -> None:
    """None is no leaf to optree, and a container is several: never an error about lists of two lengths."""
    model = nn.Sequential(nn.Linear(2, 1), ExtraState())
    tree = model_tree(model)
    for whole in (tree, {"model": tree, "more": [tree.chunks[0].parameters, torch.ones(1)]}):
        snap = optree.tree_map(made, snapshot(whole))
        try:
            use(whole, snap)
        except ValueError as error:
            assert "argument" not in str(error)  # noqa: PT017 - some uses have an answer


def test_missing_leaves_are_named() -> None:
    """A map to None has none of the leaves, and load says which."""
    model = nn.Linear(2, 1)
    tree = model_tree(model)
    snap = snapshot(tree)
    with pytest.raises(StructureMismatch) as caught:
        load(tree, optree.tree_map(lambda _: None, snap))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "chunks[0].parameters['weight']",
        "chunks[0].parameters['bias']",
    ]
    with pytest.raises(StructureMismatch) as caught:
        load(tree, optree.tree_map(lambda leaf: leaf if leaf.dim() == 1 else None, snap))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["chunks[0].parameters['weight']"]


@pytest.mark.parametrize("take", [snapshot, thaw, lambda tree: snapshot_async(tree).result()])
def test_leaves_made_in_inference_mode_are_good_outside(take: Any) -> None:
    """Autograd may save what was kept while a rollout ran, also where the container holds the leaf itself."""
    model = nn.Linear(2, 1)
    whole = {"plain": torch.ones(2), "list": [torch.ones(1)], "model": model_tree(model)}
    with torch.inference_mode():
        kept = [take({"plain": torch.ones(2)}), take(whole)]
        assert torch.is_inference_mode_enabled()
    for leaf in optree.tree_leaves(kept):
        assert not leaf.is_inference()
        x = torch.ones_like(leaf, requires_grad=True)
        (x * leaf).sum().backward()
        assert torch.equal(x.grad, leaf)


@pytest.mark.parametrize("use", [snapshot, fingerprint, thaw, lambda tree: load(tree, tree), fence])
def test_a_model_in_place_of_its_tree(use: Any) -> None:
    """The error says how to make a tree of it, and of other values what it always said."""
    for tree, name in ((nn.Linear(2, 1), "the leaf"), ({"policy": nn.Linear(2, 1)}, "['policy']")):
        with pytest.raises(StructureMismatch) as caught:
            use(tree)
        problem = caught.value.problems[0].replace("in the tree to write to: ", "")
        assert problem == f"{name}: expected a tensor, found the module Linear; pass model_tree(model)"
    with pytest.raises(StructureMismatch, match="expected a tensor, found int; keep other values elsewhere"):
        snapshot({"step": 3})


def test_back_from_a_file_of_named_leaves() -> None:
    """As docs/index.md has it: names and tensors in a file, and a tree again; or the whole tree by torch.save."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    tree = model_tree(model)
    v = snapshot(tree)
    file, whole = io.BytesIO(), io.BytesIO()
    torch.save(named_leaves(thaw(v)), file)
    torch.save(v, whole)
    d = torch.load(io.BytesIO(file.getvalue()))
    back = optree.tree_unflatten(optree.tree_structure(v), [d[k] for k in named_leaves(v)])
    flip(list(model.parameters()))
    load(tree, back)
    assert bitwise_equal(tree, v)
    assert bitwise_equal(torch.load(io.BytesIO(whole.getvalue()), weights_only=False), v)


def test_what_is_found_under_which_name() -> None:
    """Of what torch.compile returns the names are others; a ModuleList is a sequence of chunks."""
    model = nn.Linear(2, 1)
    compiled: Any = torch.compile(model)
    assert list(model_tree(compiled).chunks[0].parameters) == ["_orig_mod.weight", "_orig_mod.bias"]
    model.compile()
    assert list(model_tree(model).chunks[0].parameters) == ["weight", "bias"]
    assert len(model_tree(nn.ModuleList([model, nn.Linear(1, 1)])).chunks) == 2
