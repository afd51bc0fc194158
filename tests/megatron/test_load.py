"""`load` brings a real model back, bit for bit, and moves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configurations import (
    CONFIGURATIONS,
    bits,
    differing,
    disturb_frozen,
    gradients,
    optimizer_state,
    places,
    tensors,
)

from mcore_snap import fingerprint, load, model_tree, named_leaves, snapshot, verify
from mcore_snap.testing.gpt import batch, gpt, log_probs, logits, optimizer, train_step
from mcore_snap.testing.ranks import run_ranks


def go_back(rank: int, name: str) -> None:
    """Train, keep the weights, train on, and load them."""
    chunks = gpt(**CONFIGURATIONS[name].options)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree = model_tree(chunks)
    kept = snapshot(tree)
    digest = fingerprint(kept)
    names = named_leaves(tree).keys()
    a, a_bits = logits(chunks, batch(9)), bits(tensors(chunks))

    train_step(chunks, adam, batch(1, rank))
    train_step(chunks, adam, batch(2, rank))
    disturb_frozen(chunks)
    assert not torch.equal(a, logits(chunks, batch(9))), "training did not change the logits: nothing is tested"
    b_bits, where = bits(tensors(chunks)), places(chunks)
    unmoved = bits(gradients(chunks))
    # Without DDP's own buffers, or in fp32, the optimizer may own the very parameters that are loaded.
    shared = {t.untyped_storage().data_ptr() for t in tensors(chunks).values()}
    mains = {n: t for n, t in optimizer_state(adam).items() if t.untyped_storage().data_ptr() not in shared}
    mains_bits = bits(mains)

    assert load(tree, kept) is tree
    assert differing(bits(tensors(chunks)), a_bits) == []
    assert places(chunks) == where, differing(places(chunks), where)
    assert differing(bits(gradients(chunks)), unmoved) == []
    assert differing(bits(mains), mains_bits) == []
    assert torch.equal(logits(chunks, batch(9)), a)

    verify(kept)
    assert fingerprint(kept) == digest == fingerprint(tree)
    assert named_leaves(tree).keys() == names
    assert differing(b_bits, a_bits), "nothing had changed: nothing is tested"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_come_back(name: str) -> None:
    """Weights and logits are those of the snapshot; addresses, gradients and main parameters stay."""
    configuration = CONFIGURATIONS[name]
    run_ranks(go_back, configuration.world, name, parallel=configuration.parallel)


def keep_before_the_first_forward(rank: int, own: bool) -> None:
    """Take the snapshot while the router's bias is still bf16, and load it when it has become fp32."""
    options: dict[str, Any] = {"moe": True, "ddp": not own}
    expected = log_probs(gpt(**options), batch(9))
    chunks = gpt(**options)
    tree = model_tree(chunks)
    kept = snapshot(tree)
    before = {n: b.dtype for n, b in chunks[0].named_buffers()}
    adam = optimizer(chunks)
    for step in range(3):
        train_step(chunks, adam, batch(step, rank))
    after = {n: b.dtype for n, b in chunks[0].named_buffers()}
    assert before != after, "Megatron-Core promoted no buffer: nothing is tested"
    assert not torch.equal(log_probs(chunks, batch(9)), expected)
    load(tree, kept)
    assert {n: b.dtype for n, b in chunks[0].named_buffers()} == after
    assert torch.equal(log_probs(chunks, batch(9)), expected)


@pytest.mark.parametrize("own", [False, True])
def test_a_router_bias_promoted_since_comes_back(own: bool) -> None:
    """Float16Module makes the bias bf16, the first forward makes it fp32 in other memory: law 5's one cast."""
    run_ranks(keep_before_the_first_forward, 1, own)


def keep_all_frozen(rank: int, ddp: bool) -> tuple[int, int]:
    """Load a model of which nothing is trained; how many leaves are in flat buffers, and outside."""
    del rank
    chunks = gpt(ddp=ddp, freeze=lambda _: True)
    tree = model_tree(chunks)
    kept, a = snapshot(tree), logits(chunks, batch(9))
    disturb_frozen(chunks)
    assert not torch.equal(logits(chunks, batch(9)), a)
    load(tree, kept)
    assert torch.equal(logits(chunks, batch(9)), a)
    return len(tree.chunks[0].buffers), len(tree.chunks[0].parameters)


@pytest.mark.parametrize("ddp", [False, True])
def test_a_model_without_trained_parameters_comes_back(ddp: bool) -> None:
    """A reference model has no flat buffers even under DDP; its weights are leaves of their own."""
    (counts,) = run_ranks(keep_all_frozen, 1, ddp)
    assert counts[0] == 0 < counts[1]


def load_before_backward(rank: int, name: str) -> None:
    """Load other weights between forward and backward, when the graph holds the current ones."""
    chunks = gpt(**CONFIGURATIONS[name].options)
    adam = optimizer(chunks)
    tree = model_tree(chunks)
    kept = snapshot(tree)
    train_step(chunks, adam, batch(0, rank))

    def rewind(moment: str) -> None:
        if moment == "forward":
            load(tree, kept)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_step(chunks, adam, batch(1, rank), pause=rewind)


@pytest.mark.parametrize("name", ["dense", "dense-own-storage", "dense-float16module", "moe", "moe-expert-buffers"])
def test_load_before_backward_fails_loudly(name: str) -> None:
    """Gradients of a mixture of two versions are never computed in silence, flat buffers or not."""
    run_ranks(load_before_backward, 1, name)


def router_state(rank: int) -> list[tuple[str, int, bool, bool]]:
    """Look at the routers' buffers at the snapshot, after training half a step, and after loading."""
    chunks = gpt(moe=True, expert_parallel=2)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    stopped: dict[str, torch.Tensor] = {}

    def keep(moment: str) -> None:
        if moment == "backward":
            stopped.update({n: b.clone() for n, b in chunks[0].named_buffers() if ".router." in n})
            kept.append(snapshot(tree))

    tree = model_tree(chunks)
    kept: list[object] = []
    train_step(chunks, adam, batch(1, rank), pause=keep)
    live = {n: b for n, b in chunks[0].named_buffers() if ".router." in n}
    changed = {n: not torch.equal(b, stopped[n]) for n, b in live.items()}
    load(tree, kept[0])
    return [(n, int(stopped[n].ne(0).sum()), changed[n], torch.equal(b, stopped[n])) for n, b in live.items()]


def test_router_biases_and_counters_come_back() -> None:
    """Counters count until the step is finalized, so a version taken before has them, too."""
    for observed in run_ranks(router_state, 2, parallel={"expert_model_parallel_size": 2}):
        assert {name.rpartition(".")[2] for name, *_ in observed} >= {"expert_bias", "local_tokens_per_expert"}
        for name, nonzero, changed, came_back in observed:
            assert (nonzero > 0, changed, came_back) == (True, True, True), name
