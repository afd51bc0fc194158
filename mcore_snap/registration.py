"""The one place that tells optree and torch how to flatten our trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import optree
import torch.utils._pytree as torch_pytree
from optree import registry

from mcore_snap.nodes import FIELDS, ChunkTree, ModelTree, NamedLeaves

__all__ = ["Names", "flatten", "flatten_named"]

# optree exports the global namespace under no public name. Trees have to flatten with no namespace
# argument, and `optree.dataclasses.register_node` would run constructors on placeholders.
_GLOBAL = vars(registry)["__GLOBAL_NAMESPACE"]


def _model(tree: ModelTree) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
    return (tree.chunks,), None, ("chunks",)


def _chunk(tree: ChunkTree) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
    fields = tree.entries()
    return (tree.buffers, tree.expert_parallel_buffers, *fields[2:]), tree.layout, FIELDS


def _named(tree: NamedLeaves) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]]:
    names = tuple(tree)
    return tuple(tree[name] for name in names), names, names


def _make_model(_: None, children: Iterable[Any]) -> ModelTree:
    (chunks,) = children
    return ModelTree(chunks)


def _make_chunk(layout: Any, children: Iterable[Any]) -> ChunkTree:
    buffers, expert_parallel_buffers, parameters, module_buffers, extra_state = children
    return ChunkTree(buffers, expert_parallel_buffers, parameters, module_buffers, extra_state, layout)


def _make_named(names: tuple[str, ...], children: Iterable[Any]) -> NamedLeaves:
    return NamedLeaves(dict(zip(names, children, strict=True)))


def _register(cls: type, flatten_node: Any, unflatten_node: Any, entry: type[optree.PyTreeEntry]) -> None:
    optree.register_pytree_node(cls, flatten_node, unflatten_node, path_entry_type=entry, namespace=_GLOBAL)
    key = torch_pytree.GetAttrKey if entry is optree.GetAttrEntry else torch_pytree.MappingKey

    def flatten_for_torch(tree: Any) -> tuple[list[Any], Any]:
        children, context, _ = flatten_node(tree)
        return list(children), context

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context, names = flatten_node(tree)
        return [(key(name), child) for name, child in zip(names, children, strict=True)], context

    torch_pytree.register_pytree_node(
        cls,
        flatten_for_torch,
        lambda children, context: unflatten_node(context, children),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


_register(ModelTree, _model, _make_model, optree.GetAttrEntry)
_register(ChunkTree, _chunk, _make_chunk, optree.GetAttrEntry)
_register(NamedLeaves, _named, _make_named, optree.MappingEntry)


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves and the structure of any pytree.

    >>> flatten({"b": 1, "a": 2})[0]
    [2, 1]
    """
    leaves, treespec = optree.tree_flatten(tree)
    return leaves, treespec


def flatten_named(treespec: optree.PyTreeSpec) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Return the path of every leaf, and its readable name.

    The path is the identity: two paths may read the same, for a dict key may hold a bracket.

    >>> flatten_named(flatten({"a": [1, 2]})[1])[1]
    ["['a'][0]", "['a'][1]"]
    """
    accessors: Sequence[optree.PyTreeAccessor] = treespec.accessors()
    return treespec.paths(), [accessor.codify("").removeprefix(".") or "the leaf" for accessor in accessors]


class Names(Sequence[str]):
    """The readable names of a tree's leaves, made only if somebody looks: most trees never err.

    >>> Names(flatten({"a": [1, 2]})[1])[1]
    "['a'][1]"
    """

    def __init__(self, treespec: optree.PyTreeSpec) -> None:
        self._treespec = treespec
        self._made: list[str] | None = None

    def _all(self) -> list[str]:
        if self._made is None:
            self._made = flatten_named(self._treespec)[1]
        return self._made

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one name, or several."""
        return self._all()[index]

    def __len__(self) -> int:
        """Return how many leaves there are."""
        return self._treespec.num_leaves
