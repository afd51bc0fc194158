"""Reading a model into chunk trees: every byte of parameters and buffers in exactly one leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from torch import Tensor, nn

from mcore_snap.coverage import cover
from mcore_snap.layouts import Layout, Placement
from mcore_snap.live import Live, mark_live
from mcore_snap.megatron.extra_state import extra_state_of
from mcore_snap.megatron.flat_buffers import flat_buffers
from mcore_snap.megatron.fsdp2 import unsharded
from mcore_snap.megatron.inner_tensors import inner_tensors
from mcore_snap.megatron.megatron_fsdp import megatron_fsdp
from mcore_snap.megatron.residency import resident
from mcore_snap.megatron.shards import GatherShards, Shard, shards
from mcore_snap.megatron.transformer_engine import ForgetCopies, keeps_copies
from mcore_snap.nodes import ChunkTree
from mcore_snap.words import has_storage, plain, problem_with, region_of

__all__ = ["Buffers", "read_chunks"]

Buffers: TypeAlias = Literal["all", "persistent"]
"""Which registered buffers belong to a tree."""

_FLAT = frozenset({"buffers", "expert_parallel_buffers"})


@dataclasses.dataclass(slots=True, eq=False)
class _Found:
    """One tensor of the model: where it was found, and where it lies.

    Attributes:
        chunk: Index of its chunk.
        field: Field of the ChunkTree.
        key: Index or name in the field.
        tensor: Its memory on the device.
        memory: Where its bytes are now: its host copy while it is offloaded.
        counted: What counts versions of the same memory apart from ``tensor``.
        after: What has to be called once it was written.
        expert: Whether it is a parameter of an expert.
        slices: This rank's parts of it, where only these are kept.
        holder: The leaf that holds it, if that is another.
        covered: What else lies in it.
    """

    chunk: int
    field: str
    key: int | str
    tensor: Tensor
    memory: Tensor
    counted: tuple[Tensor, ...] = ()
    after: tuple[Callable[[], None], ...] = ()
    expert: bool = False
    slices: tuple[Shard, ...] | None = None
    holder: _Found | None = None
    covered: list[_Found] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return f"chunks[{self.chunk}].{self.field}[{self.key!r}]"


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
    found = [
        one
        for index, chunk in enumerate(chunks)
        for one in (*_weights(index, chunk, dp_sharded=dp_sharded), *_registered(index, chunk, buffers))
    ]
    forgetting = {index: ForgetCopies(chunk) for index, chunk in enumerate(chunks) if keeps_copies(chunk)}
    for one in found:
        if one.chunk in forgetting and one.field != "module_buffers":
            one.after = (*one.after, forgetting[one.chunk])
    _settle_holders(found)
    return tuple(_chunk_tree(index, chunk, found) for index, chunk in enumerate(chunks))


def _weights(index: int, chunk: nn.Module, *, dp_sharded: bool) -> Iterator[_Found]:
    sharded = megatron_fsdp(chunk)
    if sharded is not None:
        for number, data in enumerate(sharded.buffers):
            yield _Found(index, "buffers", number, data, data, counted=sharded.covered, after=(sharded.after,))
        for name, parameter in sharded.parameters:
            yield from _parts(index, "parameters", name, parameter, after=(sharded.after,))
        return
    counts: dict[str, int] = {}
    for flat in flat_buffers(chunk):
        number = counts.get(flat.field, 0)
        if dp_sharded:
            mine = tuple(shards(chunk, flat))
            yield _Found(index, flat.field, number, flat.data, flat.data, after=(GatherShards(chunk),), slices=mine)
            counts[flat.field] = number + len(mine)
        else:
            yield _Found(index, flat.field, number, flat.data, resident(flat.buffer, flat.data))
            counts[flat.field] = number + 1
    wholes = unsharded(chunk)
    for name, parameter in chunk.named_parameters():
        counted = (wholes[parameter],) if parameter in wholes else ()
        expert = not getattr(parameter, "allreduce", True)
        yield from _parts(index, "parameters", name, parameter, counted=counted, expert=expert)


def _registered(index: int, chunk: nn.Module, buffers: Buffers) -> Iterator[_Found]:
    # `chunk.buffers` is a list on DDP; `named_buffers` is the module's own on every chunk.
    left_out = {name for name, recomputed in _non_persistent(chunk) if recomputed or buffers == "persistent"}
    for name, buffer in chunk.named_buffers():
        if name not in left_out:
            yield from _parts(index, "module_buffers", name, buffer)


def _non_persistent(chunk: nn.Module) -> Iterator[tuple[str, bool]]:
    for prefix, module in chunk.named_modules():
        # Yarn's tables of sines: made from the configuration alone, and anew with another shape when a
        # sequence is longer. What they are good for stands in plain attributes, which no load reaches.
        has_tables = hasattr(module, "max_seq_len_cached")
        for name in module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name, has_tables and name.endswith("_cached")


def _parts(  # noqa: PLR0913 - where it was found, and what is known of it
    index: int,
    field: str,
    name: str,
    tensor: Tensor,
    *,
    counted: tuple[Tensor, ...] = (),
    after: tuple[Callable[[], None], ...] = (),
    expert: bool = False,
) -> Iterator[_Found]:
    inner = inner_tensors(tensor)
    if inner is None:
        yield _Found(index, field, name, tensor, tensor, counted, after, expert)
        return
    if inner.after is not None:
        after = (*after, inner.after)
    for suffix, part in inner.parts:
        key = f"{name}.{suffix}" if suffix else name
        yield _Found(index, field, key, part, part, (tensor, *counted), after, expert)


def _settle_holders(found: list[_Found]) -> None:
    # What cannot be a leaf has no memory to compare; it stays, for the reader to be refused by name.
    sound = [one for one in found if has_storage(one.tensor)]
    regions = [region_of(one.name, one.tensor, whole=one.field in _FLAT) for one in sound]
    for one, owner in zip(sound, cover(regions), strict=True):
        if owner is not None:
            one.holder = sound[owner]
            sound[owner].covered.append(one)


def _chunk_tree(index: int, chunk: nn.Module, found: list[_Found]) -> ChunkTree:
    mine = [one for one in found if one.chunk == index]
    leaves: dict[str, dict[int | str, Tensor]] = {}
    for one in mine:
        if one.holder is None:
            leaves.setdefault(one.field, {}).update(_handles(one))
    present, absent = extra_state_of(chunk)
    sliced = [shard for field in sorted(_FLAT) for one in mine if one.field == field for shard in one.slices or ()]
    return ChunkTree(
        tuple(leaves.get("buffers", {}).values()),
        tuple(leaves.get("expert_parallel_buffers", {}).values()),
        {str(name): leaf for name, leaf in leaves.get("parameters", {}).items()},
        {str(name): leaf for name, leaf in leaves.get("module_buffers", {}).items()},
        present,
        layout=Layout(
            tuple(_placement(one) for one in mine if one.field == "parameters" and not _is_sliced(one)),
            tuple((shard.rank, shard.size) for shard in sliced) if sliced else None,
        ),
        stateless=absent,
    )


def _is_sliced(one: _Found) -> bool:
    return one.holder is not None and one.holder.slices is not None


def _handles(one: _Found) -> dict[int | str, Tensor]:
    problem = problem_with(one.memory)
    if problem is not None and problem[0] == "unsupported":
        return {one.key: one.memory}
    within = [one, *one.covered]
    live = Live(
        covered=tuple(_counted_apart(one)),
        registered=one.field == "module_buffers",
        after=tuple(dict.fromkeys(hook for other in within for hook in other.after)),
    )
    if one.slices is not None and isinstance(one.key, int):
        return {one.key + number: mark_live(plain(shard.data), live) for number, shard in enumerate(one.slices)}
    return {one.key: mark_live(plain(one.memory), live)}


def _counted_apart(one: _Found) -> Iterator[Tensor]:
    yield from one.counted
    for other in one.covered:
        if other.tensor is not one.tensor:
            yield other.tensor
        yield from other.counted


def _placement(one: _Found) -> Placement:
    holder = one.holder or one
    chunk = None if holder.chunk == one.chunk else holder.chunk
    view = None
    shape, stride = tuple(one.tensor.shape), tuple(one.tensor.stride()) if one.holder else ()
    if one.holder and (shape, stride) != (tuple(holder.tensor.shape), tuple(holder.tensor.stride())):
        view = (int(one.tensor.storage_offset() - holder.tensor.storage_offset()), shape, stride)
    return Placement(str(one.key), chunk, holder.field, holder.key, view, one.expert)
