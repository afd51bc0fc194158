"""Megatron-Core's own pipeline schedules on a small model: a whole step, and the logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_snap.testing.cpu import cuda_as_cpu
from mcore_snap.testing.forward import causal, unwrapped
from mcore_snap.testing.training import begin_step, end_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

__all__ = ["pipeline_logits", "pipeline_step"]


def pipeline_step(
    chunks: Sequence[nn.Module],
    optimizer: Any,
    tokens: Sequence[Tensor],
    *,
    pause: Callable[[str], None] | None = None,
) -> float:
    """Do one training step over all pipeline stages and return the loss, the same on every rank.

    Args:
        chunks: This rank's chunks, made with ``gpt(pipeline=...)``.
        optimizer: What :func:`mcore_snap.testing.training.optimizer` returned for them.
        tokens: One batch for each microbatch, each shaped (batch, sequence); with virtual stages as
            many as a multiple of the ranks.
        pause: Called inside the step with ``"backward"`` and ``"finalize"``, each time right after
            what it names.
    """
    begin_step(chunks, optimizer)
    losses = _run(chunks, tokens, partial(_forward_step, _loss), forward_only=False)
    if pause is not None:
        pause("backward")
    with cuda_as_cpu():
        finalize_model_grads(list(chunks))
    if pause is not None:
        pause("finalize")
    end_step(chunks, optimizer)
    return float(_from_last_stage(torch.stack([found["loss"] for found in losses]).mean() if losses else None))


def pipeline_logits(chunks: Sequence[nn.Module], tokens: Sequence[Tensor]) -> Tensor:
    """Run all stages without gradients; the logits of all microbatches, the same on every rank.

    Returns:
        Logits shaped (microbatches, batch, sequence, vocabulary).
    """
    with torch.no_grad():
        found = _run(chunks, tokens, partial(_forward_step, _keep), forward_only=True)
        return _from_last_stage(torch.stack([one["logits"] for one in found]) if found else None)


def _run(
    chunks: Sequence[nn.Module], tokens: Sequence[Tensor], step: Callable[..., object], *, forward_only: bool
) -> list[dict[str, Tensor]]:
    size, seq = tokens[0].shape
    batches = [iter(list(tokens)) for _ in chunks]
    settings: Any = unwrapped(chunks[0]).config
    if getattr(getattr(chunks[0], "ddp_config", None), "overlap_grad_reduce", False):
        # Gradients are reduced when those of the last microbatch are complete, not before.
        waits: list[Any] = [getattr(chunk, "no_sync") for chunk in chunks]  # noqa: B009 - DDP's, not nn.Module's
        settings.no_sync_func = waits if len(waits) > 1 else waits[0]
    # The schedules count tokens on device "cuda".
    with cuda_as_cpu():
        found: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=batches if len(chunks) > 1 else batches[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(tokens),
            seq_length=seq,
            micro_batch_size=size,
            forward_only=forward_only,
        )
    return found


def _forward_step(
    outcome: Callable[[Tensor | None, Tensor], object], batches: Iterator[Tensor], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], object]]:
    tokens = next(batches)
    labels = tokens.roll(-1, dims=1) if outcome is _loss else None
    return model(tokens, *causal(tokens), labels=labels), partial(outcome, labels)


def _loss(labels: Tensor | None, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    del labels
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _keep(labels: Tensor | None, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    del labels
    return output.float().sum(), {"logits": output.clone()}


def _from_last_stage(value: Tensor | None) -> Tensor:
    group = parallel_state.get_pipeline_model_parallel_group()
    held: list[Any] = [value]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast_object_list(held, src=last, group=group)
    found: Tensor = held[0]
    return found
