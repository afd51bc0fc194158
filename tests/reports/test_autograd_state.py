"""Group J: grad mode, graphs, inference mode, and who keeps whom alive."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pictures import DTYPES, WRAPPERS, change_everything, layer_in, memory, picture, places
from torch import nn

from mcore_snap import NotResident, load, model_tree, named_leaves, named_parameters, snapshot, swapped, thaw
from mcore_snap.testing.chunks import DDPLike, Layer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("use", ["load", "swapped"])
def test_in_every_mode(use: str, wrapper: str, mode: str) -> None:
    """pytorch/pytorch #16303, #114505: leaves are plain, and parameters are leaves of the graph with their flags as
    before.
    """
    models = WRAPPERS[wrapper](Layer())
    before, where = picture(models), places(models)
    flags = [(t.requires_grad, t.is_leaf, t.grad_fn, t.is_inference()) for _, t in memory(models)]
    with MODES[mode]():
        tree = model_tree(models)
        snap = snapshot(tree)
        change_everything(models)
        if use == "load":
            load(tree, snap)
            assert picture(models) == before
        else:
            with swapped(tree, snap):
                assert picture(models) == before
    load(model_tree(models), snap)
    assert picture(models) == before
    assert places(models) == where
    assert [(t.requires_grad, t.is_leaf, t.grad_fn, t.is_inference()) for _, t in memory(models)] == flags
    for leaf in [*named_leaves(snap).values(), *named_leaves(thaw(snap)).values()]:
        assert type(leaf) is torch.Tensor
        assert (leaf.requires_grad, leaf.grad_fn, leaf.is_leaf, leaf.is_inference()) == (False, None, True, False)


@pytest.mark.parametrize("backing", [None, "flat", "none"])
@pytest.mark.parametrize("use", ["load", "swapped"])
def test_a_pending_backward(use: str, backing: Any) -> None:
    """pytorch/pytorch #114505: a load makes a backward of before fail loudly; a look-back gives the same gradients as
    without.
    """
    layer = nn.Linear(3, 3)
    model = layer if backing is None else DDPLike(layer, backing)
    tree = model_tree(model)
    snap = snapshot(tree)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    (expected,) = torch.autograd.grad(model(model(x)).sum(), layer.weight)
    loss = model(model(x)).sum()
    if use == "load":
        load(tree, snap)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        with torch.no_grad(), swapped(tree, snap):
            model(x)
        (found,) = torch.autograd.grad(loss, layer.weight)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["buffer", "weight", "view"])
@pytest.mark.parametrize("wrap", [lambda module: module, DDPLike])
def test_tensors_made_in_inference_mode(wrap: Callable[[nn.Module], nn.Module], kind: str, dtype: torch.dtype) -> None:
    """sgl-project/sglang #31263, pytorch/rl #529: caches made during generation are written in place, by load and by
    look-backs.
    """
    layer = Layer()
    with torch.inference_mode():
        made = torch.arange(4).to(dtype)
        made = made[1:] if kind == "view" else made
    if kind == "weight":
        layer.register_parameter("rope", nn.Parameter(made, requires_grad=False))
    else:
        layer.register_buffer("rope", made)
    model = wrap(layer)
    before, snap = picture(model), snapshot(model_tree(model))
    change_everything(model)
    now = picture(model)
    with swapped(model_tree(model), snap):
        assert picture(model) == before
    assert picture(model) == now
    load(model_tree(model), snap)
    assert picture(model) == before
    assert layer.rope.is_inference()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nobody_keeps_the_model_alive(wrapper: str) -> None:
    """pytorch/pytorch #16303: neither a snapshot nor a tree holds the source of its leaves, not even
    through a graph.
    """
    models = WRAPPERS[wrapper](Layer())
    tree = model_tree(models)
    with torch.enable_grad():
        snap = snapshot(tree)
        load(tree, snap)
        with swapped(tree, snap):
            pass
    gone = [weakref.ref(layer_in(models)), weakref.ref(layer_in(models).fc.weight)]
    del models
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert named_leaves(snap)
    with pytest.raises(NotResident, match="does not keep its model alive"):
        snapshot(tree)


def test_a_leaf_that_was_handed_out_keeps_its_bytes() -> None:
    """pytorch/pytorch #16303: the other way round, a leaf outlives its snapshot and its model, and so do
    views of it.
    """
    layer = Layer()
    snap = snapshot(model_tree(layer))
    leaf = snap.chunks[0].parameters["fc.weight"]
    view = named_parameters(snap)["chunks[0].out.weight"][1:]
    expected = leaf.tolist(), view.tolist()
    del layer, snap
    gc.collect()
    other = [snapshot({"w": torch.full((64,), float(i))}) for i in range(50)]
    assert (leaf.tolist(), view.tolist()) == expected
    assert len(other) == 50
