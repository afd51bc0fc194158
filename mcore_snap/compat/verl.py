"""verl's two functions for keeping a Megatron-Core model on the host, in place: one import changes.

Where a worker says ``from verl.utils.megatron_utils import copy_megatron_model_to_cpu,
restore_megatron_model_from_cpu``, it says ``from mcore_snap.compat.verl import`` the same instead.

Both functions are collective over the data-parallel group where overlapped parameter gathers are due
(`overlap_param_gather`, from `optimizer.step()` to the next forward pass): every rank calls them, in the
same order. verl's workers do, since they run each method on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mcore_snap.errors import StructureMismatch
from mcore_snap.loading import load
from mcore_snap.megatron.tree import model_tree
from mcore_snap.nodes import ModelTree
from mcore_snap.snapshots import snapshot

__all__ = ["copy_megatron_model_to_cpu", "restore_megatron_model_from_cpu"]

_THEIRS = "model_chunk_"


def copy_megatron_model_to_cpu(models: nn.Module | Iterable[nn.Module]) -> ModelTree:
    """Return a frozen copy of a model's weights in host memory; the model stays as it is.

    The copy holds what verl's holds, the flat parameter buffers or the parameters, and also what lies
    beside them: frozen parameters, registered buffers, extra state. It depends on no model: keep it in
    a dict by version, pickle it, delete it, restore it as often as wanted and in any order.

    Collective where parameter gathers are due. Offloaded weights are read from their host copy, by
    verl's convention or Megatron-Core's.

    Args:
        models: The chunks of the model, wrapped by DDP or not, or a single one.

    Raises:
        TypeError: Something in ``models`` is no module.
        ValueError: ``models`` is empty.
        StructureMismatch: A tensor of the model is of a kind that cannot be kept.
        NotResident: The memory of a tensor is freed, and no host copy of it is left.
        NotReady: Weights are in flight and cannot be settled from here.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> cpu_saved_models = {1: copy_megatron_model_to_cpu([model])}
    >>> cpu_saved_models[1]
    ModelTree(frozen, 1 chunk(s), 2 leaves, 12 bytes, float32)
    """
    chunks = _chunks(models)
    return snapshot(model_tree(chunks))


def restore_megatron_model_from_cpu(models: nn.Module | Iterable[nn.Module], cpu_state: ModelTree) -> None:
    """Write a copy back into a model of the same structure, in place and bit for bit.

    Everything is checked before a byte is written. Where verl's function skips in silence (a chunk that
    the copy lacks, a copy of a wrapped model for one that is not), this one raises. Collective where
    parameter gathers are due. Offloaded weights are written to their host copy.

    As with verl's, the optimizer is not told: its fp32 masters, where it has them, overwrite the weights
    at the next step. To look back, restore the current version before it.

    Args:
        models: The model; it need not be the object that the copy was taken from.
        cpu_state: What `copy_megatron_model_to_cpu` returned.

    Raises:
        TypeError: ``cpu_state`` is no such copy, or something in ``models`` is no module.
        ValueError: ``models`` is empty.
        StructureMismatch: The copy is of another structure, or was taken by verl's own function. The
            message lists all problems by name.
        NotResident: The memory of a tensor is freed, and no host copy of it is left.
        NotReady: Weights are in flight and cannot be settled from here.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> cpu_state = copy_megatron_model_to_cpu([model])
    >>> kept, _ = model.weight.clone(), model.weight.data.zero_()
    >>> restore_megatron_model_from_cpu([model], cpu_state)
    >>> bool((model.weight == kept).all())
    True
    """
    _check_ours(cpu_state)
    chunks = _chunks(models)
    load(model_tree(chunks), cpu_state)


def _chunks(models: Any) -> Any:
    # verl enumerates whatever it is given, generators too; what is no iterable is for model_tree to refuse.
    return tuple(models) if isinstance(models, Iterable) and not isinstance(models, nn.Module) else models


def _check_ours(cpu_state: object) -> None:
    # A live tree would be "restored" from the very memory that it is to be written to.
    if isinstance(cpu_state, ModelTree) and cpu_state.source is None:
        return
    expected = "expected what mcore_snap.compat.verl.copy_megatron_model_to_cpu returned"
    if isinstance(cpu_state, Mapping) and any(str(key).startswith(_THEIRS) for key in cpu_state):
        message = "the state was taken by verl's own function; nothing was written"
        cure = "take it with this module's function, or restore it with verl's"
        raise StructureMismatch(message, [f"cpu_state: {expected}, found verl's own dict of model chunks; {cure}"])
    found = "a live tree; take the copy first" if isinstance(cpu_state, ModelTree) else type(cpu_state).__name__
    raise TypeError(f"cpu_state: {expected}, found {found}")
