"""Offloaded memory where other ranks' weights are still to come: refused by name, and right once it is back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from mcore_snap import NotReady, NotResident, load, model_tree, snapshot
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.offload import host_copies, offload, onload
from mcore_snap.testing.ranks import run_ranks

CONVENTIONS = ["verl", "megatron"]


def use_while_due(rank: int, convention: str) -> list[str]:
    """Offload right after the step, use the tree, and bring the weights back."""
    chunks = gpt(overlap=True)
    adam = optimizer(chunks)
    tree = model_tree(chunks)
    train_step(chunks, adam, batch(0, rank))
    kept = snapshot(tree)
    train_step(chunks, adam, batch(1, rank))
    offload(chunks, convention)
    copies = [copy.clone() for copy in host_copies(chunks, convention)]
    told = []
    for use in (snapshot, partial(load, snap=kept)):
        with pytest.raises(NotReady) as caught:
            use(tree)
        told.append(str(caught.value))
    assert all(torch.equal(*pair) for pair in zip(copies, host_copies(chunks, convention), strict=True))
    onload(chunks, convention)
    now = snapshot(tree)
    seen = logits(chunks, batch(9))
    train_step(chunks, adam, batch(2, rank))
    load(tree, now)
    assert torch.equal(logits(chunks, batch(9)), seen)
    return told


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_gather_for_offloaded_memory_is_not_started(convention: str) -> None:
    """The host copy has other ranks' old weights, and there is no memory to gather into."""
    for told in run_ranks(use_while_due, 2, convention):
        assert all("chunks[0].bucket_groups[0]" in message for message in told), told
        assert all("bring the weights back first" in message for message in told), told


def use_slices(rank: int, convention: str) -> list[str]:
    """Use a tree of slices whose buckets have no memory."""
    chunks = gpt()
    train_step(chunks, optimizer(chunks), batch(0, rank))
    tree: Any = model_tree(chunks, dp_sharded=True)
    kept = snapshot(tree)
    seen = logits(chunks, batch(9))
    offload(chunks, convention)
    told = []
    for use in (snapshot, partial(load, snap=kept)):
        with pytest.raises(NotResident) as caught:
            use(tree)
        told.append(str(caught.value))
    onload(chunks, convention)
    load(tree, kept)
    assert torch.equal(logits(chunks, batch(9)), seen)
    return told


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_slices_of_offloaded_buffers_are_refused(convention: str) -> None:
    """A load would have nothing to gather the other ranks' slices into."""
    for told in run_ranks(use_slices, 2, convention):
        assert all("chunks[0].buffers[0]" in message for message in told), told
