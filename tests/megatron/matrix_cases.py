"""Cases of the matrix with nothing in flight: wrappers, mixtures, frozen parameters, chunks, sizes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from configurations import disturb_frozen, is_attention
from matrix_protocol import comes_back, is_refused, keep

from mcore_snap import model_tree, named_leaves, snapshot
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.pipelines import pipeline_logits, pipeline_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def trained(rank: int, **options: Any) -> None:
    """Train a step, keep the weights, train on, and come back."""
    chunks = gpt(**options)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, _data_rank(rank, options)))
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    version = keep(chunks, tree, look)
    train_step(chunks, adam, batch(1, _data_rank(rank, options)))
    if not options.get("ddp", True):
        shift_router_biases(chunks)  # what finalize_model_grads does, which needs DDP
    comes_back(chunks, adam, tree, version, look)
    train_step(chunks, adam, batch(2, _data_rank(rank, options)))


def frozen(rank: int, *, change: bool) -> None:
    """Train around a frozen base, and merge something into it or not."""
    chunks = gpt(freeze=is_attention)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    version = keep(chunks, tree, look)
    train_step(chunks, adam, batch(1, rank))
    if change:
        disturb_frozen(chunks)
    comes_back(chunks, adam, tree, version, look)


def all_frozen(rank: int) -> None:
    """Swap the weights of a reference model which DDP wraps although nothing is trained."""
    del rank
    chunks = gpt(freeze=lambda _: True)
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    version = keep(chunks, tree, look)
    disturb_frozen(chunks)
    comes_back(chunks, None, tree, version, look)


def lacks_a_chunk(rank: int) -> None:
    """Load a snapshot of the first chunk alone into both."""
    chunks = gpt(chunks=2)
    adam = optimizer(chunks)
    kept = snapshot(model_tree(chunks[:1]))
    train_step(chunks, adam, batch(0, rank))
    is_refused(chunks, adam, model_tree(chunks), kept, "chunks[1].buffers[0]")


def unwrapped_since(rank: int) -> None:
    """Load a snapshot of DDP chunks into the same modules without DDP around them."""
    chunks = gpt(chunks=2)
    adam = optimizer(chunks)
    kept = snapshot(model_tree(chunks))
    train_step(chunks, adam, batch(0, rank))
    inner: list[Any] = [chunk.module for chunk in chunks]
    is_refused(chunks, adam, model_tree(inner), kept, "chunks[0].buffers[0]")


def pipelined(rank: int, **options: Any) -> None:
    """Run Megatron-Core's own schedule over two ranks, two virtual stages on each."""
    del rank
    chunks = gpt(layers=4, pipeline=2, **options)
    adam = optimizer(chunks)
    pipeline_step(chunks, adam, [batch(0), batch(1)])
    tree, look = model_tree(chunks), partial(pipeline_logits, chunks, [batch(9), batch(10)])
    version = keep(chunks, tree, look)
    pipeline_step(chunks, adam, [batch(2), batch(3)])
    comes_back(chunks, adam, tree, version, look)
    pipeline_step(chunks, adam, [batch(4), batch(5)])


def tied_across_chunks(rank: int, **options: Any) -> None:
    """Share one parameter between two chunks of one rank, where the second wrap moves it out of the first's buffer."""
    del rank
    first: list[Any] = []

    def tie(module: Any) -> None:
        if first:
            module.output_layer.weight = first[0].embedding.word_embeddings.weight
        first.append(module)

    chunks = gpt(chunks=2, prepare=tie, **options)
    if not options.get("ddp", True):
        assert first[1].output_layer.weight is first[0].embedding.word_embeddings.weight
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    memory = [leaf.untyped_storage().data_ptr() for leaf in named_leaves(tree).values() if leaf.numel()]
    assert len(memory) == len(set(memory)), "one memory is in two leaves"
    version = keep(chunks, tree, look)
    for parameter in {id(p): p for chunk in chunks for p in chunk.parameters()}.values():
        parameter.data.mul_(1.25)
    comes_back(chunks, None, tree, version, look)


def shift_router_biases(chunks: Sequence[nn.Module]) -> None:
    """Change every router's bias, as balancing the load does."""
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                buffer.add_(torch.linspace(-1, 1, len(buffer)))


def _data_rank(rank: int, options: Any) -> int:
    # Ranks that share weights see the same data.
    return rank // int(options.get("tensor_parallel", 1))
