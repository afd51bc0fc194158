"""A model is read at every use: memory that moves in between is read as if for the first time."""

import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import mcore_snap
from mcore_snap import StructureMismatch, model_tree
from mcore_snap.live import live_part
from mcore_snap.megatron import reading
from mcore_snap.registration import flatten
from mcore_snap.testing.chunks import DDPLike


class Net(nn.Module):
    """Parameters of one shape, so that any may take the place of any other, and a buffer."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            part = nn.Module()
            part.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
            self.add_module(name, part)
        self.register_buffer("count", torch.zeros(4, 4, dtype=torch.bfloat16))


AS = {
    "itself": lambda p: p.data,
    "own memory": lambda p: p.data.clone(),
    "transposed": lambda p: p.data.t(),
    "one row less": lambda p: p.data[:-1],
    "flattened": lambda p: p.data.reshape(-1),
    "in another dtype": lambda p: p.data.view(torch.float16),
    "a row further": lambda p: p.data[1:],
    "in one storage of two": lambda p: torch.stack([p.data, p.data])[1],
    "on no device": lambda p: torch.empty_like(p.data, device="meta"),
}
HOW = (
    *[("data", how) for how in AS],
    *[("over", "b"), ("over", "c"), ("tie", "b"), ("tie", "c")],
    *[("expert", True), ("expert", False), ("rename", "bias"), ("rename", "weight")],
    *[("persists", True), ("persists", False), ("buffer over", None)],
)


def move(net, kind, where, how):
    """Do what moves memory, names or flags, as offloading, resharding and surgery on models do."""
    part = getattr(net, where)
    own = next(iter(part._parameters))
    parameter = part._parameters[own]
    if kind == "data":
        parameter.data = AS[how](parameter)
    elif kind == "over":
        parameter.data = next(getattr(net, how).parameters()).data
    elif kind == "tie":
        part._parameters[own] = next(getattr(net, how).parameters())
    elif kind == "expert":
        parameter.allreduce = not how
    elif kind == "rename":
        part._parameters[how] = part._parameters.pop(own)
    elif kind == "persists":
        (net._non_persistent_buffers_set.discard if how else net._non_persistent_buffers_set.add)("count")
    else:
        net.count = parameter.data


def described(tree):
    """All that is read of a model, or the error."""
    try:
        leaves, treespec = flatten(tree)
    except StructureMismatch as error:
        return str(error)
    return treespec, [
        (
            *(leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.is_meta),
            *(live_part(leaf).registered, [id(tensor) for tensor in live_part(leaf).covered]),
        )
        for leaf in leaves
    ]


def check_moves(flat, buffers, moves):
    """After each move, what is read is what is read with nothing remembered."""
    net = Net()
    chunk = DDPLike(net) if flat else net
    tree = model_tree(chunk, buffers=buffers)
    described(tree)
    for where, (kind, how) in moves:
        try:
            move(net, kind, where, how)
        except RuntimeError:
            continue  # not of this shape, or of no memory
        remembered = described(tree)
        reading._placed.cache_clear()
        assert remembered == described(tree)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("kind", "how"), HOW)
def test_every_single_move_is_seen(flat, kind, how):
    """What was decided of a model is remembered, and used again only where nothing that decides it has changed."""
    check_moves(flat, "persistent", [("a", (kind, how))])


@given(
    st.booleans(),
    st.sampled_from(["all", "persistent"]),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(HOW)), min_size=2, max_size=8),
)
def test_memory_that_moves_is_read_as_if_for_the_first_time(flat, buffers, moves):
    """One move after another, of any of the parameters."""
    check_moves(flat, buffers, moves)


def test_what_was_decided_is_remembered():
    """A second use of a model that did not move proves nothing anew; one that moved is proven once more."""
    net = Net()
    chunk = DDPLike(net)
    tree = model_tree(chunk)
    reading._placed.cache_clear()
    for _ in range(3):
        mcore_snap.snapshot(tree)
    assert reading._placed.cache_info().misses == 1
    net.a.weight.data = net.a.weight.data.clone()
    mcore_snap.snapshot(tree)
    assert reading._placed.cache_info().misses == 2


def test_what_is_remembered_holds_no_memory():
    """Neither tensors nor modules: a model that is dropped is gone at once."""
    net = Net()
    tree = model_tree(net)
    kept = mcore_snap.snapshot(tree)
    gone = weakref.ref(net.a.weight)
    del net
    assert gone() is None
    with pytest.raises(mcore_snap.NotResident):
        mcore_snap.load(tree, kept)
