"""`model_tree`: the live pytree of a model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast, final

from torch import nn

from mcore_snap.errors import NotResident
from mcore_snap.megatron.flat_buffers import check_ready
from mcore_snap.megatron.reading import read_chunks
from mcore_snap.nodes import ChunkTree, ModelTree

__all__ = ["model_tree"]


@final
class _LiveModel:
    """Reads a model that somebody else keeps alive."""

    __slots__ = ("_chunks",)

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = tuple(weakref.ref(chunk) for chunk in chunks)

    def read(self) -> tuple[ChunkTree, ...]:
        chunks = [chunk() for chunk in self._chunks]
        gone = [f"chunks[{i}]: expected a model, found it freed" for i, chunk in enumerate(chunks) if chunk is None]
        if gone:
            message = "a tree does not keep its model alive; keep the model, and make a new tree with model_tree"
            raise NotResident(message, gone)
        alive = [chunk for chunk in chunks if chunk is not None]
        check_ready(alive)
        return read_chunks(alive)


def model_tree(models: nn.Module | Sequence[nn.Module]) -> ModelTree:
    """Return the live pytree of a model: named leaves over the model's own memory, no copy.

    Every byte of parameters and registered buffers is in exactly one leaf: DDP flat buffers where
    they hold the weights, all other parameters (frozen ones included) and registered buffers
    (persistent or not) by name, and extra state as bytes. Tied parameters are one leaf. Tensors
    that are plain attributes of a module cannot be found, and are not in the tree.

    The tree holds the model weakly and reads it anew whenever it is used; that raises NotReady while
    a parameter gather is due or under way, and NotResident once the model is gone.

    Args:
        models: One model chunk, or a sequence of them (virtual pipeline), wrapped by Megatron-Core's
            DDP or not.

    Raises:
        TypeError: Something in ``models`` is no module.
        ValueError: ``models`` is empty.
        StructureMismatch: Two tensors share memory in part, so that no leaf can hold both.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> model_tree(model)
    ModelTree(live, 1 chunk(s), 2 leaves, 12 bytes, float32)
    """
    several = isinstance(models, Sequence | nn.ModuleList) and not isinstance(models, str)
    chunks: list[object] = list(cast("Sequence[nn.Module]", models)) if several else [models]
    strangers = [type(chunk).__name__ for chunk in chunks if not isinstance(chunk, nn.Module)]
    if strangers:
        message = f"expected a model chunk or a sequence of them, found {', '.join(strangers)}"
        raise TypeError(message)
    if not chunks:
        message = "expected at least one model chunk, found an empty sequence"
        raise ValueError(message)
    modules = [chunk for chunk in chunks if isinstance(chunk, nn.Module)]
    # Read once, so that memory shared in part is refused here. Weights in flight are not: nothing is
    # copied yet, and under overlapped gathers a fresh model has not gathered anything.
    read_chunks(modules)
    return ModelTree(source=_LiveModel(modules))
