"""Leaves and parameters by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from mcore_snap.nodes import ChunkTree, ModelTree
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

    Of a chunk, the names are those of its ``named_parameters()``, so that the result goes straight
    into ``torch.func.functional_call``; of a whole tree they begin with ``chunks[i].``. A tied
    parameter appears once, under its first name, and a parameter that lives in another chunk's leaf
    appears with the whole tree only. Views of a snapshot are read-only.

    Raises:
        TypeError: ``tree`` is no ModelTree or ChunkTree; other pytrees have no parameters.

    >>> import torch, mcore_snap
    >>> model = torch.nn.Linear(2, 1)
    >>> list(named_parameters(mcore_snap.model_tree(model)))
    ['chunks[0].weight', 'chunks[0].bias']
    """
    if isinstance(tree, ChunkTree):
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
