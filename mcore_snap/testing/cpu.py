"""Megatron-Core on a machine without CUDA.

Megatron-Core asks ``torch.cuda`` for a device in many places and offers no setting for it. The
two context managers here replace the few functions that matter, in this process only, and put
the originals back on leaving. Where CUDA is available both do nothing.

The rest is left to the configuration: a random-number tracker for inference, CPU initialisation,
an explicit attention mask, and the all-gather token dispatcher (see :mod:`mcore_snap.testing.gpt`).
"""

from __future__ import annotations

import functools
import importlib
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

__all__ = ["cpu_megatron", "cuda_as_cpu", "nothing_quantized", "without_cuda"]

_CPU: Final = torch.device("cpu")


def without_cuda(replacing: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Make a context manager of a generator function; it does nothing where CUDA is available."""
    replaced = contextmanager(replacing)

    @functools.wraps(replacing)
    def where_missing() -> AbstractContextManager[None]:
        return nullcontext() if torch.cuda.is_available() else replaced()

    return where_missing


@without_cuda
def cpu_megatron() -> Iterator[None]:
    """Let Megatron-Core build and run models on the CPU inside the ``with`` block.

    Process-local, re-entrant, and undone on leaving. Megatron's optimizer needs more than this:
    see :func:`cuda_as_cpu`.
    """
    with ExitStack() as stack:

        def replace(owner: object, name: str, value: object, *, create: bool = False) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=create))

        # DDP buffers, rotary caches and router buffers are made on current_device().
        replace(torch.cuda, "current_device", lambda: _CPU)
        # start_grad_sync() of 0.19 makes the communication stream wait for the current one.
        replace(torch.cuda, "current_stream", lambda *_: mock.MagicMock())
        # Offloading gradients, and the pipeline schedules, wait for the device.
        replace(torch.cuda, "synchronize", lambda *_: None)
        # Offloading gives freed blocks back to the device.
        replace(torch.cuda, "empty_cache", lambda: None)
        # Offloading pins what `.cpu()` returned and then frees the source; on a CPU that is the
        # same memory, so the stand-in has to copy.
        replace(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor.clone())
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        if not hasattr(moe_utils, "te_general_gemm"):
            # The router of 0.15 and 0.16 reads this name, which only Transformer Engine defines.
            replace(moe_utils, "te_general_gemm", None, create=True)
        if _megatron_version() < (0, 13):
            stack.enter_context(nothing_quantized("optimizer.distrib_optimizer"))
        yield


def nothing_quantized(module: str) -> AbstractContextManager[object]:
    """Let 0.12 update weights, of which none is quantized, from the main weights in this part of `megatron.core`.

    Without Transformer Engine it raises at once, before it has looked whether one is.
    """
    owner = importlib.import_module(f"megatron.core.{module}")
    return mock.patch.object(owner, "quantize_param_shard", return_value=None)


@without_cuda
def cuda_as_cpu() -> Iterator[None]:
    """Redirect explicit CUDA requests to the CPU while Megatron's optimizer is built or steps.

    The optimizer hard-codes ``device="cuda"`` and sorts parameters by the CUDA name of their type.
    The redirection is a :class:`TorchFunctionMode`, so it slows every torch call inside the block.
    """
    with _CudaAsCpu():
        yield


class _CudaAsCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = dict(kwargs or {})
        if _is_cuda(options.get("device")):
            options["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        # Megatron-FSDP takes a device with its number, and none but the current one.
        if func is torch.device and args and str(args[0]).startswith("cuda:"):
            return _CPU
        result = func(*args, **options)
        if func is torch.Tensor.type and len(args) == 1 and not options:
            # DistributedOptimizer accepts "torch.cuda.FloatTensor", never "torch.FloatTensor".
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_cuda(device: object) -> bool:
    # Megatron passes an ordinal, a string, or a torch.device.
    return isinstance(device, int) or str(device).startswith("cuda")


def _megatron_version() -> tuple[int, int]:
    major, minor = importlib.import_module("megatron.core").__version__.split(".")[:2]
    return int(major), int(minor)
