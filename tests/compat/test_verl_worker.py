"""verl's worker, as released, with our two functions in place of verl's."""

from __future__ import annotations

import itertools
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import released_verl
import torch

from mcore_snap.compat import verl as ours
from mcore_snap.nodes import ModelTree, tree_entries
from mcore_snap.testing import model_bytes
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.ranks import run_ranks


@pytest.fixture(autouse=True, scope="module")
def released() -> None:
    """Have the wheel before any rank reads it, and fail where it cannot be had."""
    released_verl.wheel()


OURS = "mcore_snap.compat.verl"
THEIRS = "verl.utils.megatron_utils"


def worker(chunks: Any, functions: str) -> Any:
    """Make verl's worker around a model, with the functions of this module."""
    cls = released_verl.actor_worker(functions)
    config = SimpleNamespace(actor=SimpleNamespace(strategy="megatron"))
    return cls(config, "actor", actor=SimpleNamespace(engine=SimpleNamespace(module=chunks)))


def keep_three_versions(rank: int, functions: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Save three versions, restore them in every order, clear some; the model's bits at each point."""
    sys.modules[THEIRS] = released_verl.megatron_utils()
    chunks = gpt(**options)
    adam = optimizer(chunks)
    actor = worker(chunks, functions)
    versions, seen = {}, []
    for n in (1, 2, 3):
        train_step(chunks, adam, batch(n, rank))
        versions[n] = logits(chunks, batch(9))
        assert actor.save_model_to_cpu(n) is None
    train_step(chunks, adam, batch(4, rank))
    assert len({version.numpy(force=True).tobytes() for version in versions.values()}) == 3

    for n in itertools.chain(*itertools.permutations((1, 2, 3)), (2, 2)):
        assert actor.restore_model_from_cpu(n) is None
        assert torch.equal(logits(chunks, batch(9)), versions[n])
        seen.append(model_bytes(chunks))

    actor.clear_cpu_model(2)
    assert sorted(actor.cpu_saved_models) == [1, 3]
    actor.restore_model_from_cpu(3)
    for missing in (2, 7):
        actor.restore_model_from_cpu(missing)
        actor.clear_cpu_model(missing)
        assert torch.equal(logits(chunks, batch(9)), versions[3])
    actor.restore_model_from_cpu(1)
    actor.save_model_to_cpu(3)
    actor.clear_cpu_model(1)
    train_step(chunks, adam, batch(5, rank))
    actor.restore_model_from_cpu(3)
    assert torch.equal(logits(chunks, batch(9)), versions[1])
    seen.append(model_bytes(chunks))
    train_step(chunks, adam, batch(6, rank))
    return [*seen, model_bytes(chunks)]


@pytest.mark.parametrize("world", [1, 2])
def test_the_worker_cannot_tell_ours_from_its_own(world: int) -> None:
    """Where verl's functions are right, the worker leaves the same bits at every point with either."""
    assert run_ranks(keep_three_versions, world, OURS, {}) == run_ranks(keep_three_versions, world, THEIRS, {})


@pytest.mark.parametrize(
    ("options", "world"),
    [
        ({"distributed_optimizer": False}, 1),
        ({"moe": True, "expert_buffers": True, "chunks": 2}, 1),
        ({"moe": True, "expert_parallel": 2}, 2),
        ({"overlap": True}, 2),
    ],
    ids=["own-storage", "experts", "experts-2-ranks", "overlap"],
)
def test_the_worker_is_right_where_it_was_not(options: dict[str, Any], world: int) -> None:
    """The same with what verl's functions lose or cannot read."""
    parallel = {"expert_model_parallel_size": options.get("expert_parallel", 1)}
    run_ranks(keep_three_versions, world, OURS, options, parallel=parallel)


def replace_instead_of_editing(rank: int) -> bool:
    """Put our functions into verl's module, and leave the worker's source as it is."""
    theirs = released_verl.megatron_utils()
    sys.modules[THEIRS] = theirs
    theirs.copy_megatron_model_to_cpu = ours.copy_megatron_model_to_cpu
    theirs.restore_megatron_model_from_cpu = ours.restore_megatron_model_from_cpu
    chunks = gpt(distributed_optimizer=False)
    actor = worker(chunks, THEIRS)
    actor.save_model_to_cpu(1)
    kept = model_bytes(chunks)
    train_step(chunks, optimizer(chunks), batch(0, rank))
    assert model_bytes(chunks) != kept
    actor.restore_model_from_cpu(1)
    assert model_bytes(chunks) == kept
    return isinstance(actor.cpu_saved_models[1], ModelTree)


def test_replacing_them_in_verls_module_works_as_well() -> None:
    """The worker imports them when it first needs them."""
    assert run_ranks(replace_instead_of_editing) == [True]


def forget(rank: int) -> list[int]:
    """Clear versions; how many of their leaves are still in memory after each."""
    chunks = gpt(moe=True)
    actor = worker(chunks, OURS)
    kept = []
    for n in (1, 2):
        actor.save_model_to_cpu(n)
        kept += [weakref.ref(leaf.private) for leaf in tree_entries(actor.cpu_saved_models[n])]
    alive = [sum(leaf() is not None for leaf in kept)]
    for n in (1, 2):
        actor.clear_cpu_model(n)
        alive.append(sum(leaf() is not None for leaf in kept))
    return alive


def test_a_cleared_version_is_gone() -> None:
    """Nothing else holds the memory of a version."""
    (alive,) = run_ranks(forget)
    assert alive[0] == 2 * alive[1] > alive[2] == 0
