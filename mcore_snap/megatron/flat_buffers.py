"""DDP chunks: which of their flat buffers really hold weights, and whether these are current."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn

from mcore_snap.errors import NotReady

__all__ = ["LISTS", "check_ready", "flat_buffers", "is_ddp"]

LISTS: Final = ("buffers", "expert_parallel_buffers")
_GROUPS: Final = ("bucket_groups", "expert_parallel_bucket_groups")


def is_ddp(chunk: nn.Module) -> bool:
    """Tell by what it has whether a chunk is wrapped by Megatron-Core's DDP.

    On any other module ``buffers`` is a method.
    """
    return all(isinstance(getattr(chunk, name, None), list) for name in LISTS)


def flat_buffers(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(list name, param_data)`` of each flat buffer that holds weights, in order.

    ``param_data`` is None without the distributed optimizer, and with reuse of the gradient buffer
    (MXFP8) it holds gradients: so what counts is whether parameters lie in its storage.
    """
    if not is_ddp(chunk):
        return
    for name in LISTS:
        for buffer in getattr(chunk, name):
            data: Any = buffer.param_data
            if data is None or getattr(buffer, "shared_buffer", None) is not None:
                continue
            storage = data.untyped_storage()._cdata
            if storage == _storage(getattr(buffer, "grad_data", None)):
                continue
            if any(storage == _storage(parameter.data) for parameter in buffer.params):
                yield name, data


def _storage(tensor: Any) -> int | None:
    if not isinstance(tensor, Tensor) or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    identity: int = tensor.untyped_storage()._cdata
    return identity


def check_ready(chunks: list[nn.Module]) -> None:
    """Check that no parameter gather is due or under way.

    With overlapped gathers, ``optimizer.step()`` leaves the other ranks' shards old until the next
    forward pass, and a gather in flight would land on top of whatever is written.

    Raises:
        NotReady: Names the bucket groups.
    """
    problems = []
    for index, chunk in enumerate(chunks):
        if not is_ddp(chunk):
            continue
        overlapped = bool(getattr(chunk, "use_forward_hook", False))
        for name in _GROUPS:
            for number, group in enumerate(getattr(chunk, name, ())):
                where = f"chunks[{index}].{name}[{number}]"
                if getattr(group, "param_gather_handle", None) is not None:
                    problems.append(f"{where}: expected no gather under way, found one; run a forward pass first")
                elif overlapped and not getattr(group, "param_gather_dispatched", True):
                    problems.append(f"{where}: expected gathered weights, found a gather due; run a forward pass first")
    if problems:
        raise NotReady("the weights are in flight; nothing was read or written", problems)
