"""Reading a model into chunk trees: every byte of parameters and buffers in exactly one leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final, Literal, NamedTuple, TypeAlias, final

from torch import Tensor, nn

from mcore_snap.layouts import Layout
from mcore_snap.live import Live, mark_live
from mcore_snap.megatron.extra_state import Modules, extra_state_of
from mcore_snap.megatron.flat_buffers import flat_buffers
from mcore_snap.megatron.fsdp2 import unsharded
from mcore_snap.megatron.inner_tensors import inner_tensors
from mcore_snap.megatron.megatron_fsdp import Sharded, megatron_fsdp
from mcore_snap.megatron.placing import Placing, Spot, place
from mcore_snap.megatron.residency import resident
from mcore_snap.megatron.shards import GatherShards, Shard, shards
from mcore_snap.megatron.transformer_engine import ForgetCopies, keeps_copies
from mcore_snap.nodes import ChunkTree
from mcore_snap.words import Whereabouts, plain, problem_with, region_of, whereabouts

__all__ = ["Buffers", "read_chunks"]

Hooks: TypeAlias = tuple[Callable[[], None], ...]

Buffers: TypeAlias = Literal["all", "persistent"]
"""Which registered buffers belong to a tree."""

_FLAT: Final = ("buffers", "expert_parallel_buffers")

_PLACINGS: Final = 4
"""Placings that are remembered, at about 400 bytes a parameter: of two models, say, on the device and off it."""


class _Ties(NamedTuple):
    """What is to be known of a tensor besides where it lies.

    Attributes:
        memory: Where its bytes are now, if not in itself: its host copy while it is offloaded.
        counted: What counts versions of the same memory apart from it.
        after: What has to be called once it was written.
        slices: This rank's parts of it, where only these are kept.
    """

    memory: Tensor | None = None
    counted: tuple[Tensor, ...] = ()
    after: Hooks = ()
    slices: tuple[Shard, ...] = ()


_NO_TIES: Final = _Ties()

_spot: Final = partial(tuple.__new__, Spot)  # half the time of Spot(...)


@final
class _Found:
    """All tensors of a model, a list for each thing to be known of them.

    There are thousands, looked at whenever a tree is used: what is the same for nearly all is kept for the
    others only.

    Attributes:
        spots: Where each was found.
        tensors: The tensors themselves.
        ties: What else is to be known of some, by their index.
    """

    __slots__ = ("spots", "tensors", "ties")

    def __init__(self) -> None:
        self.spots: list[Spot] = []
        self.tensors: list[Tensor] = []
        self.ties: dict[int, _Ties] = {}

    def add(self, spot: Spot, tensor: Tensor, ties: _Ties | None = None) -> None:
        """Take one tensor on."""
        if ties is not None:
            self.ties[len(self.spots)] = ties
        self.spots.append(spot)
        self.tensors.append(tensor)

    def add_parts(self, spot: Spot, tensor: Tensor, ties: _Ties | None = None) -> None:
        """Take on a tensor, or what it is made of; its ties have neither another memory nor slices."""
        inner = inner_tensors(tensor)
        if inner is None:
            self.add(spot, tensor, ties)
            return
        counted, after = ((), ()) if ties is None else (ties.counted, ties.after)
        after = after if inner.after is None else (*after, inner.after)
        for suffix, part in inner.parts:
            key = f"{spot.key}.{suffix}" if suffix else spot.key
            self.add(spot._replace(key=key), part, _Ties(None, (tensor, *counted), after))


def read_chunks(
    chunks: Sequence[nn.Module], *, buffers: Buffers = "all", dp_sharded: bool = False
) -> tuple[ChunkTree, ...]:
    """Return one ChunkTree per chunk, with handles on the model's own memory for leaves.

    Args:
        chunks: The model.
        buffers: Which registered buffers to read.
        dp_sharded: Whether to read only this rank's slices of the flat buffers.

    Raises:
        StructureMismatch: Two tensors share memory in part.
    """
    modules = [list(chunk.named_modules()) for chunk in chunks]  # walked once: that is a good part of all the time
    found = _Found()
    for index, chunk in enumerate(chunks):
        forget = (ForgetCopies(chunk),) if keeps_copies(module for _, module in modules[index]) else ()
        sharded = megatron_fsdp(chunk)
        if sharded is None:
            _find_flat_buffers(found, index, chunk, forget, dp_sharded=dp_sharded)
            _find_parameters(found, index, chunk, modules[index], forget)
        else:
            _find_sharded(found, index, sharded, forget)
        _find_registered(found, index, modules[index], buffers)
    wheres = whereabouts(found.tensors)
    placing = _placed(tuple(found.spots), tuple(wheres), len(chunks))
    covered: dict[int, list[int]] = {index: [] for index, holder in enumerate(placing.holders) if holder is None}
    for index, holder in enumerate(placing.holders):
        if holder is not None:
            covered[holder].append(index)
    fields: list[dict[str, dict[int | str, Tensor]]] = [{} for _ in chunks]
    for leaf, within in covered.items():
        spot = found.spots[leaf]
        field = fields[spot.chunk].setdefault(spot.field, {})
        if wheres[leaf] is None or within or leaf in found.ties or spot.field != "parameters":
            field.update(_handles(found, leaf, within))
        else:  # an ordinary parameter with memory of its own, of which there may be very many
            field[spot.key] = plain(found.tensors[leaf])
    return tuple(
        _chunk_tree(fields[index], its, Layout(placing.placements[index], _slices(found, index)))
        for index, its in enumerate(modules)
    )


@lru_cache(maxsize=_PLACINGS)
def _placed(spots: tuple[Spot, ...], wheres: tuple[Whereabouts | None, ...], chunks: int) -> Placing:
    # A model is read at every use, and mostly lies where it lay before. Equal places have an equal answer, so
    # the proof that every byte is in exactly one leaf is made once for each way in which its memory lies.
    regions = [
        None if where is None else region_of(str(spot), where, whole=spot.field in _FLAT)
        for spot, where in zip(spots, wheres, strict=True)
    ]
    return place(spots, regions, chunks)


def _find_sharded(found: _Found, index: int, sharded: Sharded, forget: Hooks) -> None:
    after = (sharded.after, *forget)
    for number, data in enumerate(sharded.buffers):
        found.add(Spot(index, "buffers", number), data, _Ties(counted=sharded.covered, after=after))
    for name, parameter in sharded.parameters:
        found.add_parts(Spot(index, "parameters", name), parameter, _Ties(after=after))


def _find_flat_buffers(found: _Found, index: int, chunk: nn.Module, forget: Hooks, *, dp_sharded: bool) -> None:
    counts: dict[str, int] = {}
    for flat in flat_buffers(chunk):
        number = counts.get(flat.field, 0)
        if dp_sharded:
            mine = tuple(shards(chunk, flat))
            counts[flat.field] = number + len(mine)
            ties = _Ties(after=(GatherShards(chunk), *forget), slices=mine)
        else:
            counts[flat.field] = number + 1
            ties = _Ties(resident(flat.buffer, flat.data), after=forget)
        found.add(Spot(index, flat.field, number, sliced=dp_sharded), flat.data, ties)


def _find_parameters(found: _Found, index: int, chunk: nn.Module, modules: Modules, forget: Hooks) -> None:
    wholes = unsharded(chunk)
    if type(chunk).named_parameters is not nn.Module.named_parameters:  # a wrapper that hides itself in the names
        for name, shown in chunk.named_parameters():
            ties = _Ties(counted=(wholes[shown],) if shown in wholes else (), after=forget)
            found.add_parts(Spot(index, "parameters", name, not getattr(shown, "allreduce", True)), shown, ties)
        return
    spots, tensors, special = found.spots, found.tensors, bool(wholes or forget)
    # Reading a tree is mostly this loop: it calls nothing that it need not. Names are as `named_parameters` has
    # them, each parameter once by its first, but without another walk.
    seen: set[int] = set()
    for prefix, module in modules:
        for own, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{own}" if prefix else own
            spot = _spot((index, "parameters", name, not getattr(parameter, "allreduce", True), False))
            if type(parameter) is nn.Parameter and not special:
                spots.append(spot)
                tensors.append(parameter)
            else:
                counted = (wholes[parameter],) if parameter in wholes else ()
                found.add_parts(spot, parameter, _Ties(counted=counted, after=forget))


def _find_registered(found: _Found, index: int, modules: Modules, buffers: Buffers) -> None:
    seen: set[int] = set()
    for prefix, module in modules:
        for own, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            persists = own not in module._non_persistent_buffers_set
            # Yarn's tables of sines: made from the configuration alone, and anew with another shape when a
            # sequence is longer. What they are good for stands in plain attributes, which no load reaches.
            made = not persists and own.endswith("_cached") and hasattr(module, "max_seq_len_cached")
            if persists or (buffers == "all" and not made):
                found.add_parts(Spot(index, "module_buffers", f"{prefix}.{own}" if prefix else own), buffer)


def _handles(found: _Found, leaf: int, covered: Sequence[int]) -> dict[int | str, Tensor]:
    spot, tensor, own = found.spots[leaf], found.tensors[leaf], found.ties.get(leaf, _NO_TIES)
    memory = tensor if own.memory is None else own.memory
    problem = problem_with(memory)
    if problem is not None and problem[0] == "unsupported":
        return {spot.key: memory}
    tied = [found.ties[index] for index in (leaf, *covered) if index in found.ties]
    live = Live(
        covered=(
            *[other for index in covered if (other := found.tensors[index]) is not tensor],
            *(other for ties in tied for other in ties.counted),
        ),
        registered=spot.field == "module_buffers",
        after=tuple(dict.fromkeys(hook for ties in tied for hook in ties.after)),
    )
    if spot.sliced and isinstance(spot.key, int):
        return {spot.key + number: mark_live(plain(shard.data), live) for number, shard in enumerate(own.slices)}
    return {spot.key: mark_live(plain(memory), live)}


def _slices(found: _Found, chunk: int) -> tuple[tuple[int, int], ...] | None:
    sliced = [(found.spots[index], ties.slices) for index, ties in found.ties.items() if ties.slices]
    return (
        tuple(
            (shard.rank, shard.size)
            for field in _FLAT
            for spot, mine in sliced
            if (spot.chunk, spot.field) == (chunk, field)
            for shard in mine
        )
        or None
    )


def _chunk_tree(leaves: dict[str, dict[int | str, Tensor]], modules: Modules, layout: Layout) -> ChunkTree:
    present, absent = extra_state_of(modules)
    return ChunkTree(
        tuple(leaves.get("buffers", {}).values()),
        tuple(leaves.get("expert_parallel_buffers", {}).values()),
        {str(name): leaf for name, leaf in leaves.get("parameters", {}).items()},
        {str(name): leaf for name, leaf in leaves.get("module_buffers", {}).items()},
        present,
        layout=layout,
        stateless=absent,
    )
