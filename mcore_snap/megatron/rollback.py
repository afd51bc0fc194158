"""`rollback`: a load that the optimizer goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeVar

from torch import Tensor

from mcore_snap.checking import Problem, refuse
from mcore_snap.errors import SnapError
from mcore_snap.live_trees import read_once
from mcore_snap.loading import load
from mcore_snap.megatron.inner_tensors import inner_tensors
from mcore_snap.registration import flatten
from mcore_snap.words import has_storage, problem_with

__all__ = ["rollback"]

T = TypeVar("T")

_CHAINS: Final = ("chained_optimizers", "_active_optimizers")
"""Where an optimizer made of others keeps them: ChainedOptimizer and its kin, MimoOptimizer."""

_TRAINED: Final = ("model_float16_groups", "model_fp32_groups", "float16_groups", "fp32_from_fp32_groups")
"""Where Megatron-Core's optimizers keep the model's own parameters, beside the main ones."""


def rollback(tree: T, snap: Any, optimizer: Any) -> T:
    """Load a snapshot so that the optimizer goes on from it, and return the tree.

    A bf16 or fp16 model is trained through fp32 main weights inside the optimizer, and its next step
    would overwrite what `load` alone wrote. Here they are refreshed from the loaded weights by the
    optimizer's own ``reload_model_params()``. Optimizers that work on the model's own memory need
    nothing more than the load: Megatron-Core's in fp32, torch's own over the model's parameters, and
    Megatron-FSDP's, whose main weights are leaves of the tree.

    Main weights come back as precise as the model's weights are: the bits that bf16 dropped when the
    snapshot was taken are zero now. Moments, step counts and learning rates stay as they are, for they
    are no weights; save and load the optimizer's ``state_dict()`` to take those back too. As with
    `load`, every rank has to roll back to the same version, at the same point of the program.

    Args:
        tree: What `model_tree` gave, or any pytree of tensors.
        snap: A snapshot of it.
        optimizer: What trains the tree: Megatron-Core's, chained or not, or one of torch's.

    Raises:
        StructureMismatch: The snapshot does not fit; or the optimizer trains other tensors than the
            tree's, or has main weights that cannot be refreshed (``use_precision_aware_optimizer``,
            where ``reload_model_params()`` does nothing). Nothing was written.
        NotResident: Weights are offloaded, so that nothing can be refreshed from them; or as `load`.
        NotReady: As `load`.
        SnapError: A copy failed half-way; or the optimizer refused after the load, as the message says.

    >>> import torch
    >>> from mcore_snap import model_tree, snapshot
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> kept = snapshot(model_tree(model))
    >>> rollback(model_tree(model), kept, optimizer)
    ModelTree(live, 1 chunk(s), 2 leaves, 12 bytes, float32)
    """
    now = read_once(tree)
    memory = {storage for leaf in flatten(now)[0] for storage in _storages(leaf)}
    members = list(_members(optimizer, "optimizer"))
    problems = [problem for member in members if (problem := _problem(member, memory))]
    refuse("the optimizer would not go on from the snapshot; nothing was written", problems)
    load(now, snap)
    for member in members:
        if not _works_in_place(member, memory):
            _reload(member)
    return tree


class _Member(NamedTuple):
    """An optimizer that is not made of others.

    Attributes:
        name: How to reach it from the one that was given.
        outer: Itself, perhaps a wrapper of Megatron-Core's.
        inner: The one of torch's kind that holds parameters and state.
    """

    name: str
    outer: Any
    inner: Any


def _members(optimizer: Any, name: str) -> Iterator[_Member]:
    for chain in _CHAINS:
        parts = getattr(optimizer, chain, None)
        if isinstance(parts, list | tuple):
            for index, part in enumerate(parts):
                # A rank on which nothing is trained has None, or a stub around it.
                if part is not None:
                    yield from _members(part, f"{name}.{chain}[{index}]")
            return
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is not None or not hasattr(optimizer, "optimizer"):
        yield _Member(name, optimizer, inner)


def _problem(member: _Member, memory: set[int]) -> Problem | None:
    name, outer, inner = member
    kind = type(outer).__name__
    if not hasattr(inner, "param_groups"):
        return "structure", f"{name}: expected an optimizer, found {kind}; pass the one that trains the tree"
    parts = [*_parameters(inner), *_model_parameters(outer)]
    absent = [found[1] for part in parts if (found := problem_with(part)) and found[0] == "absent"]
    if absent:
        line = f"{name}: expected weights to refresh main weights from, found {len(absent)} tensor(s) without: "
        return "absent", line + absent[0]
    hidden = _hidden_main_weights(member)
    if hidden:
        return "structure", f"{name}: expected main weights that can be refreshed, found {hidden}"
    if _works_in_place(member, memory):
        return None
    if _is_fully_sharded(outer) or not hasattr(outer, "reload_model_params"):
        line = f"{name}: expected the tree's own memory in param_groups, or main weights and reload_model_params(), "
        return "structure", line + f"found neither in {kind}; pass the optimizer that trains the tree"
    if not all(_storages(part) <= memory for part in _model_parameters(outer)):
        line = f"{name}: expected an optimizer of the tree's parameters alone, found others in {kind}; "
        return "structure", line + "make the tree of all chunks that it trains"
    return None


def _hidden_main_weights(member: _Member) -> str | None:
    _, outer, inner = member
    if _is_hybrid(inner):
        copies = getattr(inner, "gpu_params_map_cpu_copy", {})
        refreshes = hasattr(inner, "update_fp32_param_by_new_param") and hasattr(outer, "model_float16_groups")
        if refreshes and set(map(id, copies)) <= set(map(id, inner.param_to_fp32_param)):
            return None
        return (
            "copies on the CPU that Megatron-Core does not refresh (optimizer_cpu_offload); roll back by loading a "
            "checkpoint of model and optimizer"
        )
    config = getattr(outer, "config", None)
    aware = getattr(config, "use_precision_aware_optimizer", False)
    # From 0.13 on, fp8 recipes other than the delayed one keep the main weights outside all the same.
    aware = getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", aware)
    if getattr(inner, "master_weights", False) or (aware and not _is_fully_sharded(outer)):
        return (
            f"them inside {type(inner).__name__} (use_precision_aware_optimizer), where reload_model_params() does "
            "nothing; build the optimizer without it, or load a checkpoint of model and optimizer"
        )
    return None


def _works_in_place(member: _Member, memory: set[int]) -> bool:
    return not _is_hybrid(member.inner) and all(_storages(tensor) <= memory for tensor in _parameters(member.inner))


def _is_hybrid(inner: Any) -> bool:
    # HybridDeviceOptimizer lists the model's parameters, but steps on copies.
    return hasattr(inner, "param_to_fp32_param")


def _is_fully_sharded(outer: Any) -> bool:
    # Megatron-FSDP: from 0.14 on, reload_model_params() does nothing there, or raises.
    config = getattr(outer, "ddp_config", None)
    return any(getattr(config, name, False) for name in ("use_megatron_fsdp", "use_custom_fsdp"))


def _parameters(inner: Any) -> list[Tensor]:
    return [part for group in inner.param_groups for tensor in group["params"] for part in _parts(tensor)]


def _model_parameters(outer: Any) -> list[Tensor]:
    groups = [group for name in _TRAINED for group in getattr(outer, name, ())]
    return [part for group in groups for tensor in group for part in _parts(tensor)]


def _parts(tensor: Tensor) -> list[Tensor]:
    inner = inner_tensors(tensor)
    return [tensor] if inner is None else [part for _, part in inner.parts]


def _storages(part: Any) -> set[int]:
    if not isinstance(part, Tensor) or not part.numel() or not has_storage(part):
        return set()
    return {part.untyped_storage()._cdata}


def _reload(member: _Member) -> None:
    try:
        member.outer.reload_model_params()
    except Exception as error:
        message = (
            f"the weights were loaded, but the next step would overwrite them: reload_model_params() of {member.name} "
            f"failed ({error}); mend it and roll back again"
        )
        raise SnapError(message) from error
