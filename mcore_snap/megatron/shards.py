"""Data-parallel slices of flat buffers: what this rank's distributed optimizer owns of each bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcore_snap.errors import StructureMismatch
from mcore_snap.megatron.flat_buffers import FlatBuffer, bucket_groups, flat_buffers, is_ddp

__all__ = ["GatherShards", "Shard", "check_shardable", "shards"]


class Shard(NamedTuple):
    """One rank's slice of one bucket.

    Attributes:
        data: The slice, 1-D.
        rank: Which slice it is.
        size: How many there are.
    """

    data: Tensor
    rank: int
    size: int


def shards(chunk: nn.Module, flat: FlatBuffer) -> Iterator[Shard]:
    """Yield this rank's slice of each bucket of a flat buffer, in order.

    Megatron-Core gives each rank the ``rank``-th of ``size`` equal parts of every bucket
    (``shard_buffer``), counted in the group that the bucket's own gather uses: that of the experts
    for expert buffers, and one instance's where there are several optimizer instances.
    """
    group_of = {id(bucket): group for _, group in bucket_groups(chunk) for bucket in group.buckets}
    for bucket in flat.buffer.buckets:
        group = group_of[id(bucket)]
        rank = int(group.intra_distributed_optimizer_instance_rank)
        size = int(group.intra_distributed_optimizer_instance_size)
        data = bucket.param_data
        if data.untyped_storage().nbytes():  # torch slices no freed memory; whole, it is refused by name
            length = data.numel() // size
            data = data[rank * length : (rank + 1) * length]
        yield Shard(data, rank, size)


def check_shardable(chunks: Sequence[nn.Module]) -> None:
    """Check that the slices of all ranks make the whole.

    Raises:
        StructureMismatch: Lists every chunk and buffer for which they do not.
    """
    problems: list[str] = []
    for index, chunk in enumerate(chunks):
        if not is_ddp(chunk):
            problems.append(
                f"chunks[{index}]: expected Megatron-Core's DDP, found {type(chunk).__name__}; leave dp_sharded out"
            )
            continue
        holding = {(flat.field, flat.number): flat for flat in flat_buffers(chunk)}
        for name in ("buffers", "expert_parallel_buffers"):
            for number, buffer in enumerate(getattr(chunk, name)):
                problem = _problem(holding.get((name, number)), buffer)
                if problem:
                    problems.append(f"chunks[{index}].{name}[{number}]: {problem}; leave dp_sharded out")
    if problems:
        raise StructureMismatch("this rank's slices would not make the whole", problems)


def _problem(flat: FlatBuffer | None, buffer: Any) -> str | None:
    if flat is None:
        if getattr(buffer, "shared_buffer", None) is not None:
            return "expected a buffer that holds the weights, found one shared with the gradients (MXFP8)"
        return "expected the distributed optimizer's flat buffer, found one that holds no weights"
    if not getattr(buffer.ddp_config, "use_distributed_optimizer", False):
        return "expected the distributed optimizer, found none"
    if sum(bucket.param_data.numel() for bucket in buffer.buckets) != flat.data.numel():
        return "expected buckets that fill the buffer, found gaps"
    return None


@dataclass(frozen=True)
class GatherShards:
    """Megatron-Core's own parameter gather, after every rank has written its slices.

    Collective over each bucket group's own process group. The dispatch flags stay as they were: see
    `mcore_snap.megatron.settling.settle`.
    """

    chunk: nn.Module

    def __call__(self) -> None:
        """Bring the other ranks' slices over, and wait for them."""
        with torch.no_grad():
            for _, group in bucket_groups(self.chunk):
                before = group.param_gather_dispatched
                try:
                    group.start_param_sync(force_sync=True)
                finally:
                    group.param_gather_dispatched = before
