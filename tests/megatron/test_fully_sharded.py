"""FSDP2: this rank's shards are the leaves, before and after a forward pass, and a load lands in them."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from configurations import bits, differing
from half_a_step import load_before_backward

from mcore_snap import compare, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.errors import NotReady, StructureMismatch
from mcore_snap.testing.fully_sharded import cpu_fully_sharded, fsdp2_gpt, train_step
from mcore_snap.testing.gpt import batch, gpt, logits
from mcore_snap.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

_MODELS: Final[dict[str, dict[str, Any]]] = {
    "dense": {},
    "dense-fp32": {"bf16": False},
    "dense-left-unsharded": {"reshard_after_forward": False},
    "moe": {"moe": True},
    "moe-left-unsharded": {"moe": True, "reshard_after_forward": False},
    "partly-frozen": {"freeze": lambda name: "self_attention" in name},
}
_MOMENTS: Final = ("forward", "backward", "finalize", "update")


def shards(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return this rank's shards and the registered buffers, found as FSDP2's own users find them."""
    fsdp = sys.modules["torch.distributed.fsdp"].FSDPModule
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, fsdp):
                module.reshard()
    parameters: Any = [(name, p) for chunk in chunks for name, p in chunk.named_parameters()]
    found = {name: p.to_local().detach() for name, p in parameters}
    return found | {name: b for chunk in chunks for name, b in chunk.named_buffers()}


def shift_biases(chunks: Sequence[nn.Module]) -> None:
    """Change the routers' biases, which no gradient changes."""
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.tensor([0.9, -0.9, 0.6, -0.6]))


def go_back(rank: int, name: str) -> tuple[int, int, int]:
    """Train, keep the shards, train on, load; bytes of the shards, of the whole model, and of the leaves."""
    with cpu_fully_sharded():
        chunks = fsdp2_gpt(**_MODELS[name])
        train_step(chunks, batch(0, rank))
        tree = model_tree(chunks)
        a = logits(chunks, batch(9))
        kept = snapshot(tree)
        a_bits = bits(shards(chunks))

        train_step(chunks, batch(1, rank))
        shift_biases(chunks)
        assert not torch.equal(logits(chunks, batch(9)), a), "nothing changed: nothing is tested"
        assert load(tree, kept) is tree
        assert differing(bits(shards(chunks)), a_bits) == []
        assert torch.equal(logits(chunks, batch(9)), a)

        shards(chunks)
        parameters: list[Any] = list(chunks[0].parameters())
        return (
            sum(p.to_local().nbytes for p in parameters),
            sum(p.numel() * p.itemsize for p in parameters),
            sum(leaf.nbytes for leaf in kept.chunks[0].parameters.values()),
        )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["dense", "dense-left-unsharded", "moe"])
def test_logits_come_back(name: str, world: int) -> None:
    """Weights and logits are those of the snapshot, which has this rank's shards and no more."""
    found = run_ranks(go_back, world, name)
    assert [leaves for _, _, leaves in found] == [local for local, _, _ in found]
    assert sum(leaves for _, _, leaves in found) == found[0][1]


def structures(rank: int, name: str) -> tuple[int, bool]:
    """Compare snapshots before and after a forward; how many parameters were unsharded in between."""
    del rank
    with cpu_fully_sharded():
        chunks = fsdp2_gpt(**_MODELS[name])
        logits(chunks, batch(9))  # promotes the routers' biases
        tree = model_tree(chunks)
        before = snapshot(tree)
        placed = {n: t.data_ptr() for n, t in shards(chunks).items()}
        logits(chunks, batch(9))
        unsharded = [n for n, p in chunks[0].named_parameters() if not hasattr(p, "to_local")]
        after = snapshot(tree)
        assert {n: t.data_ptr() for n, t in shards(chunks).items()} == placed
        here = shards(chunks)
        assert {n: t.shape for n, t in after.chunks[0].parameters.items()} == {
            n: here[n].shape for n, _ in chunks[0].named_parameters()
        }
        assert list(named_leaves(before)) == list(named_leaves(after)) == list(named_leaves(tree))
        return len(unsharded), not compare(before, after)


@pytest.mark.parametrize("name", ["dense-left-unsharded", "moe-left-unsharded"])
def test_unsharded_parameters_are_sharded_again(name: str) -> None:
    """After a forward pass that leaves whole parameters behind, the leaves are the same shards."""
    for unsharded, equal in run_ranks(structures, 2, name):
        assert unsharded > 0, "the forward pass left nothing unsharded: nothing is tested"
        assert equal


def train(rank: int, moment: str | None, options: dict[str, Any]) -> tuple[list[float], dict[str, object]]:
    """Train three steps, with a look-back to the first version at that moment of each of them."""
    with cpu_fully_sharded():
        chunks = fsdp2_gpt(**options)
        tree = model_tree(chunks)
        train_step(chunks, batch(0, rank))
        kept, expected = snapshot(tree), logits(chunks, batch(9))
        if moment is not None:
            train_step(chunks, batch(1, rank))
            load(tree, kept)

        def look_back(now: str) -> None:
            if now == moment:
                with swapped(tree, kept, check=True):
                    assert torch.equal(logits(chunks, batch(9)), expected)

        losses = [train_step(chunks, batch(step, rank), pause=look_back) for step in (2, 3, 4)]
        return losses, dict(bits(shards(chunks)))


def look_back_and_train(rank: int, name: str) -> list[str]:
    """Return the moments at which a look-back changed the training that followed."""
    options = _MODELS[name]
    losses, state = train(rank, None, options)
    found = [(moment, *train(rank, moment, options)) for moment in _MOMENTS]
    return [moment for moment, others, other in found if others != losses or differing(other, state)]


@pytest.mark.parametrize("name", ["dense", "dense-left-unsharded", "moe"])
def test_training_goes_on_as_without_the_look_back(name: str) -> None:
    """Bit by bit, wherever in a step the look-back came, between forward and backward too."""
    assert run_ranks(look_back_and_train, 2, name) == [[], []]


@pytest.mark.parametrize("name", ["dense", "dense-left-unsharded"])
def test_load_before_backward_fails_loudly(name: str) -> None:
    """The graph holds the parameters that were gathered, and these count the load as well."""
    run_ranks(load_before_backward, 2, partial(fsdp2_gpt, **_MODELS[name]))


def load_whole(rank: int) -> list[str]:
    """Load the snapshot of an unsharded model of the same names; what the refusal says."""
    del rank
    with cpu_fully_sharded():
        chunks = fsdp2_gpt()
        inner: Any = chunks[0].module
        tree, before = model_tree(inner), bits(shards(chunks))
        whole = gpt(ddp=False, seed=4)
        kept = snapshot(model_tree(whole))
        assert list(named_leaves(kept)) == list(named_leaves(tree))
        with pytest.raises(StructureMismatch) as caught:
            load(tree, kept)
        assert differing(bits(shards(chunks)), before) == []
        return list(caught.value.problems)


def test_whole_weights_are_refused_by_shards() -> None:
    """Every parameter is named with both shapes, and nothing is written."""
    for problems in run_ranks(load_whole, 2):
        names = [line.partition(":")[0] for line in problems]
        assert len(set(names)) == len(names) > 10
        assert "chunks[0].parameters['module.embedding.word_embeddings.weight']" in names
        (embedding,) = [line for line in problems if "word_embeddings" in line]
        assert "64, 32" in embedding
        assert "32, 32" in embedding


def use_in_flight(rank: int) -> list[str]:
    """Use a tree while an unshard was started that nobody waited for."""
    del rank
    with cpu_fully_sharded():
        chunks = fsdp2_gpt()
        tree = model_tree(chunks)
        kept, before = snapshot(tree), bits(shards(chunks))
        embedding: Any = chunks[0].get_submodule("module.module.embedding")
        handle = embedding.unshard(async_op=True)
        for use in (lambda: snapshot(tree), lambda: load(tree, kept), lambda: named_leaves(tree)):
            with pytest.raises(NotReady) as caught:
                use()
        handle.wait()
        load(tree, kept)
        assert differing(bits(shards(chunks)), before) == []
        return list(caught.value.problems)


@pytest.mark.parametrize("world", [1, 2])
def test_a_gather_under_way_is_not_ready(world: int) -> None:
    """The module is named, and what to call; after that the tree can be used."""
    for problems in run_ranks(use_in_flight, world):
        (problem,) = problems
        assert problem.startswith("module.module.embedding: ")
        assert "call wait() on the handle that unshard(async_op=True) returned" in problem


def use_in_forward(rank: int) -> list[str]:
    """Use a tree from within a forward pass, by a hook."""
    del rank
    with cpu_fully_sharded():
        chunks = fsdp2_gpt()
        tree = model_tree(chunks)
        caught: list[str] = []

        def read(*_: object) -> None:
            with pytest.raises(NotReady) as error:
                snapshot(tree)
            caught.extend(error.value.problems)

        chunks[0].get_submodule("module.module.decoder.final_layernorm").register_forward_hook(read)
        logits(chunks, batch(9))
        return caught


def test_a_forward_pass_under_way_is_not_ready() -> None:
    """What is unsharded now is in use."""
    for problems in run_ranks(use_in_forward, 2):
        assert problems[0].startswith("module: expected a module at rest, found it in its forward pass")


def test_fsdp_is_not_imported() -> None:
    """Models without FSDP2 do not pay for its import."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from mcore_snap import model_tree, snapshot\n"
        "model = torch.nn.Linear(2, 1); snapshot(model_tree(model))\n"
        "print([name for name in set(sys.modules) - before if name.startswith('torch.distributed.fsdp')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
