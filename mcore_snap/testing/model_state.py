"""Everything that a model holds, read without the library under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from mcore_snap.testing.raw_bytes import to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


class Held(NamedTuple):
    """What is known of one tensor of a model."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: bytes


class Place(NamedTuple):
    """Where one tensor of a model is, and what hangs on it."""

    identity: int
    address: int
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    storage: int
    grad: bytes | None


def chunks_of(models: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the chunks of a model that is one chunk or several."""
    return list(models) if isinstance(models, (list, tuple)) else [models]  # type: ignore[list-item]


def model_tensors(models: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Give every name of every parameter, registered buffer and flat buffer of a model."""
    for i, chunk in enumerate(chunks_of(models)):
        for name, param in chunk.named_parameters(remove_duplicate=False):
            yield f"{i}:{name}", param
        for name, buffer in chunk.named_buffers(remove_duplicate=False):
            yield f"{i}:buffer:{name}", buffer
        for name, flat in flat_buffers(chunk):
            yield f"{i}:{name}", flat


def flat_buffers(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the flat buffers of a DDP chunk that hold its weights."""
    for kind in ("buffers", "expert_parallel_buffers"):
        listed = getattr(chunk, kind, ())
        for j, buffer in enumerate(listed if isinstance(listed, list) else ()):
            if buffer.param_data is not None and not hasattr(buffer, "shared_buffer"):
                yield f"{kind}[{j}]", buffer.param_data


def model_bytes(models: nn.Module | Sequence[nn.Module]) -> dict[str, Held]:
    """Return dtype, shape and bytes of everything that a model holds, extra state included."""
    found = {name: Held(t.dtype, tuple(t.shape), to_bytes(t)) for name, t in model_tensors(models)}
    for i, chunk in enumerate(chunks_of(models)):
        for name, module in chunk.named_modules():
            if hasattr(module, "history"):
                found[f"{i}:extra:{name}"] = Held(torch.int64, tuple(module.history), to_bytes(module.scale))
    return found


def model_places(models: nn.Module | Sequence[nn.Module]) -> dict[str, Place]:
    """Return where the tensors of a model are, and their gradients."""
    return {
        name: Place(
            id(t),
            t.data_ptr(),
            t.stride(),
            int(t.storage_offset()),
            t.requires_grad,
            t.untyped_storage().data_ptr(),
            None if t.grad is None else to_bytes(t.grad),
        )
        for name, t in model_tensors(models)
    }
