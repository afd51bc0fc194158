"""Weights in flight: with overlapped gathers, trees wait for them, and training does not notice."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
import torch
from configurations import bits, differing, everything, places
from matrix_protocol import agree_on, flags, handles, keep, loads, weights

from mcore_snap import bitwise_equal, load, model_tree, snapshot, swapped
from mcore_snap.testing.forward import causal
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.ranks import RankFailure, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


MOMENTS: Final = ("after step", "forward", "backward", "finalize")
EP2: Final = {"expert_model_parallel_size": 2}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "dense": {},
    "dense, fp32": {"bf16": False},
    "two chunks": {"chunks": 2},
    "mixture": {"moe": True, "expert_parallel": 2},
}


def only_enter(chunks: Any, expected: Any) -> None:
    """Run nothing in the body."""


def run_forward(chunks: Any, expected: Any) -> None:
    """Run the model in the body: its forward pass gathers what is due, and sets the flags."""
    assert torch.equal(logits(chunks, batch(9)), expected)


def run_with_gradients(chunks: Any, expected: Any) -> None:
    """Run the first chunk with gradients enabled, so that routers count."""
    del expected
    tokens = batch(9)
    chunks[0](tokens, *causal(tokens))


BODIES: Final[dict[str, Callable[[Any, Any], None]]] = {
    "nothing": only_enter,
    "forward": run_forward,
    "forward with gradients": run_with_gradients,
}


class Moment(NamedTuple):
    """What is at hand when the tree is used in the middle of training."""

    chunks: list[Any]
    adam: Any
    tree: Any
    kept: Any
    expected: torch.Tensor


def train_with(options: Any, rank: int, moment: str | None, use: Callable[..., None]) -> tuple[Any, ...]:
    """Train four steps and use the tree once in the third; losses, and all that is left at the end."""
    chunks = gpt(overlap=True, **options)
    adam = optimizer(chunks)
    losses = [train_step(chunks, adam, batch(0, rank))]
    expected = logits(chunks, batch(9))
    tree = model_tree(chunks)
    kept = snapshot(tree)
    losses.append(train_step(chunks, adam, batch(1, rank)))

    def pause(now: str) -> None:
        if now == moment:
            before = flags(chunks)
            use(Moment(chunks, adam, tree, kept, expected))
            assert flags(chunks) == before
            assert handles(chunks) == 0

    losses.append(train_step(chunks, adam, batch(2, rank), pause=pause))
    pause("after step")
    losses.append(train_step(chunks, adam, batch(3, rank)))
    agree_on(logits(chunks, batch(9)))
    return losses, everything(chunks, adam)


def take_snapshot(at: Moment) -> None:
    """Keep another version."""
    current = snapshot(at.tree)
    assert not bitwise_equal(current, at.kept)
    assert bitwise_equal(at.tree, current)


def look_back(body: str, at: Moment) -> None:
    """Look back with a body, and see that nothing is left of it."""
    snapshot(at.tree)  # gathers what is due, so that there is one state to compare with
    before, where = everything(at.chunks, at.adam), places(at.chunks)
    with swapped(at.tree, at.kept):
        BODIES[body](at.chunks, at.expected)
    assert differing(everything(at.chunks, at.adam), before) == []
    assert places(at.chunks) == where


def fail_inside(at: Moment) -> None:
    """Look back inside a look-back, and leave both by an exception."""
    with swapped(at.tree, at.kept), swapped(at.tree, at.kept):
        run_forward(at.chunks, at.expected)
        raise KeyError


def nested(at: Moment) -> None:
    """See the exception come through."""
    with pytest.raises(KeyError):
        fail_inside(at)


USES: Final[dict[str, Callable[..., None]]] = {
    "snapshot": take_snapshot,
    **{f"swapped, {body}": partial(look_back, body) for body in BODIES},
    "swapped, nested": nested,
}
SOME: Final = (
    ("after step", "snapshot"),
    ("after step", "swapped, nothing"),
    ("forward", "swapped, forward"),
    ("backward", "swapped, forward with gradients"),
    ("finalize", "swapped, forward"),
)


def compare_trainings(rank: int, model: str) -> None:
    """Compare trainings that use the tree at each moment with the one that does not."""
    plain = train_with(MODELS[model], rank, None, only_enter)
    for moment, name in product(MOMENTS, USES) if model == "dense" else SOME:
        losses, state = train_with(MODELS[model], rank, moment, USES[name])
        assert losses == plain[0], (moment, name)
        assert differing(state, plain[1]) == [], (moment, name)


@pytest.mark.parametrize("model", MODELS)
def test_training_does_not_notice(model: str) -> None:
    """Snapshots and look-backs at every pause of a step: the same losses, state and flags, bit for bit."""
    run_ranks(compare_trainings, 2, model, parallel=EP2 if model == "mixture" else None)


def snapshot_after_step(rank: int, model: str) -> None:
    """Compare a snapshot right after the step with the weights that the next forward pass uses."""
    chunks = gpt(overlap=True, **MODELS[model])
    adam = optimizer(chunks)
    tree = model_tree(chunks)
    for step in range(2):
        train_step(chunks, adam, batch(step, rank))
    stale = bits(weights(chunks))
    kept = snapshot(tree)
    logits(chunks, batch(9))
    assert differing(bits(weights(chunks)), stale), "no weight was stale after the step: nothing is tested"
    assert bitwise_equal(kept, snapshot(tree))


@pytest.mark.parametrize("model", MODELS)
def test_a_snapshot_right_after_the_step_is_of_the_next_forward(model: str) -> None:
    """The other ranks' shards, which are old by then, are gathered first."""
    run_ranks(snapshot_after_step, 2, model, parallel=EP2 if model == "mixture" else None)


def start_all(chunks: Any) -> None:
    """Start every gather, as a training loop that aligns them does."""
    for chunk in chunks:
        chunk.start_param_sync()


def start_first(chunks: Any) -> None:
    """Start the first chunk's gathers, as ``overlap_param_gather_with_optimizer_step`` does."""
    chunks[0].start_param_sync()


def break_off(chunks: Any) -> None:
    """Break a forward pass off in its first layer, when the next gather is under way."""

    def fail(*_: object) -> None:
        raise KeyError

    layers = [module for name, module in chunks[0].named_modules() if name.endswith("layers.0")]
    hook = layers[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        logits(chunks, batch(9))
    hook.remove()


STARTS: Final[dict[str, Callable[[Any], None]]] = {
    "all": start_all,
    "first chunk": start_first,
    "broken forward": break_off,
}


def use_in_flight(rank: int, start: str, model: str) -> None:
    """Use the tree in every way while gathers are under way."""
    chunks = gpt(overlap=True, **MODELS[model])
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree, look = model_tree(chunks), partial(logits, chunks, batch(9))
    version = keep(chunks, tree, look)

    def step(number: int) -> None:
        train_step(chunks, adam, batch(number, rank))
        STARTS[start](chunks)
        assert handles(chunks), "no gather is under way: nothing is tested"

    step(1)
    current = snapshot(tree)
    assert handles(chunks) == 0
    look()
    assert bitwise_equal(tree, current)
    step(2)
    with swapped(tree, version.kept):
        assert torch.equal(look(), version.seen)
    agree_on(look())
    step(3)
    loads(chunks, adam, tree, version)
    assert torch.equal(look(), version.seen)
    train_step(chunks, adam, batch(4, rank))
    agree_on(look())


@pytest.mark.parametrize("model", ["dense", "two chunks"])
@pytest.mark.parametrize("start", STARTS)
def test_gathers_under_way_are_waited_for(start: str, model: str) -> None:
    """However they were started, none lands on what is read or written."""
    run_ranks(use_in_flight, 2, start, model)


def gather_with_step(rank: int, look_at: bool) -> tuple[list[float], int]:
    """Train with Megatron-Core's own option that starts the first chunk's gather inside the step."""
    chunks = gpt(chunks=2, overlap=True)
    adam = optimizer(chunks, overlap_param_gather_with_optimizer_step=True)
    tree = model_tree(chunks)
    losses, under_way = [train_step(chunks, adam, batch(0, rank))], handles(chunks)
    kept = snapshot(tree) if look_at else None
    for number in range(1, 4):
        losses.append(train_step(chunks, adam, batch(number, rank)))
        if look_at:
            with swapped(tree, kept):
                logits(chunks, batch(9))
    return losses, under_way


def test_gathers_that_the_step_starts() -> None:
    """They are under way after every step; the losses are those without snapshots."""
    plain, looked = run_ranks(gather_with_step, 2, False), run_ranks(gather_with_step, 2, True)
    assert all(under_way > 0 for _, under_way in plain)
    assert plain == looked


def without_hooks(rank: int, look_at: bool) -> list[float]:
    """Look back while the hooks that gather are disabled, as for an evaluation."""
    chunks: Any = gpt(overlap=True)
    adam = optimizer(chunks)
    tree = model_tree(chunks)
    losses = [train_step(chunks, adam, batch(0, rank))]
    kept, expected = snapshot(tree), logits(chunks, batch(9))
    for number in range(1, 4):
        losses.append(train_step(chunks, adam, batch(number, rank)))
        chunks[0].disable_forward_pre_hook()
        current = logits(chunks, batch(9))
        if look_at:
            with swapped(tree, kept):
                assert torch.equal(logits(chunks, batch(9)), expected)
            assert torch.equal(logits(chunks, batch(9)), current)
        chunks[0].enable_forward_pre_hook()
    return losses


def test_hooks_may_be_disabled() -> None:
    """Nothing gathers then although ``use_forward_hook`` stays set; nothing has to, either."""
    assert run_ranks(without_hooks, 2, False) == run_ranks(without_hooks, 2, True)


def load_on_one_rank(rank: int) -> None:
    """Load on rank 0 where a gather is due, while rank 1 goes on, and see whether the ranks still agree."""
    chunks = gpt(overlap=True)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree = model_tree(chunks)
    kept = snapshot(tree)
    train_step(chunks, adam, batch(1, rank))
    if rank == 0:
        load(tree, kept)
    agree_on(logits(chunks, batch(9)))


def test_one_rank_alone_cannot_load_in_silence() -> None:
    """Using a tree is collective where a gather is due: a rank that does not takes the job down."""
    with pytest.raises(RankFailure):
        run_ranks(load_on_one_rank, 2, timeout=15)
