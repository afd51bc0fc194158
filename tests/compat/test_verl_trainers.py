"""verl's trainers, as released, look back through verl's worker with our two functions."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import released_verl
import torch

from mcore_snap.testing import model_bytes
from mcore_snap.testing.gpt import batch, gpt, log_probs, optimizer, train_step
from mcore_snap.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST = {"FullyAsyncTrainer": 1, "PPOTrainerSeparateAsync": 0}
"""The step at which each trainer keeps the version that generated the batches."""


@pytest.fixture(autouse=True, scope="module")
def released() -> None:
    """Have the wheel before any rank reads it, and fail where it cannot be had."""
    released_verl.wheel()


class LogProbs:
    """The base of a trainer: computes log-probabilities with the weights that are live."""

    def __init__(self, chunks: Any, resident: Callable[[], Any]) -> None:
        cls = released_verl.actor_worker("mcore_snap.compat.verl")
        actor = SimpleNamespace(engine=SimpleNamespace(module=chunks))
        self.actor_rollout_wg = cls(SimpleNamespace(actor=SimpleNamespace(strategy="megatron")), "actor", actor=actor)
        self.config = SimpleNamespace(algorithm={})
        self.local_trigger_step = 0
        self.chunks = chunks
        self.resident = resident

    def _compute_old_log_prob(self, tokens, metrics=None):
        with self.resident():
            found = log_probs(self.chunks, tokens)
        return (found, 0.0) if metrics is None else found


def train(rank: int, name: str | None, options: dict[str, Any], offload: bool) -> tuple[list[Any], list[Any]]:
    """Train five steps with a trainer's look-backs, or without; old log-probabilities, and all that training made."""
    verl = released_verl.megatron_utils()
    chunks = gpt(**options)
    adam = optimizer(chunks)

    @contextmanager
    def loaded() -> Iterator[None]:
        # What the engine does around each use if `param_offload` is set.
        verl.load_megatron_model_to_gpu(chunks)
        yield
        verl.offload_megatron_model_to_cpu(chunks)

    resident = loaded if offload else nullcontext
    if offload:
        verl.offload_megatron_model_to_cpu(chunks)
    trainer = name and released_verl.trainer(name, LogProbs)(chunks, resident)
    old, made = [], []
    for step in range(5):
        if trainer:
            trainer.local_trigger_step = FIRST[name] + step
            arguments = (batch(9, rank),) if name == "FullyAsyncTrainer" else (batch(9, rank), {})
            found = trainer._compute_old_log_prob(*arguments)
            old.append(found[0] if name == "FullyAsyncTrainer" else found)
            assert list(trainer.actor_rollout_wg.cpu_saved_models) == [FIRST[name]]
        with resident():
            made.append(train_step(chunks, adam, batch(step, rank)))
            made.append(log_probs(chunks, batch(8)))
            made.append(model_bytes(chunks))
    return old, made


def with_and_without(rank: int, name: str, options: dict[str, Any], offload: bool) -> None:
    """Train twice, and compare."""
    old, made = train(rank, name, options, offload)
    _, plainly_made = train(rank, None, options, offload)
    assert len(old) == 5
    assert all(torch.equal(found, old[0]) for found in old)
    changed = [step for step in range(1, 5) if not torch.equal(made[3 * step + 1], made[1])]
    assert changed == [1, 2, 3, 4], "training did not change the log-probabilities: nothing is tested"
    for found, expected in zip(made, plainly_made, strict=True):
        same = torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
        assert same


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize(
    ("options", "world", "offload"),
    [
        ({}, 1, True),
        ({"moe": True, "expert_buffers": True, "chunks": 2}, 1, False),
        ({"moe": True, "expert_parallel": 2}, 2, True),
        ({"overlap": True}, 2, False),
        ({"distributed_optimizer": False, "bf16": False}, 2, False),
    ],
    ids=["offloaded", "experts", "offloaded-experts", "overlap", "own-storage"],
)
def test_old_log_probs_are_those_of_the_first_version_and_training_goes_on_untouched(
    name: str, options: dict[str, Any], world: int, offload: bool
) -> None:
    """At each step the same bits as at the first one; losses and weights as in training without looking back."""
    parallel = {"expert_model_parallel_size": options.get("expert_parallel", 1)}
    run_ranks(with_and_without, world, name, options, offload, parallel=parallel)
