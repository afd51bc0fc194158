"""Trees of data-parallel slices: a share of the host memory, never stale, and whole again after a load."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import optree
import pytest
import torch
from configurations import bits, differing, everything, is_attention, places
from matrix_protocol import flags, remainder, weights

from mcore_snap import SnapError, StructureMismatch, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.forward import causal
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.mxfp8 import has_mxfp8_reuse, mxfp8_gpt, simulated_mxfp8
from mcore_snap.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

EP2: Final = {"expert_model_parallel_size": 2}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "dense": {},
    "dense, fp32": {"bf16": False},
    "two chunks": {"chunks": 2},
    "tied": {"tied": True},
    "mixture": {"moe": True, "expert_parallel": 2},
    "two instances": {"ddp_settings": {"num_distributed_optimizer_instances": 2}},
    "partly frozen": {"freeze": is_attention},
}
MOMENTS: Final = ("after step", "forward", "backward", "finalize")


def parallel(model: str) -> dict[str, int]:
    """Arguments of Megatron-Core's initialisation."""
    if model == "two instances":
        return {"num_distributed_optimizer_instances": 2}
    return dict(EP2) if model == "mixture" else {}


def no_collectives() -> Any:
    """Let every collective that a gather may use fail."""
    names = ("all_gather_into_tensor", "_all_gather_base", "all_gather", "all_reduce", "broadcast", "barrier")
    return mock.patch.multiple(torch.distributed, **{name: mock.Mock(side_effect=AssertionError) for name in names})


@contextmanager
def stand_in_streams() -> Iterator[None]:
    """Let Megatron-Core have the communication stream that it makes for several optimizer instances."""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "Stream", mock.MagicMock()))
            stack.enter_context(mock.patch.object(torch.cuda, "default_stream", mock.MagicMock()))
            stack.enter_context(mock.patch.object(torch.cuda, "stream", return_value=nullcontext()))
        yield


def flat(chunks: list[Any], kind: str) -> list[Any]:
    """Return DDP's buffers of one kind."""
    return [buffer for chunk in chunks for buffer in getattr(chunk, kind)]


def keep_slices(rank: int, model: str, overlap: bool) -> tuple[int, int, int]:
    """Keep slices with stand-in streams."""
    with stand_in_streams():
        return keep_and_load(rank, model, overlap=overlap)


def keep_and_load(rank: int, model: str, *, overlap: bool) -> tuple[int, int, int]:
    """Keep slices right after a step, come back in both ways; bytes kept, of expert and of dense buffers."""
    chunks: list[Any] = gpt(overlap=overlap, **MODELS[model])
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    train_step(chunks, adam, batch(1, rank))
    tree, look = model_tree(chunks, dp_sharded=True), partial(logits, chunks, batch(9))
    before, where = everything(chunks, adam), places(chunks)
    with no_collectives():
        kept = snapshot(tree)
    assert differing(everything(chunks, adam), before) == []
    seen = look()  # gathers, with overlap: the weights that the snapshot is of
    expected = bits(weights(chunks))

    train_step(chunks, adam, batch(2, rank))
    current = snapshot(tree)
    with swapped(tree, kept):
        assert torch.equal(look(), seen)
    later = look()
    assert not torch.equal(later, seen), "training did not change the logits: nothing is tested"
    train_step(chunks, adam, batch(3, rank))
    marked, left = flags(chunks), remainder(chunks, adam)
    assert load(tree, kept) is tree
    assert flags(chunks) == marked
    assert differing(remainder(chunks, adam), left) == []
    assert places(chunks) == where
    assert torch.equal(look(), seen)
    assert differing(bits(weights(chunks)), expected) == []
    load(tree, current)
    assert torch.equal(look(), later)

    for chunk, part in zip(chunks, kept.chunks, strict=True):
        assert sum(len(buffer.buckets) for buffer in chunk.buffers) == len(part.buffers)
        assert sum(len(buffer.buckets) for buffer in chunk.expert_parallel_buffers) == len(part.expert_parallel_buffers)
    kinds = ("buffers", "expert_parallel_buffers")
    own = sum(leaf.nbytes for part in kept.chunks for kind in kinds for leaf in getattr(part, kind))
    sizes = [sum(buffer.param_data.nbytes for buffer in flat(chunks, kind)) for kind in kinds]
    replicated = sum(
        leaf.nbytes
        for part in model_tree(chunks).chunks
        for name in ("parameters", "module_buffers", "extra_state")
        for leaf in getattr(part, name).values()
    )
    assert sum(leaf.nbytes for leaf in named_leaves(kept).values()) == own + replicated
    return own, sizes[0], sizes[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_four_ranks_keep_a_quarter_each(model: str, overlap: bool) -> None:
    """And every rank computes bit for bit as before right after the next forward; experts have their own group."""
    for own, dense, experts in run_ranks(keep_slices, 4, model, overlap, parallel=parallel(model)):
        # Four ranks share the dense weights, or two those of each optimizer instance; two share each expert's.
        assert own == dense // (2 if model == "two instances" else 4) + experts // 2
        assert (experts > 0) == (model == "mixture")


def train_with(rank: int, options: Any, moment: str | None, use: str) -> tuple[list[float], dict[str, object]]:
    """Train four steps, using the tree once in the third; losses and the final state."""
    chunks = gpt(**options)
    adam = optimizer(chunks)
    losses = [train_step(chunks, adam, batch(0, rank))]
    tree, expected = model_tree(chunks, dp_sharded=True), logits(chunks, batch(9))
    kept = snapshot(tree)
    losses.append(train_step(chunks, adam, batch(1, rank)))

    def pause(now: str) -> None:
        if now != moment:
            return
        before = flags(chunks)
        if use == "snapshot":
            with no_collectives():
                snapshot(tree)
        elif use == "load":
            current = snapshot(tree)
            load(tree, kept)
            load(tree, current)
        else:
            with swapped(tree, kept):
                assert torch.equal(logits(chunks, batch(9)), expected)
                if use == "swapped, counting":
                    chunks[0](batch(9), *causal(batch(9)))
        assert flags(chunks) == before

    losses.append(train_step(chunks, adam, batch(2, rank), pause=pause))
    pause("after step")
    losses.append(train_step(chunks, adam, batch(3, rank)))
    logits(chunks, batch(9))
    return losses, everything(chunks, adam)


def compare_trainings(rank: int, options: Any) -> None:
    """Compare trainings that use the tree at each moment with the one that does not."""
    plain = train_with(rank, options, None, "")
    for moment in MOMENTS:
        for use in ("snapshot", "swapped", "swapped, counting", "load"):
            if use == "load" and moment == "forward":
                continue  # autograd's version counters refuse the backward pass, as they should
            losses, state = train_with(rank, options, moment, use)
            assert losses == plain[0], (moment, use)
            assert differing(state, plain[1]) == [], (moment, use)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_training_does_not_notice(model: str, overlap: bool) -> None:
    """Snapshots, loads there and back, and look-backs at every pause of a step."""
    run_ranks(compare_trainings, 2, MODELS[model] | {"overlap": overlap}, parallel=parallel(model))


def start_gather(rank: int) -> None:
    """Use slices while gathers are under way."""
    chunks: list[Any] = gpt(overlap=True)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree, look = model_tree(chunks, dp_sharded=True), partial(logits, chunks, batch(9))
    kept, seen = snapshot(tree), look()
    for use in (snapshot, partial(load, snap=kept)):
        train_step(chunks, adam, batch(1, rank))
        chunks[0].start_param_sync()
        use(tree)
    assert torch.equal(look(), seen)


def test_gathers_under_way_are_waited_for() -> None:
    """None lands on the slices that were written."""
    run_ranks(start_gather, 2)


def unsuitable(rank: int, how: str) -> list[str] | None:
    """Ask for slices of a model whose slices do not make the whole."""
    del rank
    if how == "mxfp8":
        if not has_mxfp8_reuse():
            return None
        with simulated_mxfp8():
            chunks = mxfp8_gpt()
    else:
        chunks = gpt(**{"own storage": {"distributed_optimizer": False}, "bare": {"ddp": False}}[how])
    with pytest.raises(StructureMismatch) as caught:
        model_tree(chunks, dp_sharded=True)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("how", ["own storage", "bare", "mxfp8"])
def test_what_has_no_slices_is_refused(how: str) -> None:
    """When the tree is made, by name, with what to do."""
    for problems in run_ranks(unsuitable, 2, how):
        if problems is not None:  # 0.12 has no MXFP8
            assert problems
            assert all("chunks[0]" in problem and "dp_sharded" in problem for problem in problems)


def load_foreign(rank: int, how: str) -> list[str]:
    """Load slices of another rank, of another number of ranks, or a whole snapshot; and slices into a whole."""
    chunks = gpt()
    adam = optimizer(chunks)
    sliced, whole = model_tree(chunks, dp_sharded=True), model_tree(chunks)
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, snapshot(sliced))
    tree, kept = {
        "other rank": (sliced, every[1 - rank]),
        "computed from another rank": (sliced, optree.tree_map(lambda t: t + 0, every[1 - rank])),
        "whole into slices": (sliced, snapshot(whole)),
        "slices into whole": (whole, every[rank]),
    }[how]
    train_step(chunks, adam, batch(0, rank))
    before, where = everything(chunks, adam), places(chunks)
    with pytest.raises(StructureMismatch) as caught:
        load(tree, kept)
    with pytest.raises(SnapError), swapped(tree, kept):
        raise AssertionError("the body was entered")
    assert differing(everything(chunks, adam), before) == []
    assert places(chunks) == where
    load(sliced, every[rank])
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("how", ["other rank", "computed from another rank", "whole into slices", "slices into whole"])
def test_slices_of_something_else_are_refused(how: str) -> None:
    """They have the right shape, but belong elsewhere: nothing is written."""
    for problems in run_ranks(load_foreign, 2, how):
        assert problems
        assert all("chunk" in problem for problem in problems), problems
