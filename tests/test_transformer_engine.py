"""Quantized tensors as Transformer Engine has them: which parts are weights, and that no cache outlives its bytes."""

import pytest
import torch
from torch import nn

from mcore_snap.megatron.inner_tensors import inner_tensors
from mcore_snap.testing.quantized import EXAMPLES, Float8BlockwiseQTensor, QuantizedTensor, Quantizer
from mcore_snap.testing.raw_bytes import carrier, to_bytes
from mcore_snap.words import problem_with

ROWS = ("_rowwise_data", "_rowwise_scale_inv")
COLUMNS = ("_columnwise_data", "_columnwise_scale_inv")
CACHED = {"float8": ("_data", "_scale_inv"), "blockwise": ROWS, "nvfp4": (*ROWS, "_amax_rowwise")}
APART = {"blockwise_1d": (*ROWS, *COLUMNS), "mxfp8": (*ROWS, *COLUMNS)}


def raw(*shape):
    """Draw bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def names(tensor):
    """Return the suffixes of the parts."""
    return tuple(name for name, _ in inner_tensors(tensor).parts)


def scramble(tensor):
    """Write random bytes, but no NaN and no infinity, into all parts of a tensor, as a load would."""
    for _, part in inner_tensors(tensor).parts:
        words = carrier(part)
        words.copy_(torch.randint(torch.iinfo(words.dtype).min, torch.iinfo(words.dtype).max, words.shape))
        if part.is_floating_point():
            words.bitwise_and_(~(1 << 30))


def readings(tensor):
    """Return the bytes of the values as read by rows and as read by columns."""
    return to_bytes(tensor.by_rows()), to_bytes(tensor.by_columns().T)


def with_cache(kind):
    """Make one whose columns were used."""
    tensor = EXAMPLES[kind]()
    tensor.update_usage(columnwise=True)
    return tensor


def nvfp4_apart(**how):
    """Packed, with columns that were quantized apart."""
    tensor = EXAMPLES["nvfp4"]()
    tensor._quantizer = Quantizer(**how)
    inner = {
        "_columnwise_data": raw(6, 2),
        "_columnwise_scale_inv": torch.rand(3, 2),
        "_amax_columnwise": torch.rand(1),
    }
    vars(tensor).update(inner)
    return tensor


@pytest.mark.parametrize(("kind", "expected"), [*CACHED.items(), *APART.items()])
def test_the_parts_are_the_memory_itself_under_the_names_it_has(kind, expected):
    """No copy, no view: the attributes."""
    for tensor in (EXAMPLES[kind](), nn.Parameter(EXAMPLES[kind]())):
        parts = inner_tensors(tensor).parts
        assert tuple(name for name, _ in parts) == expected
        assert all(part is getattr(tensor, name) for name, part in parts)


@pytest.mark.parametrize("kind", CACHED)
def test_both_readings_follow_what_was_written(kind):
    """After a load the columns are those of the rows, and going back gives all bits."""
    tensor = with_cache(kind)
    before = readings(tensor)
    kept = [part.clone() for _, part in inner_tensors(tensor).parts]
    scramble(tensor)
    inner_tensors(tensor).after()
    rows, columns = readings(tensor)
    assert rows == columns != before[0]
    for (_, part), old in zip(inner_tensors(tensor).parts, kept, strict=True):
        part.copy_(old)
    inner_tensors(tensor).after()
    assert readings(tensor) == before


@pytest.mark.parametrize("kind", CACHED)
def test_a_cache_that_nobody_refreshed_is_seen(kind):
    """The stand-ins would tell: without the hook the two readings differ."""
    tensor = with_cache(kind)
    scramble(tensor)
    rows, columns = readings(tensor)
    assert rows != columns


@pytest.mark.parametrize("kind", APART)
def test_columns_of_their_own_are_kept(kind):
    """What cannot be made from the rows is written back like them."""
    tensor = EXAMPLES[kind]()
    before = readings(tensor)
    kept = [part.clone() for _, part in inner_tensors(tensor).parts]
    scramble(tensor)
    assert all(new != old for new, old in zip(readings(tensor), before, strict=True))
    for (_, part), old in zip(inner_tensors(tensor).parts, kept, strict=True):
        part.copy_(old)
    inner_tensors(tensor).after()
    assert readings(tensor) == before


@pytest.mark.parametrize(("kind", "expected"), CACHED.items())
def test_a_cache_may_come_and_go_between_a_snapshot_and_its_load(kind, expected):
    """The names of the parts do not depend on what was used."""
    tensor = EXAMPLES[kind]()
    for columnwise in (False, True, False):
        tensor.update_usage(columnwise=columnwise)
        assert names(tensor) == expected


@pytest.mark.parametrize("kind", CACHED)
def test_a_cache_is_refreshed_in_its_memory_and_never_made(kind):
    """A captured graph may hold the address."""
    tensor = EXAMPLES[kind]()
    inner_tensors(tensor).after()
    cache = "_transpose" if kind == "float8" else "_columnwise_data"
    assert getattr(tensor, cache) is None
    tensor.update_usage(columnwise=True)
    there = getattr(tensor, cache)
    scramble(tensor)
    inner_tensors(tensor).after()
    assert getattr(tensor, cache) is there


def test_an_invalid_cache_stays_invalid():
    """Nobody asked for it."""
    tensor = with_cache("float8")
    tensor._transpose_invalid = True
    stale = to_bytes(tensor._transpose)
    scramble(tensor)
    inner_tensors(tensor).after()
    assert tensor._transpose_invalid
    assert to_bytes(tensor._transpose) == stale


def test_columns_alone_are_the_weights():
    """Where the rows were dropped, nothing else has the values."""
    tensor = with_cache("float8")
    tensor._data = None
    assert names(tensor) == ("_transpose", "_scale_inv")
    inner_tensors(tensor).after()
    assert not tensor._transpose_invalid

    tensor = with_cache("blockwise")
    tensor._rowwise_data = tensor._rowwise_scale_inv = None
    assert names(tensor) == COLUMNS
    inner_tensors(tensor).after()
    assert tensor._columnwise_data is not None

    tensor = EXAMPLES["mxfp8"]()
    tensor._columnwise_data = tensor._columnwise_scale_inv = None
    assert names(tensor) == ROWS


@pytest.mark.parametrize("kind", CACHED)
def test_a_tensor_without_weights_is_refused_by_name(kind):
    """As while they are saved for a backward pass."""
    tensor = EXAMPLES[kind]()
    for name in inner_tensors(tensor).parts:
        setattr(tensor, name[0], None)
    assert inner_tensors(tensor) is None
    assert type(tensor).__name__ in problem_with(tensor)[1]


def test_invalid_columns_are_no_weights():
    """They have the bytes of a step before."""
    tensor = with_cache("float8")
    tensor._data = None
    tensor._transpose_invalid = True
    assert inner_tensors(tensor) is None


def test_swizzled_scales_have_another_name():
    """Their bytes in a tensor that is not swizzled would be other scales."""
    tensor = EXAMPLES["mxfp8"]()
    tensor._with_gemm_swizzled_scales = True
    assert names(tensor) == tuple(f"{name}.swizzled" if "scale" in name else name for name in (*ROWS, *COLUMNS))


@pytest.mark.parametrize("how", ["with_rht", "stochastic_rounding", "row_scaled_nvfp4", None])
def test_columns_that_are_no_transpose_of_the_rows_are_weights(how):
    """Rotated, rounded at random, scaled by row, or blocks that are not square."""
    tensor = nvfp4_apart(**({how: True} if how else {"with_2d_quantization": False}))
    assert names(tensor) == (*ROWS, "_amax_rowwise", *COLUMNS, "_amax_columnwise")
    before = readings(tensor)
    inner_tensors(tensor).after()
    assert readings(tensor) == before


def test_releases_that_cannot_make_a_cache():
    """Then columns are weights, or the cache is marked invalid."""

    class Old(QuantizedTensor):
        pass

    # 2.3: blocks without _create_columnwise, and NVFP4 up to 2.13. 1.x: Float8Tensor without _create_transpose.
    blocks = type("Float8BlockwiseQTensorBase", (Old,), {"fields": Float8BlockwiseQTensor.fields})
    assert names(blocks((4, 6), **vars(with_cache("blockwise")))) == (*ROWS, *COLUMNS)
    packed = type("NVFP4TensorStorage", (Old,), {})
    assert names(packed((4, 6), **vars(nvfp4_apart()))) == (*ROWS, "_amax_rowwise", *COLUMNS, "_amax_columnwise")
    scaled = type("Float8Tensor", (Old,), {})((4, 6), **vars(with_cache("float8")))
    assert names(scaled) == ("_data", "_scale_inv")
    inner_tensors(scaled).after()
    assert scaled._transpose_invalid


@pytest.mark.parametrize("kind", CACHED)
def test_a_cache_is_dropped_where_the_rows_cannot_be_read(kind):
    """While a model is offloaded, its rows are written to the host copy."""
    tensor = with_cache(kind)
    inner = inner_tensors(tensor)
    inner.parts[0][1].untyped_storage().resize_(0)
    inner.after()
    if kind == "float8":
        assert tensor._transpose_invalid
    else:
        assert tensor._columnwise_data is tensor._columnwise_scale_inv is None


@pytest.mark.parametrize("kind", CACHED)
def test_their_kernels_are_not_called_on_host_memory(kind):
    """The cache is dropped instead."""
    cls = type(EXAMPLES[kind]())

    def launch(self):
        pytest.fail("an address on the host went to a kernel")

    space = {"__module__": "transformer_engine.pytorch", "_create_transpose": launch, "_create_columnwise": launch}
    tensor = type(cls.__name__, (cls,), space)((4, 6), **vars(with_cache(kind)))
    inner_tensors(tensor).after()
    assert getattr(tensor, "_transpose_invalid", True)
    assert kind == "float8" or tensor._columnwise_data is None


@pytest.mark.parametrize("suffix", ["", "Base", "Storage"])
def test_the_storage_classes_have_had_several_names(suffix):
    """2.0 to 2.8 say Base, later releases Storage."""

    class Mixin(QuantizedTensor):
        pass

    made = type(f"MXFP8Tensor{suffix}", (Mixin,), {})((4, 6), **vars(EXAMPLES["mxfp8"]()))
    assert names(type("Own", (type(made),), {})((4, 6), **vars(made))) == (*ROWS, *COLUMNS)


def test_a_class_of_the_same_name_is_told_by_what_it_has():
    """There is a Float8Tensor elsewhere."""
    other = type("Float8Tensor", (QuantizedTensor,), {"fields": ("qdata", "scale")})
    tensor = other((4, 6), qdata=raw(4, 6), scale=torch.rand(4, 1))
    assert names(tensor) == ("qdata", "scale")
    assert inner_tensors(tensor).after is None


def test_an_unknown_class_of_theirs_is_refused_whatever_it_tells():
    """Nobody knows which of its tensors are caches."""
    new = type("Posit8Tensor", (QuantizedTensor,), {"fields": ("_data",), "__module__": "transformer_engine.pytorch"})
    tensor = new((4, 6), _data=raw(4, 6))
    assert inner_tensors(tensor) is None
    assert "Posit8Tensor" in problem_with(tensor)[1]
