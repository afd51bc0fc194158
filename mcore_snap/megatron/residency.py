"""Offloaded flat buffers: the host copy that stands for memory which was freed on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["resident"]


def resident(buffer: Any, data: Tensor) -> Tensor:
    """Return where the weights of a flat buffer are now: ``param_data``, or its host copy.

    Megatron-Core (from 0.16) leaves the copy in ``buffer.param_data_cpu``, verl in
    ``buffer.param_data.cpu_data``. Both survive the way back to the device, so a copy counts only
    while ``param_data`` has no storage. Where no single copy stands for the buffer, ``param_data``
    itself is returned, which is then refused by name.

    From the second time on Megatron-Core copies without waiting, on the current stream, and frees the
    memory at once. Until the copy has arrived, the host would read older weights, and what it writes
    would be written over; so that is waited for here.
    """
    if data.untyped_storage().nbytes() or not data.numel():
        return data
    copies = [getattr(buffer, "param_data_cpu", None), getattr(data, "cpu_data", None)]
    fitting = [
        copy for copy in copies if isinstance(copy, Tensor) and copy.dtype == data.dtype and copy.shape == data.shape
    ]
    if len(fitting) != 1:  # with two, nothing tells which of them will be brought back
        return data
    if not data.is_cpu:
        torch.accelerator.current_stream(data.device).record_event().synchronize()
    return fitting[0]
