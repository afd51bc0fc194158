"""Weights in flight: waiting for parameter gathers, and what they leave behind, before weights are touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mcore_snap.errors import NotReady
from mcore_snap.megatron.flat_buffers import bucket_groups

__all__ = ["flags_unchanged", "settle"]


def settle(chunks: Sequence[nn.Module], *, gather: bool = True) -> None:
    """Make the weights current, as the pre-hooks of the next forward pass would.

    With overlapped gathers, ``optimizer.step()`` leaves the other ranks' shards old until the next
    forward pass, and a gather under way would land on top of whatever is written. The flags are
    given back: left at "dispatched" between ``finalize_model_grads()`` and ``step()``, they would
    make the forward pass after the step skip its gather.

    Collective over the data-parallel group where a gather is due; else nothing is communicated.

    Args:
        chunks: The model.
        gather: Whether to start what is due. Slices of one's own are current without.

    Raises:
        NotReady: A gather is due, but starting it from here would destroy weights or gradients.
    """
    groups = [
        (f"chunks[{index}].{name}", group) for index, chunk in enumerate(chunks) for name, group in bucket_groups(chunk)
    ]
    if not groups:
        return
    overlapped = {id(group) for chunk in chunks if _overlaps(chunk) for _, group in bucket_groups(chunk)}
    due = [(name, group) for name, group in groups if gather and id(group) in overlapped and _is_due(group)]
    problems = [f"{name}: {problem}" for name, group in due if (problem := _why_not(group))]
    if problems:
        raise NotReady("the weights are in flight; nothing was read or written", problems)
    started = {id(group) for _, group in due}
    try:
        with torch.no_grad():
            for _, group in groups:
                if id(group) in started or getattr(group, "param_gather_handle", None) is not None:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)
    finally:
        for _, group in due:
            group.param_gather_dispatched = False


@contextmanager
def flags_unchanged(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Give the dispatch flags back on leaving, as they were on entry.

    A forward pass in between marks its groups as gathered. Between ``finalize_model_grads()`` and
    ``step()`` that would keep the forward pass after the step from gathering.
    """
    groups = [group for chunk in chunks for _, group in bucket_groups(chunk)]
    before = [getattr(group, "param_gather_dispatched", None) for group in groups]
    try:
        yield
    finally:
        for group, flag in zip(groups, before, strict=True):
            if flag is not None:
                group.param_gather_dispatched = flag


def _overlaps(chunk: nn.Module) -> bool:
    # Not `ddp_config.overlap_param_gather`, which Megatron-Core up to 0.16 ignores without the
    # distributed optimizer. It stays set after `disable_forward_pre_hook()`; gathering is harmless then.
    return bool(getattr(chunk, "use_forward_hook", False))


def _is_due(group: Any) -> bool:
    return not getattr(group, "param_gather_dispatched", True)


def _why_not(group: Any) -> str | None:
    config = getattr(group, "ddp_config", None)
    if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        return (
            "expected MXFP8 weights that were published, found a gather due, from a buffer that now holds gradients "
            "or zeros; call optimizer.prepare_model_params_for_param_sync() (before Megatron-Core 0.19: "
            "zero_grad_buffer() and then _copy_main_params_to_param_buffer()), and run a forward pass first"
        )
    if config is not None and not getattr(config, "use_distributed_optimizer", True) and _size(group) > 1:
        return (
            "expected gathered weights, found a gather of the layer-wise optimizer due, which would receive into the "
            "gradients and clear them; run a forward pass first"
        )
    if any(_is_freed(getattr(bucket, "param_data", None)) for bucket in group.buckets):
        return (
            "expected gathered weights, found a gather due for memory that is offloaded, with other ranks' old weights "
            "in its host copy; bring the weights back first, or run a forward pass before offloading"
        )
    return None


def _is_freed(data: Any) -> bool:
    return isinstance(data, Tensor) and data.numel() > 0 and not data.untyped_storage().nbytes()


def _size(group: Any) -> int:
    return int(getattr(group, "intra_distributed_optimizer_instance_size", 1))
