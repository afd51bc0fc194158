"""Group K, containers: a snapshot cannot be edited, and it goes to a file and comes back."""

from __future__ import annotations

import io
import mmap
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import optree
import pytest
import torch
from pictures import DTYPES, WRAPPERS, change_everything, picture

from mcore_snap import (
    FrozenError,
    as_numpy,
    fingerprint,
    load,
    model_tree,
    named_leaves,
    snapshot,
    swapped,
    thaw,
    verify,
)
from mcore_snap.testing.chunks import Layer
from mcore_snap.testing.raw_bytes import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

wrapped = pytest.mark.parametrize("wrapper", WRAPPERS)
ONE = torch.ones(1)

EDITS: dict[str, Callable[[Any], object]] = {
    "set a weight": lambda snap: snap.chunks[0].parameters.__setitem__("fc.weight", ONE),
    "delete a weight": lambda snap: snap.chunks[0].parameters.__delitem__("fc.weight"),
    "add a buffer": lambda snap: snap.chunks[0].module_buffers.__setitem__("new", ONE),
    "replace a field": lambda snap: setattr(snap.chunks[0], "buffers", (ONE,)),
    "delete a field": lambda snap: delattr(snap.chunks[0], "buffers"),
    "replace the chunks": lambda snap: setattr(snap, "chunks", ()),
    "add an attribute": lambda snap: setattr(snap, "note", 1),
}
IMPOSSIBLE: dict[str, Callable[[Any], object]] = {
    "set a chunk": lambda snap: snap.chunks.__setitem__(0, None),
    "clear": lambda snap: snap.chunks[0].parameters.clear(),
    "pop": lambda snap: snap.chunks[0].parameters.pop("fc.weight"),
    "update": lambda snap: snap.chunks[0].parameters.update({}),
    "set a buffer": lambda snap: snap.chunks[0].buffers.__setitem__(0, ONE),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("make", ["snapshot", "thawed", "live", "average"])
def test_containers_refuse_edits(make: str, edit: str) -> None:
    """vllm-project/vllm #48312: the manifest is made before any change and cannot be changed afterwards; nor can those
    made of it.
    """
    layer = Layer()
    tree = model_tree(layer)
    snap = snapshot(tree)
    made = {
        "snapshot": lambda: snap,
        "thawed": lambda: thaw(snap),
        "live": lambda: tree,
        "average": lambda: optree.tree_map(torch.clone, snap),
    }[make]()
    before, digest = list(named_leaves(made)), fingerprint(made)
    with pytest.raises(FrozenError):
        EDITS[edit](made)
    assert list(named_leaves(made)) == before
    assert fingerprint(made) == digest


@pytest.mark.parametrize("edit", IMPOSSIBLE)
def test_containers_have_no_way_to_edit(edit: str) -> None:
    """vllm-project/vllm #48312: the methods of a dict or list that change it are not there at all."""
    layer = Layer()
    snap = snapshot(model_tree(layer))
    digest = fingerprint(snap)
    with pytest.raises((AttributeError, TypeError)):
        IMPOSSIBLE[edit](snap)
    assert verify(snap) == digest


def test_names_keys_and_values_are_views_of_nothing_live() -> None:
    """vllm-project/vllm #48312: a dict made of a snapshot is the caller's own; editing it leaves the snapshot as it
    is.
    """
    layer = Layer()
    snap = snapshot(model_tree(layer))
    own = dict(snap.chunks[0].parameters)
    own.clear()
    leaves = named_leaves(snap)
    leaves.clear()
    optree.tree_leaves(snap).clear()
    assert "fc.weight" in snap.chunks[0].parameters
    assert named_leaves(snap)


def _as_tree(tree: Any, named: dict[str, torch.Tensor]) -> Any:
    return optree.tree_unflatten(optree.tree_structure(tree), [named[name] for name in named_leaves(tree)])


@wrapped
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_through_torch_save(wrapper: str, dtype: torch.dtype, mapped: bool, tmp_path: Path) -> None:
    """vllm-project/vllm #48312, pytorch/pytorch #40157: `torch.save` of a thawed copy, safely loaded, in memory or
    mapped from the file.
    """
    models = WRAPPERS[wrapper](Layer(3, dtype))
    tree = model_tree(models)
    before, snap = picture(models), snapshot(tree)
    torch.save(named_leaves(thaw(snap)), tmp_path / "snap.pt")
    back = torch.load(tmp_path / "snap.pt", weights_only=True, mmap=mapped)
    content = (tmp_path / "snap.pt").read_bytes()
    change_everything(models)
    changed = picture(models)
    with swapped(tree, _as_tree(tree, back)):
        assert picture(models) == before
    assert picture(models) == changed
    load(tree, _as_tree(tree, back))
    assert picture(models) == before
    change_everything(models)
    assert (tmp_path / "snap.pt").read_bytes() == content
    assert {name: to_bytes(leaf) for name, leaf in back.items()} == {
        n: to_bytes(t) for n, t in named_leaves(snap).items()
    }


def test_a_thawed_tree_goes_through_torch_save_whole() -> None:
    """pytorch/pytorch #40157: as the tree that it is, where the file is trusted."""
    layer = Layer()
    tree = model_tree(layer)
    before, snap = picture(layer), snapshot(tree)
    file = io.BytesIO()
    torch.save(thaw(snap), file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    change_everything(layer)
    load(tree, back)
    assert picture(layer) == before


@wrapped
def test_a_source_that_can_only_be_read(wrapper: str, tmp_path: Path) -> None:
    """vllm-project/vllm #48312: a source mapped read-only is only read; a write to it would kill the process."""
    models = WRAPPERS[wrapper](Layer())
    tree = model_tree(models)
    before, snap = picture(models), snapshot(tree)
    sources: dict[str, torch.Tensor] = {}
    for i, (name, leaf) in enumerate(named_leaves(snap).items()):
        path = tmp_path / f"{i}.bin"
        path.write_bytes(to_bytes(leaf) or b"\0")
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors, and says so
            flat = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)
        sources[name] = flat[: leaf.nbytes].view(leaf.dtype).view(leaf.shape) if leaf.nbytes else leaf
    change_everything(models)
    for source in (_as_tree(tree, sources), snapshot(_as_tree(tree, sources))):
        load(tree, source)
        assert picture(models) == before
        change_everything(models)


def test_numpy_files(tmp_path: Path) -> None:
    """pytorch/pytorch #40157: arrays of a snapshot are written by numpy as they are, and come back mapped."""
    layer = Layer()
    tree = model_tree(layer)
    before, snap = picture(layer), snapshot(tree)
    arrays = dict(zip(named_leaves(snap), optree.tree_leaves(as_numpy(snap)), strict=True))
    back = {}
    for i, (name, array) in enumerate(arrays.items()):
        np.save(tmp_path / f"{i}.npy", array)
        back[name] = torch.from_numpy(np.load(tmp_path / f"{i}.npy", mmap_mode="c"))
    change_everything(layer)
    load(tree, _as_tree(tree, back))
    assert picture(layer) == before


def test_a_single_leaf_does_not_leave_by_pickle() -> None:
    """pytorch/pytorch #1995: pickling one leaf would ask for a pointer to write with; the whole snapshot pickles, and
    thawed leaves.
    """
    layer = Layer()
    tree = model_tree(layer)
    snap = snapshot(tree)
    with pytest.raises(RuntimeError):
        torch.save(snap.chunks[0].parameters["fc.weight"], io.BytesIO())
    before = picture(layer)
    back = pickle.loads(pickle.dumps(snap))
    change_everything(layer)
    load(tree, back)
    assert picture(layer) == before
