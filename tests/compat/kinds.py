"""How models of each kind are built, trained and read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mcore_snap.testing import fully_sharded, model_bytes, mxfp8
from mcore_snap.testing.gpt import gpt, optimizer, train_step

if TYPE_CHECKING:
    from collections.abc import Callable


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
        build: Makes the chunks, from the options of a case.
        optimizer: Makes their optimizer.
        step: Trains them one step, from chunks, optimizer and tokens.
        bits: Reads everything that a model holds.
        around: Entered around all of this.
    """

    build: Callable[..., Any] = gpt
    optimizer: Callable[[Any], Any] = optimizer
    step: Callable[[Any, Any, torch.Tensor], object] = train_step
    bits: Callable[[Any], dict[str, Any]] = model_bytes
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def _shards(chunks: Any) -> dict[str, Any]:
    """Read this rank's shards, with nothing gathered."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    named = [*chunks[0].named_parameters(), *chunks[0].named_buffers()]
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in named}
    return {name: t.detach().float().numpy().tobytes() for name, t in local.items()}


def _step_and_publish(chunks: Any, adam: Any, tokens: torch.Tensor) -> None:
    """Train one step and bring the new weights to where a forward pass reads them."""
    train_step(chunks, adam, tokens)
    mxfp8.publish(chunks, adam)


KINDS: Final = {
    "gpt": Kind(),
    "fsdp2": Kind(
        build=fully_sharded.fsdp2_gpt,
        optimizer=lambda chunks: None,
        step=lambda chunks, adam, tokens: fully_sharded.train_step(chunks, tokens),
        bits=_shards,
        around=fully_sharded.cpu_fully_sharded,
    ),
    "mxfp8": Kind(build=mxfp8.mxfp8_gpt, optimizer=mxfp8.mxfp8_optimizer, around=mxfp8.simulated_mxfp8),
    "mxfp8 overlap": Kind(
        build=mxfp8.mxfp8_gpt,
        optimizer=mxfp8.mxfp8_optimizer,
        step=_step_and_publish,
        around=mxfp8.simulated_mxfp8,
    ),
}
