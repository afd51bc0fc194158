"""Ranks that hold different versions are told so, all of them the same, by leaf and by rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_snap.agreement import agree
from mcore_snap.digests import fingerprint
from mcore_snap.errors import Corrupt, StructureMismatch
from mcore_snap.megatron.tree import model_tree
from mcore_snap.snapshots import snapshot
from mcore_snap.testing.ranks import run_ranks

EXPERT_PARALLEL = {"expert_model_parallel_size": 2}
OWN = {"distributed_optimizer": False}
MOE = {"moe": True, "expert_parallel": 2}


def told(work: Callable[[], str]) -> tuple[str, tuple[str, ...]]:
    """Return the digest, or the kind of the error and its lines."""
    try:
        return work(), ()
    except (Corrupt, StructureMismatch) as error:
        return type(error).__name__, error.problems


def groups() -> dict[str, Any]:
    """Return the data-parallel groups that Megatron-Core made, as `agree` takes them."""
    from megatron.core import parallel_state

    return {
        "group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "expert_group": parallel_state.get_expert_data_parallel_group(),
    }


def trained(rank: int, options: dict[str, Any], steps: int = 1) -> tuple[Any, Any]:
    """Build a model and train it for some steps, each rank on its own data."""
    from mcore_snap.testing import gpt

    chunks = gpt.gpt(**options)
    optimizer = gpt.optimizer(chunks)
    for step in range(steps):
        gpt.train_step(chunks, optimizer, gpt.batch(step, rank))
    return chunks, optimizer


def after_training(rank: int, options: dict[str, Any], live: bool) -> tuple[tuple[str, tuple[str, ...]], str]:
    """Compare what training gave: the same weights, and every rank's own counters; and take the fingerprint."""
    from mcore_snap.testing import gpt
    from mcore_snap.testing.forward import forward

    chunks, _ = trained(rank, options, 2)
    if not live:
        # With gradients enabled a router counts this rank's tokens.
        forward(chunks, gpt.batch(7, rank), None)
    tree = model_tree(chunks)
    kept = tree if live else snapshot(tree)
    return told(lambda: agree(kept, **groups())), fingerprint(kept)


@pytest.mark.parametrize("live", [False, True], ids=["snapshot", "live"])
@pytest.mark.parametrize(
    ("options", "parallel"),
    [
        ({}, {}),
        (OWN, {}),
        ({"overlap": True}, {}),
        (MOE, EXPERT_PARALLEL),
        (MOE | OWN, EXPERT_PARALLEL),
    ],
    ids=["dense", "own-storage", "overlap", "experts", "experts-own-storage"],
)
def test_trained_ranks_agree(options: dict[str, Any], parallel: dict[str, int], live: bool) -> None:
    """One digest on all ranks: counters and other ranks' experts do not count, a gather that is due is done."""
    (first, print_of_first), (second, print_of_second) = run_ranks(after_training, 2, options, live, parallel=parallel)
    assert first == second
    assert len(first[0]) == 32
    assert (print_of_first == print_of_second) is ("moe" not in options)


def one_rank_older(rank: int, options: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Compare version 1 on rank 0 with version 2 on rank 1."""
    chunks, optimizer = trained(rank, options)
    from mcore_snap.testing import gpt

    tree = model_tree(chunks)
    version_1 = snapshot(tree)
    gpt.train_step(chunks, optimizer, gpt.batch(5, rank))
    version_2 = snapshot(tree)
    return told(lambda: agree(version_2 if rank else version_1, groups()["group"]))


@pytest.mark.parametrize("options", [{}, OWN], ids=["dense", "own-storage"])
def test_another_version_is_told_on_every_rank(options: dict[str, Any]) -> None:
    """Both ranks raise one error, which names every leaf that moved and who holds what."""
    first, second = run_ranks(one_rank_older, 2, options)
    assert first == second
    kind, lines = first
    assert kind == "Corrupt"
    assert len(lines) == 1 if not options else len(lines) > 10
    for line in lines:
        assert line.startswith("chunks[0].parameters['module" if options else "chunks[0].buffers[0]: ")
        assert " on rank 0; " in line
        assert " on rank 1; load one version on all of them" in line


def one_weight(rank: int, options: dict[str, Any], part: str, culprit: int) -> tuple[str, tuple[str, ...]]:
    """Flip one bit of one parameter on one rank, and compare with and without the experts' group."""
    chunks, _ = trained(rank, options)
    tree = model_tree(chunks)
    agreed = told(lambda: agree(tree, **groups()))
    assert len(agreed[0]) == 32, agreed
    if rank == culprit:
        weight = next(p for name, p in chunks[0].named_parameters() if part in name)
        weight.data.view(-1)[:1].view(torch.int16).bitwise_xor_(1)
    return told(lambda: agree(tree, **groups()))


@pytest.mark.parametrize("options", [MOE, MOE | OWN], ids=["experts", "experts-own-storage"])
@pytest.mark.parametrize("part", [".experts.", "self_attention"])
def test_one_bit_of_an_expert_or_of_the_rest(options: dict[str, Any], part: str) -> None:
    """Four ranks, two per expert: what differs is said on all four, though only two compared it."""
    told_all = run_ranks(one_weight, 4, options, part, 2, parallel=EXPERT_PARALLEL)
    assert told_all == [told_all[0]] * 4
    kind, (line,) = told_all[0]
    assert kind == "Corrupt"
    if "distributed_optimizer" in options:
        assert part in line.split(":")[0]
    else:
        assert line.startswith("chunks[0].expert_parallel_buffers[0]: " if "expert" in part else "chunks[0].buffers[0]")
    # Rank 2 holds the same experts as rank 0.
    assert (" on rank 0; " if "expert" in part else " on ranks 0, 1, 3; ") in line
    assert " on rank 2; load" in line


def without_expert_group(rank: int, options: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Compare everything over the data-parallel group, experts of other ranks too."""
    chunks, _ = trained(rank, options)
    return told(lambda: agree(model_tree(chunks), groups()["group"]))


@pytest.mark.parametrize("options", [MOE, MOE | OWN], ids=["experts", "experts-own-storage"])
def test_experts_differ_unless_compared_among_their_replicas(options: dict[str, Any]) -> None:
    """Left to the data-parallel group, exactly the experts' leaves are said to differ."""
    first, second = run_ranks(without_expert_group, 2, options, parallel=EXPERT_PARALLEL)
    assert first == second
    assert first[0] == "Corrupt"
    assert first[1]
    assert all("expert" in line.split(":")[0] for line in first[1])


def slices(rank: int) -> tuple[str, tuple[str, ...]]:
    """Compare what is cut up among the ranks."""
    from mcore_snap.testing import gpt

    chunks = gpt.gpt()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_object", None)
        return told(lambda: agree(snapshot(model_tree(chunks, dp_sharded=True)), groups()["group"]))


def test_slices_are_refused_before_anything_is_exchanged() -> None:
    """Every rank has others, so there is nothing to compare."""
    first, second = run_ranks(slices, 2)
    assert first == second
    assert first[0] == "StructureMismatch"
    assert "dp_sharded" in first[1][0]


def plain_trees(rank: int) -> list[tuple[str, tuple[str, ...]]]:
    """Compare ordinary trees: equal, three versions, a leaf that one lacks, and one that cannot be read."""
    leaf = torch.zeros(3)
    model = torch.nn.Linear(2, 1)
    gone = model_tree(torch.nn.Linear(2, 1) if rank == 1 else model)
    gc.collect()
    trees: list[Any] = [
        {"w": leaf},
        {"same": leaf, "w": leaf + (rank > 0)},
        {"w": leaf} if rank else {"w": leaf, "v": leaf},
        {"w": leaf, "gone": gone} if rank == 1 else {"w": leaf, "gone": {"other": leaf}},
    ]
    return [told(lambda tree=tree: agree(tree, None)) for tree in trees]


def test_plain_trees() -> None:
    """All leaves count; a rank that cannot take part is named, and no rank waits for it."""
    found = run_ranks(plain_trees, 3)
    assert found == [found[0]] * 3
    equal, versions, lacking, unreadable = found[0]
    assert len(equal[0]) == 32
    (line,) = versions[1]
    assert line.startswith("['w']: expected the same bytes on every rank, found ")
    assert " on rank 0; " in line
    assert " on ranks 1, 2; load" in line
    (line,) = lacking[1]
    assert line.startswith("['v']: ")
    assert "no such leaf on ranks 1, 2" in line
    (line,) = unreadable[1]
    assert line.startswith("rank 1: expected a tree that can be read, found: a tree does not keep its model alive")
