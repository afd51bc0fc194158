"""DDP chunks: which of their flat buffers really hold weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from mcore_snap.megatron.inner_tensors import inner_tensors
from mcore_snap.words import whereabouts

__all__ = ["FlatBuffer", "bucket_groups", "flat_buffers", "is_ddp"]

_LISTS: Final = ("buffers", "expert_parallel_buffers")
_GROUPS: Final = ("bucket_groups", "expert_parallel_bucket_groups")


class FlatBuffer(NamedTuple):
    """A flat buffer that holds weights.

    Attributes:
        field: The list that it is in, which is also the field of the ChunkTree.
        number: Its place in that list.
        buffer: Megatron-Core's own object.
        data: Its ``param_data``, 1-D and padded.
    """

    field: str
    number: int
    buffer: Any
    data: Tensor


def is_ddp(chunk: nn.Module) -> bool:
    """Tell by what it has whether a chunk is wrapped by Megatron-Core's DDP.

    On any other module ``buffers`` is a method.
    """
    return all(isinstance(getattr(chunk, name, None), list) for name in _LISTS)


def flat_buffers(chunk: nn.Module) -> Iterator[FlatBuffer]:
    """Yield each flat buffer that holds weights, in order.

    ``param_data`` is None without the distributed optimizer, and with reuse of the gradient buffer
    (MXFP8) it holds gradients: so what counts is whether parameters lie in its storage.
    """
    if not is_ddp(chunk):
        return
    for name in _LISTS:
        for index, buffer in enumerate(getattr(chunk, name)):
            data: Any = buffer.param_data
            if data is None or getattr(buffer, "shared_buffer", None) is not None:
                continue
            if _lies_in(getattr(buffer, "grad_data", None), data):
                continue
            if any(_lies_in(parameter, data) for parameter in buffer.params):
                yield FlatBuffer(name, index, buffer, data)


def _lies_in(tensor: Any, data: Tensor) -> bool:
    # A tensor, or any of the tensors that it is made of.
    if not isinstance(tensor, Tensor):
        return False
    storage = data.untyped_storage()._cdata
    inner = inner_tensors(tensor)
    parts = [tensor] if inner is None else [part for _, part in inner.parts]
    return any(where is not None and where[0] == storage for where in whereabouts(parts))


def bucket_groups(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each bucket group, in the order in which they communicate."""
    if is_ddp(chunk):
        for name in _GROUPS:
            for number, group in enumerate(getattr(chunk, name, ())):
                yield f"{name}[{number}]", group
