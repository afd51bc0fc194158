"""Law 4: a load changes no address, stride, `requires_grad`, tying, optimizer view or gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import pytest
import torch
from hypothesis import given

from mcore_snap import load, model_tree, snapshot, swapped
from mcore_snap.testing.chunks import Backing, DDPLike
from mcore_snap.testing.model_state import chunks_of, flat_buffers, model_places, model_tensors
from mcore_snap.testing.model_strategies import model_trees, trainable_models
from mcore_snap.testing.raw_bytes import flip, to_bytes
from mcore_snap.testing.strategies import trees

if TYPE_CHECKING:
    from mcore_snap.testing.model_strategies import Models


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (id(tensor), tensor.data_ptr(), tensor.stride(), tensor.storage_offset(), tensor.requires_grad)


@given(trees())
def test_leaves_of_any_tree_stay_where_they_are(tree: Any) -> None:
    """Neither snapshot nor load nor swapped moves a tensor."""
    leaves = optree.tree_leaves(tree)
    before = [_place(leaf) for leaf in leaves]
    snap = snapshot(tree)
    flip(leaves)
    load(tree, snap)
    with swapped(tree, snap):
        assert [_place(leaf) for leaf in leaves] == before
    assert [_place(leaf) for leaf in leaves] == before


@given(model_trees())
def test_tensors_of_a_model_stay_where_they_are(pair: tuple[Models, Any]) -> None:
    """Objects, addresses, strides, requires_grad and gradients of every name are what they were."""
    models, tree = pair
    for chunk in chunks_of(models):
        for param in chunk.parameters():
            if param.requires_grad and param.dtype in {torch.float32, torch.float64}:
                param.grad = torch.full_like(param, float("nan"))
    before = model_places(models)
    snap = snapshot(tree)
    flip(tensor for _, tensor in model_tensors(models))
    load(tree, snap)
    with swapped(tree, snap):
        assert model_places(models) == before
    assert model_places(models) == before


@given(model_trees())
def test_flat_buffers_still_hold_the_parameters(pair: tuple[Models, Any]) -> None:
    """What is written to a flat buffer after a load is seen by its parameters, and gradients were not touched."""
    models, tree = pair
    grads = [b.grad_data for c in chunks_of(models) for b in _buffers(c)]
    for grad in grads:
        grad.fill_(7)
    held = [to_bytes(grad) for grad in grads]
    load(tree, snapshot(tree))
    assert [to_bytes(grad) for grad in grads] == held
    for chunk in chunks_of(models):
        flats = [flat for _, flat in flat_buffers(chunk)]
        params = [p for b in _buffers(chunk) if any(b.param_data is flat for flat in flats) for p in b.params]
        before = [to_bytes(param) for param in params]
        flip(flats)
        assert all(to_bytes(p) != was for p, was in zip(params, before, strict=True) if p.numel())


def _buffers(chunk: torch.nn.Module) -> list[Any]:
    found: list[Any] = []
    for kind in ("buffers", "expert_parallel_buffers"):
        listed = getattr(chunk, kind, None)
        found += listed if isinstance(listed, list) else []
    return found


@given(trainable_models())
def test_an_optimizer_goes_on_with_the_loaded_weights(models: Models) -> None:
    """The optimizer steps the same parameters, with its own state, from the weights that were loaded."""
    params = [param for chunk in chunks_of(models) for param in chunk.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5)
    snap = snapshot(model_tree(models))
    held = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    load(model_tree(models), snap)
    momenta = [optimizer.state[param]["momentum_buffer"].clone() for param in params]
    optimizer.step()
    for param, was, momentum in zip(params, held, momenta, strict=True):
        expected = was.add(momentum * 0.5 + 1, alpha=-0.5)
        assert torch.equal(param.detach(), expected)


@pytest.mark.parametrize("backing", [None, "flat", "none", "shared"])
def test_loading_between_forward_and_backward_is_noticed(backing: Backing | None) -> None:
    """A load, unlike a look-back, changes weights that autograd saved: backward must refuse to go on."""
    layer = torch.nn.Linear(3, 3)  # nothing but weights: a buffer that autograd saved would be noticed by itself
    model = layer if backing is None else DDPLike(layer, backing)
    tree = model_tree(model)
    snap = snapshot(tree)
    loss = model(model(torch.ones(2, 3))).sum()
    load(tree, snap)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
