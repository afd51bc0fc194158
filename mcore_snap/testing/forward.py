"""One forward pass through chunks of a Megatron-Core model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

__all__ = ["causal", "forward", "unwrapped"]


def forward(chunks: Sequence[nn.Module], tokens: Tensor, labels: Tensor | None) -> Tensor:
    """Run the chunks one after the other on this rank.

    Args:
        chunks: At least one chunk; the first takes tokens, the last returns what the model returns.
        tokens: Token numbers, shaped (batch, sequence).
        labels: Tokens to predict; the losses are returned then, and otherwise the logits.

    Raises:
        ValueError: There is no chunk.
    """
    positions, mask = causal(tokens)
    output: Tensor | None = None
    for chunk in chunks:
        if output is not None:
            model = unwrapped(chunk)
            # Float16Module widens what every chunk returns, here also the hidden states.
            model.set_input_tensor(output.to(model.config.params_dtype))
        output = chunk(tokens, positions, mask, labels=labels)
    if output is None:
        msg = "expected at least one chunk, got none"
        raise ValueError(msg)
    return output


def causal(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of tokens, shaped as they are, and the mask that hides later ones."""
    size, seq = tokens.shape
    positions = torch.arange(seq, device=tokens.device).expand(size, seq)
    # True hides. Given explicitly because Megatron would build its own on the CUDA device.
    mask = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    return positions, mask


def unwrapped(chunk: nn.Module) -> Any:
    """Return the model inside DistributedDataParallel and Float16Module."""
    while isinstance(chunk, (DistributedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk
