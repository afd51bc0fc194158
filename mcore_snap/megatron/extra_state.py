"""Extra state of modules as bytes: what ``get_extra_state()`` returns lies in no parameter or buffer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mcore_snap.live import Live, mark_live

__all__ = ["extra_state_leaves"]


def extra_state_leaves(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(module name, bytes)`` for each module that has extra state.

    ``None`` is no state: Megatron-Core's own linear layers return it to stay compatible with
    checkpoints of Transformer Engine.
    """
    for name, module in chunk.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        state = module.get_extra_state()
        if state is not None:
            settable = type(module).set_extra_state is not nn.Module.set_extra_state
            live = Live(accept=_setter(module), settable=settable)
            yield name or "extra_state", mark_live(_encode(state), live)


def _encode(state: object) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _setter(module: nn.Module) -> Callable[[Tensor], None]:
    def accept(data: Tensor) -> None:
        file = io.BytesIO(bytes(data.clone().numpy()))
        # The bytes are this process's own, or came by pickle, which is trusted as much.
        module.set_extra_state(torch.load(file, weights_only=False))

    return accept
