"""Group M: the same over Megatron-Core's own wrapper, with everything that these reports are about in one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pictures import change_everything, flat_buffers, layer_in, picture, places

from mcore_snap import load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.chunks import Layer
from mcore_snap.testing.ranks import run_ranks
from mcore_snap.testing.raw_bytes import to_bytes


def _wrapped(flat: bool, dtype: torch.dtype) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    choices = DistributedDataParallelConfig(use_distributed_optimizer=flat)
    return [
        *(DistributedDataParallel(config=config, ddp_config=choices, module=Layer(3, dtype)) for _ in range(2)),
        Layer(3, dtype),
    ]


def _buffers(models: list[Any]) -> list[Any]:
    return [buffer for chunk in models[:2] for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]


def round_trip(rank: int, flat: bool, dtype: torch.dtype) -> list[str]:
    """Take, change, look back and load; the names of the leaves."""
    models = _wrapped(flat, dtype)
    buffers = _buffers(models)
    assert len(buffers) == 4
    assert all((buffer.param_data is not None) == flat for buffer in buffers)
    with pytest.raises(TypeError):
        models[0].buffers()
    tree = model_tree(models)
    before, where, snap = picture(models), places(models), snapshot(tree)
    change_everything(models)
    changed = picture(models)
    assert all(changed[name] != was for name, was in before.items())
    for buffer in buffers:
        buffer.grad_data.fill_(7)
    with swapped(tree, snap, check=True):
        assert picture(models) == before
    assert picture(models) == changed
    load(tree, snap)
    assert picture(models) == before
    assert places(models) == where
    assert all(bool((buffer.grad_data == 7).all()) for buffer in buffers)
    if flat:  # still views of the flat buffer
        for buffer in buffers:
            buffer.param_data.zero_()
        assert not layer_in(models).fc.weight.any()
        assert not layer_in(models).out.weight.any()
    return list(named_leaves(snap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("flat", [True, False], ids=["distributed optimizer", "own storage"])
def test_the_whole_round_trip(flat: bool, dtype: torch.dtype) -> None:
    """verl-project/verl #1766, NVIDIA/Megatron-LM #2164, NVIDIA-NeMo/RL #1038: experts, frozen weights, buffers,
    chunks, with and without flat ones.
    """
    (names,) = run_ranks(round_trip, 1, flat, dtype)
    assert [name for name in names if "buffers[0]" in name] == [
        f"chunks[{i}].{kind}[0]" for i in range(2) for kind in ("buffers", "expert_parallel_buffers") if flat
    ]
    for i in range(3):
        inner = "" if i == 2 else "module."
        assert f"chunks[{i}].parameters['{inner}base.weight']" in names
        assert f"chunks[{i}].module_buffers['{inner}count']" in names
        assert f"chunks[{i}].extra_state['{inner}fp8']" in names


def offloaded(rank: int) -> tuple[bool, str]:
    """Offload by Megatron-Core's own method, use the tree, reload; whether it has that method, and its version."""
    import megatron.core

    models = _wrapped(flat=True, dtype=torch.bfloat16)
    buffers = _buffers(models)
    if not hasattr(buffers[0], "offload_to_cpu"):
        return False, megatron.core.__version__
    tree = model_tree(models)
    before, snap = {name: to_bytes(leaf) for name, leaf in named_leaves(tree).items()}, snapshot(tree)
    for buffer in buffers:
        buffer.param_data.fill_(3)
        buffer.offload_to_cpu(move_params=True, move_grads=False)
    taken = snapshot(tree)
    assert all(bool((taken.chunks[i].buffers[0] == 3).all()) for i in range(2))
    load(tree, snap)
    for buffer in buffers:
        buffer.reload_from_cpu(move_params=True, move_grads=False)
    assert {name: to_bytes(leaf) for name, leaf in named_leaves(tree).items()} == before
    return True, megatron.core.__version__


def test_offloaded_by_megatron_itself() -> None:
    """verl-project/verl #6026, #6095: the convention of this Megatron-Core, read and written in its host copy."""
    ((has_it, version),) = run_ranks(offloaded, 1)
    assert has_it == (tuple(map(int, version.split(".")[:2])) >= (0, 16))


def attributes(rank: int) -> bool:
    """Compare the names of attributes."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from mcore_snap.testing.chunks import DDPLike, GatherGroup

    real, stand_in = _wrapped(flat=True, dtype=torch.bfloat16)[0], DDPLike(Layer())
    (group,) = real.bucket_groups
    for name in ("param_gather_dispatched", "param_gather_handle", "buckets"):
        assert hasattr(group, name)
        assert hasattr(GatherGroup(), name)
    for name in ("start_param_sync", "finish_param_sync"):
        assert callable(getattr(_ParamAndGradBucketGroup, name))
        assert callable(getattr(GatherGroup, name))
    for name in ("param_data", "grad_data", "params", "param_index_map", "param_dtype", "numel", "buckets"):
        assert hasattr(real.buffers[0], name)
        assert hasattr(stand_in.buffers[0], name)  # type: ignore[index]
    for name in ("buffers", "expert_parallel_buffers", "bucket_groups", "expert_parallel_bucket_groups"):
        assert isinstance(getattr(real, name), list)
        assert isinstance(getattr(stand_in, name), list)
    return list(flat_buffers([stand_in])) != []


def test_the_stand_ins_are_like_the_real_ones() -> None:
    """What these tests use in place of Megatron-Core's buffers and bucket groups has the attributes that ours relies
    on.
    """
    assert all(run_ranks(attributes, 1))
