"""The classes of a model's pytree: immutable, one per level, with frozen or live leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final, NoReturn, Protocol, TypeAlias, final

from torch import Tensor

from mcore_snap.errors import FrozenError, NotResident, SnapError
from mcore_snap.frozen import FrozenLeaf
from mcore_snap.layouts import EMPTY, Layout

__all__ = ["FIELDS", "ChunkTree", "ModelTree", "NamedLeaves", "Source"]

Entry: TypeAlias = Any
"""What a node holds in a leaf's place: a FrozenLeaf, a tensor, or whatever a tree_map returned."""

FIELDS: Final = ("buffers", "expert_parallel_buffers", "parameters", "module_buffers", "extra_state")


def _read(entry: Entry) -> Any:
    return entry.read() if isinstance(entry, FrozenLeaf) else entry


def _refuse(what: str) -> NoReturn:
    message = f"{what} is immutable; make a new tree with optree.tree_map, or thaw(snapshot) for writable copies"
    raise FrozenError(message)


class Source(Protocol):
    """A live model, held weakly, from which a tree is read whenever it is used."""

    def read(self) -> tuple[ChunkTree, ...]:
        """Settle weights in flight, and return the chunks with the model's own memory for leaves."""

    def look(self) -> tuple[ChunkTree, ...]:
        """Return the same without settling anything, for looking at names and sizes."""

    def unchanged(self) -> AbstractContextManager[None]:
        """Give the model's param-sync flags back on leaving, as they were on entry."""


class _Immutable:
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        _refuse(type(self).__name__)

    def __delattr__(self, name: str) -> NoReturn:
        _refuse(type(self).__name__)


@final
class NamedLeaves(_Immutable, Mapping[str, Tensor]):
    """An immutable mapping from names to leaves, in the order of the model.

    >>> NamedLeaves({"bias": 1})["bias"]
    1
    """

    __slots__ = ("entries",)
    entries: dict[str, Entry]

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        object.__setattr__(self, "entries", dict(entries))

    def __getitem__(self, name: str) -> Tensor:
        leaf: Tensor = _read(self.entries[name])
        return leaf

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __setitem__(self, name: str, value: object) -> NoReturn:
        """Refuse."""
        _refuse("a snapshot tree")

    def __delitem__(self, name: str) -> NoReturn:
        """Refuse."""
        _refuse("a snapshot tree")

    __hash__ = None  # type: ignore[assignment]  # leaves are compared by bitwise_equal, not by ==

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> tuple[type[NamedLeaves], tuple[dict[str, Entry]]]:
        """Pickle the frozen entries, not the aliases that reading gives."""
        return NamedLeaves, (self.entries,)

    def __deepcopy__(self, memo: dict[int, Any]) -> NamedLeaves:
        """Copy what can change; frozen entries are shared."""
        import copy  # noqa: PLC0415 - only here

        return NamedLeaves(copy.deepcopy(self.entries, memo))

    def __repr__(self) -> str:
        return f"NamedLeaves({', '.join(self.entries)})"


@final
class ChunkTree(_Immutable):
    """One model chunk.

    Attributes:
        buffers: DDP flat parameter buffers, each 1-D and padded as Megatron-Core lays them out.
        expert_parallel_buffers: The same for expert parallelism.
        parameters: Every parameter that no flat buffer holds, by its first name.
        module_buffers: Registered buffers, persistent or not.
        extra_state: What ``get_extra_state()`` returned, as uint8 bytes, by module.
        stateless: Of a live chunk, handles on modules that take extra state but have none now.
        layout: Static: where each parameter of the chunk lies, and whether its flat buffers are slices.
    """

    __slots__ = ("_fields", "layout", "stateless")
    _fields: tuple[Any, ...]
    layout: Layout
    stateless: Mapping[str, Tensor]

    def __init__(  # noqa: PLR0913, PLR0917 - one argument per field, as they are unflattened
        self,
        buffers: tuple[Entry, ...] = (),
        expert_parallel_buffers: tuple[Entry, ...] = (),
        parameters: Mapping[str, Entry] | Any = None,
        module_buffers: Mapping[str, Entry] | Any = None,
        extra_state: Mapping[str, Entry] | Any = None,
        layout: Layout = EMPTY,
        *,
        stateless: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        # Unflattening calls this with placeholders of any kind, so nothing is validated.
        named = [
            NamedLeaves(value or {}) if value is None or type(value) is dict else value
            for value in (parameters, module_buffers, extra_state)
        ]
        object.__setattr__(self, "_fields", (buffers, expert_parallel_buffers, *named))
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "stateless", stateless)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """DDP flat parameter buffers."""
        return tuple(map(_read, self._fields[0]))

    @property
    def expert_parallel_buffers(self) -> tuple[Tensor, ...]:
        """DDP flat parameter buffers of expert parallelism."""
        return tuple(map(_read, self._fields[1]))

    @property
    def parameters(self) -> NamedLeaves:
        """Every parameter that no flat buffer holds."""
        named: NamedLeaves = self._fields[2]
        return named

    @property
    def module_buffers(self) -> NamedLeaves:
        """Registered buffers."""
        named: NamedLeaves = self._fields[3]
        return named

    @property
    def extra_state(self) -> NamedLeaves:
        """Extra state, as bytes."""
        named: NamedLeaves = self._fields[4]
        return named

    def entries(self) -> tuple[Any, ...]:
        """Return the fields with their frozen leaves unread."""
        return self._fields

    def __reduce__(self) -> tuple[type[ChunkTree], tuple[Any, ...]]:
        """Pickle the frozen entries, not the aliases that reading gives."""
        return ChunkTree, (*self._fields, self.layout)

    def __repr__(self) -> str:
        counts = (f"{name}={len(field)}" for name, field in zip(FIELDS, self._fields, strict=True))
        return f"ChunkTree({', '.join(counts)})"


@final
class ModelTree(_Immutable):
    """A model as a pytree: live when made by `model_tree`, frozen when made by `snapshot`.

    A live tree holds its model weakly and reads it anew at every use, so that memory which moved
    is found again; it has no leaves of its own to go stale.

    Attributes:
        chunks: One ChunkTree per model chunk.
    """

    __slots__ = ("_chunks", "source")
    _chunks: tuple[ChunkTree, ...]
    source: Source | None

    def __init__(self, chunks: tuple[ChunkTree, ...] = (), *, source: Source | None = None) -> None:
        object.__setattr__(self, "_chunks", chunks)
        object.__setattr__(self, "source", source)

    @property
    def chunks(self) -> tuple[ChunkTree, ...]:
        """The chunks; of a live tree, read from the model now.

        Where overlapped parameter gathers are due, reading is collective over the data-parallel
        group: every rank has to do it, in the same order.

        Raises:
            NotReady: Weights are in flight and cannot be settled from here.
            NotResident: The model of a live tree is gone, or memory of it is.
        """
        return self._chunks if self.source is None else self.source.read()

    def __copy__(self) -> ModelTree:
        """Return itself: a tree is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelTree:
        """Return itself if every leaf is frozen; of a live tree, refuse."""
        _only_if_kept(self)
        if all(isinstance(entry, FrozenLeaf) for entry in tree_entries(self)):
            return self
        import copy  # noqa: PLC0415 - only here

        return ModelTree(copy.deepcopy(self._chunks, memo))

    def __reduce__(self) -> tuple[type[ModelTree], tuple[tuple[ChunkTree, ...]]]:
        """Pickle a snapshot; of a live tree, refuse."""
        _only_if_kept(self)
        return ModelTree, (self._chunks,)

    def __repr__(self) -> str:
        if self.source is None:
            return f"ModelTree({_summary(self, live=False)})"
        # Debuggers and test runners ask at any moment: what is wrong with the model is told, not raised.
        try:
            return f"ModelTree({_summary(ModelTree(self.source.look()), live=True)})"
        except NotResident:
            return "ModelTree(live, model freed)"
        except SnapError as error:
            return f"ModelTree(live, cannot be read: {error.message})"
        except Exception as error:  # noqa: BLE001 - get_extra_state and tensor subclasses may raise anything
            return f"ModelTree(live, cannot be read: {type(error).__name__})"


def tree_entries(tree: ModelTree) -> list[Entry]:
    """Return what stands in each leaf's place, in the order in which the tree is flattened."""
    found: list[Entry] = []
    for chunk in tree.chunks:
        for field in chunk.entries():
            found.extend(field.entries.values() if isinstance(field, NamedLeaves) else field)
    return found


def _summary(tree: ModelTree, *, live: bool) -> str:
    kept = [entry for entry in tree_entries(tree) if entry is not None]
    sizes = [entry for entry in kept if isinstance(entry, FrozenLeaf | Tensor)]
    dtypes = sorted({_dtype_of(entry) for entry in sizes})
    kind = "live" if live else "frozen" if all(isinstance(entry, FrozenLeaf) for entry in kept) else "computed"
    total = sum(entry.nbytes for entry in sizes)
    return f"{kind}, {len(tree.chunks)} chunk(s), {len(kept)} leaves, {total:,} bytes, {', '.join(dtypes) or 'empty'}"


def _dtype_of(entry: FrozenLeaf | Tensor) -> str:
    tensor = entry.private if isinstance(entry, FrozenLeaf) else entry
    return str(tensor.dtype).removeprefix("torch.")


def _only_if_kept(tree: ModelTree) -> None:
    if tree.source is not None:
        message = "a live tree is a view of its model and cannot be copied or pickled; take snapshot(tree)"
        raise TypeError(message)
