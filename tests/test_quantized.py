"""Models with quantized weights, whole: what a snapshot keeps of them, and that no cache survives a load."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from mcore_snap import StructureMismatch, bitwise_equal, fingerprint, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.chunks import DDPLike, FlatBuffer, Layer
from mcore_snap.testing.quantized import EXAMPLES, Float8Tensor, QuantizedLinear
from mcore_snap.testing.raw_bytes import to_bytes

KEPT = {
    "float8": {"_data", "_scale_inv"},
    "blockwise": {"_rowwise_data", "_rowwise_scale_inv"},
    "blockwise_1d": {"_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"},
    "mxfp8": {"_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"},
    "nvfp4": {"_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"},
}
CACHED = {"float8", "blockwise", "nvfp4"}


def passes(model):
    """Return what goes forward and what comes back, as bytes: the rows and the columns of all weights."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6).requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return to_bytes(y), to_bytes(grad)


def train(weight, kind):
    """Overwrite the weights as an optimizer step does, which leaves no cache."""
    other = EXAMPLES[kind]()
    for name in KEPT[kind]:
        getattr(weight, name).copy_(getattr(other, name))
    if kind in CACHED:
        weight.update_usage(columnwise=False)


@pytest.fixture(params=EXAMPLES)
def kind(request):
    """Choose a format."""
    return request.param


@pytest.fixture
def model(kind):
    """Make a layer with such a weight."""
    torch.manual_seed(0)
    return QuantizedLinear(EXAMPLES[kind]())


def test_the_leaves_are_the_weights_inside(kind, model):
    """Under the parameter's name and the attribute's, and nothing else."""
    snap = snapshot(model_tree(model))
    assert set(snap.chunks[0].parameters) == {f"weight.{name}" for name in KEPT[kind]}
    passes(model)
    assert set(snapshot(model_tree(model)).chunks[0].parameters) == set(snap.chunks[0].parameters)


def test_a_load_brings_both_passes_back(kind, model):
    """Whether the columns were made before the snapshot, since, or both."""
    tree = model_tree(model)
    early = snapshot(tree)
    v1 = passes(model)
    late = snapshot(tree)
    assert bitwise_equal(early, late)
    train(model.weight, kind)
    v2 = passes(model)
    assert all(new != old for new, old in zip(v2, v1, strict=True))
    kept = snapshot(tree)
    for snap, expected in ((early, v1), (kept, v2), (late, v1)):
        load(tree, snap)
        assert passes(model) == expected
        assert fingerprint(tree) == fingerprint(snap)


def test_a_look_back_leaves_nothing_behind(kind, model):
    """Nested, and with both passes inside."""
    tree = model_tree(model)
    v1, snap = passes(model), snapshot(tree)
    train(model.weight, kind)
    v2, print2 = passes(model), fingerprint(tree)
    with swapped(tree, snap, check=True):
        assert passes(model) == v1
        with swapped(tree, snap):
            assert passes(model) == v1
    assert fingerprint(tree) == print2
    assert passes(model) == v2


def test_between_forward_and_backward(kind, model):
    """The columns that the backward pass reads are those of its own forward pass."""
    tree = model_tree(model)
    snap = snapshot(tree)
    train(model.weight, kind)
    expected = passes(model)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6).requires_grad_()
    y = model(x)
    with swapped(tree, snap):
        passes(model)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert (to_bytes(y), to_bytes(grad)) == expected


def test_a_load_is_seen_by_a_graph_made_before(model):
    """The wrapper counts its versions apart from what is inside."""
    tree = model_tree(model)
    snap = snapshot(tree)
    x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
    y = model(x)
    load(tree, snap)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def into_flat_buffer(weight, gap=3):
    """Move the bytes of a Float8 weight into a flat buffer of bytes, as the distributed optimizer does."""
    flat = FlatBuffer([weight], "none", gap)
    flat.param_dtype = torch.uint8
    flat.param_data = torch.zeros(flat.numel, dtype=torch.uint8)
    start, end, _ = flat.param_index_map[weight]
    view = flat.param_data[start:end].view(weight.shape)
    view.copy_(weight._data)
    weight._data = view
    return flat


def wrapped():
    """Make a DDP chunk with a plain layer and a Float8 one."""
    chunk = DDPLike(Layer())
    chunk.module.quantized = QuantizedLinear(EXAMPLES["float8"]())
    flat = into_flat_buffer(chunk.module.quantized.weight)
    chunk.buffers.append(flat)
    return chunk, flat


def test_bytes_in_a_flat_buffer_are_in_its_leaf_alone():
    """The scale lies beside it; and a load of the buffer refreshes the cache of the weight in it."""
    chunk, flat = wrapped()
    layer = chunk.module.quantized
    tree = model_tree(chunk)
    snap = snapshot(tree)
    assert to_bytes(snap.chunks[0].buffers[1]) == to_bytes(flat.param_data)
    names = set(snap.chunks[0].parameters)
    assert "module.quantized.weight._scale_inv" in names
    assert "module.quantized.weight._data" not in names
    v1 = passes(layer)
    train(layer.weight, "float8")
    v2 = passes(layer)
    with swapped(tree, snap):
        assert passes(layer) == v1
    assert passes(layer) == v2
    load(tree, snap)
    assert layer.weight._data.data_ptr() == flat.param_data.data_ptr() + 3
    assert passes(layer) == v1


def test_while_it_is_offloaded():
    """The host copy is written, and the cache of what is not there is not believed afterwards."""
    chunk, flat = wrapped()
    layer = chunk.module.quantized
    tree = model_tree(chunk)
    snap = snapshot(tree)
    v1 = passes(layer)
    train(layer.weight, "float8")
    passes(layer)
    flat.offload()
    load(tree, snap)
    assert layer.weight._transpose_invalid
    flat.reload()
    assert passes(layer) == v1


def test_scales_in_another_order_do_not_fit():
    """They are refused before anything is written."""
    plain = EXAMPLES["mxfp8"]()
    model = QuantizedLinear(plain)
    snap = snapshot(model_tree(model))
    before = fingerprint(model_tree(model))
    model.weight._with_gemm_swizzled_scales = True
    with pytest.raises(StructureMismatch, match="_rowwise_scale_inv"):
        load(model_tree(model), snap)
    model.weight._with_gemm_swizzled_scales = False
    assert fingerprint(model_tree(model)) == before


def test_a_weight_that_cannot_be_kept_is_refused_by_name():
    """Not half of it, and not silently."""
    model = QuantizedLinear(EXAMPLES["float8"]())
    model.weight._data = None
    with pytest.raises(StructureMismatch, match=r"weight.*Float8Tensor"):
        snapshot(model_tree(model))


def test_any_subclass_that_tells_what_it_is_made_of():
    """As a parameter and as a buffer, tied or not."""
    model = nn.Module()
    a, b = torch.arange(3.0), torch.full((3,), float("nan"))
    model.weight = nn.Parameter(TwoTensor(a, b))
    model.tied = nn.Parameter(TwoTensor(b, a))
    model.register_buffer("scale", TwoTensor(torch.ones(2), torch.zeros(2)))
    tree = model_tree(model)
    snap = snapshot(tree)
    assert set(named_leaves(snap)) == {
        "chunks[0].parameters['weight.a']",
        "chunks[0].parameters['weight.b']",
        "chunks[0].module_buffers['scale.a']",
        "chunks[0].module_buffers['scale.b']",
    }
    bits = to_bytes(b)
    for tensor in (a, b, model.scale.b):
        tensor.fill_(7)
    load(tree, snap)
    assert (a.tolist(), to_bytes(b), model.scale.b.tolist()) == ([0, 1, 2], bits, [0, 0])


def test_the_stand_in_refuses_what_the_library_must_not_do():
    """No copy and no arithmetic through the wrapper."""
    weight = EXAMPLES["float8"]()
    for write in (lambda: weight.copy_(torch.ones(4, 6)), weight.zero_, weight.clone):
        with pytest.raises(RuntimeError, match="not to be used"):
            write()
    assert isinstance(nn.Parameter(weight), Float8Tensor)
