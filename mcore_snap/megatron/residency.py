"""Offloaded flat buffers: the host copy that stands for memory which was freed on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["resident"]


def resident(buffer: Any, data: Tensor) -> Tensor:
    """Return where the weights of a flat buffer are now: ``param_data``, or its host copy.

    Megatron-Core (from 0.16) leaves the copy in ``buffer.param_data_cpu``, verl in
    ``buffer.param_data.cpu_data``. Both survive the way back to the device, so a copy counts only
    while ``param_data`` has no storage. Where no single copy stands for the buffer, ``param_data``
    itself is returned, which is then refused by name.
    """
    if data.untyped_storage().nbytes() or not data.numel():
        return data
    copies = [getattr(buffer, "param_data_cpu", None), getattr(data, "cpu_data", None)]
    fitting = [
        copy for copy in copies if isinstance(copy, Tensor) and copy.dtype == data.dtype and copy.shape == data.shape
    ]
    # With two, nothing tells which of them will be brought back.
    return fitting[0] if len(fitting) == 1 else data
