"""Small Megatron-Core GPT models that are fully sharded, by FSDP2 or by Megatron-FSDP, and their training.

Everything here runs inside :func:`cpu_fully_sharded`, which on a machine without CUDA makes both work
on the CPU. Everything else is as in :mod:`mcore_snap.testing.gpt`; Megatron-FSDP also needs einops.
"""

from __future__ import annotations

import dataclasses
import importlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from mcore_snap.testing.cpu import cuda_as_cpu, nothing_quantized, without_cuda
from mcore_snap.testing.forward import forward
from mcore_snap.testing.gpt import gpt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

__all__ = ["STRATEGIES", "cpu_fully_sharded", "fsdp2_gpt", "megatron_fsdp_gpt", "train_step"]

STRATEGIES: Final = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What Megatron-FSDP shards: nothing, or ever more of optimizer state, gradients and weights."""


def fsdp2_gpt(*, reshard_after_forward: bool = True, **options: Any) -> list[nn.Module]:
    """Build a GPT model in TorchFullyShardedDataParallel, as a list of one chunk.

    Args:
        reshard_after_forward: Whether modules other than the root free gathered weights after their
            forward pass; known to Megatron-Core from 0.14 on.
        **options: Arguments of :func:`mcore_snap.testing.gpt.gpt`, without those of DDP.
    """
    distributed = importlib.import_module("megatron.core.distributed")
    (module,) = gpt(ddp=False, **options)
    config: Any = module.config
    wrapper: Any = distributed.TorchFullyShardedDataParallel
    if hasattr(distributed, "TorchFullyShardedDataParallelConfig"):
        # Else linear layers inside a layer that is sharded already would be sharded once more.
        config.transformer_impl = "local"
        settings = distributed.TorchFullyShardedDataParallelConfig(reshard_after_forward=reshard_after_forward)
        return [wrapper(config, settings, module)]
    layer = importlib.import_module("megatron.core.transformer.transformer_layer").TransformerLayer
    embedding = importlib.import_module("megatron.core.models.common.embeddings.language_model_embedding")
    units = {layer, embedding.LanguageModelEmbedding}
    return [wrapper(config, DistributedDataParallelConfig(), module, sub_modules_to_wrap=units)]


def megatron_fsdp_gpt(strategy: str, *, overlap: bool | None = None, **options: Any) -> list[nn.Module]:
    """Build a GPT model in Megatron-FSDP's FullyShardedDataParallel, as a list of one chunk.

    Args:
        strategy: One of :data:`STRATEGIES`.
        overlap: Overlap gathers and gradient reduction with computation; by default where the
            strategy demands it.
        **options: Arguments of :func:`mcore_snap.testing.gpt.gpt`, without those of DDP.
    """
    (module,) = gpt(ddp=False, **options)
    wanted = {
        "use_distributed_optimizer": True,
        "use_megatron_fsdp": True,
        "use_custom_fsdp": True,
        "data_parallel_sharding_strategy": strategy,
        "overlap_grad_reduce": overlap or strategy in {"optim_grads", "optim_grads_params"},
        "overlap_param_gather": strategy == "optim_grads_params" if overlap is None else overlap,
        "check_for_nan_in_grad": False,
        "gradient_reduce_div_fusion": False,  # needs NCCL, but for bf16
    }
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    settings = DistributedDataParallelConfig(**{name: value for name, value in wanted.items() if name in known})
    # Megatron-FSDP came with 0.14; before, it was a part of Megatron-Core.
    home = _module("fsdp.mcore_fsdp_adapter") or _module("custom_fsdp")
    chunk = home.FullyShardedDataParallel(module.config, settings, module, device=torch.device("cpu"))
    if hasattr(chunk, "all_gather_pipeline"):
        chunk.is_last_microbatch = True  # set by the schedules
    return [chunk]


def train_step(
    chunks: Sequence[nn.Module], tokens: Tensor, *, lr: float = 0.5, pause: Callable[[str], None] | None = None
) -> float:
    """Do one step of gradient descent, as Megatron-Core's own optimizers do it, and return the loss.

    Args:
        chunks: What :func:`fsdp2_gpt` or :func:`megatron_fsdp_gpt` returned.
        tokens: Token numbers, shaped (batch, sequence).
        lr: Learning rate.
        pause: Called inside the step with ``"forward"``, ``"backward"``, ``"finalize"``, ``"update"`` (of
            this rank's part of the weights) and ``"gather"`` (of the others'), each time right after
            what it names.
    """
    (chunk,) = chunks
    fsdp: Any = chunk
    said = pause or _go_on
    own = hasattr(chunk, "param_and_grad_buffer")
    chunk.train()
    if own:
        fsdp.zero_grad_buffer()
    loss = forward(chunks, tokens, tokens.roll(-1, dims=1)).float().mean()
    said("forward")
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    said("backward")
    if own:
        fsdp.finish_grad_sync()
        weights = [weight for _, weight in fsdp.param_and_grad_buffer.optimizer_named_parameters]
    else:
        weights = list(chunk.parameters())
    said("finalize")
    descent = torch.optim.SGD([weight for weight in weights if weight.grad is not None], lr=lr, foreach=False)
    descent.step()
    descent.zero_grad()  # at the next step the chunk may show other parameters
    if own:
        fsdp.param_and_grad_buffer.copy_main_weights_to_model_weights()
    said("update")
    if own and fsdp.ddp_config.data_parallel_sharding_strategy != "no_shard":  # which fails there before 0.19
        fsdp.start_param_sync()
    said("gather")
    return float(loss.item())


@without_cuda
def cpu_fully_sharded() -> Iterator[None]:
    """Let fully sharded models be built and run on the CPU inside the ``with`` block.

    Comes on top of :func:`mcore_snap.testing.cpu.cpu_megatron`; does nothing where CUDA is available.
    """
    with ExitStack() as stack:
        for home in ("torch_fully_sharded_data_parallel", "fsdp.mcore_fsdp_adapter"):
            module = _module(home)
            if module is not None:
                stack.enter_context(mock.patch.object(module, "DeviceMesh", _CpuMesh(module.DeviceMesh)))
        custom = "custom_fsdp.param_and_grad_buffer"
        if _module(custom) is not None:
            stack.enter_context(nothing_quantized(f"distributed.{custom}"))
        for name, value in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(cuda_as_cpu())
        yield


class _CpuMesh:
    """Stands for DeviceMesh, of which only `from_group` is used: makes meshes of the CPU."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def from_group(self, group: object, device_type: str = "cuda", **options: Any) -> object:
        del device_type
        return self.real.from_group(group, "cpu", **options)


class _Stream:
    """A stream or an event where everything runs at once, and the context of being on it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def at_once(self, *_: object) -> _Stream:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = __enter__ = __exit__ = at_once


_CUDA: Final = {
    "Stream": _Stream,
    "Event": _Stream,
    "stream": _Stream,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "current_device": lambda: 0,  # becomes the CPU like every other number of a device
}


def _module(name: str) -> Any:
    """Import a part of `megatron.core.distributed`, or return None where this version has none of that name."""
    try:
        return importlib.import_module(f"megatron.core.distributed.{name}")
    except ModuleNotFoundError:
        return None


def _go_on(moment: str) -> None:
    del moment
