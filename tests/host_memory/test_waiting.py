"""Who waits for snapshots in the background: fences, whatever writes to the model, and a third one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from held_copies import TIMEOUT, Failing, begin, copying_with, finish, held, in_thread, ordered
from torch import nn

from mcore_snap import (
    HostMemory,
    PendingSnapshot,
    StructureMismatch,
    fence,
    load,
    model_tree,
    named_leaves,
    snapshot,
    snapshot_async,
    swapped,
)
from mcore_snap.testing.asserts import assert_bitwise_equal


def test_a_fence_waits() -> None:
    """For copies of this model, whatever tree of it is asked; not for those of others."""
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    with held() as copies:
        pending = begin(model_tree(model), copies)
        fence(model_tree(other))
        fence({"x": torch.ones(1), "step": 3})
        fence([])
        assert not pending.done()
        assert ordered(copies, lambda: fence([model.weight.view(-1)[3:]])) == ["let go", "done"]
    fence(model_tree(model))
    assert pending.done()
    with held() as copies:
        pending = begin(model_tree(model), copies)
        assert ordered(copies, lambda: fence({"step": 3, "pending": pending})) == ["let go", "done"]


@pytest.mark.parametrize("wrong", [lambda model: model, lambda model: [model]])
def test_a_fence_does_not_take_the_model_for_its_tree(wrong: Any) -> None:
    """It would wait for nothing, without a word."""
    with pytest.raises(StructureMismatch, match="Linear"):
        fence(wrong(nn.Linear(3, 3)))


def _load(tree: Any, kept: Any) -> None:
    load(tree, kept)
    assert_bitwise_equal(tree, kept)


def _look_back(tree: Any, kept: Any) -> None:
    with swapped(tree, kept):
        assert_bitwise_equal(tree, kept)


def _load_a_part(tree: Any, kept: Any) -> None:
    load([_weights(tree)[1:]], [_weights(kept)[1:].clone()])
    assert torch.equal(_weights(tree)[1:], _weights(kept)[1:])


def _weights(tree: Any) -> torch.Tensor:
    return named_leaves(tree)["chunks[0].parameters['weight']"]


@pytest.mark.parametrize("write", [_load, _look_back, _load_a_part])
def test_what_writes_to_the_model_waits_by_itself(write: Callable[[Any, Any], None]) -> None:
    """Until the copy is made: the snapshot has the weights of before, not those that were loaded."""
    model = nn.Linear(3, 3)
    tree = model_tree(model)
    before = snapshot(tree)
    with torch.no_grad():
        model.weight.fill_(7)
        model.bias.fill_(7)
    with held() as copies:
        pending = begin(tree, copies)
        assert copies.begun.wait(TIMEOUT)
        assert ordered(copies, lambda: write(tree, before)) == ["let go", "done"]
    assert all(bool((leaf == 7).all()) for leaf in named_leaves(pending.result()).values())


def test_leaving_a_look_back_waits() -> None:
    """For a snapshot that the body began."""
    live = {"w": torch.ones(4)}
    kept = snapshot({"w": torch.zeros(4)})
    with held() as copies:
        block = swapped(live, kept)
        block.__enter__()
        pending = begin(live, copies)
        assert copies.begun.wait(TIMEOUT)
        assert ordered(copies, lambda: block.__exit__(None, None, None)) == ["let go", "done"]
    assert pending.result()["w"].tolist() == [0] * 4
    assert live["w"].tolist() == [1] * 4


def test_a_load_into_another_model_does_not_wait() -> None:
    """Nor does one into what a copy is not reading."""
    live, other = {"w": torch.ones(4)}, {"w": torch.ones(4)}
    kept = snapshot({"w": torch.zeros(4)})
    with held() as copies:
        pending = begin(live, copies)
        load(other, kept)
        assert not pending.done()
    assert other["w"].tolist() == [0] * 4
    assert pending.result()["w"].tolist() == [1] * 4


def test_a_failed_copy_holds_nobody_up() -> None:
    """A load after it goes on; the error is for whoever asks for the result."""
    live = {"w": torch.ones(4)}
    kept = snapshot({"w": torch.zeros(4)})
    with copying_with(Failing(0, RuntimeError("the bus is on fire"))):
        pending = snapshot_async(live)
        assert pending.wait()
    fence(live)
    load(live, kept)
    assert live["w"].tolist() == [0] * 4
    with pytest.raises(RuntimeError, match="on fire"):
        pending.result()


def test_at_most_two_are_under_way() -> None:
    """A third waits for one of them to end; all come out right, in their order."""
    lives = [{"w": torch.full((3,), float(i))} for i in range(4)]
    memory = HostMemory()
    pending: list[PendingSnapshot[Any]] = []
    with held() as copies:
        pending += [begin(live, copies, memory=memory) for live in lives[:2]]
        assert copies.begun.wait(TIMEOUT)
        assert len(memory.stats().leases) <= 2
        with copying_with(copies):
            order = ordered(copies, lambda: pending.extend(snapshot_async(one, memory=memory) for one in lives[2:]))
        assert order == ["let go", "done"]
    assert [one.result()["w"].tolist() for one in pending] == [[float(i)] * 3 for i in range(4)]


def test_places_are_given_back_after_failures() -> None:
    """However many there were."""
    live = {"w": torch.ones(4)}

    def fail() -> None:
        for _ in range(5):
            snapshot_async(live).wait()

    with copying_with(Failing(0, RuntimeError("the bus is on fire"))):
        finish(in_thread(fail), in_thread(fail))
    assert snapshot_async(live).result(TIMEOUT)["w"].tolist() == [1] * 4
