"""Cases of the matrix in which the weights are not where they seem: gathered late, offloaded, or quantized."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from configurations import bits, differing
from matrix_protocol import Version, comes_back, flags, keep, loads, remainder, weights

from mcore_snap import Corrupt, agree, load, model_tree, snapshot
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.mxfp8 import has_mxfp8_reuse, mxfp8_gpt, mxfp8_optimizer, publish, simulated_mxfp8
from mcore_snap.testing.offload import offload, onload


def overlapped(rank: int, *, snap: str, back: str) -> None:
    """Keep and load with overlapped gathers, each right after a step or after the forward pass that follows it."""
    chunks = gpt(overlap=True)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    train_step(chunks, adam, batch(1, rank))
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    if snap == "after forward":
        look()
    before = flags(chunks)
    assert all(before) == (snap == "after forward")
    kept = snapshot(tree)
    assert flags(chunks) == before
    seen = look()
    version = Version(kept, dict(bits(weights(chunks))), seen)
    train_step(chunks, adam, batch(2, rank))
    if back == "after forward":
        comes_back(chunks, adam, tree, version, look)
    else:
        loads(chunks, adam, tree, version)
        assert torch.equal(look(), version.seen)
    train_step(chunks, adam, batch(3, rank))


def gather_in_flight(rank: int) -> None:
    """Load while gathers are under way that would land on top of what is written."""
    chunks = gpt(overlap=True)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    version = keep(chunks, tree, look)
    train_step(chunks, adam, batch(1, rank))
    chunk: Any = chunks[0]
    chunk.start_param_sync()
    assert any(group.param_gather_handle is not None for group in chunk.bucket_groups)
    loads(chunks, adam, tree, version)
    assert all(group.param_gather_handle is None for group in chunk.bucket_groups)
    assert torch.equal(look(), version.seen)


def one_rank_loads(rank: int) -> None:
    """Load on rank 0 only: with nothing due, that is silent, and `agree` tells every rank by name."""
    chunks = gpt(overlap=True)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    version = keep(chunks, tree, look)
    train_step(chunks, adam, batch(1, rank))
    look()
    current = snapshot(tree)
    assert agree(version.kept, None) != agree(current, None)
    with pytest.raises(Corrupt):
        agree(version.kept if rank == 0 else current, None)
    if rank == 0:
        load(tree, version.kept)
    with pytest.raises(Corrupt) as caught:
        agree(tree, None)
    assert "chunks[0].buffers[0]" in str(caught.value)
    assert torch.equal(look(), version.seen) == (rank == 0)


def offloaded(rank: int, *, convention: str, at: str) -> None:
    """Take or load a snapshot while the flat buffers have no memory but a host copy."""
    chunks = gpt()
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    version = keep(chunks, tree, look)
    if at == "snapshot":
        offload(chunks, convention)
        version = version._replace(kept=snapshot(tree))
        onload(chunks, convention)
    train_step(chunks, adam, batch(1, rank))
    if at == "snapshot":
        comes_back(chunks, adam, tree, version, look)
        return
    assert not torch.equal(look(), version.seen)
    left = remainder(chunks, adam)
    offload(chunks, convention)
    load(tree, version.kept)
    assert all(buffer.param_data.untyped_storage().nbytes() == 0 for buffer in chunks[0].buffers)
    onload(chunks, convention)
    assert differing(bits(weights(chunks)), version.weights) == []
    assert differing(remainder(chunks, adam), left) == []
    assert torch.equal(look(), version.seen)


def mxfp8(rank: int, *, overlap: bool) -> str:
    """Load while the buffer that quantized weights are gathered through holds gradients."""
    if not has_mxfp8_reuse():
        return "no such mode"
    with simulated_mxfp8():
        chunks = mxfp8_gpt(overlap=overlap)
        adam = mxfp8_optimizer(chunks)
        train_step(chunks, adam, batch(0, rank))
        if overlap:
            publish(chunks, adam)
        tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
        version = keep(chunks, tree, look)
        seen: list[str] = []

        def load_between(moment: str) -> None:
            # With overlap the flags say "published" until the step is finalized.
            if moment == "backward":
                chunk: Any = chunks[0]
                assert any(buffer.grad_data.abs().sum() > 0 for buffer in chunk.buffers)
                comes_back(chunks, adam, tree, version, look)
                seen.append(moment)

        train_step(chunks, adam, batch(1, rank))
        train_step(chunks, adam, batch(2, rank), pause=load_between)
        assert seen == ["backward"]
    return "kept"
