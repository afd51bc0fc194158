"""The bytes of a tensor, read and written another way than the library under test does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def carrier(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers of the same width, for which every operation is implemented."""
    if tensor.dtype.itemsize not in _CARRIERS:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of `tensor` in logical order, whatever its layout."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = carrier(plain).clone(memory_format=torch.contiguous_format)
    return bytes(dense.numpy().tobytes())


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return every memory under `tensors` once, by address and whole, as writable bytes that share it.

    What lies beside the tensors (padding, gaps of a stride) is in there too. Version counters do not see writes to it.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return found


def flip(tensors: Iterable[torch.Tensor]) -> None:
    """Change every byte under `tensors`, and beside them, exactly once, whatever is tied to what."""
    listed = list(tensors)
    truths = {t.untyped_storage().data_ptr() for t in listed if t.dtype is torch.bool and t.numel()}
    for address, memory in storages(listed).items():
        memory.bitwise_xor_(1 if address in truths else 0xFF)


def covered(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each byte of the storage under `tensor` whether it belongs to `tensor`."""
    width = tensor.dtype.itemsize
    mask = torch.zeros(tensor.untyped_storage().nbytes() // width, dtype=torch.bool)
    if tensor.numel():
        # stride 0 makes many elements of one: as_strided writes such memory by assignment only
        mask[torch.arange(mask.numel()).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())] = True
    return np.repeat(mask.numpy(), width)
