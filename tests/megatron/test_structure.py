"""The tree of a real model tells what Megatron-Core holds, every byte once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import optree
import pytest
import torch
from configurations import CONFIGURATIONS, bits, differing, flat_buffers, tensors

from mcore_snap import as_numpy, bitwise_equal, compare, model_tree, named_leaves, named_parameters, snapshot, thaw
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.ranks import run_ranks


def shape_of(rank: int, options: Any) -> list[dict[str, Any]]:
    """Return the kinds of leaves of each chunk, and whether their bits are those of the model."""
    del rank
    chunks = gpt(**options)
    logits(chunks, batch(0))
    tree = model_tree(chunks)
    own = sorted(t.untyped_storage().data_ptr() for t in tensors(chunks).values())
    # Extra state is kept as bytes of its own, none at all here.
    leaves = sorted(t.untyped_storage().data_ptr() for t in named_leaves(tree).values() if t.nbytes)
    assert leaves == sorted(set(own)), "some memory is in no leaf, or in two"
    shapes = []
    for chunk, part in zip(chunks, tree.chunks, strict=True):
        flat = dict(flat_buffers(chunk))
        listed = {id(p) for buffer in flat.values() if buffer.param_data is not None for p in buffer.params}
        names = {name for name, _ in chunk.named_parameters()}
        shapes.append(
            {
                "buffers": len(part.buffers),
                "expert_parallel_buffers": len(part.expert_parallel_buffers),
                "parameters": set(part.parameters),
                "all names": names,
                "outside": {name for name, p in chunk.named_parameters() if id(p) not in listed},
                "module_buffers": {name.rpartition(".")[2] for name in part.module_buffers},
            }
        )
    return shapes


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_parameter_is_in_one_place(name: str) -> None:
    """Flat buffers cover what they hold, and `parameters` has exactly the rest, under the chunk's own names."""
    configuration = CONFIGURATIONS[name]
    options = configuration.options
    flat = options.get("ddp", True) and options.get("distributed_optimizer", True)
    experts = options.get("expert_buffers", False) or options.get("expert_parallel", 1) > 1
    for chunks in run_ranks(shape_of, configuration.world, options, parallel=configuration.parallel):
        assert len(chunks) == options.get("chunks", 1)
        for part in chunks:
            assert part["parameters"] == part["outside"]
            assert (part["buffers"] > 0, part["expert_parallel_buffers"] > 0) == (flat, bool(flat and experts))
            if not flat:
                assert part["parameters"] == part["all names"]
            elif "freeze" in options:
                assert part["parameters"]
                assert all("self_attention" in name for name in part["parameters"])
            else:
                assert part["parameters"] == set()
            if options.get("moe"):
                assert part["module_buffers"] >= {"expert_bias", "local_tokens_per_expert"}


def compare_parameters(rank: int, name: str) -> None:
    """Compare the parameters by name: of the model, of the live tree, and of a snapshot."""
    chunks = gpt(**CONFIGURATIONS[name].options)
    train_step(chunks, optimizer(chunks), batch(0, rank))
    tree = model_tree(chunks)
    kept = snapshot(tree)
    for chunk, live, frozen in zip(chunks, tree.chunks, kept.chunks, strict=True):
        own = {parameter_name: p.detach() for parameter_name, p in chunk.named_parameters()}
        for mapping in (named_parameters(live), named_parameters(frozen)):
            assert set(mapping) == set(own)
            assert differing(bits({**mapping}), bits(own)) == []
        for parameter_name, p in named_parameters(live).items():
            assert p.data_ptr() == own[parameter_name].data_ptr(), parameter_name


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_parameters_by_name(name: str) -> None:
    """`named_parameters` has the chunk's own names, shapes and bits; live ones are the model's memory."""
    configuration = CONFIGURATIONS[name]
    run_ranks(compare_parameters, configuration.world, name, parallel=configuration.parallel)


def tied_leaves(rank: int) -> list[tuple[int, int]]:
    """Count leaves that hold the embedding, in models that keep it in flat buffers and on its own."""
    del rank
    found = []
    variants: list[dict[str, Any]] = [{"tied": True, "ddp": False}, {"ddp": False}]
    for options in variants:
        chunks = gpt(**options)
        weights = [n for n in model_tree(chunks).chunks[0].parameters if "embedding" in n or "output_layer" in n]
        found.append((len(weights), sum(t.numel() for t in named_leaves(model_tree(chunks)).values())))
    return found


def test_tied_embeddings_are_one_leaf() -> None:
    """Two names of one memory are kept once, so the tree is smaller by one embedding (64 tokens, width 32)."""
    (((tied, size), (untied, larger)),) = run_ranks(tied_leaves, 1)
    assert (tied, untied) == (1, 2)
    assert larger - size == 64 * 32


def use_as_a_tree(rank: int) -> None:
    """Put snapshots of a real model through everything that takes trees."""
    chunks = gpt(moe=True, expert_buffers=True, freeze=lambda name: "embedding" in name)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree: Any = model_tree(chunks)
    first: Any = snapshot(tree)
    train_step(chunks, adam, batch(1, rank))
    second: Any = snapshot(tree)

    assert bitwise_equal(tree, second)
    assert not bitwise_equal(first, second)
    untrained = {f"chunks[0].parameters[{name!r}]" for name in tree.chunks[0].parameters}
    assert untrained
    assert untrained <= named_leaves(first).keys()
    differences = {difference.name for difference in compare(first, second).differences}
    assert {"chunks[0].buffers[0]", "chunks[0].expert_parallel_buffers[0]"} <= differences
    assert untrained.isdisjoint(differences)
    assert optree.tree_structure(tree) == optree.tree_structure(first) == optree.tree_structure(second)
    assert named_leaves(first).keys() == named_leaves(tree).keys()

    distances: Any = optree.tree_map(lambda a, b: float((a.double() - b.double()).abs().max()), first, second)
    assert max(optree.tree_leaves(distances)) > 0
    copies: Any = thaw(first)
    assert bitwise_equal(copies, first)
    for leaf in optree.tree_leaves(copies):
        leaf.zero_()
    assert not bitwise_equal(copies, first)
    with pytest.raises(RuntimeError):
        first.chunks[0].buffers[0].zero_()
    for array in optree.tree_leaves(as_numpy(first)):
        assert not array.flags.writeable


def test_snapshots_go_through_tree_functions() -> None:
    """Trees map over them, comparisons see the change of one step, and none can be written."""
    run_ranks(use_as_a_tree, 1)


def drop_models(rank: int) -> list[bool]:
    """Delete models whose trees and snapshots live on, and see whether they are gone."""
    gone = []
    for options in ({}, {"ddp": False}, {"moe": True}, {"chunks": 2}):
        # Not trained: Megatron's own backward hooks keep some models alive for good.
        chunks = gpt(**options)
        logits(chunks, batch(0, rank))
        tree = model_tree(chunks)
        kept = snapshot(tree)
        alive = [weakref.ref(chunk) for chunk in chunks]
        memory = [weakref.ref(p) for chunk in chunks for p in chunk.parameters()]
        del chunks
        gc.collect()
        gone.append(not any(reference() is not None for reference in alive + memory))
        assert all(torch.isfinite(t.float()).all() for t in named_parameters(kept).values())
        del tree
    return gone


def test_a_tree_does_not_keep_its_model() -> None:
    """Neither the tree nor the snapshot holds a chunk or a parameter; the snapshot stays readable."""
    assert run_ranks(drop_models, 1) == [[True] * 4]
