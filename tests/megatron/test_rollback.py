"""Which optimizers `rollback` takes, what it refuses before anything is written, and how it says so."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from configurations import bits, differing, everything
from test_optimizer import mains, trained
from torch import nn

from mcore_snap import NotResident, SnapError, StructureMismatch, fingerprint, model_tree, rollback, snapshot
from mcore_snap.testing.ranks import run_ranks

_VERSION: Final = tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
# Megatron-FSDP of 0.14 and 0.15 does not work with current torch.
SHARDED: Final = ["fsdp2"] if (0, 14) <= _VERSION < (0, 16) else ["fsdp2", "optim", "optim_grads_params"]


def refused(rank: int, how: str) -> tuple[str, str]:
    """Try what must be refused, check that no byte of model or optimizer moved, and return the error."""
    from mcore_snap.testing import gpt

    chunks, optimizer = trained(rank, {"chunks": 2, "bf16": True}, 1)
    version_1 = snapshot(model_tree(chunks))
    gpt.train_step(chunks, optimizer, gpt.batch(1, rank))
    tree: Any = model_tree(chunks)
    given = optimizer
    if how == "precision-aware":
        for one in optimizer.chained_optimizers:
            one.config.use_precision_aware_optimizer = True
            one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        # What makes it a case to refuse: Megatron-Core says nothing, and does nothing.
        main = next(mains(optimizer))[1]
        was = bits({"": main})
        chunks[0].buffers[0].param_data.mul_(2)
        optimizer.reload_model_params()
        assert bits({"": main}) == was
    elif how == "another model":
        given = trained(rank, {"chunks": 2}, 0)[1]
    elif how == "chunks missing":
        tree, version_1 = model_tree(chunks[0]), snapshot(model_tree(chunks[0]))
    elif how == "misfit":
        version_1 = snapshot(model_tree(trained(rank, {"chunks": 2, "bf16": False}, 0)[0]))
    elif how == "no optimizer":
        given = None
    before = everything(chunks, optimizer)
    try:
        rollback(tree, version_1, given)
    except SnapError as error:
        assert differing(everything(chunks, optimizer), before) == []
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("precision-aware", "use_precision_aware_optimizer"),
        ("another model", "found others in DistributedOptimizer"),
        ("chunks missing", "make the tree of all chunks that it trains"),
        ("misfit", "bfloat16"),
        ("no optimizer", "optimizer: expected an optimizer, found NoneType"),
    ],
)
def test_refused_before_anything_is_written(how: str, message: str) -> None:
    """An optimizer that would overwrite the load later is said to, and the model is left alone."""
    ((kind, text),) = run_ranks(refused, 1, how)
    assert kind == "StructureMismatch"
    assert message in text
    assert "nothing was written" in text


def offloaded(rank: int) -> tuple[str, str]:
    """Roll back while the weights are in host memory, which a load can do."""
    chunks, optimizer = trained(rank, {}, 1)
    version_1 = snapshot(model_tree(chunks))
    data = chunks[0].buffers[0].param_data
    data.cpu_data = data.clone()
    data.untyped_storage().resize_(0)
    was = bits({"": data.cpu_data})
    try:
        rollback(model_tree(chunks), version_1, optimizer)
    except SnapError as error:
        assert bits({"": data.cpu_data}) == was
        return type(error).__name__, str(error)
    return "nothing", ""


def test_offloaded_weights_are_refused_by_name() -> None:
    """Main weights would be refreshed from freed memory, which ends the process."""
    ((kind, text),) = run_ranks(offloaded, 1)
    assert kind == NotResident.__name__
    assert "optimizer.chained_optimizers[0]: expected weights to refresh main weights from" in text
    assert "bring the offloaded memory back" in text


def fully_sharded(rank: int, kind: str) -> bool:
    """Roll a fully sharded model back, with an optimizer that cannot reload, as Megatron-FSDP's own."""
    from mcore_snap.testing import fully_sharded as sharded
    from mcore_snap.testing.gpt import batch

    with sharded.cpu_fully_sharded():
        chunks: Any = sharded.fsdp2_gpt() if kind == "fsdp2" else sharded.megatron_fsdp_gpt(kind)
        sharded.train_step(chunks, batch(0, rank))
        tree = model_tree(chunks)
        version_1 = snapshot(tree)
        sharded.train_step(chunks, batch(1, rank))
        assert fingerprint(tree) != fingerprint(version_1)
        if kind == "fsdp2":
            rollback(tree, version_1, torch.optim.SGD(chunks[0].parameters()))
        else:
            main = [weight for _, weight in chunks[0].param_and_grad_buffer.optimizer_named_parameters]
            rollback(tree, version_1, Wrapper(torch.optim.SGD(main), ddp_config=FSDP, reload_model_params=None))
        return fingerprint(tree) == fingerprint(version_1)


@pytest.mark.parametrize("kind", SHARDED)
def test_main_weights_of_a_fully_sharded_model_are_in_the_tree(kind: str) -> None:
    """What the optimizer steps on is loaded like the rest, so nothing has to be refreshed."""
    assert run_ranks(fully_sharded, 2, kind) == [True, True]


class Wrapper:
    """Be an optimizer of Megatron-Core's kind around one of torch's."""

    def __init__(self, inner: Any, **attributes: Any) -> None:
        self.optimizer = inner
        self.reloads = 0
        vars(self).update(attributes)

    def reload_model_params(self) -> None:
        """Count the calls."""
        self.reloads += 1


class OwnMasters(torch.optim.SGD):
    """Be like fused optimizers that keep main weights in their state."""

    master_weights = True


class Hybrid(torch.optim.SGD):
    """Be like Megatron-Core's HybridDeviceOptimizer: it lists the model's weights, and steps on copies."""

    def __init__(self, params: Any, copies: Any = (), widened: Any = ()) -> None:
        super().__init__(params)
        self.gpu_params_map_cpu_copy = dict.fromkeys(copies)
        self.param_to_fp32_param = dict.fromkeys(widened)

    def update_fp32_param_by_new_param(self) -> None:
        """Do nothing here."""


def linear() -> tuple[nn.Linear, Any, Any]:
    """Make a model, its tree, and a snapshot with other weights."""
    model = nn.Linear(2, 1)
    tree = model_tree(model)
    kept = snapshot(tree)
    model.weight.data.add_(1)
    return model, tree, kept


FSDP: Final = SimpleNamespace(use_megatron_fsdp=True)
AWARE: Final = SimpleNamespace(use_precision_aware_optimizer=True)
OUTSIDE: Final = SimpleNamespace(
    use_precision_aware_optimizer=True, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False
)


@pytest.mark.parametrize(
    ("make", "reloads"),
    [
        (lambda own, copies: Wrapper(torch.optim.SGD(own)), 0),
        (lambda own, copies: Wrapper(torch.optim.SGD(copies), float16_groups=[own]), 1),
        (lambda own, copies: Wrapper(torch.optim.SGD(copies), config=OUTSIDE, model_float16_groups=[own]), 1),
        (lambda own, copies: Wrapper(torch.optim.SGD(own), ddp_config=FSDP, config=AWARE), 0),
        (lambda own, copies: Wrapper(Hybrid(own, own, own), config=AWARE, model_float16_groups=[own]), 1),
    ],
    ids=["in place", "copies", "precision-aware outside", "fully sharded", "hybrid"],
)
def test_main_weights_are_refreshed_exactly_where_there_are_any(make: Any, reloads: int) -> None:
    """Also inside chains of chains, beside members that are missing or empty."""
    model, tree, kept = linear()
    own = list(model.parameters())
    member = make(own, [p.detach().clone().requires_grad_() for p in own])
    stub = Wrapper(None)
    chain = SimpleNamespace(
        chained_optimizers=[None, stub, SimpleNamespace(chained_optimizers=[member, torch.optim.SGD(own)])]
    )
    rollback(tree, kept, chain)
    assert bits(dict(model.state_dict())) == bits(dict(tree_of(kept)))
    assert (member.reloads, stub.reloads) == (reloads, 0)


def tree_of(kept: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of a snapshot of one chunk by name, as copies."""
    return {name: tensor.clone() for name, tensor in kept.chunks[0].parameters.items()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda own, copies: torch.optim.SGD(copies), "found neither in SGD"),
        (lambda own, copies: torch.optim.SGD([own[0], copies[1]]), "found neither in SGD"),
        (lambda own, copies: OwnMasters(own), "inside OwnMasters"),
        (lambda own, copies: Wrapper(torch.optim.SGD(copies), config=AWARE), "use_precision_aware_optimizer"),
        (lambda own, copies: Wrapper(torch.optim.SGD(copies), ddp_config=FSDP), "found neither in Wrapper"),
        (lambda own, copies: Wrapper(Hybrid(own, own), model_float16_groups=[own]), "optimizer_cpu_offload"),
        (lambda own, copies: Wrapper(Hybrid(own, own, own)), "optimizer_cpu_offload"),
        (lambda own, copies: Wrapper(torch.optim.SGD(copies), float16_groups=[copies]), "found others in Wrapper"),
        (lambda own, copies: Wrapper(object()), "expected an optimizer, found Wrapper"),
    ],
)
def test_main_weights_out_of_reach_are_refused(make: Any, message: str) -> None:
    """Every member of a chain that would undo the load is named, and nothing is written."""
    model, tree, kept = linear()
    own = list(model.parameters())
    before = bits(dict(model.state_dict()))
    member = make(own, [p.detach().clone().requires_grad_() for p in own])
    with pytest.raises(StructureMismatch, match=r"nothing was written") as caught:
        rollback(tree, kept, SimpleNamespace(chained_optimizers=[member, torch.optim.SGD(own), member]))
    names = [line.split(":")[0] for line in caught.value.problems]
    assert names == ["optimizer.chained_optimizers[0]", "optimizer.chained_optimizers[2]"]
    assert all(message in line for line in caught.value.problems)
    assert bits(dict(model.state_dict())) == before


def test_an_optimizer_that_fails_to_reload_is_said_after_the_load() -> None:
    """By then the weights are the snapshot's, and the message says that the next step would undo it."""
    model, tree, kept = linear()
    own = list(model.parameters())
    member: Any = Wrapper(torch.optim.SGD([own[0].detach().clone()]), float16_groups=[own])
    member.reload_model_params = lambda: 1 / 0
    with pytest.raises(SnapError, match="the next step would overwrite them") as caught:
        rollback(tree, kept, member)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert bits(dict(model.state_dict())) == bits(tree_of(kept))


def test_a_plain_tree_with_torchs_own_optimizer() -> None:
    """Any pytree will do where the optimizer works on its memory."""
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    kept = snapshot({"w": weight})
    weight.sum().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    optimizer.step()
    assert rollback({"w": weight}, kept, optimizer)["w"] is weight
    assert weight.tolist() == [1.0, 1.0]
