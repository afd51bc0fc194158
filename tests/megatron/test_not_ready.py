"""Weights in flight that cannot be gathered from here: refused, and nothing is destroyed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from configurations import differing, everything, places
from matrix_protocol import keep, loads

from mcore_snap import NotReady, load, model_tree, snapshot, swapped
from mcore_snap.testing.forward import causal
from mcore_snap.testing.gpt import batch, gpt, logits, train_step
from mcore_snap.testing.mxfp8 import has_mxfp8_reuse, mxfp8_gpt, mxfp8_optimizer, publish, simulated_mxfp8
from mcore_snap.testing.ranks import run_ranks


def enter(tree: Any, kept: Any) -> None:
    """Enter a look-back, which has to be refused."""
    with swapped(tree, kept):
        raise AssertionError("the body was entered")


def mxfp8_undispatched(rank: int) -> str | None:
    """Use the tree when weights are due from a buffer that holds gradients, and once they are published."""
    if not has_mxfp8_reuse():
        return None
    with simulated_mxfp8():
        chunks = mxfp8_gpt(overlap=True)
        adam = mxfp8_optimizer(chunks)
        train_step(chunks, adam, batch(0, rank))
        publish(chunks, adam)
        tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
        version = keep(chunks, tree, look)
        train_step(chunks, adam, batch(1, rank))
        before, where = everything(chunks, adam), places(chunks)
        told = []
        for use in (snapshot, partial(load, snap=version.kept), partial(enter, kept=version.kept)):
            with pytest.raises(NotReady) as caught:
                use(tree)
            told.append(str(caught.value))
        assert differing(everything(chunks, adam), before) == []
        assert places(chunks) == where
        publish(chunks, adam)
        loads(chunks, adam, tree, version)
        assert torch.equal(look(), version.seen)
        train_step(chunks, adam, batch(2, rank))
        assert len(set(told)) == 1
        return told[0]


@pytest.mark.parametrize("world", [1, 2])
def test_mxfp8_weights_that_were_not_published_are_refused(world: int) -> None:
    """The message names the groups and what to call; after that, everything works."""
    for told in run_ranks(mxfp8_undispatched, world):
        if told is not None:  # 0.12 has no such mode
            assert "chunks[0].bucket_groups[0]" in told
            assert "prepare_model_params_for_param_sync" in told
            assert "_copy_main_params_to_param_buffer" in told


def layer_wise(rank: int) -> tuple[bool, str]:
    """Use a tree whose next gather would receive into the gradients."""
    chunks: Any = gpt(overlap=True, distributed_optimizer=False)
    tokens = batch(0, rank)
    for group in chunks[0].bucket_groups:
        group.param_gather_dispatched = True
    chunks[0](tokens, *causal(tokens)).float().mean().backward()
    tree = model_tree(chunks)
    kept = snapshot(tree)
    chunks[0].finish_grad_sync()  # else the reduction may still be writing to the gradients
    for group in chunks[0].bucket_groups:
        group.param_gather_dispatched = False
    before = everything(chunks)
    told = ""
    try:
        load(tree, kept)
    except NotReady as error:
        told = str(error)
    assert differing(everything(chunks), before) == []
    return bool(chunks[0].use_forward_hook), told


def test_gathers_of_a_layer_wise_optimizer_are_not_started() -> None:
    """They clear the gradients. Only newer releases gather without the distributed optimizer at all."""
    for gathers, told in run_ranks(layer_wise, 2):
        assert gathers == ("chunks[0].bucket_groups[0]" in told and "run a forward pass first" in told)
