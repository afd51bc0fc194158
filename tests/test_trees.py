"""Trees among other pytrees: with optree and torch, nested, and immutable."""

import importlib
import warnings
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import nn

import mcore_snap
from mcore_snap import ModelTree, as_numpy, bitwise_equal, load, model_tree, named_leaves, named_parameters, snapshot
from mcore_snap import frozen as frozen_module


class Pair(NamedTuple):
    """A node that optree and torch know by themselves."""

    a: object
    b: object


def model():
    """Two layers and batch statistics."""
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_optree_and_torch_see_the_same_leaves():
    """No namespace argument anywhere, and what a map makes is a tree of the same class again."""
    net = model()
    tree = model_tree(net)
    kept = snapshot(tree)
    assert [leaf.data_ptr() for leaf in optree.tree_leaves(tree)] == [
        leaf.data_ptr() for leaf in torch_pytree.tree_leaves(tree)
    ]
    summed = optree.tree_map(torch.add, tree, kept)
    assert isinstance(summed, ModelTree)
    assert bitwise_equal(summed, torch_pytree.tree_map(lambda leaf: leaf + leaf, kept))
    assert optree.tree_paths(kept)[0] == ("chunks", 0, "parameters", "0.weight")
    keyed = torch_pytree.tree_flatten_with_path(kept)[0]
    assert torch_pytree.keystr(keyed[0][0]) == ".chunks[0].parameters['0.weight']"
    assert next(iter(named_leaves(kept))) == "chunks[0].parameters['0.weight']"


def test_torch_func_takes_a_snapshot():
    """Gradients, vmap and functional_call read frozen leaves like any tensor."""
    net = nn.Linear(2, 1)
    kept = snapshot(model_tree(net))
    weights = dict(named_parameters(kept.chunks[0]))
    with torch.no_grad():
        net.weight.add_(1)
    data = torch.randn(4, 2)
    out = torch.func.functional_call(net, weights, (data,))
    assert torch.equal(out, nn.functional.linear(data, weights["weight"], weights["bias"]))
    grad = torch.func.grad(lambda w: torch.func.functional_call(net, w, (data,)).sum())(weights)
    assert torch.equal(grad["bias"], torch.tensor([4.0]))
    assert torch.func.vmap(lambda row: row * 2)(weights["weight"]).shape == (1, 2)


def test_trees_nest_in_other_pytrees():
    """A policy and a reference side by side, in one snapshot, one load, one look-back."""
    policy, reference = model(), nn.Linear(1, 1)
    both = {"policy": model_tree(policy), "pair": Pair(model_tree(reference), [torch.ones(1)])}
    kept = snapshot(both)
    assert isinstance(kept["policy"], ModelTree)
    before = mcore_snap.fingerprint(both)
    with torch.no_grad():
        for net in (policy, reference):
            for parameter in net.parameters():
                parameter.add_(1)
    both["pair"].b[0].zero_()
    with mcore_snap.swapped(both, kept, check=True):
        assert mcore_snap.fingerprint(both) == before
    assert mcore_snap.fingerprint(both) != before
    load(both, kept)
    assert mcore_snap.fingerprint(kept) == before
    assert mcore_snap.verify(kept) == before
    # A frozen leaf inside the inner tree stays frozen, and fresh at each read.
    leaf = kept["policy"].chunks[0].parameters["0.weight"]
    assert leaf is not kept["policy"].chunks[0].parameters["0.weight"]
    with pytest.raises(RuntimeError):
        leaf.add_(1)


def test_containers_pair_by_path_not_by_order():
    """An OrderedDict and a dict with the same keys are one tree."""
    live = OrderedDict(b=torch.zeros(1), a=torch.zeros(2))
    load(live, snapshot({"a": torch.ones(2), "b": torch.full((1,), 2.0)}))
    assert live["a"].tolist() == [1.0, 1.0]
    assert live["b"].tolist() == [2.0]


def test_containers_are_immutable():
    """Attributes and items cannot be set or deleted, and the message says what to do instead."""
    net = model()
    kept = snapshot(model_tree(net))
    chunk = kept.chunks[0]
    for change in (
        lambda: setattr(kept, "chunks", ()),
        lambda: setattr(kept, "new", 1),
        lambda: delattr(kept, "_chunks"),
        lambda: setattr(chunk, "buffers", ()),
        lambda: chunk.parameters.__setitem__("0.weight", torch.ones(1)),
        lambda: chunk.parameters.__delitem__("0.weight"),
    ):
        with pytest.raises(mcore_snap.FrozenError, match="thaw"):
            change()
    with pytest.raises(AttributeError):
        kept.no_such_thing  # noqa: B018 - reading is the test


def test_a_handle_that_was_re_pointed_does_not_reach_the_snapshot():
    """In an ordinary dict the handle itself is stored: load still writes what was kept."""
    kept = snapshot({"w": torch.ones(2)})
    kept["w"].data = torch.zeros(2)
    live = {"w": torch.full((2,), 5.0)}
    load(live, kept)
    assert live["w"].tolist() == [1.0, 1.0]


def test_reloading_the_package_keeps_old_snapshots_good():
    """Registration happens once per process."""
    net = model()
    kept = snapshot(model_tree(net))
    net[0].weight.data.zero_()
    again = importlib.reload(mcore_snap)
    tree = again.model_tree(net)
    again.load(tree, kept)
    assert again.bitwise_equal(tree, kept)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([1.0, -2.0]), np.float32),
        (torch.tensor([1.0, -2.0], dtype=torch.bfloat16), np.uint16),
        (torch.tensor([1.0, -2.0]).to(torch.float8_e5m2), np.uint8),
        (torch.tensor([True, False]), np.bool_),
        (torch.tensor([1 + 2j]), np.complex64),
        (torch.tensor(7), np.int64),
        (torch.empty(0, 3), np.float32),
        (torch.arange(6.0).reshape(2, 3).T, np.float32),
    ],
)
def test_numpy_arrays_are_read_only_views(tensor, expected):
    """Same bits, no copy, and no way to make them writable."""
    kept = snapshot([tensor])
    array = as_numpy(kept)[0]
    assert array.dtype == expected
    assert array.shape == tuple(tensor.shape)
    assert array.tobytes() == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    del kept
    assert array.tobytes() == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_numpy_views_of_live_memory_are_refused():
    """They would keep its storage from ever being offloaded."""
    with pytest.raises(mcore_snap.StructureMismatch, match=r"\['w'\].*take snapshot"):
        as_numpy({"w": torch.ones(1)})


def test_without_read_only_storages_reads_are_copies(monkeypatch):
    """Where torch lacks the flag this is said once, and the bytes are safe all the same."""
    net = nn.Linear(1, 1)
    kept = snapshot(model_tree(net))
    monkeypatch.setattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)
    frozen_module._can_flag.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no read-only storages"):
            leaf = kept.chunks[0].parameters["weight"]
        before = leaf.clone()
        leaf.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(kept.chunks[0].parameters["weight"], before)
    finally:
        frozen_module._can_flag.cache_clear()
