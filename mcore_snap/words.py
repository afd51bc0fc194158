"""Tensors as plain strided memory: views that are the same bits, whatever the dtype or wrapper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mcore_snap.coverage import Region
from mcore_snap.specs import LeafSpec, contiguous_strides, dense_strides, span_of

__all__ = [
    "Whereabouts",
    "dtype_name",
    "has_storage",
    "plain",
    "problem_with",
    "region_of",
    "spec_of",
    "storage_strides",
    "whereabouts",
    "words",
]

Whereabouts: TypeAlias = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Where a tensor lies: which storage, its first element's place there, its dtype, shape and strides, in elements."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIDED = torch.strided
_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def plain(tensor: Tensor) -> Tensor:
    """Return an alias without autograd history and without a Python subclass.

    The alias shares the version counter, so writes through it are seen by autograd's own checks.

    >>> plain(torch.nn.Parameter(torch.ones(2)))
    tensor([1., 1.])
    """
    if type(tensor) in _PLAIN:  # nearly every one, and a third of the time
        return tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def words(tensor: Tensor) -> Tensor:
    """Return the same memory, shape and strides as integers, so that copying is blind to the dtype.

    Sixteen-byte elements (complex128) have no integer of their size and stay as they are: torch
    copies them as bits.

    >>> words(torch.tensor([-0.0]))
    tensor([-2147483648], dtype=torch.int32)
    """
    word = _WORDS.get(tensor.itemsize)
    return tensor if word is None or tensor.is_conj() or tensor.is_neg() else tensor.view(word)


def spec_of(tensor: Tensor) -> LeafSpec:
    """Return the dtype and shape of a tensor as plain data."""
    return LeafSpec(dtype_name(tensor.dtype), tuple(tensor.shape))


def storage_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides in which a copy of the tensor is kept: its own if dense, else row-major."""
    shape = tuple(tensor.shape)
    found = dense_strides(shape, tuple(tensor.stride()))
    return contiguous_strides(shape) if found is None else found


def whereabouts(tensors: Iterable[Tensor]) -> list[Whereabouts | None]:
    """Return where tensors lie, as plain data; ``None`` for those that are no plain view of some storage.

    >>> tensor = torch.zeros(4)
    >>> one, same, other = whereabouts([tensor, tensor.detach(), tensor[1:]])
    >>> one == same, one == other
    (True, False)
    """
    # The StorageImpl, not its pointer: freed storages all have the pointer 0.
    return [
        (one.untyped_storage()._cdata, int(one.storage_offset()), one.dtype, one.shape, one.stride())
        # Nearly every one is told by these few looks; there may be tens of thousands, at every use of a tree.
        if (type(one) in _PLAIN and one.layout is _STRIDED and not (one.is_nested or one.is_quantized or one.is_meta))
        or has_storage(one)
        else None
        for one in tensors
    ]


def region_of(name: str, where: Whereabouts, *, whole: bool = False) -> Region:
    """Return where a tensor lies, in bytes."""
    storage, offset, dtype, shape, stride = where
    size = dtype.itemsize
    return Region(name, storage, offset * size, dtype_name(dtype), size, tuple(shape), tuple(stride), whole)


def _is_plainly_there(tensor: Any) -> bool:
    # What nearly every leaf is, told by a few cheap looks.
    return (
        type(tensor) in _PLAIN
        and tensor.layout is _STRIDED
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        and tensor.is_contiguous()
        and (tensor.storage_offset() + tensor.numel()) * tensor.itemsize <= tensor.untyped_storage().nbytes()
    )


def has_storage(tensor: Tensor) -> bool:
    """Tell whether a tensor is a plain view of some storage, even one that was freed.

    >>> has_storage(torch.ones(1)), has_storage(torch.empty(1, device="meta"))
    (True, False)
    """
    problem = problem_with(tensor)
    return problem is None or (problem[0] == "absent" and not tensor.is_meta)


def problem_with(tensor: object) -> tuple[str, str] | None:
    """Return what keeps this object from being a leaf: ``(kind, sentence)``, or ``None``.

    The kind is ``"unsupported"`` or ``"absent"``. A read of freed memory crashes the process, so the
    size of the storage is looked at before anything else touches it.

    >>> problem_with(3)[0], problem_with(torch.empty(1, device="meta"))[0]
    ('unsupported', 'absent')
    """
    if _is_plainly_there(tensor):
        return None
    if isinstance(tensor, torch.nn.Module):
        return "unsupported", f"expected a tensor, found the module {type(tensor).__name__}; pass model_tree(model)"
    if not isinstance(tensor, Tensor):
        return "unsupported", f"expected a tensor, found {type(tensor).__name__}; keep other values elsewhere"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return "unsupported", f"expected plain memory, found the tensor subclass {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "unsupported", f"expected a strided tensor, found layout {tensor.layout}; make it dense first"
    if tensor.is_quantized or tensor.dtype in _QUANTIZED:
        return "unsupported", f"expected plain memory, found the quantized dtype {tensor.dtype}"
    if tensor.is_meta:
        return "absent", "expected memory, found a meta tensor; materialise the model first"
    need = (tensor.storage_offset() + span_of(tuple(tensor.shape), tuple(tensor.stride()))) * tensor.itemsize
    have = tensor.untyped_storage().nbytes()
    if tensor.numel() and have < need:
        return "absent", f"expected {need} bytes of storage, found {have}; bring the offloaded memory back first"
    return None
