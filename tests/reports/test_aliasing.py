"""Group A: a snapshot and a model never share memory, in neither direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import pytest
import torch
from pictures import DTYPES, WRAPPERS, change_everything, layer_in, memory, picture
from torch import nn

from mcore_snap import as_numpy, load, model_tree, named_leaves, snapshot, thaw
from mcore_snap.testing.chunks import Layer
from mcore_snap.testing.raw_bytes import flip, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mcore_snap.testing.model_strategies import Models


def _bytes(snap: Any) -> dict[str, bytes]:
    return {name: to_bytes(leaf) for name, leaf in named_leaves(snap).items()}


def _through_numpy(models: Models) -> None:
    for _, tensor in memory(models):
        array = tensor.detach().view(torch.uint8).numpy() if tensor.dim() else tensor.numpy()
        array += 1


def _through_data(models: Models) -> None:
    for _, tensor in memory(models):
        tensor.data.add_(1)


def _through_an_optimizer(models: Models) -> None:
    params = [tensor for _, tensor in memory(models) if tensor.requires_grad]
    for param in params:
        param.grad = torch.ones_like(param)
    torch.optim.AdamW(params, lr=1.0, fused=True).step()


CHANGES: dict[str, Callable[[Models], None]] = {
    "bits": change_everything,
    "numpy": _through_numpy,
    ".data": _through_data,
    "optimizer": _through_an_optimizer,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_live_on_the_cpu_are_copied(wrapper: str, change: str, dtype: torch.dtype) -> None:
    """verl-project/verl-omni #645, pytorch/pytorch #144657, #145408: moving to the CPU is no copy where the weights
    are there already.
    """
    if change == "numpy" and dtype is torch.float16:
        dtype = torch.float64
    models = WRAPPERS[wrapper](Layer(3, dtype))
    before = picture(models)
    snap = snapshot(model_tree(models))
    kept = _bytes(snap)
    CHANGES[change](models)
    assert picture(models) != before
    assert _bytes(snap) == kept


@pytest.mark.parametrize("source", ["snapshot", "thawed", "clones", "average"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_after_a_load_does_not_reach_what_was_loaded(wrapper: str, source: str) -> None:
    """pytorch/pytorch #196083: values go in, never the memory that they came in, so two owners cannot meet in it."""
    models = WRAPPERS[wrapper](Layer())
    snap = snapshot(model_tree(models))
    given: Any = {
        "snapshot": lambda: snap,
        "thawed": lambda: thaw(snap),
        "clones": lambda: optree.tree_map(torch.clone, snap),
        "average": lambda: optree.tree_map(lambda a, b: a if a.dtype is torch.uint8 else (a + b) // 2, snap, snap),
    }[source]()
    held = _bytes(given)
    load(model_tree(models), given)
    _through_an_optimizer(models)
    change_everything(models)
    assert _bytes(given) == held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_refilled_source_does_not_reach_the_model(dtype: torch.dtype) -> None:
    """modelscope/ms-swift #10207: a receiver that stages through one buffer refills it, and the weights must not
    follow.
    """
    layer = Layer(3, dtype)
    staging = thaw(snapshot(model_tree(layer)))
    load(model_tree(layer), staging)
    before = picture(layer)
    flip(named_leaves(staging).values())
    assert picture(layer) == before


def test_two_models_from_one_snapshot_go_their_own_ways() -> None:
    """pytorch/pytorch #196083, the other way round: a snapshot loaded twice ties nothing together."""
    one, other = Layer(), Layer()
    snap = snapshot(model_tree(one))
    load(model_tree(other), snap)
    assert picture(one) == picture(other)
    before = picture(other)
    change_everything(one)
    assert picture(other) == before


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_storage_is_shared(wrapper: str) -> None:
    """verl-project/verl-omni #645: the storages of a snapshot, of a second one, of thawed copies and of the model are
    disjoint.
    """
    models = WRAPPERS[wrapper](Layer())
    tree = model_tree(models)
    snap = snapshot(tree)
    taken = [snap, snapshot(tree), snapshot(snap)]
    thawed = optree.tree_leaves(thaw(snap))
    inside = [_bytes_under(tensor for _, tensor in memory(models)), _bytes_under(thawed)]
    for kept in taken:
        arrays = optree.tree_leaves(as_numpy(kept))
        inside.append({array.ctypes.data + i for array in arrays for i in range(array.nbytes)})
    assert len(set.union(*inside)) == sum(map(len, inside))


def _bytes_under(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() + i for tensor in tensors for i in range(tensor.nbytes)}


@pytest.mark.parametrize("split", [lambda packed: packed.split(2), lambda packed: packed.unbind(0), torch.Tensor.chunk])
def test_entries_split_from_a_packed_weight_are_written_in_place(split: Callable[[Any], Any]) -> None:
    """PrimeIntellect-ai/prime-rl #3486: whether an entry is a view of the packed weight or a copy is no matter of its
    layout.
    """
    packed = nn.Parameter(torch.arange(24.0).view(6, 4))
    entries = dict(enumerate(split(packed.detach(), 3) if split is torch.Tensor.chunk else split(packed.detach())))
    snap = snapshot({"experts": entries})
    held = to_bytes(packed)
    flip([packed])
    load({"experts": entries}, snap)
    assert to_bytes(packed) == held
    flip([packed])
    assert [to_bytes(leaf) for leaf in optree.tree_leaves(snap)] != [to_bytes(leaf) for leaf in entries.values()]


def test_the_weights_of_one_layer_are_where_the_picture_sees_them() -> None:
    """The helper of these tests does see the layer, whatever wraps it."""
    for wrapper in WRAPPERS.values():
        models = wrapper(Layer())
        before = picture(models)
        with torch.no_grad():
            layer_in(models).out.weight[0, 0] += 1
        assert sum(before[name] != now for name, now in picture(models).items()) == 1
