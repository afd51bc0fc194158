"""The memory layout of MXFP8 with ``reuse_grad_buf_for_mxfp8_param_ag``, without Transformer Engine.

In this mode of Megatron-Core (0.13 and newer) the buffer of quantized parameters shares its memory
with their gradients: it is the place that weights are gathered through, and never where they are.
Here the "quantized" weights are plain bf16 tensors which Megatron-Core is made to take for MXFP8, so
that its own code lays out the buffers, gathers, copies and zeroes, and outputs can be compared by bits.
"""

from __future__ import annotations

import dataclasses
import importlib
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from mcore_snap.testing.gpt import gpt
from mcore_snap.testing.training import optimizer, stage_main_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

__all__ = ["has_mxfp8_reuse", "mxfp8_gpt", "mxfp8_optimizer", "publish", "simulated_mxfp8"]

_MARK: Final = "_mcore_snap_simulated_mxfp8"
_SETTINGS: Final = {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
_MODULES: Final = ("distributed_data_parallel", "param_and_grad_buffer")
_TESTS: Final = ("is_float8tensor", "is_mxfp8tensor", "_param_uses_quantized_storage")


def has_mxfp8_reuse() -> bool:
    """Whether this Megatron-Core has the mode at all."""
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    return known >= _SETTINGS.keys()


@contextmanager
def simulated_mxfp8() -> Iterator[None]:
    """Let Megatron-Core take the weights that :func:`mxfp8_gpt` marks for quantized ones.

    Has to be active while such a model is built, trained and run.
    """
    with ExitStack() as stack:
        for module in (importlib.import_module(f"megatron.core.distributed.{name}") for name in _MODULES):
            for test in _TESTS:
                if hasattr(module, test):
                    stack.enter_context(mock.patch.object(module, test, _is_marked))
            # Newer releases quantize what was gathered through one of these.
            for copy, stand_in in _COPIES.items():
                if hasattr(module, copy):
                    stack.enter_context(mock.patch.object(module, copy, stand_in))
        yield


def mxfp8_gpt(*, overlap: bool = False) -> list[nn.Module]:
    """Build a model whose linear weights are taken for MXFP8.

    Args:
        overlap: Overlap gathers and reductions with computation.
    """
    # Before 0.17 offsets inside buckets ignore the padding of parameters to 64 elements: width 64 needs none.
    return gpt(hidden=64, overlap=overlap, prepare=_mark, ddp_settings=_SETTINGS | {"bucket_size": None})


def mxfp8_optimizer(chunks: Sequence[nn.Module]) -> Any:
    """Megatron-Core's Adam, told of the mode."""
    return optimizer(chunks, reuse_grad_buf_for_mxfp8_param_ag=True)


def publish(chunks: Sequence[nn.Module], optimizer: Any) -> None:
    """Bring what the last step computed into the weights, as a training loop has to before others read them.

    Destroys the gradients, whose memory the weights travel through. Only with overlapped gathers;
    without, the step itself does it.
    """
    if hasattr(optimizer, "prepare_model_params_for_param_sync"):
        optimizer.prepare_model_params_for_param_sync()
    else:
        for chunk in _wrapped(chunks):
            chunk.zero_grad_buffer()
        stage_main_parameters(chunks, optimizer)
    for chunk in _wrapped(chunks):
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.param_gather_dispatched = False
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def _wrapped(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    yield from (chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel))


def _mark(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2 and "linear" in name:
            vars(parameter)[_MARK] = True


def _is_marked(tensor: Tensor) -> bool:
    return bool(getattr(tensor, _MARK, False))


def _copy_one(parameter: Tensor, gathered: Tensor) -> None:
    parameter.data.copy_(gathered.view(parameter.shape))


def _copy_all(parameters: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
    for parameter, part in zip(parameters, gathered, strict=True):
        _copy_one(parameter, part)


_COPIES: Final = {"copy_tensor_to_quantized_param": _copy_one, "copy_tensors_to_quantized_params": _copy_all}
