"""Taking snapshots, and what else one does with them: writable copies and numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import optree
import torch

import mcore_snap.sharing  # noqa: F401 - tells multiprocessing how to send leaves
from mcore_snap.checking import check_leaves
from mcore_snap.copying import capture
from mcore_snap.errors import StructureMismatch
from mcore_snap.frozen import FrozenLeaf, owner_of
from mcore_snap.host_memory import HostMemory, default_memory
from mcore_snap.nodes import ChunkTree, ModelTree, NamedLeaves, tree_entries
from mcore_snap.registration import Names, flatten, flatten_named
from mcore_snap.words import plain, words

if TYPE_CHECKING:
    import numpy as np

__all__ = ["as_numpy", "frozen_entries", "frozen_tree", "leasing", "snapshot", "thaw"]

T = TypeVar("T")


def snapshot(tree: T, *, memory: HostMemory | None = None, label: str = "a snapshot") -> T:
    """Return a frozen copy in host memory, with the same structure.

    Leaves have the same names, dtypes and shapes. They are read-only tensors on the CPU: torch
    refuses every write with a RuntimeError, and reads cost nothing extra. Of a ModelTree each read
    hands out a fresh alias, so nothing done to a handle reaches the snapshot; of other pytrees (a
    dict, say) the container is yours, and only the bytes are protected.

    Collective over the data-parallel group where overlapped parameter gathers are due, as with every
    use of a live model tree: see `model_tree`.

    The snapshot is one lease of host memory of the size of its leaves, and every byte is copied once.
    Memory that an earlier snapshot of that size has given back is used again; it is given back when
    the last tensor over it is gone, views and arrays included.

    Args:
        tree: What `model_tree` gave, or any pytree of tensors.
        memory: Where the snapshot is to live; by default memory that all snapshots share.
        label: How `HostMemory.stats` and OutOfHostMemory call it, as in ``"version 7"``.

    Raises:
        StructureMismatch: A leaf is no tensor, or of a kind that cannot be kept (sparse, quantized,
            a subclass with memory of its own).
        NotResident: A leaf's memory is freed or on the meta device, or the model is gone.
        NotReady: Weights are in flight and cannot be settled from here.
        OutOfHostMemory: The memory's limit would be passed, or the system has no more.

    >>> live = {"w": torch.ones(2)}
    >>> kept = snapshot(live)
    >>> live["w"].zero_(), kept["w"]
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    leaves, treespec = flatten(tree)
    check_leaves(leaves, Names(treespec), "snapshot")
    return cast("T", frozen_tree(capture(leaves, leasing(memory, len(leaves), label)), treespec))


def leasing(memory: HostMemory | None, count: int, label: str) -> Callable[[int], torch.Tensor]:
    """Return what gives a snapshot of so many leaves its memory."""
    home = memory or default_memory()
    return lambda nbytes: home.lease(nbytes, f"{label} of {count:,} leaves")


def frozen_tree(kept: Sequence[FrozenLeaf], treespec: optree.PyTreeSpec) -> Any:
    """Return the tree of this structure with frozen leaves."""
    if not _holds_model_trees(treespec):
        # A stranger's node may look at what it is made of: give it tensors at once.
        return optree.tree_unflatten(treespec, _aliases(kept))
    untyped: Any = kept  # our nodes hold frozen leaves in the place of tensors
    entries: Any = optree.tree_unflatten(treespec, untyped)
    # Outside our own nodes nothing reads a FrozenLeaf on access: put aliases there.
    tops, outside = optree.tree_flatten(entries, is_leaf=_reads_by_itself)
    return optree.tree_unflatten(outside, _aliases(tops))


def _aliases(tops: Sequence[Any]) -> list[Any]:
    # They outlive the call, and autograd can never save a tensor that was made in inference mode.
    with torch.inference_mode(mode=False):
        return [top.read(owned=True) if isinstance(top, FrozenLeaf) else top for top in tops]


def _reads_by_itself(node: object) -> bool:
    return isinstance(node, ModelTree | ChunkTree | NamedLeaves)


def _holds_model_trees(treespec: optree.PyTreeSpec) -> bool:
    if treespec.type in (ModelTree, ChunkTree, NamedLeaves):
        return True
    if treespec.num_nodes == treespec.num_leaves + 1:
        return False  # a flat container, perhaps of very many leaves
    return any(_holds_model_trees(child) for child in treespec.children() if not child.is_leaf())


def frozen_entries(tree: Any) -> list[FrozenLeaf | None]:
    """Return, per leaf in the order of flattening, the frozen leaf behind it, or ``None``."""
    found: list[Any] = []
    for top in optree.tree_leaves(tree, is_leaf=_reads_by_itself):
        if isinstance(top, ModelTree):
            found.extend(tree_entries(top))
        elif isinstance(top, ChunkTree):
            found.extend(tree_entries(ModelTree((top,))))
        elif isinstance(top, NamedLeaves):
            found.extend(top.entries.values())
        else:
            found.append(top)
    if not {*map(type, found)} <= {FrozenLeaf, torch.Tensor}:
        # Where a tree_map put None, optree counts no leaf; where it put a container, all that are in there.
        entries: Any = found
        found = optree.tree_leaves(entries)
    return [entry if isinstance(entry, FrozenLeaf) else owner_of(entry) for entry in found]


def thaw(snap: T) -> T:
    """Return the same tree with writable copies for leaves, on the CPU.

    Raises:
        StructureMismatch: A leaf is of a kind that cannot be copied.
        NotResident: A leaf's memory is not there.

    >>> thaw(snapshot({"w": torch.ones(2)}))["w"].add_(1)
    tensor([2., 2.])
    """
    leaves, treespec = flatten(snap)
    check_leaves(leaves, Names(treespec), "thaw")
    # One allocation per leaf here: the caller owns each and may free them one by one.
    copies = [capture([leaf], _own)[0].private for leaf in leaves]
    return cast("T", optree.tree_unflatten(treespec, copies))


def _own(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def as_numpy(snap: Any) -> Any:
    """Return the same tree with read-only numpy arrays over the snapshot's own memory.

    Nothing is copied. Dtypes that numpy lacks (bfloat16, float8 and the like) come as unsigned
    integers of the same size: their bit patterns.

    Raises:
        StructureMismatch: A leaf does not belong to a snapshot; a numpy view of live memory would
            keep it from ever being offloaded.

    >>> as_numpy(snapshot({"w": torch.ones(2)}))["w"].sum()
    np.float32(2.0)
    """
    _, treespec = flatten(snap)
    owners = frozen_entries(snap)
    problems = [
        f"{name}: expected a leaf of a snapshot, found another tensor; take snapshot(tree) first"
        for name, owner in zip(flatten_named(treespec)[1], owners, strict=True)
        if owner is None
    ]
    if problems:
        raise StructureMismatch("as_numpy works on snapshots", problems)
    arrays = [_array(owner) for owner in owners if owner is not None]
    untyped: Any = arrays  # nodes hold any leaf, arrays included
    return optree.tree_unflatten(treespec, untyped)


_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _array(leaf: FrozenLeaf) -> np.ndarray[Any, Any]:
    import numpy as np  # noqa: PLC0415 - torch works without numpy, and so does the rest of this library

    private = plain(leaf.private)
    try:
        dtype = private.flatten()[:0].numpy().dtype
    except TypeError:
        dtype = words(private).view(_UNSIGNED[private.itemsize]).flatten()[:0].numpy().dtype
    # An array over a read-only buffer cannot be made writable again, unlike one whose flag is cleared.
    flat = np.frombuffer(leaf.buffer(), dtype=dtype) if private.numel() else np.empty(0, dtype)
    strides = [step * private.itemsize for step in private.stride()]
    return np.lib.stride_tricks.as_strided(flat, tuple(private.shape), strides, writeable=False)
