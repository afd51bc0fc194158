"""A model is read at every use: memory that moves in between is read as if for the first time."""

import weakref
from types import SimpleNamespace

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
    *[("persists", True), ("persists", False), ("buffer over", None), ("to buffer", None)],
)


def move(net, kind, where, how):
    """Do what moves memory, names or flags, as offloading, resharding and surgery on models do."""
    part = getattr(net, where)
    own = next(iter(part._parameters), None)
    if own is None:
        return  # it has become a buffer
    parameter = part._parameters[own]
    if kind == "data":
        parameter.data = AS[how](parameter)
    elif kind == "over":
        parameter.data = weight(net, how).data
    elif kind == "tie":
        part._parameters[own] = weight(net, how)
    elif kind == "expert":
        parameter.allreduce = not how
    elif kind == "rename":
        part._parameters[how] = part._parameters.pop(own)
    elif kind == "persists":
        (net._non_persistent_buffers_set.discard if how else net._non_persistent_buffers_set.add)("count")
    elif kind == "to buffer":
        part._buffers[own] = part._parameters.pop(own).data
    else:
        net.count = parameter.data


def weight(net, where):
    """The parameter of one part, or what has become of it."""
    part = getattr(net, where)
    return next(iter((part._parameters or part._buffers).values()))


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


def check_unremembered(tree):
    """What is read is what is read with nothing remembered."""
    remembered = described(tree)
    reading._placed.cache_clear()
    assert remembered == described(tree)


def check_moves(flat, buffers, moves):
    """That is so after each move."""
    net = Net()
    chunk = DDPLike(net) if flat else net
    tree = model_tree(chunk, buffers=buffers)
    described(tree)
    for where, (kind, how) in moves:
        try:
            move(net, kind, where, how)
        except RuntimeError:
            continue  # not of this shape, or of no memory
        check_unremembered(tree)


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


@pytest.mark.parametrize("flat", [True, False])
def test_a_parameter_that_becomes_a_buffer_is_seen(flat):
    """Where nothing else changes: it is found under its name, in its place among all, with its memory."""
    check_moves(flat, "persistent", [("a", ("persists", False)), ("c", ("to buffer", None))])


@pytest.mark.parametrize("flat", [True, False])
def test_a_module_that_moves_to_another_chunk_is_seen(flat):
    """Though all names, their order and the memory are what they were."""
    nets = [nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), nn.ModuleDict({"c": nn.Linear(2, 2)})]
    chunks = [DDPLike(net) if flat else net for net in nets]
    tree = model_tree(chunks)
    described(tree)
    nets[0]["c"] = nets[1].pop("c")
    check_unremembered(tree)
    assert [len(chunk.layout.placements) for chunk in tree.chunks] == [6, 0]


@pytest.mark.parametrize("more", [1, 2])
def test_chunks_without_any_tensor_count(more):
    """As many chunk trees as chunks, after a reading of fewer that hold the same, and of more."""
    chunks = [Net(), *(nn.Module() for _ in range(more))]
    trees = [model_tree(chunks[:1]), model_tree(chunks)]
    for tree in (*trees, *trees):
        described(tree)
        check_unremembered(tree)


def sharded(net):
    """A chunk as the distributed optimizer has it: one bucket, of which this rank owns the second half."""
    chunk = DDPLike(net)
    for buffer in chunk.buffers:
        buffer.ddp_config = SimpleNamespace(use_distributed_optimizer=True)
        buffer.buckets = [SimpleNamespace(param_data=buffer.param_data)]
    share = {"intra_distributed_optimizer_instance_rank": 1, "intra_distributed_optimizer_instance_size": 2}
    chunk.bucket_groups = [SimpleNamespace(buckets=buffer.buckets, **share) for buffer in chunk.buffers]
    return chunk


@pytest.mark.parametrize("order", [1, -1])
def test_slices_and_the_whole_are_two_things(order):
    """Of one model, read as a whole and by this rank's slices, in either order."""
    chunk = sharded(Net())
    (flat,) = [buffer.param_data for buffer in chunk.buffers]
    for slices in [False, True][::order]:
        tree = model_tree(chunk, dp_sharded=slices)
        (leaf,) = tree.chunks[0].buffers
        assert (leaf.data_ptr(), leaf.numel()) == (
            flat[flat.numel() // 2 * slices :].data_ptr(),
            flat.numel() // (1 + slices),
        )
        assert (tree.chunks[0].layout.placements == ()) == slices
        check_unremembered(tree)
        described(tree)


class Shows(nn.Module):
    """Names its parameters as it likes, as wrappers for checkpoints of activations do."""

    def __init__(self, shown):
        super().__init__()
        self._checkpoint_wrapped_module = Net()
        self.shown = shown

    def named_parameters(self, *args, **kwargs):
        """Leave a prefix out, or a parameter."""
        return self.shown(super().named_parameters(*args, **kwargs))


SHOWN = {
    "without a prefix": lambda found: ((n.removeprefix("_checkpoint_wrapped_module."), p) for n, p in found),
    "without one of them": lambda found: ((n, p) for n, p in found if ".b." not in n),
    "in another order": lambda found: reversed(list(found)),
}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_names_are_those_that_a_chunk_shows(shown, flat):
    """Not those by which a walk over its modules would call them; and what it hides is no leaf of its own."""
    chunk = Shows(shown)
    named = {name: parameter.data_ptr() for name, parameter in chunk.named_parameters()}
    if flat:
        DDPLike(chunk._checkpoint_wrapped_module)
    tree = model_tree(chunk)
    assert list(tree.chunks[0].parameters) == list(named)
    assert list(mcore_snap.named_parameters(mcore_snap.snapshot(tree).chunks[0])) == list(named)
    shows = dict(chunk.named_parameters())
    assert all(leaf.data_ptr() == shows[name].data_ptr() for name, leaf in tree.chunks[0].parameters.items())
    chunk.shown = SHOWN["without one of them"]
    check_unremembered(tree)
    assert list(tree.chunks[0].parameters) == [name for name, _ in chunk.named_parameters()]


def test_little_is_remembered():
    """A few ways in which models lie, however many models there were."""
    assert reading._placed.cache_info().maxsize <= 4


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


def test_a_parameter_under_two_names_is_told_once():
    """By its first name, as `named_parameters` does it; it is one parameter, whether a flat buffer holds it or not."""
    for wrap in (DDPLike, lambda net: net):
        net = Net()
        net.c.weight = net.a.weight
        chunk = wrap(net)
        shown = [name for name, _ in chunk.named_parameters()]
        assert [placement.name for placement in model_tree(chunk).chunks[0].layout.placements] == shown
        assert list(mcore_snap.named_parameters(model_tree(chunk).chunks[0])) == shown


@pytest.mark.parametrize("hides", [False, True])
def test_parameters_of_experts_are_told_apart(hides):
    """They have replicas of their own, which `agree` compares among themselves; wrapped or not."""

    class Wrapper(Net):
        """Shows its parameters itself."""

        def named_parameters(self, *args, **kwargs):
            """As they are."""
            yield from super().named_parameters(*args, **kwargs)

    net = Wrapper() if hides else Net()
    net.b.weight.allreduce = False
    experts = {placement.name: placement.expert for placement in model_tree(net).chunks[0].layout.placements}
    assert experts == {"a.weight": False, "b.weight": True, "c.weight": False}
