"""`model_tree`: the live pytree of a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast, final, get_args

from torch import nn

from mcore_snap.errors import NotResident
from mcore_snap.megatron.fsdp2 import reshard
from mcore_snap.megatron.megatron_fsdp import gathers_unchanged, settle_gathers
from mcore_snap.megatron.reading import Buffers, read_chunks
from mcore_snap.megatron.settling import flags_unchanged, settle
from mcore_snap.megatron.shards import check_shardable
from mcore_snap.nodes import ChunkTree, ModelTree

__all__ = ["model_tree"]


@final
class _LiveModel:
    """Reads a model that somebody else keeps alive."""

    __slots__ = ("_buffers", "_chunks", "_dp_sharded")

    def __init__(self, chunks: Sequence[nn.Module], buffers: Buffers, *, dp_sharded: bool) -> None:
        self._chunks = tuple(weakref.ref(chunk) for chunk in chunks)
        self._buffers: Buffers = buffers
        self._dp_sharded = dp_sharded

    def read(self) -> tuple[ChunkTree, ...]:
        alive = self._alive()
        # One's own slices are current without the gather, which would overwrite nothing of them.
        settle(alive, gather=not self._dp_sharded)
        for chunk in alive:
            reshard(chunk)
            settle_gathers(chunk)
        return self.look()

    def look(self) -> tuple[ChunkTree, ...]:
        return read_chunks(self._alive(), buffers=self._buffers, dp_sharded=self._dp_sharded)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        alive = self._alive()
        with ExitStack() as stack:
            stack.enter_context(flags_unchanged(alive))
            for chunk in alive:
                stack.enter_context(gathers_unchanged(chunk))
            yield

    def _alive(self) -> list[nn.Module]:
        chunks = [chunk() for chunk in self._chunks]
        gone = [f"chunks[{i}]: expected a model, found it freed" for i, chunk in enumerate(chunks) if chunk is None]
        if gone:
            message = "a tree does not keep its model alive; keep the model, and make a new tree with model_tree"
            raise NotResident(message, gone)
        return [chunk for chunk in chunks if chunk is not None]


def model_tree(
    models: nn.Module | Sequence[nn.Module], *, buffers: Buffers = "all", dp_sharded: bool = False
) -> ModelTree:
    """Return the live pytree of a model: named leaves over the model's own memory, no copy.

    Every byte of parameters and registered buffers is in exactly one leaf: DDP flat buffers where
    they hold the weights, all other parameters (frozen ones included) and registered buffers
    (persistent or not) by name, and extra state as bytes. Tied parameters are one leaf. A quantized
    or otherwise composed parameter is one leaf per tensor that it is made of; of a DTensor the leaf
    is this rank's shard; of Megatron-FSDP the leaves are its own weight buffers. Tensors that are
    plain attributes of a module cannot be found: put them beside the tree, ``{"model": model_tree(m),
    "cache": m.cache}`` is a tree as well.

    The tree holds the model weakly and reads it anew whenever it is used. Memory that moved is found
    again, and of a flat buffer that was offloaded, the host copy is read and written. With
    overlapped parameter gathers, using the tree finishes what is under way and gathers what is due:
    **collective** over the data-parallel group, as a forward pass is. So every rank uses its tree at
    the same points of the program.

    Args:
        models: One model chunk, or a sequence of them (virtual pipeline), wrapped by Megatron-Core's
            DDP or not. ``nn.ModuleList`` counts as a sequence; give ``[it]`` if it is one chunk. Give
            the raw module, not what ``torch.compile`` returned, which has other names.
        buffers: Which registered buffers belong to the tree: ``"all"``, or only the ``"persistent"``
            ones that a state dict has. Routers count tokens in the others, so that a look-back
            without them changes the training that follows. Yarn's tables of sines are in neither:
            they are made anew from the configuration.
        dp_sharded: With the distributed optimizer, keep of every flat buffer only the slices that
            this rank's optimizer owns: host memory and traffic divided by the data-parallel size.
            Taking a snapshot then communicates nothing and is never stale; `load` writes the slices
            and has Megatron-Core gather the rest, which is collective.

    Raises:
        TypeError: Something in ``models`` is no module.
        ValueError: ``models`` is empty, or ``buffers`` is neither of the two.
        StructureMismatch: Two tensors share memory in part, so that no leaf can hold both; or, with
            ``dp_sharded``, the slices would not make the whole.

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
    if buffers not in get_args(Buffers):
        message = f"expected buffers to be one of {', '.join(map(repr, get_args(Buffers)))}, found {buffers!r}"
        raise ValueError(message)
    if dp_sharded:
        check_shardable(modules)
    # Looked at once, so that memory shared in part is refused here. Nothing is settled yet: making a
    # tree is not collective.
    source = _LiveModel(modules, buffers, dp_sharded=dp_sharded)
    source.look()
    return ModelTree(source=source)
