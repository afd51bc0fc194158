"""Moving a model's memory off the accelerator and back, in the two conventions that trainers use.

Both free the storage of DDP's flat parameter buffers, so that every parameter in them keeps its shape
and loses its memory, and leave the bytes in a host copy: Megatron-Core's (0.16 and newer) at
``buffer.param_data_cpu``, verl's at ``buffer.param_data.cpu_data``. On older Megatron-Core its
convention is followed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core.distributed import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

__all__ = ["CONVENTIONS", "host_copies", "move_outside", "offload", "offload_gradients", "onload", "onload_gradients"]

CONVENTIONS: Final = ("megatron", "verl")


def offload(chunks: Sequence[nn.Module], convention: str) -> None:
    """Free the flat parameter buffers of DDP-wrapped chunks, keeping host copies.

    Args:
        chunks: The model.
        convention: One of `CONVENTIONS`.
    """
    for buffer in _buffers(chunks):
        data: Any = buffer.param_data
        if convention == "verl":
            data.cpu_data = data.data.clone()
            buffer.param_data_size = data.numel()
            data.untyped_storage().resize_(0)
        elif hasattr(buffer, "offload_to_cpu"):
            buffer.offload_to_cpu(move_params=True, move_grads=False)
        else:
            buffer.param_data_size = data.numel()
            buffer.param_data_cpu = data.clone()
            data.untyped_storage().resize_(0)


def onload(chunks: Sequence[nn.Module], convention: str) -> None:
    """Bring back what :func:`offload` freed; the host copies stay, and go stale with the next step."""
    for buffer in _buffers(chunks):
        if convention == "megatron" and hasattr(buffer, "reload_from_cpu"):
            buffer.reload_from_cpu(move_params=True, move_grads=False)
        else:
            copy = buffer.param_data.cpu_data if convention == "verl" else buffer.param_data_cpu
            buffer.param_data.untyped_storage().resize_(buffer.param_data_size * copy.itemsize)
            buffer.param_data.copy_(copy)


def host_copies(chunks: Sequence[nn.Module], convention: str) -> list[Tensor]:
    """Return the host copies that :func:`offload` left, in the order of the buffers."""
    if convention == "verl":
        return [buffer.param_data.cpu_data for buffer in _buffers(chunks)]
    return [buffer.param_data_cpu for buffer in _buffers(chunks)]


def offload_gradients(chunks: Sequence[nn.Module]) -> list[int]:
    """Free the gradient buffers, whose content nobody needs between steps; their sizes in bytes."""
    sizes = []
    for buffer in _buffers(chunks):
        storage = buffer.grad_data.untyped_storage()
        sizes.append(storage.nbytes())
        storage.resize_(0)
    return sizes


def onload_gradients(chunks: Sequence[nn.Module], sizes: Sequence[int]) -> None:
    """Give the gradient buffers memory again, zeroed.

    Args:
        chunks: The model.
        sizes: What :func:`offload_gradients` returned.
    """
    for buffer, size in zip(_buffers(chunks), sizes, strict=True):
        buffer.grad_data.untyped_storage().resize_(size)
        buffer.grad_data.zero_()


def move_outside(chunks: Sequence[nn.Module], device: torch.device | str = "cpu") -> None:
    """Move every parameter that no flat buffer holds to new memory, as verl moves a frozen base, by ``.data``."""
    listed = {id(parameter) for buffer in _buffers(chunks) for parameter in buffer.params}
    for chunk in chunks:
        for parameter in chunk.parameters():
            if id(parameter) not in listed:
                parameter.data = parameter.data.to(torch.device(device), copy=True)


def _buffers(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    chunk: Any
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                if buffer.param_data is not None:
                    yield buffer
