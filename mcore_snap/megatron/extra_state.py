"""Extra state of modules as bytes: what ``get_extra_state()`` returns lies in no parameter or buffer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mcore_snap.errors import StructureMismatch
from mcore_snap.live import Live, mark_live

__all__ = ["extra_state_leaves"]


def extra_state_leaves(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(module name, bytes)`` for each module that defines extra state.

    ``None``, which Megatron-Core's own linear layers return, is no bytes. It is a leaf all the same:
    Transformer Engine's layers return it until their first forward pass, and a look-back around that
    has to take the state away again.

    Raises:
        StructureMismatch: Some state cannot be pickled.
    """
    problems: list[str] = []
    for name, module in chunk.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        try:
            data = _encode(module.get_extra_state())
        except Exception as error:  # noqa: BLE001 - whatever pickling somebody's objects raises
            problems.append(f"{name or 'the chunk'}: expected extra state that pickles, found {error}")
            continue
        settable = type(module).set_extra_state is not nn.Module.set_extra_state
        yield name or "extra_state", mark_live(data, Live(accept=_setter(module), settable=settable))
    if problems:
        raise StructureMismatch("some extra state cannot be kept", problems)


def _encode(state: object) -> Tensor:
    if state is None:
        return torch.empty(0, dtype=torch.uint8)
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _setter(module: nn.Module) -> Callable[[Tensor], None]:
    def accept(data: Tensor) -> None:
        if not data.numel():
            module.set_extra_state(None)
            return
        file = io.BytesIO(bytes(data.clone().numpy()))
        # The bytes are this process's own, or came by pickle, which is trusted as much.
        module.set_extra_state(torch.load(file, weights_only=False))

    return accept
