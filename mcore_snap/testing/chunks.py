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

HostCopy: TypeAlias = Literal["param_data_cpu", "cpu_data", "nowhere"]
"""Where an offloaded buffer keeps its host copy: Megatron-Core's attribute, verl's on the tensor, or none."""


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
        self.param_data_cpu: torch.Tensor | None = None
        self.param_data_size = 0  # elements
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

    def offload(self, to: HostCopy = "param_data_cpu") -> None:
        """Free the memory of the parameters, which keep their shapes, after a copy to where `to` says."""
        if self.param_data is None:
            return
        kept = self.param_data.clone()
        if to == "param_data_cpu":
            self.param_data_cpu = kept
        elif to == "cpu_data":
            vars(self.param_data)["cpu_data"] = kept
        self.param_data_size = kept.numel()
        self.param_data.untyped_storage().resize_(0)

    def reload(self) -> None:
        """Bring the parameters back from the host copy, which stays where it is, as in Megatron-Core."""
        kept = self.host_copy()
        if self.param_data is None or kept is None:
            return
        self.param_data.untyped_storage().resize_(kept.nbytes)
        carrier(self.param_data).copy_(carrier(kept))

    def host_copy(self) -> torch.Tensor | None:
        """Return the host copy, or None while the memory of the parameters is there, or where there is no copy."""
        if self.param_data is None or self.param_data.untyped_storage().nbytes():
            return None
        kept = vars(self.param_data).get("cpu_data")
        return self.param_data_cpu if kept is None else kept


class GatherGroup:
    """A bucket group under overlapped parameter gathers: values land when its gather is finished, and not before.

    Attributes:
        started: How many gathers were dispatched.
        finished: For each call of `finish_param_sync`, whether the next group was left alone.
        landed: How many gathers landed.
        next_param_gather_bucket_group: Dispatched on finishing, unless told not to.
    """

    def __init__(self, *arriving: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Take pairs of memory that a gather writes and the values that the other ranks send."""
        self.arriving = [(target, values.clone()) for target, values in arriving]
        self.buckets: list[Any] = []
        self.param_gather_dispatched = False
        self.param_gather_handle: object | None = None
        self.next_param_gather_bucket_group: GatherGroup | None = None
        self.started = 0
        self.finished: list[bool] = []
        self.landed = 0

    def start_param_sync(self, force_sync: bool = False) -> None:  # noqa: FBT001, FBT002 - Megatron-Core's signature
        """Dispatch a gather; with `force_sync` it lands at once."""
        if self.param_gather_handle is not None:
            msg = "a gather was dispatched while another one is under way"
            raise RuntimeError(msg)
        self.started += 1
        self.param_gather_dispatched = True
        self.param_gather_handle = object()
        if force_sync:
            self._land()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:  # noqa: FBT001, FBT002 - the same
        """Dispatch the gather if it is due, and let it land."""
        self.finished.append(skip_next_bucket_dispatch)
        if not self.param_gather_dispatched:
            self.start_param_sync()
        if self.param_gather_handle is not None:
            self._land()
            if self.next_param_gather_bucket_group is not None and not skip_next_bucket_dispatch:
                self.next_param_gather_bucket_group.start_param_sync()

    def _land(self) -> None:
        for target, values in self.arriving:
            carrier(target).copy_(carrier(values))
        self.param_gather_handle = None
        self.landed += 1


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


class AnyState(nn.Module):
    """Has the extra state that it is given, whatever that is: None, a file, a tensor, nested objects."""

    def __init__(self, state: Any = None) -> None:
        """Start from `state`."""
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        """Return the state itself, not a copy."""
        return self.state

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""
        self.state = state

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
