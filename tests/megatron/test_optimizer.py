"""What Megatron-Core's own optimizers do after a load, and that `rollback` makes them go on from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
import torch
from configurations import CONFIGURATIONS, Configuration, bits, differing, everything, optimizer_state, tensors
from torch import nn

from mcore_snap import load, model_tree, rollback, snapshot
from mcore_snap.testing.ranks import run_ranks

MIXED: Final = {
    name: CONFIGURATIONS[name]
    for name in (
        "dense",
        "dense-own-storage",
        "tied-own-storage",
        "two-chunks",
        "partly-frozen",
        "moe-expert-buffers",
        "moe-expert-buffers-own-storage",
        "dense-2-ranks",
        "moe-2-ranks",
        "moe-own-storage-2-ranks",
    )
} | {
    "overlap-2-ranks": Configuration(2, {"overlap": True}),
    "moe-overlap-2-ranks": Configuration(2, {"overlap": True, "moe": True, "expert_parallel": 2}),
}
IN_PLACE: Final = {
    name: CONFIGURATIONS[name]
    for name in ("dense-fp32", "dense-own-storage-fp32", "dense-float16module", "moe-plain", "moe-fp32-2-ranks")
} | {"overlap-fp32-2-ranks": Configuration(2, {"overlap": True, "bf16": False})}
MATRIX: Final = {
    "restore then step: bf16 dist_opt": (CONFIGURATIONS["dense"], "load", "current"),
    "restore then step: bf16 dist_opt + reload_model_params": (
        CONFIGURATIONS["dense"],
        "load, reload_model_params",
        "restored",
    ),
    "restore then step: fp32 dist_opt": (CONFIGURATIONS["dense-fp32"], "load", "restored"),
}
STEPS: Final = [
    *(pytest.param(*case, id=name) for name, case in MATRIX.items()),
    *(pytest.param(one, "load", "current", id=f"{name}, load") for name, one in MIXED.items()),
    *(pytest.param(one, "rollback", "restored", id=f"{name}, rollback") for name, one in MIXED.items()),
    *(pytest.param(one, "load", "restored", id=f"{name}, load") for name, one in IN_PLACE.items()),
    *(pytest.param(one, "rollback", "restored", id=f"{name}, rollback") for name, one in IN_PLACE.items()),
]


def trained(rank: int, options: Any, steps: int) -> tuple[Sequence[nn.Module], Any]:
    """Build a model and its optimizer, and train for some steps; the same every time."""
    from mcore_snap.testing import gpt

    chunks = gpt.gpt(**options)
    optimizer = gpt.optimizer(chunks)
    for number in range(steps):
        gpt.train_step(chunks, optimizer, gpt.batch(number, rank))
    return chunks, optimizer


def weights_of(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the bits of all parameters, after the gather that a forward pass does."""
    from mcore_snap.testing import gpt

    gpt.logits(chunks, gpt.batch(99))
    return bits({f"{i}.{name}": p.data for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()})


def moments_of(optimizer: Any) -> dict[str, Any]:
    """Return the bits of what an optimizer keeps beside weights."""
    return {name: found for name, found in bits(optimizer_state(optimizer)).items() if ".main[" not in name}


def mains(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give each main weight that is a copy, after the part of the model's weight that it is a copy of."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for weight, main in pairs(one, "model_float16_groups", "shard_fp32_from_float16_groups"):
            part = one._get_model_param_range_map(weight)["param"]
            yield weight.data.view(-1)[part.start : part.end], main.data
        for weight, main in pairs(one, "float16_groups", "fp32_from_float16_groups"):
            yield weight.data, main.data


def pairs(optimizer: Any, weights: str, copies: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give the parameters of two attributes, group by group, side by side."""
    for group, others in zip(getattr(optimizer, weights, ()), getattr(optimizer, copies, ()), strict=True):
        yield from zip(group, others, strict=True)


def next_step(rank: int, options: Any, how: str) -> str:
    """Go back to version 1 four steps later, and say whose weights are live after a step that adds nothing."""
    from mcore_snap.testing import gpt

    first, last = weights_of(trained(rank, options, 1)[0]), weights_of(trained(rank, options, 5)[0])
    assert first != last
    chunks, optimizer = trained(rank, options, 1)
    tree = model_tree(chunks)
    version_1 = snapshot(tree)
    for number in range(1, 5):
        gpt.train_step(chunks, optimizer, gpt.batch(number, rank))
    moments = moments_of(optimizer)
    # With overlapped gathers one is due here.
    if how == "rollback":
        assert rollback(tree, version_1, optimizer) is tree
    else:
        load(tree, version_1)
    if how == "load, reload_model_params":
        optimizer.reload_model_params()
    assert moments_of(optimizer) == moments
    if how != "load":
        copies = list(mains(optimizer))
        assert bits({str(i): main for i, (_, main) in enumerate(copies)}) == bits(
            {str(i): weight.float() for i, (weight, _) in enumerate(copies)}
        )
        assert bool(copies) is (options.get("bf16", True) and options.get("ddp", True))
    assert weights_of(chunks) == first
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the step writes the optimizer's own weights to the model, and changes none
    gpt.train_step(chunks, optimizer, gpt.batch(9, rank))
    found = weights_of(chunks)
    return "restored" if found == first else "current" if found == last else "neither"


@pytest.mark.parametrize(("configuration", "how", "weights"), STEPS)
def test_restore_then_step(configuration: Configuration, how: str, weights: str) -> None:
    """After a load alone bf16's main weights win, bit for bit; after a rollback what was loaded does."""
    world, options = configuration
    assert run_ranks(next_step, world, options, how, parallel=configuration.parallel) == [weights] * world


def by_hand(rank: int, options: Any) -> list[str]:
    """Roll one of two equal trainings back, the other by hand, and say what differs two steps later."""
    from mcore_snap.testing import gpt

    runs = [trained(rank, options, 1) for _ in range(2)]
    version_1 = snapshot(model_tree(runs[0][0]))
    kept = {name: tensor.clone() for name, tensor in tensors(runs[1][0]).items()}
    for chunks, optimizer in runs:
        for number in range(1, 4):
            gpt.train_step(chunks, optimizer, gpt.batch(number, rank))
    (chunks, optimizer), (other, other_optimizer) = runs
    rollback(model_tree(chunks), version_1, optimizer)
    for name, tensor in tensors(other).items():
        tensor.copy_(kept[name])
    for weight, main in mains(other_optimizer):
        main.copy_(weight)
    for one in runs:
        for number in range(4, 6):
            gpt.train_step(*one, gpt.batch(number, rank))
    return differing(everything(chunks, optimizer), everything(other, other_optimizer))


@pytest.mark.parametrize(
    "name",
    ["dense", "dense-fp32", "dense-own-storage", "dense-float16module", "moe-expert-buffers", "moe-2-ranks"],
)
def test_training_goes_on_as_if_everything_had_been_put_back_by_hand(name: str) -> None:
    """Weights, main weights, moments, gradients, router state and random numbers, two steps later."""
    configuration = CONFIGURATIONS[name]
    found = run_ranks(by_hand, configuration.world, configuration.options, parallel=configuration.parallel)
    assert found == [[]] * configuration.world


def sliced(rank: int) -> str:
    """Roll back from slices: only this rank's own are kept, and its optimizer needs no others."""
    from mcore_snap.testing import gpt

    first = weights_of(trained(rank, {}, 1)[0])
    chunks, optimizer = trained(rank, {}, 1)
    tree = model_tree(chunks, dp_sharded=True)
    version_1 = snapshot(tree)
    gpt.train_step(chunks, optimizer, gpt.batch(1, rank))
    rollback(tree, version_1, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    gpt.train_step(chunks, optimizer, gpt.batch(2, rank))
    return "restored" if weights_of(chunks) == first else "other"


def test_rollback_from_slices() -> None:
    """With the distributed optimizer, main weights are cut as the snapshot is."""
    assert run_ranks(sliced, 2) == ["restored"] * 2


def nothing_trained(rank: int, options: Any) -> str:
    """Roll back a frozen model, whose optimizer has nothing in it."""
    from mcore_snap.testing import gpt

    del rank
    chunks = gpt.gpt(**options, freeze=bool)
    optimizer = gpt.optimizer(chunks)
    first = bits(tensors(chunks))
    version_1 = snapshot(model_tree(chunks))
    for tensor in tensors(chunks).values():
        tensor.data.mul_(2)
    rollback(model_tree(chunks), version_1, optimizer)
    assert bits(tensors(chunks)) == first
    return type(optimizer).__name__


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": False}], ids=["dense", "own-storage"])
def test_an_optimizer_without_parameters_is_no_hindrance(options: dict[str, Any]) -> None:
    """A rank on which nothing is trained has an empty chain, or one of stubs."""
    assert run_ranks(nothing_trained, 1, options) == ["ChainedOptimizer"]
