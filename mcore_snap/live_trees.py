"""Live model trees inside any pytree: reading them once, and what they have beside leaves."""

from __future__ import annotations

from typing import Any, TypeVar

import optree

from mcore_snap.layouts import Layout
from mcore_snap.nodes import ChunkTree, ModelTree, Source

__all__ = ["layouts_of", "read_once", "sources_of"]

T = TypeVar("T")


def read_once(tree: T) -> T:
    """Return the same pytree with each live model tree replaced by one reading of it.

    Reading may be collective, so whoever needs the leaves twice reads them once.

    >>> read_once({"a": [1]})
    {'a': [1]}
    """
    if not sources_of(tree):
        return tree
    read: Any = optree.tree_map(_read, tree, is_leaf=_is_model)  # type: ignore[arg-type]  # any pytree
    return read  # type: ignore[no-any-return]  # of the type that it was


def sources_of(tree: Any) -> list[Source]:
    """Return the live models behind a pytree, each once."""
    found = [top.source for top in _tops(tree, ModelTree) if isinstance(top, ModelTree)]
    return list(dict.fromkeys(source for source in found if source is not None))


def layouts_of(tree: Any) -> list[Layout]:
    """Return the static part of every chunk in a pytree that has been read.

    >>> layouts_of([1, 2])
    []
    """
    return [top.layout for top in _tops(tree, ChunkTree) if isinstance(top, ChunkTree)]


def _tops(tree: Any, cls: type) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, cls))


def _is_model(node: object) -> bool:
    return isinstance(node, ModelTree)


def _read(node: Any) -> Any:
    return ModelTree(node.chunks) if isinstance(node, ModelTree) and node.source is not None else node
