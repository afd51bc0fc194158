"""Quantized tensors with the names and attributes of Transformer Engine's, in arithmetic that a CPU does exactly.

One strict class per format. Each is read in two ways, as its matrix multiplications do: by rows going forward, by
columns going backward, where a cache that nobody refreshed gives wrong numbers. Nothing writes through the wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

__all__ = [
    "EXAMPLES",
    "Float8BlockwiseQTensor",
    "Float8Tensor",
    "GroupedTensor",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "QuantizedLinear",
    "Quantizer",
]


@dataclass
class Quantizer:
    """How a tensor was quantized, as far as it tells whether the columns follow from the rows."""

    with_2d_quantization: bool = True
    with_rht: bool = False
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False


class QuantizedTensor(torch.Tensor):
    """Looks like float32 of a shape, and holds other tensors instead."""

    fields: ClassVar[tuple[str, ...]] = ()
    _data: Any
    _scale_inv: Any
    _transpose: Any
    _transpose_invalid: bool
    _rowwise_data: Any
    _rowwise_scale_inv: Any
    _columnwise_data: Any
    _columnwise_scale_inv: Any
    _amax_rowwise: Any
    _amax_columnwise: Any
    _is_2D_scaled: bool  # noqa: N815 - their name
    _quantizer: Quantizer

    def __new__(cls, shape: tuple[int, ...], **inner: Any) -> Self:
        """Hold `inner` as attributes."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        vars(made).update(inner)
        return made

    def __init__(self, shape: tuple[int, ...], **inner: Any) -> None:
        """Do nothing more."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}{tuple(self.shape)}"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name all tensors, caches included, as newer releases do."""
        return [name for name in self.fields if getattr(self, name) is not None], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Detach, which shares all that is inside, and refuse everything else."""
        if func is torch.ops.aten.detach.default:
            return cls(tuple(args[0].shape), **vars(args[0]))
        raise RuntimeError(f"{cls.__name__} is not to be used with {func}")

    def by_rows(self) -> Tensor:
        """Return the values, as a product with an input reads them."""
        raise TypeError(f"{type(self).__name__} has no values of its own")

    def by_columns(self) -> Tensor:
        """Return the transposed values, as a product with a gradient reads them."""
        raise TypeError(f"{type(self).__name__} has no values of its own")


class Float8Tensor(QuantizedTensor):
    """One scale for all; the transposed data is a cache with a flag."""

    fields = ("_data", "_transpose", "_scale_inv")

    @classmethod
    def of(cls, data: Tensor, scale: Tensor) -> Float8Tensor:
        """Make one without a cache."""
        inner = {"_data": data, "_scale_inv": scale, "_transpose": None, "_transpose_invalid": True}
        return cls(tuple(data.shape), **inner)

    def update_usage(self, *, columnwise: bool) -> None:
        """Make the cache if it is not there or invalid, or drop it."""
        if columnwise and self._transpose_invalid:
            self._create_transpose()
        elif not columnwise:
            self._transpose = None
            self._transpose_invalid = True

    def _create_transpose(self) -> None:
        self._transpose = _into(self._transpose, self._data.T)
        self._transpose_invalid = False

    def by_rows(self) -> Tensor:
        """Scale the data."""
        return _scaled(self._data, self._scale_inv.view(1, 1))

    def by_columns(self) -> Tensor:
        """Scale the cache."""
        assert self._transpose is not None, "nobody made the transposed data"
        assert not self._transpose_invalid, "the transposed data is invalid"
        return _scaled(self._transpose, self._scale_inv.view(1, 1))


class _ByDirection(QuantizedTensor):
    fields: ClassVar[tuple[str, ...]] = (
        "_rowwise_data",
        "_rowwise_scale_inv",
        "_columnwise_data",
        "_columnwise_scale_inv",
    )

    def update_usage(self, *, columnwise: bool) -> None:
        """Make the columns if they are not there, where that can be done, or drop them."""
        if columnwise and self._columnwise_data is None:
            self._create_columnwise()
        elif not columnwise:
            vars(self).update(dict.fromkeys((name for name in self.fields if "columnwise" in name), None))

    def _create_columnwise(self) -> None:
        raise RuntimeError(f"{type(self).__name__} cannot make columns from rows")


class Float8BlockwiseQTensor(_ByDirection):
    """One scale per block of 2 x 2 elements, or of 2 elements along a row and along a column."""

    @classmethod
    def of(cls, data: Tensor, scale: Tensor, columns: tuple[Tensor, Tensor] | None = None) -> Float8BlockwiseQTensor:
        """Make one with square blocks, or with columns of its own."""
        column_data, column_scale = columns or (None, None)
        inner = dict(zip(cls.fields, (data, scale, column_data, column_scale), strict=True))
        return cls(tuple(data.shape), **inner, _is_2D_scaled=columns is None)

    def _create_columnwise(self) -> None:
        assert self._is_2D_scaled, "one-dimensional blocks of rows say nothing of those of columns"
        self._columnwise_data = _into(self._columnwise_data, self._rowwise_data.T)
        self._columnwise_scale_inv = _into(self._columnwise_scale_inv, self._rowwise_scale_inv.T)

    def by_rows(self) -> Tensor:
        """Scale the blocks."""
        return _scaled(self._rowwise_data, self._rowwise_scale_inv)

    def by_columns(self) -> Tensor:
        """Scale the blocks of the transposed data."""
        return _scaled(self._columnwise_data, self._columnwise_scale_inv)


class MXFP8Tensor(_ByDirection):
    """A power of two per 2 elements along a row, and other data with others along a column; neither is transposed."""

    @classmethod
    def of(cls, *inner: Tensor, swizzled: bool = False) -> MXFP8Tensor:
        """Make one of data and scales by rows, and data and scales by columns."""
        named = dict(zip(cls.fields, inner, strict=True))
        return cls(tuple(inner[0].shape), **named, _with_gemm_swizzled_scales=swizzled)

    def by_rows(self) -> Tensor:
        """Scale the row blocks."""
        return _scaled(self._rowwise_data, _power(self._rowwise_scale_inv))

    def by_columns(self) -> Tensor:
        """Scale the column blocks."""
        return _scaled(self._columnwise_data, _power(self._columnwise_scale_inv)).T


class NVFP4Tensor(_ByDirection):
    """Two elements a byte, a scale per 2 x 2, and one for all from the largest magnitude."""

    fields = (*_ByDirection.fields, "_amax_rowwise", "_amax_columnwise")

    @classmethod
    def of(cls, data: Tensor, scale: Tensor, amax: Tensor, quantizer: Quantizer | None = None) -> NVFP4Tensor:
        """Make one without columns from packed data."""
        inner = dict.fromkeys(cls.fields, None) | {
            "_rowwise_data": data,
            "_rowwise_scale_inv": scale,
            "_amax_rowwise": amax,
            "_quantizer": quantizer or Quantizer(),
        }
        return cls((data.shape[0], 2 * data.shape[1]), **inner)

    def _create_columnwise(self) -> None:
        assert self._quantizer.with_2d_quantization, "blocks of rows say nothing of those of columns"
        self._columnwise_data = _into(self._columnwise_data, _packed(_unpacked(self._rowwise_data).T))
        self._columnwise_scale_inv = _into(self._columnwise_scale_inv, self._rowwise_scale_inv.T)
        self._amax_columnwise = _into(self._amax_columnwise, self._amax_rowwise)

    def by_rows(self) -> Tensor:
        """Unpack and scale."""
        return _scaled(_unpacked(self._rowwise_data), self._rowwise_scale_inv.double() * self._amax_rowwise)

    def by_columns(self) -> Tensor:
        """Unpack and scale the transposed data."""
        return _scaled(_unpacked(self._columnwise_data), self._columnwise_scale_inv.double() * self._amax_columnwise)


class GroupedTensor(QuantizedTensor):
    """Several Float8 tensors of one shape in one piece of memory each for data and scales."""

    @classmethod
    def of(cls, data: Tensor, scales: Tensor) -> GroupedTensor:
        """Make one of data with the member as its first dimension, and a scale per member."""
        flat = data.reshape(-1)
        members = [
            Float8Tensor.of(part.view(data.shape[1:]), scale.view(1))
            for part, scale in zip(flat.chunk(len(data)), scales, strict=True)
        ]
        inner = {"rowwise_data": flat, "columnwise_data": None, "scale_inv": scales, "columnwise_scale_inv": None}
        return cls(tuple(data.shape), **inner, quantized_tensors=members)


class QuantizedLinear(nn.Module):
    """A linear layer that multiplies by the rows of its weight going forward and by its columns going backward."""

    def __init__(self, weight: QuantizedTensor) -> None:
        """Take the weight."""
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, and see to the columns if a backward pass may follow."""
        if torch.is_grad_enabled():
            self.weight.update_usage(columnwise=True)  # type: ignore[attr-defined]
        return _Linear.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.by_rows().T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.by_columns().T, None


def _into(out: Tensor | None, values: Tensor) -> Tensor:
    return values.contiguous().clone() if out is None else out.copy_(values)


def _scaled(data: Tensor, scale: Tensor) -> Tensor:
    for dim in (0, 1):
        scale = scale.repeat_interleave(data.shape[dim] // scale.shape[dim], dim)
    return data.double() * scale.double()


def _power(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.double() - 127)


def _unpacked(data: Tensor) -> Tensor:
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _packed(data: Tensor) -> Tensor:
    return data[..., ::2] | data[..., 1::2] << 4


def _raw(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _scale(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


EXAMPLES: Final[dict[str, Callable[[], QuantizedTensor]]] = {
    "float8": lambda: Float8Tensor.of(_raw(4, 6), _scale(1)),
    "blockwise": lambda: Float8BlockwiseQTensor.of(_raw(4, 6), _scale(2, 3)),
    "blockwise_1d": lambda: Float8BlockwiseQTensor.of(_raw(4, 6), _scale(4, 3), (_raw(6, 4), _scale(6, 2))),
    "mxfp8": lambda: MXFP8Tensor.of(_raw(4, 6), _raw(4, 3), _raw(4, 6), _raw(2, 6)),
    "nvfp4": lambda: NVFP4Tensor.of(_raw(4, 3), _scale(2, 3), _scale(1)),
}
"""A weight of 4 x 6 random elements per format, without a cache."""
