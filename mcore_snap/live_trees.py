"""Live model trees inside any pytree: reading them once, and what they have beside leaves."""

from __future__ import annotations

from typing import Any, TypeVar

import optree
from torch import Tensor

from mcore_snap.layouts import Layout
from mcore_snap.nodes import ChunkTree, ModelTree, Source

__all__ = ["layouts_of", "look_once", "read_once", "sources_of", "stateless_of"]

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


def look_once(tree: T) -> T:
    """Return the same, but without settling anything: for looking at names, sizes and memory."""
    if not sources_of(tree):
        return tree
    seen: Any = optree.tree_map(_look, tree, is_leaf=_is_model)  # type: ignore[arg-type]  # any pytree
    return seen  # type: ignore[no-any-return]  # of the type that it was


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


def stateless_of(tree: Any) -> dict[tuple[Any, ...], tuple[str, Tensor]]:
    """Return handles on modules that take extra state but have none now: by the path that its leaf would have."""
    paths, tops, treespec = optree.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, ChunkTree))
    names = treespec.accessors()
    return {
        (*path, "extra_state", name): (f"{accessor.codify('').removeprefix('.')}.extra_state[{name!r}]", handle)
        for path, accessor, top in zip(paths, names, tops, strict=True)
        if isinstance(top, ChunkTree)
        for name, handle in top.stateless.items()
    }


def _tops(tree: Any, cls: type) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, cls))


def _is_model(node: object) -> bool:
    return isinstance(node, ModelTree)


def _read(node: Any) -> Any:
    return ModelTree(node.chunks) if isinstance(node, ModelTree) and node.source is not None else node


def _look(node: Any) -> Any:
    return ModelTree(node.source.look()) if isinstance(node, ModelTree) and node.source is not None else node
