"""A look-back leaves no trace: training goes on as if it had not been."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from configurations import CONFIGURATIONS, differing, disturb_frozen, everything, places

from mcore_snap import SnapError, load, model_tree, snapshot, swapped
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

MOMENTS = ("between steps", "forward", "backward", "finalize")


def train_with(options: Any, rank: int, moment: str | None) -> tuple[list[float], dict[str, object]]:
    """Train four steps, looking back once at `moment` of the third; the losses and the final state."""
    chunks = gpt(**options)
    adam = optimizer(chunks)
    losses = [train_step(chunks, adam, batch(0, rank))]
    expected = logits(chunks, batch(9))
    tree = model_tree(chunks)
    kept = snapshot(tree)
    losses.append(train_step(chunks, adam, batch(1, rank)))
    disturb_frozen(chunks)
    looks = 0

    def look_back(now: str) -> None:
        nonlocal looks
        if now != moment:
            return
        looks += 1
        before, where = everything(chunks, adam), places(chunks)
        with swapped(tree, kept):
            assert torch.equal(logits(chunks, batch(9)), expected)
        assert differing(everything(chunks, adam), before) == []
        assert places(chunks) == where, differing(places(chunks), where)

    look_back("between steps")
    losses.append(train_step(chunks, adam, batch(2, rank), pause=look_back))
    losses.append(train_step(chunks, adam, batch(3, rank)))
    assert looks == (moment is not None)
    return losses, everything(chunks, adam)


def compare_training(rank: int, options: Any, moments: Sequence[str]) -> None:
    """Compare each training that looks back with the one that does not."""
    random = torch.get_rng_state()
    plain = train_with(options, rank, None)
    for moment in moments:
        torch.set_rng_state(random)
        losses, state = train_with(options, rank, moment)
        assert losses == plain[0], moment
        assert differing(state, plain[1]) == [], moment


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_goes_on_as_if_nothing_had_been(name: str) -> None:
    """Version 1 is live inside; every byte is back afterwards, and every later loss is the same."""
    configuration = CONFIGURATIONS[name]
    run_ranks(compare_training, configuration.world, configuration.options, MOMENTS, parallel=configuration.parallel)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("options", [{}, {"moe": True, "expert_buffers": True}, {"chunks": 2}], ids=str)
def test_training_with_overlapped_gathers_goes_on(options: Any, world: int) -> None:
    """Between forward and backward no gather is due, so a look-back is possible; every flag is as it was."""
    run_ranks(compare_training, world, {**options, "overlap": True}, ["forward"])


def start_with(rank: int, options: Any, look_back: bool) -> tuple[list[float], dict[str, object]]:
    """Train three steps, perhaps with a look-back before the model has run at all."""
    chunks = gpt(**options)
    adam = optimizer(chunks)
    tree = model_tree(chunks)
    kept = snapshot(tree)
    for name, buffer in chunks[0].named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-1, 1, len(buffer)))
    if look_back:
        with swapped(tree, kept):
            logits(chunks, batch(9))
    losses = [train_step(chunks, adam, batch(step, rank)) for step in range(3)]
    return losses, everything(chunks, adam)


@pytest.mark.parametrize("ddp", [False, True])
def test_the_first_forward_may_be_in_the_body(ddp: bool) -> None:
    """There the routers' bias turns from bf16 to fp32, in new memory, and it has to be found on leaving."""
    options = {"moe": True, "ddp": ddp}
    (plain,) = run_ranks(start_with, 1, options, False)
    (looked,) = run_ranks(start_with, 1, options, True)
    assert looked[0] == plain[0]
    assert differing(looked[1], plain[1]) == []


class Look(NamedTuple):
    """What the body of a look-back has at hand: the model, two of its versions, and their logits."""

    chunks: list[Any]
    tree: Any
    first: Any
    second: Any
    a: torch.Tensor
    b: torch.Tensor


def _fail(look: Look) -> None:
    del look
    raise KeyError("from the body")


def _nest(look: Look) -> None:
    with swapped(look.tree, look.second):
        assert torch.equal(logits(look.chunks, batch(9)), look.b)
        with swapped(look.tree, look.first):
            assert torch.equal(logits(look.chunks, batch(9)), look.a)
        assert torch.equal(logits(look.chunks, batch(9)), look.b)
    assert torch.equal(logits(look.chunks, batch(9)), look.a)


def _load(look: Look) -> None:
    load(look.tree, look.second)


def _count_tokens(look: Look) -> None:
    # With gradients and in training mode, routers count the tokens of a forward pass.
    tokens = batch(9)
    seq = tokens.shape[1]
    look.chunks[0](tokens, torch.arange(seq).expand_as(tokens), torch.ones(seq, seq).triu(1).bool()[None, None])


def _write(look: Look) -> None:
    for chunk in look.chunks:
        for tensor in (*chunk.parameters(), *(b for _, b in chunk.named_buffers())):
            tensor.data.add_(1)


def _read(look: Look) -> None:
    assert torch.equal(logits(look.chunks, batch(9)), look.a)


BODIES = {"raise": _fail, "nest": _nest, "load": _load, "count tokens": _count_tokens, "write": _write, "read": _read}


def look_back_with(rank: int, name: str, body: str, check: bool) -> str | None:
    """Look back twice with one of the bodies, see that nothing is left of it; the error, if one came."""
    chunks = gpt(**CONFIGURATIONS[name].options)
    adam = optimizer(chunks)
    train_step(chunks, adam, batch(0, rank))
    tree = model_tree(chunks)
    first, a = snapshot(tree), logits(chunks, batch(9))
    train_step(chunks, adam, batch(1, rank))
    second, b = snapshot(tree), logits(chunks, batch(9))
    train_step(chunks, adam, batch(2, rank))
    look = Look(chunks, tree, first, second, a, b)
    before, where = everything(chunks, adam), places(chunks)
    said = None
    for _ in range(2):
        try:
            with swapped(tree, first, check=check):
                BODIES[body](look)
        except (KeyError, SnapError) as error:
            said = f"{type(error).__name__}: {error}"
        assert differing(everything(chunks, adam), before) == []
        assert places(chunks) == where, differing(places(chunks), where)
    return said


@pytest.mark.parametrize("name", ["dense", "moe", "moe-float16module", "moe-own-storage-2-ranks"])
@pytest.mark.parametrize("body", BODIES)
def test_whatever_the_body_does_is_gone(name: str, body: str) -> None:
    """The current weights come back from where they were kept, not from what the body left."""
    configuration = CONFIGURATIONS[name]
    for said in run_ranks(look_back_with, configuration.world, name, body, False, parallel=configuration.parallel):
        assert said == ("KeyError: 'from the body'" if body == "raise" else None)


@pytest.mark.parametrize("name", ["dense", "moe-float16module"])
@pytest.mark.parametrize("body", BODIES)
def test_a_change_by_the_body_is_told_on_request(name: str, body: str) -> None:
    """`check=True` names the weights that the body changed, and says nothing about what forward passes count."""
    (said,) = run_ranks(look_back_with, 1, name, body, True)
    if body in {"load", "write"}:
        assert said is not None
        assert said.startswith("FrozenError: ")
        assert "chunks[0]." in said
    else:
        assert said == ("KeyError: 'from the body'" if body == "raise" else None)
