"""Training a small Megatron-Core model: its optimizer, and one step, as Megatron's own training does it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from mcore_snap.testing.cpu import cuda_as_cpu
from mcore_snap.testing.forward import forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

__all__ = ["begin_step", "end_step", "optimizer", "stage_main_parameters", "train_step"]


def optimizer(chunks: Sequence[nn.Module], lr: float = 0.05, **options: object) -> Any:
    """Megatron-Core's own Adam for DDP-wrapped chunks; plain torch SGD for chunks without DDP.

    Args:
        chunks: What :func:`gpt` returned.
        lr: Learning rate.
        **options: Further settings of Megatron-Core's OptimizerConfig.
    """
    if not isinstance(chunks[0], DistributedDataParallel):
        trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=lr)
    settings = chunks[0].ddp_config
    bf16 = bool(chunks[0].config.bf16)
    chosen = {
        "optimizer": "adam",
        "lr": lr,
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "use_distributed_optimizer": settings.use_distributed_optimizer,
        "overlap_param_gather": settings.overlap_param_gather,
        **options,
    }
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    config = OptimizerConfig(**{name: value for name, value in chosen.items() if name in known})
    with cuda_as_cpu():
        return get_megatron_optimizer(config, list(chunks))


def train_step(
    chunks: Sequence[nn.Module],
    optimizer: Any,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    pause: Callable[[str], None] | None = None,
) -> float:
    """Do one whole training step and return its loss.

    Args:
        chunks: What :func:`gpt` returned; run one after the other on this rank.
        optimizer: What :func:`optimizer` returned for them.
        tokens: Token numbers, shaped (batch, sequence).
        labels: Tokens to predict; by default each position's next token.
        pause: Called inside the step with ``"forward"``, ``"backward"``, and ``"finalize"``, each
            time right after what it names. After ``"finalize"`` only the optimizer's step is left.

    Raises:
        RuntimeError: The optimizer skipped the step.
    """
    pause = pause or _go_on
    begin_step(chunks, optimizer)
    labels = tokens.roll(-1, dims=1) if labels is None else labels
    loss = forward(chunks, tokens, labels).float().mean()
    pause("forward")
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    pause("backward")
    if isinstance(chunks[0], DistributedDataParallel):
        # Reduces the gradients, updates expert biases, and resets the routers' counters.
        finalize_model_grads(list(chunks))
    pause("finalize")
    end_step(chunks, optimizer)
    return float(loss.item())


def begin_step(chunks: Sequence[nn.Module], optimizer: Any) -> None:
    """Clear the gradients, and stage the weights where a step has to begin with that."""
    chunk: Any  # DDP's own methods are not nn.Module's
    for chunk in chunks:
        chunk.train()
        if isinstance(chunk, DistributedDataParallel):
            chunk.zero_grad_buffer()
    optimizer.zero_grad()
    stage_main_parameters(chunks, optimizer)


def stage_main_parameters(chunks: Sequence[nn.Module], optimizer: Any) -> None:
    """Put the main parameters where the next gather takes them from.

    Only with ``reuse_grad_buf_for_mxfp8_param_ag`` and overlapped gathers, where the buffer that is
    gathered from holds gradients between steps; everything else is left alone.
    """
    settings: Any = getattr(chunks[0], "ddp_config", None)
    if getattr(settings, "reuse_grad_buf_for_mxfp8_param_ag", False) and settings.overlap_param_gather:
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            one._copy_main_params_to_param_buffer()


def end_step(chunks: Sequence[nn.Module], optimizer: Any) -> None:
    """Let the optimizer step.

    Raises:
        RuntimeError: It skipped the step.
    """
    if not isinstance(chunks[0], DistributedDataParallel):
        optimizer.step()
        return
    with cuda_as_cpu():
        done, _, _ = optimizer.step()
    if not done:
        msg = "the optimizer skipped the step: a gradient was not finite"
        raise RuntimeError(msg)


def _go_on(moment: str) -> None:
    del moment
