"""Leaves and parameters by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from mcore_snap.errors import StructureMismatch
from mcore_snap.nodes import FIELDS, ChunkTree, ModelTree
from mcore_snap.registration import flatten, flatten_named

__all__ = ["named_leaves", "named_parameters"]


def named_leaves(tree: Any) -> dict[str, Tensor]:
    """Return every leaf of a pytree by its readable name, in the order of flattening.

    Raises:
        ValueError: Two paths read the same, so that names do not tell the leaves apart.

    >>> import torch
    >>> list(named_leaves({"w": torch.ones(2), "b": [torch.ones(1)]}))
    ["['b'][0]", "['w']"]
    """
    leaves, treespec = flatten(tree)
    names = flatten_named(treespec)[1]
    found = dict(zip(names, leaves, strict=True))
    if len(found) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        message = f"two leaves read the same: {twice}; rename a key, or use optree.tree_paths"
        raise ValueError(message)
    return found


def named_parameters(tree: ModelTree | ChunkTree) -> Mapping[str, Tensor]:
    """Return every parameter by name, as views: nothing is copied.

    Of a chunk, the names are those of its ``named_parameters()``, so that together with its
    ``module_buffers`` the result goes straight into ``torch.func.functional_call``, which takes from
    the model, without a word, what it is not given. Of a whole tree they begin with ``chunks[i].``. A
    tied parameter appears once, under its first name, and a parameter that lives in another chunk's
    leaf appears with the whole tree only. Views of a snapshot are read-only.

    Raises:
        TypeError: ``tree`` is no ModelTree or ChunkTree; other pytrees have no parameters.
        StructureMismatch: Flat buffers are this rank's slices (``dp_sharded``), or do not tell where
            parameters lie (Megatron-FSDP's), so that parameters would be missing.

    >>> import torch, mcore_snap
    >>> model = torch.nn.Linear(2, 1)
    >>> list(named_parameters(mcore_snap.model_tree(model)))
    ['chunks[0].weight', 'chunks[0].bias']
    """
    if isinstance(tree, ChunkTree):
        _check_complete([("", tree)])
        leaves = _leaves_of(tree)
        return MappingProxyType(
            {
                placement.name: _view(leaves, placement.field, placement.key, placement.view)
                for placement in tree.layout.placements
                if placement.chunk is None
            }
        )
    if not isinstance(tree, ModelTree):
        message = f"expected a ModelTree or ChunkTree, found {type(tree).__name__}; use named_leaves"
        raise TypeError(message)
    chunks = tree.chunks
    _check_complete([(f"chunks[{index}].", chunk) for index, chunk in enumerate(chunks)])
    by_chunk = [_leaves_of(chunk) for chunk in chunks]
    return MappingProxyType(
        {
            f"chunks[{index}].{placement.name}": _view(
                by_chunk[index if placement.chunk is None else placement.chunk],
                placement.field,
                placement.key,
                placement.view,
            )
            for index, chunk in enumerate(chunks)
            for placement in chunk.layout.placements
        }
    )


def _check_complete(chunks: Sequence[tuple[str, ChunkTree]]) -> None:
    problems = [f"{where}{line}" for where, chunk in chunks for line in _untold(chunk)]
    if problems:
        message = "not every parameter can be told, and only some would be no answer"
        raise StructureMismatch(message, problems)


def _untold(chunk: ChunkTree) -> Iterator[str]:
    dense, experts, *_ = chunk.entries()
    slices, told = chunk.layout.data_parallel, chunk.layout.placements
    if slices is None and told:
        return
    flat = [f"{field}[{i}]" for field, its in zip(FIELDS, (dense, experts), strict=False) for i in range(len(its))]
    if slices is None:
        for name in flat:
            yield (
                f"{name}: expected a flat buffer that tells where its parameters lie, found one that does not, as "
                "Megatron-FSDP's; use named_leaves"
            )
        return
    for name, (rank, size) in zip(flat, slices, strict=True):
        yield (
            f"{name}: expected a whole flat buffer, found slice {rank} of {size}; take model_tree(models) without "
            "dp_sharded"
        )


def _leaves_of(chunk: ChunkTree) -> dict[str, Any]:
    # Each leaf is read once, so that views of one flat buffer share one alias.
    return {
        "buffers": chunk.buffers,
        "expert_parallel_buffers": chunk.expert_parallel_buffers,
        "parameters": dict(chunk.parameters),
        "module_buffers": dict(chunk.module_buffers),
    }


def _view(
    leaves: dict[str, Any],
    field: str,
    key: int | str,
    view: tuple[int, tuple[int, ...], tuple[int, ...]] | None,
) -> Tensor:
    leaf: Tensor = leaves[field][key]
    if view is None:
        return leaf
    offset, shape, stride = view
    return leaf.as_strided(shape, stride, leaf.storage_offset() + offset)
