"""The models that are measured: bytes of a given number in the shapes of a transformer, and many small leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from mcore_snap.words import words

__all__ = ["SMALLEST", "FlatBuffer", "StandIn", "Subject", "device_here", "many_leaves", "one_buffer"]

SMALLEST: Final = 64 << 10
"""Bytes that a StandIn needs at least for its shapes."""

_LAYERS: Final = 24
_ITEMSIZE: Final = 2  # bfloat16
_SMALL: Final = (8, 16)  # 256 bytes a leaf: a norm's weight or a bias
_PERIOD: Final = 2_097_143  # a prime: bytes that land in a wrong place are other bytes
_CHUNK: Final = 1 << 24  # elements compared at a time


@dataclass(frozen=True, eq=False)
class FlatBuffer:
    """The memory of all parameters, as Megatron-Core's DDP keeps it, without that of the gradients."""

    param_data: Tensor
    params: tuple[nn.Parameter, ...]


class StandIn(nn.Module):
    """Has the fields of Megatron-Core's DDP that keeping weights needs, and no forward pass.

    Args:
        nbytes: Size of the flat buffer; at least `SMALLEST`, and even.
        device: Where it lies.

    >>> chunk = StandIn(1 << 20, torch.device("cpu"))
    >>> chunk.buffers[0].param_data.nbytes, len(list(chunk.parameters()))
    (1048576, 145)
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        flat = torch.empty(nbytes // _ITEMSIZE, dtype=torch.bfloat16, device=device)
        self.module = nn.Module()
        start = 0
        for layer, name, shape in _shapes(flat.numel()):
            stop = start + math.prod(shape)
            if not hasattr(self.module, layer):
                self.module.add_module(layer, nn.Module())
            parameter = nn.Parameter(flat[start:stop].view(shape))
            self.module.get_submodule(layer).register_parameter(name, parameter)
            start = stop
        self.buffers = [FlatBuffer(flat, tuple(self.parameters()))]  # type: ignore[assignment, method-assign]
        self.expert_parallel_buffers: list[FlatBuffer] = []
        self.bucket_groups: list[Any] = []  # on one rank nothing is gathered
        self.expert_parallel_bucket_groups: list[Any] = []
        self.use_forward_hook = False


def _shapes(numel: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    # The hidden size that fills the layers almost; the embedding takes what is left, so that the sum is exact.
    hidden = max(8, math.isqrt(numel * 49 // 50 // (12 * _LAYERS)) // 8 * 8)
    layer = {
        "input_norm": (hidden,),
        "qkv": (3 * hidden, hidden),
        "proj": (hidden, hidden),
        "mlp_norm": (hidden,),
        "fc1": (4 * hidden, hidden),
        "fc2": (hidden, 4 * hidden),
    }
    yield "embedding", "weight", (numel - _LAYERS * sum(map(math.prod, layer.values())),)
    for number in range(_LAYERS):
        for name, shape in layer.items():
            yield f"layer{number}", name, shape


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its memory, and what its bits are to be.

    There are two versions of the weights: the current one, and the old one, which is its bitwise
    complement. So every bit differs, and no third copy is needed to tell which one is live.

    Attributes:
        model: The model.
        live: All of its weights, as integers, in the order of its parameters.
        reference: The current version, 1-D, on the host.
        kept: Copies of the old version, by who made them.
    """

    model: nn.Module
    live: tuple[Tensor, ...]
    reference: Tensor
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of the weights, in bytes."""
        return self.reference.nbytes

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.live[0].device

    def reset(self) -> None:
        """Make the current version live."""
        for target, source in zip(self.live, self._pieces(self.live), strict=True):
            target.copy_(source)

    def old_version(self, keeper: str, keep: Callable[[], Any]) -> Any:
        """Return a copy of the old version, made only once by each keeper.

        Args:
            keeper: Who makes it.
            keep: Makes it from the model.
        """
        if keeper not in self.kept:
            for one in self.live:
                one.bitwise_not_()
            self.kept[keeper] = keep()
            self.reset()
        return self.kept[keeper]

    def holds(self, *, old: bool = False) -> bool:
        """Tell whether the current version, or the old one, is live, bit for bit."""
        return self.same(self.live, old=old)

    def same(self, tensors: Iterable[Tensor], *, old: bool = False) -> bool:
        """Tell whether tensors, one after the other, are the bits of the current version, or of the old one."""
        found = [words(tensor.detach()).reshape(-1) for tensor in tensors]
        if sum(one.nbytes for one in found) != self.nbytes:
            return False
        return all(
            torch.equal(part.cpu(), ~expected if old else expected)
            for one, piece in zip(found, self._pieces(found), strict=True)
            for part, expected in zip(_cut(one, _CHUNK), _cut(piece.reshape(-1), _CHUNK), strict=True)
        )

    def _pieces(self, like: Iterable[Tensor]) -> Iterator[Tensor]:
        start = 0
        for one in like:
            yield self.reference[start : start + one.numel()].view(one.shape)
            start += one.numel()


def device_here() -> torch.device:
    """Return the accelerator, or the CPU where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def one_buffer(nbytes: int, device: torch.device) -> Subject:
    """Return a model whose weights are one flat buffer of this many bytes."""
    model = StandIn(nbytes, device)
    flat: Tensor = model.buffers[0].param_data  # type: ignore[index]
    return _filled(model, [flat])


def many_leaves(count: int, device: torch.device) -> Subject:
    """Return a model of this many parameters of 256 bytes each, all of them apart in memory."""
    model = nn.ParameterList(torch.empty(_SMALL, dtype=torch.bfloat16, device=device) for _ in range(count))
    return _filled(model, [parameter.data for parameter in model])


def _filled(model: nn.Module, weights: list[Tensor]) -> Subject:
    live = tuple(words(one) for one in weights)
    reference = torch.empty(sum(one.numel() for one in live), dtype=torch.int16)
    bits = torch.randint(-(1 << 15), 1 << 15, (_PERIOD,), dtype=torch.int16, generator=torch.Generator().manual_seed(1))
    for part in _cut(reference, _PERIOD):
        part.copy_(bits[: part.numel()])
    subject = Subject(model, live, reference)
    subject.reset()
    return subject


def _cut(flat: Tensor, length: int) -> list[Tensor]:
    return [flat[start : start + length] for start in range(0, flat.numel(), length)]
