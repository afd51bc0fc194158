"""Models for these tests, and a picture of all that one holds, read without the library under test."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from mcore_snap.testing.chunks import AnyState, DDPLike, ExtraState, Layer
from mcore_snap.testing.model_state import chunks_of
from mcore_snap.testing.raw_bytes import flip, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mcore_snap.testing.model_strategies import Models

WRAPPERS: Final[dict[str, Callable[[nn.Module], Models]]] = {
    "bare": lambda module: module,
    "flat buffers": DDPLike,
    "no flat buffers": lambda module: DDPLike(module, "none"),
    "buffers over gradients": lambda module: DDPLike(module, "shared"),
    "two chunks": lambda module: [DDPLike(module), DDPLike(Layer(2))],
    "wrapped and bare": lambda module: [Layer(2), DDPLike(module)],
}
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def layer_in(models: Models) -> Layer:
    """Return the layer of three features that was wrapped."""
    return next(m for chunk in chunks_of(models) for m in chunk.modules() if isinstance(m, Layer) and len(m.scale) == 3)


def flat_buffers(models: Models) -> Iterator[Any]:
    """Give every flat buffer of every wrapped chunk, dense before expert."""
    for chunk in chunks_of(models):
        if isinstance(chunk, DDPLike):
            yield from [*chunk.buffers, *chunk.expert_parallel_buffers]


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a tensor is made of, by suffix; a plain one is made of itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {"": tensor}
    return {f".{name}": getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def memory(models: Models) -> Iterator[tuple[str, Tensor]]:
    """Give every parameter and buffer under every name, and of offloaded ones their place in the host copy."""
    hosts = {
        buffer.param_data.untyped_storage()._cdata: buffer.host_copy()
        for buffer in flat_buffers(models)
        if buffer.param_data is not None and buffer.host_copy() is not None
    }
    for i, chunk in enumerate(chunks_of(models)):
        named = [
            *chunk.named_parameters(remove_duplicate=False),
            *((f"buffer {name}", buffer) for name, buffer in chunk.named_buffers(remove_duplicate=False)),
        ]
        for name, whole in named:
            for suffix, tensor in parts(whole).items():
                host = hosts.get(tensor.untyped_storage()._cdata)
                where = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
                yield f"{i}:{name}{suffix}", tensor if host is None else host.as_strided(*where)


def picture(models: Models) -> dict[str, object]:
    """Return dtype, shape, strides and bytes of every parameter and buffer, and all extra state."""
    found: dict[str, object] = {
        name: (tensor.dtype, tuple(tensor.shape), tensor.stride(), to_bytes(tensor)) for name, tensor in memory(models)
    }
    for i, chunk in enumerate(chunks_of(models)):
        for name, module in chunk.named_modules():
            if isinstance(module, AnyState | ExtraState):
                found[f"{i}:state {name}"] = _comparable(module.get_extra_state())
    return found


def places(models: Models) -> dict[str, object]:
    """Return where every parameter and buffer lies, which object it is, and what hangs on it."""
    found: dict[str, object] = {
        name: (tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.stride(), int(tensor.storage_offset()))
        for name, tensor in memory(models)
    }
    for i, chunk in enumerate(chunks_of(models)):
        for name, param in chunk.named_parameters(remove_duplicate=False):
            found[f"{i}:{name} itself"] = (id(param), param.requires_grad, param.is_leaf, sorted(vars(param)))
    return found


def gradients(models: Models) -> list[bytes]:
    """Return the bytes of all gradients, in flat buffers and out of them."""
    params = [param for chunk in chunks_of(models) for param in chunk.parameters()]
    return [
        *(to_bytes(buffer.grad_data) for buffer in flat_buffers(models)),
        *(to_bytes(param.grad) for param in params if param.grad is not None),
    ]


def change_everything(models: Models) -> None:
    """Flip every bit of every parameter and buffer, and change extra state in value and in length."""
    flip(tensor for _, tensor in memory(models))
    for chunk in chunks_of(models):
        for module in chunk.modules():
            if isinstance(module, ExtraState):
                module.history = [*module.history, 7, 1 << 50]
                module.scale = torch.ones(5)


def _comparable(state: object) -> object:
    if isinstance(state, Tensor):
        return state.dtype, tuple(state.shape), to_bytes(state)
    if isinstance(state, io.BytesIO):
        return "a file", state.getvalue()
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state).__name__, [_comparable(value) for value in state]
    return type(state).__name__, state
