"""Extra state of modules as bytes: what ``get_extra_state()`` returns lies in no parameter or buffer."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from mcore_snap.errors import StructureMismatch
from mcore_snap.live import Live, mark_live

__all__ = ["Modules", "extra_state_of"]

Modules: TypeAlias = Sequence[tuple[str, nn.Module]]
"""What ``named_modules()`` of a chunk gives."""


def extra_state_of(modules: Modules) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the extra state of a chunk's modules, as bytes by module name: of those that have some, and of the rest.

    ``None`` is no state and no leaf: Megatron-Core's own linear layers always return it. Transformer
    Engine's layers may return it until their first forward pass, and a look-back around that has to
    take the state away again; so these modules come second, with no bytes.

    Raises:
        StructureMismatch: Some state cannot be pickled.
    """
    problems: list[str] = []
    present: dict[str, Tensor] = {}
    absent: dict[str, Tensor] = {}
    for name, module in modules:
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        try:
            state = module.get_extra_state()
            data = _encode(state)
        except Exception as error:  # noqa: BLE001 - whatever pickling somebody's objects raises
            problems.append(f"{name or 'the chunk'}: expected extra state that pickles, found {error}")
            continue
        settable = type(module).set_extra_state is not nn.Module.set_extra_state
        group = absent if state is None else present
        group[name or "extra_state"] = mark_live(data, Live(accept=_setter(module), settable=settable))
    if problems:
        raise StructureMismatch("some extra state cannot be kept", problems)
    return present, absent


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
