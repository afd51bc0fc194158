"""Small modules in the shapes that Megatron-Core gives its model chunks, without Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from mcore_snap.testing.raw_bytes import carrier

if TYPE_CHECKING:
    from collections.abc import Sequence

Backing: TypeAlias = Literal["flat", "none", "shared"]
"""What `param_data` is: the memory of the parameters, None, or memory of the gradients, lent."""


class FlatBuffer:
    """Holds the parameters of one dtype in one tensor, as Megatron-Core's `_ParamAndGradBuffer` does.

    With the backing `flat` each parameter is re-pointed to a view of `param_data`, `gap` elements behind the last.
    """

    def __init__(self, params: Sequence[nn.Parameter], backing: Backing, gap: int) -> None:
        """Lay out `params`, and move them where the backing says so."""
        self.params = list(params)
        self.param_dtype = self.params[0].dtype
        self.param_index_map: dict[nn.Parameter, tuple[int, int, int]] = {}
        end = 0
        for param in self.params:
            start = end + gap
            end = start + param.numel()
            self.param_index_map[param] = (start, end, 0)
        self.numel = end + gap
        self.grad_data = torch.zeros(self.numel, dtype=torch.float32)
        self.param_data: torch.Tensor | None = None
        self.buckets: list[Any] = []
        if backing == "flat":
            raw = torch.zeros(self.numel * self.param_dtype.itemsize, dtype=torch.uint8)
            self.param_data = raw.view(self.param_dtype)
        elif backing == "shared":
            self.shared_buffer = self.grad_data
            self.param_data = self.grad_data.view(torch.bfloat16)[: self.numel]
        for param, (start, stop, _) in self.param_index_map.items():
            if backing == "flat" and self.param_data is not None:
                view = self.param_data[start:stop].view(param.shape)
                carrier(view).copy_(carrier(param.detach()))
                param.data = view
            param.main_grad = self.grad_data[start:stop].view(param.shape)  # type: ignore[attr-defined]


class DDPLike(nn.Module):
    """Wraps a module as Megatron-Core's DistributedDataParallel does: its `buffers` is a list, not a method."""

    def __init__(self, module: nn.Module, backing: Backing = "flat", gap: int = 3) -> None:
        """Collect the trainable parameters by dtype, those of experts apart."""
        super().__init__()
        self.module = module
        self.use_forward_hook = False
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        trainable = [param for param in module.parameters() if param.requires_grad]
        experts = [param for param in trainable if not getattr(param, "allreduce", True)]
        dense = [param for param in trainable if getattr(param, "allreduce", True)]
        self.buffers = _by_dtype(dense, backing, gap)  # type: ignore[assignment, method-assign]
        self.expert_parallel_buffers = _by_dtype(experts, backing, gap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the wrapped module."""
        return self.module(x)  # type: ignore[no-any-return]


def _by_dtype(params: Sequence[nn.Parameter], backing: Backing, gap: int) -> list[FlatBuffer]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault(param.dtype, []).append(param)
    return [FlatBuffer(group, backing, gap) for group in groups.values()]


class ExtraState(nn.Module):
    """Keeps something that is no tensor of the module, and whose bytes change in number."""

    def __init__(self, history: Sequence[int] = (1, 2), scale: torch.Tensor | None = None) -> None:
        """Start from a list of integers, and from a tensor beside it."""
        super().__init__()
        self.history = list(history)
        self.scale = torch.tensor([1.0, float("nan"), -0.0]) if scale is None else scale

    def get_extra_state(self) -> dict[str, Any]:
        """Return what Transformer Engine would: a dictionary of tensors and plain values."""
        return {"history": list(self.history), "scale": self.scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the state back."""
        self.history = list(state["history"])
        self.scale = state["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let everything through."""
        return x


class Layer(nn.Module):
    """A linear layer, a scale that is a buffer, and the extra state of an FP8 module: a chunk that can be trained."""

    def __init__(self, width: int = 3, dtype: torch.dtype = torch.float32) -> None:
        """Make the layer with parameters and buffers of `dtype`."""
        super().__init__()
        self.fc = nn.Linear(width, width, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, dtype=dtype)
        self.base = nn.Linear(width, width, bias=False, dtype=dtype).requires_grad_(requires_grad=False)
        vars(self.out.weight)["allreduce"] = False
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width).to(dtype))
        self.register_buffer("count", torch.tensor(0), persistent=False)
        self.fp8 = ExtraState()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all layers, so that every parameter has a gradient."""
        return self.fp8(self.out(torch.tanh(self.fc(x) * self.scale)) + self.base(x))  # type: ignore[no-any-return]
