"""Models that the tests of this folder go through, and everything that such a model holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn


def is_attention(name: str) -> bool:
    """Choose the parameters that a frozen model does not train."""
    return "self_attention" in name


class Configuration(NamedTuple):
    """How to build a model, and on how many ranks."""

    world: int
    options: Mapping[str, Any]

    @property
    def parallel(self) -> dict[str, int]:
        """Arguments of Megatron's initialize_model_parallel."""
        return {"expert_model_parallel_size": self.options.get("expert_parallel", 1)}


_BARE: Final = {"ddp": False}
_OWN: Final = {"distributed_optimizer": False}
_MODELS: Final[dict[str, dict[str, Any]]] = {
    "dense": {},
    "dense-fp32": {"bf16": False},
    "dense-own-storage": _OWN,
    "dense-own-storage-fp32": _OWN | {"bf16": False},
    "dense-float16module": _BARE,
    "dense-plain": _BARE | {"bf16": False},
    "tied": {"tied": True},
    "tied-own-storage": _OWN | {"tied": True},
    "tied-float16module": _BARE | {"tied": True},
    "partly-frozen": {"freeze": is_attention},
    "partly-frozen-own-storage": _OWN | {"freeze": is_attention},
    "two-chunks": {"chunks": 2},
    "two-chunks-own-storage": _OWN | {"chunks": 2},
    "two-chunks-float16module": _BARE | {"chunks": 2},
    "moe": {"moe": True},
    "moe-expert-buffers": {"moe": True, "expert_buffers": True},
    "moe-expert-buffers-own-storage": _OWN | {"moe": True, "expert_buffers": True},
    "moe-float16module": _BARE | {"moe": True},
    "moe-plain": _BARE | {"moe": True, "bf16": False},
    "moe-two-chunks": {"moe": True, "chunks": 2, "expert_buffers": True},
}
_TWO_RANKS: Final = ("dense", "dense-own-storage", "tied", "two-chunks", "partly-frozen")
CONFIGURATIONS: Final[dict[str, Configuration]] = {
    **{name: Configuration(1, options) for name, options in _MODELS.items()},
    **{f"{name}-2-ranks": Configuration(2, _MODELS[name]) for name in _TWO_RANKS},
    "moe-2-ranks": Configuration(2, {"moe": True, "expert_parallel": 2}),
    "moe-own-storage-2-ranks": Configuration(2, _OWN | {"moe": True, "expert_parallel": 2}),
    "moe-fp32-2-ranks": Configuration(2, {"moe": True, "expert_parallel": 2, "bf16": False}),
}


def flat_buffers(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """Give DDP's buffers under names; none for a chunk that DDP does not wrap."""
    for kind in ("buffers", "expert_parallel_buffers"):
        listed = getattr(chunk, kind, None)
        if isinstance(listed, list):
            yield from ((f"{kind}[{i}]", buffer) for i, buffer in enumerate(listed))


def tensors(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return everything that makes a model's outputs: parameters, registered buffers, flat buffers."""
    found: dict[str, Tensor] = {}
    for i, chunk in enumerate(chunks):
        found |= {f"{i}.{name}": p.data for name, p in chunk.named_parameters(remove_duplicate=False)}
        found |= {f"{i}.{name}": b for name, b in chunk.named_buffers(remove_duplicate=False)}
        for name, buffer in flat_buffers(chunk):
            if buffer.param_data is not None:
                found[f"{i}.{name}.param_data"] = buffer.param_data
    return found


def gradients(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return DDP's gradient buffers, and the plain gradients of parameters."""
    found: dict[str, Tensor] = {}
    for i, chunk in enumerate(chunks):
        found |= {f"{i}.{name}.grad_data": buffer.grad_data for name, buffer in flat_buffers(chunk)}
        found |= {f"{i}.{name}.grad": p.grad for name, p in chunk.named_parameters() if p.grad is not None}
    return found


def optimizer_state(optimizer: Any) -> dict[str, Tensor]:
    """Return the main parameters and moments of a Megatron or torch optimizer."""
    found: dict[str, Tensor] = {}
    for i, wrapper in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = getattr(wrapper, "optimizer", wrapper)
        params = [p for group in inner.param_groups for p in group["params"]]
        for j, param in enumerate(params):
            found[f"optimizer[{i}].main[{j}]"] = param.data
            for key, value in inner.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer[{i}].{key}[{j}]"] = value
    return found


def bits(named: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """Return dtype, shape and bytes of each tensor."""
    return {
        name: (t.dtype, t.shape, t.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in named.items()
    }


def everything(chunks: Sequence[nn.Module], optimizer: Any = None) -> dict[str, object]:
    """Return the bits of all that decides how training goes on from here."""
    state: dict[str, object] = dict(bits(tensors(chunks) | gradients(chunks)))
    if optimizer is not None:
        state |= bits(optimizer_state(optimizer))
    for i, chunk in enumerate(chunks):
        groups = [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]
        state[f"{i}.dispatched"] = [getattr(group, "param_gather_dispatched", None) for group in groups]
        state[f"{i}.modes"] = [module.training for module in chunk.modules()]
    state["random state"] = torch.get_rng_state().numpy().tobytes()
    return state


def places(chunks: Sequence[nn.Module]) -> dict[str, tuple[object, ...]]:
    """Return where each parameter and buffer lies, and what the model's owner may hold on to."""
    found: dict[str, tuple[object, ...]] = {
        name: (t.data_ptr(), t.stride(), t.storage_offset(), t.untyped_storage().data_ptr())
        for name, t in (tensors(chunks) | gradients(chunks)).items()
    }
    for i, chunk in enumerate(chunks):
        for name, p in chunk.named_parameters(remove_duplicate=False):
            found[f"{i}.{name} itself"] = (id(p), p.requires_grad)
    return found


def differing(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    """Return the names under which two mappings differ."""
    return [name for name in {**a, **b} if a.get(name, None) != b.get(name, None) or (name in a) != (name in b)]


def disturb_frozen(chunks: Sequence[nn.Module]) -> None:
    """Change what no optimizer changes, as merging an adapter into its base does."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(1.5)
