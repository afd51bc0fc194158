"""Megatron-FSDP: the buffers that hold its weights, and the gathers that bring them from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from mcore_snap.errors import StructureMismatch
from mcore_snap.words import problem_with

__all__ = ["Sharded", "gathers_unchanged", "megatron_fsdp", "settle_gathers"]

_HYBRID: Final = ("hsdp_wbuf", "hfsdp_helper_wbuf", "hfsdp_helper_wtbuf")


@dataclass(frozen=True, slots=True)
class Sharded:
    """What holds the weights of a chunk that Megatron-FSDP wraps.

    Attributes:
        buffers: This rank's memory, one 1-D tensor each: per parameter group the compute weights and
            then the main weights. Whole or this rank's shard, as the sharding strategy has it.
        parameters: Compute weights that no buffer holds (strategy ``no_shard``), by name.
        covered: The parameters that compute, which count their versions apart from the buffers.
        after: What has to be called once any of this was written; equal for the same chunk.
            Collective over the data-parallel group if gathered weights are cached, else nothing.
    """

    buffers: tuple[Tensor, ...]
    parameters: tuple[tuple[str, Tensor], ...]
    covered: tuple[Tensor, ...]
    after: Callable[[], None]


class _Gathers(NamedTuple):
    """Megatron-FSDP's own objects.

    Attributes:
        prefix: What precedes the names of parameters in the chunk.
        module: The module that shows DTensors or raw parameters.
        groups: Parameter groups; a bucket's number is its group's index.
        names: Each raw parameter's name.
        pipeline: Which buckets are gathered, and how far.
    """

    prefix: str
    module: Any
    groups: Sequence[Any]
    names: dict[Tensor, str]
    pipeline: Any


def megatron_fsdp(chunk: nn.Module) -> Sharded | None:
    """Return what holds the weights of a chunk wrapped by Megatron-FSDP, or ``None`` for any other chunk.

    ``named_parameters()`` of such a chunk shows DTensors over the main weights, or the parameters
    that compute, whose memory is freed between uses. The buffers are the same in either state, so
    that a snapshot taken in one loads in the other. Buckets into which shards are gathered are not
    among them: they are copies.

    Reads attributes only: see `settle_gathers` for what has to precede a read or a write.

    Args:
        chunk: A model chunk: Megatron-Core's wrapper, from 0.12 on, or a bare MegatronFSDP.

    Raises:
        StructureMismatch: The parameters are quantized, so that their scales lie outside the buffers; or
            sharding is hybrid, over two levels of ranks.

    >>> megatron_fsdp(nn.Linear(2, 1)) is None
    True
    """
    found = _gathers(chunk)
    if found is None:
        return None
    hybrid = [
        f"parameter group {index}: expected one level of sharding, found two (HSDP, HFSDP); use one distributed "
        "optimizer instance"
        for index, group in enumerate(found.groups)
        if any(getattr(group, name, None) is not None for name in _HYBRID)
    ]
    if hybrid:
        raise StructureMismatch("hybrid sharding of Megatron-FSDP cannot be kept", hybrid)
    raw = [(found.prefix + found.names[one], one) for group in found.groups for one in group.params]
    quantized = [
        f"{name}: expected plain weights, found {type(_local(one)).__name__}; build the model without FP8 parameters"
        for name, one in raw
        if (problem := problem_with(_local(one))) is not None and problem[0] == "unsupported"
    ]
    if quantized:
        raise StructureMismatch("quantized parameters of Megatron-FSDP cannot be kept", quantized)
    alone = {one for group in found.groups if group.model_weight_buffer is None for one in group.params}
    return Sharded(
        buffers=tuple(data for group in found.groups for data in _memory_of(group)),
        parameters=tuple((name, _local(one)) for name, one in raw if one in alone),
        covered=tuple(_local(one) for _, one in raw),
        after=_GatherAgain(chunk),
    )


def settle_gathers(chunk: nn.Module) -> None:
    """Make the weights of a chunk that Megatron-FSDP wraps current, and wait for gathers under way.

    A gather under way reads the shards that a load is about to write. And where only the optimizer
    is sharded, ``optimizer.step()`` renews this rank's part of the compute weights and leaves the
    rest to a gather. Which buckets count as gathered is not changed, so that no later gather is
    skipped.

    Collective over the data-parallel group where a gather is due; that cannot be told from the time
    before the step, so it is where nothing was gathered since the gradients were reduced.

    >>> settle_gathers(nn.Linear(2, 1))
    """
    found = _gathers(chunk)
    if found is None:
        return
    _wait(found.pipeline)
    with torch.no_grad():
        for key, status in found.pipeline.bucket_status.items():
            group = found.groups[_number(key)]
            if not _is_gathered(status):
                _gather_whole(group, transposed=_transposed(key))


@contextmanager
def gathers_unchanged(chunk: nn.Module) -> Iterator[None]:
    """Give back on leaving which buckets count as gathered, and which parameters the chunk shows.

    A forward pass in between gathers. Between ``finish_grad_sync()`` and ``step()`` that would keep
    the forward pass after the step from gathering what the step changed.
    """
    found = _gathers(chunk)
    if found is None:
        yield
        return
    _wait(found.pipeline)
    statuses = dict(found.pipeline.bucket_status)
    shown = getattr(found.module, "is_param_fsdp_distributed", None)
    try:
        yield
    finally:
        _wait(found.pipeline)
        for key, status in statuses.items():
            if not _is_gathered(status) and _is_gathered(found.pipeline.bucket_status[key]):
                if status.name == "EMPTY":
                    found.pipeline.release_bucket(*_arguments(key))
                found.pipeline.bucket_status[key] = status
        if shown is True:
            found.module._replace_param_with_distributed_if_needed()
        elif shown is False:
            found.module._replace_param_with_raw_if_needed()


@dataclass(frozen=True, slots=True)
class _GatherAgain:
    """Gathers anew, in place, what is cached of shards that were written.

    Dropping the cache instead would free memory that a backward pass still reads.
    """

    chunk: nn.Module

    def __call__(self) -> None:
        found = _gathers(self.chunk)
        if found is None:
            return
        with torch.no_grad():
            for key, status in found.pipeline.bucket_status.items():
                buffer = _weights(found.groups[_number(key)], transposed=_transposed(key))
                if buffer is not None and buffer.is_data_distributed and _is_gathered(status):
                    _all_gather(buffer.fetch_bucket().data, buffer.get_shard_from_local_buffer(), buffer)


def _gathers(chunk: nn.Module) -> _Gathers | None:
    # From 0.14 on Megatron-Core's wrapper holds a MegatronFSDP; before, it is the sharded module itself.
    for prefix, module in (("module.", chunk), ("module.module.", getattr(chunk, "module", None))):
        # Asked at each use of a tree: a module that lacks an attribute is slow to say so.
        pipeline = vars(module).get("all_gather_pipeline") if isinstance(module, nn.Module) else None
        buffer: Any = getattr(module, "param_and_grad_buffer", None) if pipeline is not None else None
        if hasattr(buffer, "parameter_groups"):
            return _Gathers(prefix, module, buffer.parameter_groups, buffer.param_to_name, pipeline)
    return None


def _memory_of(group: Any) -> Iterator[Tensor]:
    buffers = [
        _weights(group, transposed=False),
        _weights(group, transposed=True),
        getattr(group, "main_weight_buffer", None),
    ]
    return (buffer.data for buffer in buffers if buffer is not None)


def _weights(group: Any, *, transposed: bool) -> Any:
    return getattr(group, "transpose_weight_buffer" if transposed else "model_weight_buffer", None)


def _gather_whole(group: Any, *, transposed: bool) -> None:
    buffer, main = _weights(group, transposed=transposed), getattr(group, "main_weight_buffer", None)
    if buffer is not None and not buffer.is_data_distributed and getattr(main, "is_data_distributed", False):
        _all_gather(buffer.data, buffer.get_shard_from_local_buffer(), buffer)


def _all_gather(whole: Tensor, shard: Tensor, buffer: Any) -> None:
    torch.distributed.all_gather_into_tensor(whole, shard, group=buffer.data_parallel_group)


def _wait(pipeline: Any) -> None:
    for key in list(pipeline.param_gather_event_map):
        # One event may serve several buckets.
        if key in pipeline.param_gather_event_map:
            pipeline.wait_bucket_ready(*_arguments(key))


def _is_gathered(status: Any) -> bool:
    return bool(status.name == "READY_TO_USE")


def _arguments(key: Any) -> tuple[Any, ...]:
    # Up to 0.15 a bucket is known by its number, then by that and whether it is the transposed one.
    return key if isinstance(key, tuple) else (key,)


def _number(key: Any) -> int:
    return int(_arguments(key)[0])


def _transposed(key: Any) -> bool:
    return _arguments(key)[1:] == (True,)


def _local(parameter: Tensor) -> Tensor:
    local = getattr(parameter, "_local_tensor", parameter)  # tensor parallelism by DTensor
    return local if isinstance(local, Tensor) else parameter
