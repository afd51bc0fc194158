"""PyTorch's FSDP2: bringing parameters back to their shards before weights are read or written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn

from mcore_snap.errors import NotReady

__all__ = ["reshard", "unsharded"]

_HOMES: Final = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


def reshard(chunk: nn.Module) -> None:
    """Let every parameter that FSDP2 shards be a DTensor over this rank's shard again.

    The root module keeps its parameters unsharded after a forward pass, as ordinary parameters in
    memory that the next reshard frees: what is written there is lost. Autograd does not mind, since
    the backward pass gathers again into the same memory.

    Not collective: nothing is communicated.

    Args:
        chunk: A model chunk; one without FSDP2 modules is left alone.

    Raises:
        NotReady: An all-gather is under way, or a forward pass is; nothing was resharded.

    >>> reshard(nn.Linear(2, 1))
    """
    sharded = list(_sharded_modules(chunk))
    problems = [problem for name, module in sharded for problem in _in_flight(name, module)]
    if problems:
        raise NotReady("the weights are in flight; nothing was read or written", problems)
    for _, module in sharded:
        module.reshard()


def unsharded(chunk: nn.Module) -> dict[Tensor, Tensor]:
    """Return, for each parameter that FSDP2 shards, the parameter that it is gathered into.

    That one computes, and autograd's graphs hold it. It counts its versions apart from the shards,
    its memory is freed between uses, and it is only there once it was gathered.

    >>> unsharded(nn.Linear(2, 1))
    {}
    """
    return {
        one.sharded_param: whole
        for _, module in _sharded_modules(chunk)
        for group in _parameter_groups(module)
        for one in getattr(group, "fsdp_params", ())
        if isinstance(whole := getattr(one, "_unsharded_param", None), Tensor)
    }


def _sharded_modules(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    # Whoever has such a module has imported its class; importing it here would cost others seconds.
    homes = [sys.modules[home] for home in _HOMES if home in sys.modules]
    classes = tuple(cls for home in homes if isinstance(cls := getattr(home, "FSDPModule", None), type))
    for name, module in chunk.named_modules() if classes else ():
        if isinstance(module, classes):
            yield name or "the model", module


def _in_flight(name: str, module: Any) -> Iterator[str]:
    for group in _parameter_groups(module):
        if getattr(group, "_all_gather_result", None) is not None:
            yield (
                f"{name}: expected no gather under way, found an unshard that nobody waited for; call wait() on the "
                "handle that unshard(async_op=True) returned, or run a forward pass first"
            )
        elif getattr(getattr(group, "_training_state", None), "name", None) == "FORWARD":
            yield (
                f"{name}: expected a module at rest, found it in its forward pass; wait for the end of the forward "
                "pass, and after one that failed call reset_iter_state() on the root module"
            )


def _parameter_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one group at most, before torch 2.13
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
