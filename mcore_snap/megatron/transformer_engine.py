"""Transformer Engine's quantized tensors: which of their tensors are the weights, and which are caches of them.

Read off what the objects have, as of releases 1.8 to 2.19: nothing of Transformer Engine is imported. The data in row
order and its scales are the weights. What is in column order comes and goes with use (`update_usage`), and is one of
two things:

- another quantization of the same values, with scales of its own, which nothing here can be computed from (MXFP8,
  one-dimensional blocks, NVFP4 in general): weights as well;
- the same elements transposed (Float8's `_transpose`, two-dimensional blocks): a cache. It is not kept, so that a
  snapshot fits whether or not it is there, and after a load it is made anew where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from mcore_snap.words import problem_with

__all__ = ["ForgetCopies", "Refresh", "engine_parts", "from_engine", "keeps_copies"]

Parts: TypeAlias = tuple[tuple[str, Tensor], ...]

_ROWWISE: Final = ("_rowwise_data", "_rowwise_scale_inv")
_COLUMNWISE: Final = ("_columnwise_data", "_columnwise_scale_inv")
_COPIES: Final = "_fp8_workspaces"
_HALVES: Final = ("_rowwise_storage", "_columnwise_storage")
_GROUP: Final = (
    *("rowwise_data", "scale_inv", "amax", "columnwise_data", "columnwise_scale_inv", "columnwise_amax"),
    *("scale", "first_dims", "last_dims", "tensor_offsets"),
)


@dataclass(frozen=True, slots=True)
class _Format:
    """How a storage class lays out its weights.

    Attributes:
        rowwise: Attributes that hold the weights in row order, the data first.
        columnwise: The same in column order.
        is_cache: Whether the columns of this tensor are a cache of its rows.
        make: The method that makes the cache anew, in place where it is there.
    """

    rowwise: tuple[str, ...]
    columnwise: tuple[str, ...]
    is_cache: Callable[[Any], bool]
    make: str = "_create_columnwise"


def _blocks_are_square(tensor: Any) -> bool:
    return bool(tensor._is_2D_scaled) and hasattr(tensor, "_create_columnwise")


def _tiles_are_square(tensor: Any) -> bool:
    # Columns that were rotated (RHT) or rounded at random of their own are no transpose of the rows.
    how = tensor._quantizer
    apart = ("with_rht", "stochastic_rounding", "row_scaled_nvfp4")
    return (
        hasattr(tensor, "_create_columnwise")
        and bool(getattr(how, "with_2d_quantization", False))
        and not any(getattr(how, name, False) for name in apart)
    )


_FORMATS: Final = {
    "Float8Tensor": _Format(
        ("_data", "_scale_inv"), ("_transpose", "_scale_inv"), lambda _: True, make="_create_transpose"
    ),
    "Float8BlockwiseQTensor": _Format(_ROWWISE, _COLUMNWISE, _blocks_are_square),
    "MXFP8Tensor": _Format(_ROWWISE, _COLUMNWISE, lambda _: False),
    "NVFP4Tensor": _Format((*_ROWWISE, "_amax_rowwise"), (*_COLUMNWISE, "_amax_columnwise"), _tiles_are_square),
}
_HOW: Final = {"Float8BlockwiseQTensor": ("_is_2D_scaled",), "NVFP4Tensor": ("_quantizer",)}


def from_engine(tensor: object) -> bool:
    """Tell whether an object is of a class of Transformer Engine's, known here or not.

    >>> from_engine(torch.ones(1))
    False
    """
    return _is_theirs(tensor) or _kind(tensor) is not None


def engine_parts(tensor: object) -> Parts | None:
    """Return the live tensors that are the weights of a quantized tensor, by attribute, or None.

    None stands for a class that is not known, and for a tensor that holds no weights at the moment.
    Scales in the order that a matrix multiplication wants (swizzled) have a name of their own, since
    their bytes mean something else.

    >>> engine_parts(torch.ones(1)) is None
    True
    """
    kind = _kind(tensor)
    if kind is None:
        return None
    if kind == "GroupedTensor":
        return _group_parts(tensor)
    if kind == "HybridQuantizedTensor":
        return _hybrid_parts(tensor)
    if kind == "IdentityTensor":
        return _present(tensor, ("_hp_data",)) or None
    return _format_parts(tensor, _FORMATS[kind])


@dataclass(frozen=True, slots=True, eq=False)
class Refresh:
    """Makes the caches of a quantized tensor follow its weights; equal for the same tensor.

    Where the weights are not there to be read, as while they are offloaded, the caches are dropped
    instead: Transformer Engine makes them when it needs them.
    """

    tensor: Any

    def __call__(self) -> None:
        """Refresh what is there, and make nothing that is not."""
        with torch.no_grad():
            for one in _members(self.tensor):
                kind = _kind(one)
                if kind in _FORMATS:
                    _refresh(one, _FORMATS[kind])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refresh) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def keeps_copies(modules: Iterable[nn.Module]) -> bool:
    """Tell whether some of these modules keep quantized copies of weights that are not quantized themselves.

    >>> keeps_copies([nn.Linear(1, 1)])
    False
    """
    return any(isinstance(vars(module).get(_COPIES), dict) for module in modules)


@dataclass(frozen=True, slots=True)
class ForgetCopies:
    """Drops the quantized copies of weights that a chunk's modules keep from one microbatch to the next.

    Otherwise a forward pass that is not the first one of its step would use the copies, and one that
    is would write over what an outer backward pass still needs. A copy that is not there is made anew.
    """

    chunk: nn.Module

    def __call__(self) -> None:
        """Empty what is there; graphs made before keep what they saved."""
        for module in self.chunk.modules():
            copies = vars(module).get(_COPIES)
            if isinstance(copies, dict):
                copies.clear()


def _is_theirs(tensor: object) -> bool:
    return any(cls.__module__.partition(".")[0] == "transformer_engine" for cls in type(tensor).__mro__)


def _kind(tensor: object) -> str | None:
    # The storage behind a class is called by one of these suffixes, and may stand alone in a composed tensor.
    names = {cls.__name__ for cls in type(tensor).__mro__}
    for kind in (*_FORMATS, "GroupedTensor", "HybridQuantizedTensor", "IdentityTensor"):
        if names & {kind, f"{kind}Base", f"{kind}Storage"} and all(hasattr(tensor, name) for name in _telling(kind)):
            return kind
    return None


def _telling(kind: str) -> tuple[str, ...]:
    if kind in _FORMATS:
        return (*_FORMATS[kind].rowwise, *_FORMATS[kind].columnwise, *_HOW.get(kind, ()))
    own = {"GroupedTensor": ("rowwise_data", "columnwise_data", "quantized_tensors"), "IdentityTensor": ("_hp_data",)}
    return own.get(kind, _HALVES)


def _format_parts(tensor: Any, layout: _Format) -> Parts | None:
    by_row, by_column = (getattr(tensor, names[0]) is not None for names in (layout.rowwise, layout.columnwise))
    if by_row and layout.is_cache(tensor):
        return _present(tensor, layout.rowwise)
    if by_row:
        return _present(tensor, (*layout.rowwise, *layout.columnwise))
    if by_column and not getattr(tensor, "_transpose_invalid", False):
        return _present(tensor, layout.columnwise)
    return None


def _present(tensor: Any, names: tuple[str, ...]) -> Parts:
    swizzled = getattr(tensor, "_with_gemm_swizzled_scales", False)
    return tuple(
        (f"{name}.swizzled" if swizzled and name.endswith("scale_inv") else name, part)
        for name in names
        # Of a name that is not set, a tensor may have a method.
        if isinstance(part := getattr(tensor, name, None), Tensor)
    )


def _hybrid_parts(tensor: Any) -> Parts | None:
    halves = [(name, getattr(tensor, name)) for name in _HALVES]
    found = [(name, engine_parts(half)) for name, half in halves if half is not None]
    if not found or any(parts is None for _, parts in found):
        return None
    return tuple((f"{name}.{inner}", part) for name, parts in found for inner, part in parts or ())


def _group_parts(tensor: Any) -> Parts | None:
    parts = _present(tensor, _GROUP)
    memory = {part.untyped_storage()._cdata for _, part in parts}
    for member in tensor.quantized_tensors or ():
        inner = (("", member),) if _kind(member) is None else engine_parts(member)
        # Members are views of the group's memory; one that was given its own would be left out.
        if inner is None or any(part.untyped_storage()._cdata not in memory for _, part in inner):
            return None
    return parts or None


def _members(tensor: Any) -> Iterator[Any]:
    """Yield everything under a tensor that may have a cache: itself, or what it is composed of."""
    yield tensor
    for name in _HALVES:
        if getattr(tensor, name, None) is not None:
            yield from _members(getattr(tensor, name))
    yield from getattr(tensor, "quantized_tensors", None) or ()


def _refresh(tensor: Any, layout: _Format) -> None:
    data, cache = (getattr(tensor, names[0]) for names in (layout.rowwise, layout.columnwise))
    if data is None or cache is None or not layout.is_cache(tensor):
        return
    flagged = hasattr(tensor, "_transpose_invalid")
    if flagged and tensor._transpose_invalid:
        return
    if flagged:
        tensor._transpose_invalid = True
    there = all(problem_with(part) is None for part in (data, cache))
    # Their kernels take an address on the host for one on the device.
    takes = not (_is_theirs(tensor) and data.is_cpu)
    if there and takes and hasattr(tensor, layout.make):
        # Into the memory that is there: a captured graph may hold its address.
        getattr(tensor, layout.make)()
    elif not flagged:
        for name in layout.columnwise:
            setattr(tensor, name, None)
