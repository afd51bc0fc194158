"""Reading a model into chunk trees: every byte of parameters and buffers in exactly one leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor, nn

from mcore_snap.coverage import cover
from mcore_snap.live import Live, mark_live
from mcore_snap.megatron.extra_state import extra_state_leaves
from mcore_snap.megatron.flat_buffers import flat_buffers
from mcore_snap.nodes import ChunkTree, Placement
from mcore_snap.words import plain, problem_with, region_of

__all__ = ["read_chunks"]


@dataclasses.dataclass(slots=True)
class _Found:
    """One tensor of the model: where it was found, and where it lies."""

    chunk: int
    field: str
    key: int | str
    tensor: Tensor
    holder: _Found | None = None
    covered: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        key = repr(self.key)
        return f"chunks[{self.chunk}].{self.field}[{key}]"


def read_chunks(chunks: Sequence[nn.Module]) -> tuple[ChunkTree, ...]:
    """Return one ChunkTree per chunk, with handles on the model's own memory for leaves.

    Raises:
        StructureMismatch: Two tensors share memory in part.
    """
    found = [one for index, chunk in enumerate(chunks) for one in _find(index, chunk)]
    _settle_holders(found)
    return tuple(_chunk_tree(index, chunk, found) for index, chunk in enumerate(chunks))


def _find(index: int, chunk: nn.Module) -> list[_Found]:
    found: list[_Found] = []
    counts: dict[str, int] = {}
    for name, data in flat_buffers(chunk):
        found.append(_Found(index, name, counts.get(name, 0), data))
        counts[name] = counts.get(name, 0) + 1
    found += [_Found(index, "parameters", name, parameter) for name, parameter in chunk.named_parameters()]
    # `chunk.buffers` is a list on DDP; `named_buffers` is the module's own on every chunk.
    found += [_Found(index, "module_buffers", name, buffer) for name, buffer in chunk.named_buffers()]
    return found


def _settle_holders(found: list[_Found]) -> None:
    # What cannot be a leaf has no memory to compare; it stays, for the reader to be refused by name.
    sound = [one for one in found if _has_memory(one.tensor)]
    regions = [
        region_of(one.name, one.tensor, whole=one.field in {"buffers", "expert_parallel_buffers"}) for one in sound
    ]
    for one, owner in zip(sound, cover(regions), strict=True):
        if owner is not None:
            one.holder = sound[owner]
            if one.tensor is not sound[owner].tensor:
                sound[owner].covered.append(one.tensor)


def _has_memory(tensor: Tensor) -> bool:
    problem = problem_with(tensor)
    return problem is None or (problem[0] == "absent" and not tensor.is_meta)


def _chunk_tree(index: int, chunk: nn.Module, found: list[_Found]) -> ChunkTree:
    mine = [one for one in found if one.chunk == index]
    leaves: dict[str, dict[int | str, Tensor]] = {}
    for one in mine:
        if one.holder is None:
            leaves.setdefault(one.field, {})[one.key] = _handle(one)
    return ChunkTree(
        tuple(leaves.get("buffers", {}).values()),
        tuple(leaves.get("expert_parallel_buffers", {}).values()),
        {str(name): leaf for name, leaf in leaves.get("parameters", {}).items()},
        {str(name): leaf for name, leaf in leaves.get("module_buffers", {}).items()},
        dict(extra_state_leaves(chunk)),
        layout=tuple(_placement(one) for one in mine if one.field == "parameters"),
    )


def _handle(one: _Found) -> Tensor:
    problem = problem_with(one.tensor)
    if problem is not None and problem[0] == "unsupported":
        return one.tensor
    live = Live(covered=tuple(one.covered), registered=one.field == "module_buffers")
    return mark_live(plain(one.tensor), live)


def _placement(one: _Found) -> Placement:
    holder = one.holder or one
    chunk = None if holder.chunk == one.chunk else holder.chunk
    view = None
    shape, stride = tuple(one.tensor.shape), tuple(one.tensor.stride()) if one.holder else ()
    if one.holder and (shape, stride) != (tuple(holder.tensor.shape), tuple(holder.tensor.stride())):
        view = (int(one.tensor.storage_offset() - holder.tensor.storage_offset()), shape, stride)
    return Placement(str(one.key), chunk, holder.field, holder.key, view)
