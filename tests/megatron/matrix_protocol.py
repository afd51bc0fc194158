"""What every case of the matrix does: keep a version, go on, come back, and disturb nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from configurations import bits, differing, everything, flat_buffers, optimizer_state, places, tensors

from mcore_snap import StructureMismatch, load, snapshot, swapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


class Version(NamedTuple):
    """A snapshot, and what the model was when it was taken."""

    kept: Any
    weights: dict[str, Any]
    seen: Tensor


def weights(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return what makes a model's outputs, without flat buffers that share the gradients' memory."""
    shared = {
        f"{i}.{name}.param_data"
        for i, chunk in enumerate(chunks)
        for name, buffer in flat_buffers(chunk)
        if getattr(buffer, "shared_buffer", None) is not None
    }
    return {name: tensor for name, tensor in tensors(chunks).items() if name not in shared}


def remainder(chunks: Sequence[nn.Module], adam: Any) -> dict[str, object]:
    """Return all that decides how training goes on and that no load may touch."""
    written = weights(chunks)
    memory = {tensor.untyped_storage().data_ptr() for tensor in written.values()}
    # In fp32, or without DDP's own buffers, the optimizer's main parameters are the weights themselves.
    mains = optimizer_state(adam) if adam is not None else {}
    views = {name for name, tensor in mains.items() if tensor.untyped_storage().data_ptr() in memory}
    return {name: value for name, value in everything(chunks, adam).items() if name not in written.keys() | views}


def flags(chunks: Sequence[nn.Module]) -> list[bool]:
    """Return which bucket groups are marked as gathered."""
    return [
        group.param_gather_dispatched
        for chunk in chunks
        for group in (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
    ]


def handles(chunks: Sequence[Any]) -> int:
    """Count the gathers under way."""
    groups = [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    return sum(group.param_gather_handle is not None for group in groups)


def agree_on(seen: torch.Tensor) -> None:
    """Check that all ranks computed the same."""
    every = [torch.empty_like(seen) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, seen)
    assert all(torch.equal(one, seen) for one in every), "the ranks compute with different weights"


def keep(chunks: Sequence[nn.Module], tree: Any, look: Callable[[], Tensor]) -> Version:
    """Take a snapshot of weights that are current, and see that taking it changed nothing."""
    seen = look()
    before, where = everything(chunks), places(chunks)
    kept = snapshot(tree)
    assert differing(everything(chunks), before) == []
    assert places(chunks) == where
    return Version(kept, dict(bits(weights(chunks))), seen)


def comes_back(
    chunks: Sequence[nn.Module],
    adam: Any,
    tree: Any,
    version: Version,
    look: Callable[[], Tensor],
) -> None:
    """Look back at a version, and then load it: outputs bit for bit, and nothing else is touched."""
    assert not torch.equal(look(), version.seen), "the model did not change: nothing is tested"
    before, where = everything(chunks, adam), places(chunks)
    with swapped(tree, version.kept):
        assert torch.equal(look(), version.seen)
    assert differing(everything(chunks, adam), before) == []
    assert places(chunks) == where, differing(places(chunks), where)
    loads(chunks, adam, tree, version)
    assert torch.equal(look(), version.seen)


def loads(chunks: Sequence[nn.Module], adam: Any, tree: Any, version: Version) -> None:
    """Load a version: the weights are its own, and gradients, addresses, flags and optimizer stay."""
    left, where = remainder(chunks, adam), places(chunks)
    assert differing(bits(weights(chunks)), version.weights), "no weight had changed: nothing is tested"
    assert load(tree, version.kept) is tree
    assert differing(bits(weights(chunks)), version.weights) == []
    assert differing(remainder(chunks, adam), left) == []
    assert places(chunks) == where, differing(places(chunks), where)


def is_refused(chunks: Sequence[nn.Module], adam: Any, tree: Any, kept: Any, named: str) -> None:
    """See that a snapshot which does not fit is refused by name, and that nothing was written."""
    before, where = everything(chunks, adam), places(chunks)
    with pytest.raises(StructureMismatch) as caught:
        load(tree, kept)
    assert any(named in str(problem) for problem in caught.value.problems), caught.value
    with pytest.raises(StructureMismatch), swapped(tree, kept):
        raise AssertionError("the body was entered")
    assert differing(everything(chunks, adam), before) == []
    assert places(chunks) == where
