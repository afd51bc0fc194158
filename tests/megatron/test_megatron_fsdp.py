"""Megatron-FSDP: its weight buffers are the leaves, whichever parameters the model shows at the moment."""

from __future__ import annotations

import itertools
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from configurations import bits, differing, is_attention
from half_a_step import load_before_backward
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from mcore_snap import compare, fingerprint, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.errors import StructureMismatch
from mcore_snap.megatron.megatron_fsdp import megatron_fsdp
from mcore_snap.testing.fully_sharded import STRATEGIES, cpu_fully_sharded, megatron_fsdp_gpt, train_step
from mcore_snap.testing.gpt import batch, gpt, logits
from mcore_snap.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_STATES: Final = ("distributed", "raw")
_MOMENTS: Final = ("forward", "backward", "finalize", "update", "gather")
_TRAINED: Final = ("optim", "optim_grads", "optim_grads_params")
_VERSION: Final = tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
# Before 0.14 `no_shard` cannot be trained: its weights are not updated from the main weights.
_STRATEGIES: Final = STRATEGIES if _VERSION >= (0, 14) else _TRAINED
_OTHERS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("optim", {"overlap": True}),
    *([("optim", {"bf16": False})] if _VERSION >= (0, 14) else []),
    ("optim_grads", {"overlap": True}),
    ("optim_grads_params", {"tied": True}),
    # Before, Megatron-FSDP could not be built with these.
    *([("optim_grads_params", {"freeze": is_attention})] if _VERSION >= (0, 17) else []),
]


def memory(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return what Megatron-FSDP trains and computes with, found without the library."""
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        owner: Any = chunk
        for number, group in enumerate(owner.param_and_grad_buffer.parameter_groups):
            for name in ("model_weight_buffer", "main_weight_buffer"):
                buffer = getattr(group, name)
                if buffer is not None:
                    found[f"{number}.{name}"] = buffer.data
            if group.model_weight_buffer is None:
                found |= {f"{number}.{index}": parameter.data for index, parameter in enumerate(group.params)}
    return found


def show(chunks: Sequence[nn.Module], state: str) -> None:
    """Let the model show DTensors over its main weights, or the parameters that compute."""
    fsdp: Any = chunks[0].module
    if state == "raw":
        logits(chunks, batch(8))
    else:
        fsdp.module.state_dict()
    # Before 0.14 the model shows the parameters that compute, always.
    assert _VERSION < (0, 14) or fsdp.is_param_fsdp_distributed == (state == "distributed")


def go_back(rank: int, strategy: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Train, keep, train on, and load, in each pair of states; bytes of leaves, of compute weights, of parameters."""
    with cpu_fully_sharded():
        chunks = megatron_fsdp_gpt(strategy, **options)
        train_step(chunks, batch(0, rank))
        tree = model_tree(chunks)
        for kept_in, loaded_in in itertools.product(_STATES, _STATES):
            show(chunks, kept_in)
            kept = snapshot(tree)
            a_bits, a = bits(memory(chunks)), logits(chunks, batch(9))
            next_loss = train_step(chunks, batch(1, rank))
            b = logits(chunks, batch(9))
            assert not torch.equal(b, a), "nothing changed: nothing is tested"

            show(chunks, loaded_in)
            where = {name: tensor.data_ptr() for name, tensor in memory(chunks).items()}
            names, shown = list(named_leaves(tree)), [id(p) for p in chunks[0].parameters()]
            assert load(tree, kept) is tree
            assert list(named_leaves(kept)) == names
            assert [id(p) for p in chunks[0].parameters()] == shown
            assert differing(bits(memory(chunks)), a_bits) == []
            assert {name: tensor.data_ptr() for name, tensor in memory(chunks).items()} == where
            assert torch.equal(logits(chunks, batch(9)), a)
            # The main weights came back too, so the same step leads to the same weights.
            assert train_step(chunks, batch(1, rank)) == next_loss
            assert torch.equal(logits(chunks, batch(9)), b)
        groups: Any = chunks[0].param_and_grad_buffer.parameter_groups  # type: ignore[union-attr]  # not nn.Module's
        return (
            sum(leaf.nbytes for leaf in kept.chunks[0].buffers),
            sum(group.model_weight_buffer.data.nbytes for group in groups if group.model_weight_buffer is not None),
            sum(leaf.nbytes for leaf in kept.chunks[0].parameters.values()),
        )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_logits_come_back(strategy: str, world: int) -> None:
    """Compute and main weights are those of the snapshot, which may be taken and loaded in either state."""
    for buffers, compute, parameters in run_ranks(go_back, world, strategy, {}):
        assert (parameters > 0) == (strategy == "no_shard")
        share = world if strategy in {"optim", "optim_grads"} else 1
        main = 2 * (compute or parameters) // share  # fp32 instead of bf16
        assert buffers == compute + main


@pytest.mark.parametrize(("strategy", "options"), _OTHERS)
def test_other_models_come_back(strategy: str, options: dict[str, Any]) -> None:
    """Overlapped gathers, tied and frozen weights, full precision."""
    run_ranks(go_back, 2, strategy, options)


def whole_and_shard(rank: int) -> tuple[int, int]:
    """Return the bytes of a snapshot with and without sharded weights."""
    del rank
    with cpu_fully_sharded():
        kept = []
        for strategy in ("optim", "optim_grads_params"):
            chunks = megatron_fsdp_gpt(strategy, hidden=64)
            kept.append(snapshot(model_tree(chunks)))
        whole, shard = (sum(leaf.nbytes for leaf in one.chunks[0].buffers) for one in kept)
        return whole, shard


def test_a_snapshot_has_this_ranks_shard_only() -> None:
    """Compute weights are halved by two ranks: 2 + 4/2 bytes per weight become 2/2 + 4/2."""
    for whole, shard in run_ranks(whole_and_shard, 2):
        assert shard / whole == pytest.approx(3 / 4, rel=0.05)  # but for padding


def train(rank: int, strategy: str, overlap: bool, moment: str | None) -> tuple[list[float], dict[str, object]]:
    """Train three steps, with a look-back to the first version at that moment of each of them."""
    chunks = megatron_fsdp_gpt(strategy, overlap=overlap or None)
    tree = model_tree(chunks)
    kept, expected = snapshot(tree), logits(chunks, batch(9))

    def look_back(now: str) -> None:
        if now == moment:
            shown = [id(p) for p in chunks[0].parameters()]
            with swapped(tree, kept, check=True):
                assert torch.equal(logits(chunks, batch(9)), expected), f"the look-back after {now} saw other weights"
            assert [id(p) for p in chunks[0].parameters()] == shown

    losses = [train_step(chunks, batch(step, rank), pause=look_back) for step in range(3)]
    # Not the buffers themselves, the padding of which is never initialised.
    main = dict(chunks[0].param_and_grad_buffer.optimizer_named_parameters)  # type: ignore[union-attr, arg-type]
    shards = {name: getattr(weight, "_local_tensor", weight) for name, weight in main.items()}
    return losses, dict(bits({"logits": logits(chunks, batch(9))} | shards))


def look_back_and_train(rank: int, strategy: str, overlap: bool) -> list[str]:
    """Return the moments at which a look-back changed the training that followed."""
    with cpu_fully_sharded():
        losses, state = train(rank, strategy, overlap, None)
        moments = [moment for moment in _MOMENTS if moment != "update" or overlap or strategy == "optim_grads_params"]
        found = [(moment, *train(rank, strategy, overlap, moment)) for moment in moments]
        return [moment for moment, others, other in found if others != losses or differing(other, state)]


@pytest.mark.parametrize(("strategy", "overlap"), [*itertools.product(_TRAINED, [False]), ("optim", True)])
def test_training_goes_on_as_without_the_look_back(strategy: str, overlap: bool) -> None:
    """Bit by bit, wherever in a step the look-back came, between forward and backward too."""
    assert run_ranks(look_back_and_train, 2, strategy, overlap) == [[], []]


def keep_when_due(rank: int, strategy: str, overlap: bool) -> tuple[str, list[bool], str]:
    """Take a snapshot at each moment around an update; what it has, and whether a later one is the same."""
    with cpu_fully_sharded():
        chunks = megatron_fsdp_gpt(strategy, overlap=overlap or None)
        tree = model_tree(chunks)
        train_step(chunks, batch(0, rank))
        kept: list[Any] = []

        def keep(now: str) -> None:
            # Without overlap the update and the gather are one call of Megatron-Core.
            if now == "gather" or (now == "update" and overlap):
                kept.append(snapshot(tree))

        train_step(chunks, batch(1, rank), pause=keep)
        logits(chunks, batch(9))
        later = snapshot(tree)
        compute = [leaf for leaf in later.chunks[0].buffers if leaf.dtype == torch.bfloat16]
        return fingerprint(later), [not compare(one, later) for one in kept], fingerprint(compute)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", _TRAINED)
def test_a_snapshot_after_the_update_is_never_stale(strategy: str, overlap: bool) -> None:
    """Before the gather, and while it is under way, a snapshot has what the next forward pass computes with."""
    found = run_ranks(keep_when_due, 2, strategy, overlap)
    assert [current for _, current, _ in found] == [[True, True] if overlap else [True]] * 2
    if strategy != "optim_grads_params":
        assert found[0][2] == found[1][2], "whole weights are the same on all ranks"


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_load_before_backward_fails_loudly(strategy: str) -> None:
    """Gradients of a mixture of two versions are never computed in silence, wherever the weights lie."""
    run_ranks(load_before_backward, 2, partial(megatron_fsdp_gpt, strategy))


def load_unwrapped(rank: int) -> list[str]:
    """Load the snapshot of a model that is not sharded; what the refusal says."""
    del rank
    with cpu_fully_sharded():
        chunks, whole = megatron_fsdp_gpt("optim_grads_params"), gpt(ddp=False)
        before = bits(memory(chunks))
        with pytest.raises(StructureMismatch) as caught:
            load(model_tree(chunks), snapshot(model_tree(whole)))
        assert differing(bits(memory(chunks)), before) == []
        return list(caught.value.problems)


def test_whole_weights_are_refused_by_buffers() -> None:
    """Every leaf of either is named, and nothing is written."""
    for problems in run_ranks(load_unwrapped, 1):
        assert any("chunks[0].buffers[0]" in line for line in problems)
        assert any("word_embeddings.weight" in line for line in problems)


def test_quantized_parameters_are_refused_by_name() -> None:
    """Their scales lie outside the buffers, so that a snapshot of these alone would be wrong."""
    pair: Any = TwoTensor
    quantized = nn.Parameter(pair(torch.ones(2), torch.ones(2)))
    group = SimpleNamespace(params=[quantized], model_weight_buffer=SimpleNamespace(data=torch.zeros(2)))
    chunk: Any = nn.Module()
    chunk.all_gather_pipeline = SimpleNamespace(bucket_status={})
    chunk.param_and_grad_buffer = SimpleNamespace(parameter_groups=[group], param_to_name={quantized: "fc.weight"})
    with pytest.raises(StructureMismatch, match=r"module.fc.weight: expected plain weights, found TwoTensor"):
        megatron_fsdp(chunk)


@pytest.mark.parametrize("where", ["hsdp_wbuf", "hfsdp_helper_wbuf", "hfsdp_helper_wtbuf"])
def test_hybrid_sharding_is_refused_by_name(where: str) -> None:
    """Its second level of shards has never been seen to come back."""
    weight = nn.Parameter(torch.ones(2))
    group = SimpleNamespace(
        params=[weight], model_weight_buffer=SimpleNamespace(data=torch.zeros(2)), **{where: object()}
    )
    chunk: Any = nn.Module()
    chunk.all_gather_pipeline = SimpleNamespace(bucket_status={})
    chunk.param_and_grad_buffer = SimpleNamespace(parameter_groups=[group], param_to_name={weight: "fc.weight"})
    with pytest.raises(StructureMismatch, match="parameter group 0: expected one level of sharding"):
        megatron_fsdp(chunk)
