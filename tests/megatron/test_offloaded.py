"""Offloaded models: host copies are read and written, and freed memory is refused by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import bits, differing, is_attention, places
from matrix_protocol import keep, remainder, weights

from mcore_snap import NotResident, bitwise_equal, fingerprint, load, model_tree, snapshot, swapped
from mcore_snap.testing.gpt import batch, gpt, logits, optimizer, train_step
from mcore_snap.testing.offload import (
    CONVENTIONS,
    host_copies,
    move_outside,
    offload,
    offload_gradients,
    onload,
    onload_gradients,
)
from mcore_snap.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, fp32": {"bf16": False},
    "mixture": {"moe": True, "expert_buffers": True},
    "two chunks": {"chunks": 2},
    "frozen base": {"freeze": is_attention},
    "overlap": {"overlap": True},
}


class Trained:
    """A model with a kept version, trained on since."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.rank = rank
        self.chunks: list[Any] = gpt(**options)
        self.adam = optimizer(self.chunks)
        train_step(self.chunks, self.adam, batch(0, rank))
        self.tree = model_tree(self.chunks)
        self.look: Callable[[], torch.Tensor] = partial(logits, self.chunks, batch(9))
        self.version = keep(self.chunks, self.tree, self.look)
        train_step(self.chunks, self.adam, batch(1, rank))
        assert not torch.equal(self.look(), self.version.seen)

    def is_freed(self) -> bool:
        """Whether no flat buffer has memory."""
        buffers = [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return not any(buffer.param_data.untyped_storage().nbytes() for buffer in buffers)


def use_offloaded(rank: int, name: str, convention: str) -> None:
    """Do everything with a tree while the model is offloaded; nothing wakes it."""
    model = Trained(rank, **OPTIONS[name])
    chunks, tree, version = model.chunks, model.tree, model.version
    current = keep(chunks, tree, model.look)
    left, where = remainder(chunks, model.adam), places(chunks)
    offload(chunks, convention)
    assert model.is_freed()
    assert bitwise_equal(snapshot(tree), current.kept)
    assert fingerprint(tree) == fingerprint(current.kept)
    copies = [copy.data_ptr() for copy in host_copies(chunks, convention)]
    load(tree, version.kept)
    assert bitwise_equal(tree, version.kept)
    assert [copy.data_ptr() for copy in host_copies(chunks, convention)] == copies
    with swapped(tree, current.kept):
        assert model.is_freed()
        assert bitwise_equal(tree, current.kept)
    assert bitwise_equal(tree, version.kept)
    assert model.is_freed()
    onload(chunks, convention)
    assert differing(bits(weights(chunks)), version.weights) == []
    assert torch.equal(model.look(), version.seen)
    assert differing(remainder(chunks, model.adam), left) == []
    addresses = {entry[:1] for name, entry in places(chunks).items() if "grad" in name}
    assert addresses == {entry[:1] for name, entry in where.items() if "grad" in name}
    train_step(chunks, model.adam, batch(2, rank))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_host_copies_are_read_and_written(name: str, convention: str) -> None:
    """Snapshot, load, look-back and fingerprint, all while the flat buffers have no memory."""
    run_ranks(use_offloaded, 1, name, convention)


def look_back_offloaded(rank: int, name: str, convention: str, look: bool) -> list[float]:
    """Train, offloading between the steps, and perhaps look back meanwhile: the body brings the model back."""
    chunks: list[Any] = gpt(**OPTIONS[name])
    adam = optimizer(chunks)
    losses = [train_step(chunks, adam, batch(0, rank))]
    tree = model_tree(chunks)
    kept, expected = snapshot(tree), logits(chunks, batch(9))
    for step in range(1, 5):
        losses.append(train_step(chunks, adam, batch(step, rank)))
        current = logits(chunks, batch(9))
        offload(chunks, convention)
        if look:
            with swapped(tree, kept):
                onload(chunks, convention)
                assert torch.equal(logits(chunks, batch(9)), expected)
                if step % 2:
                    offload(chunks, convention)
        if not look or step % 2:
            onload(chunks, convention)
        assert torch.equal(logits(chunks, batch(9)), current)
    return losses


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("name", ["dense", "mixture", "overlap"])
def test_a_body_may_bring_the_model_back(name: str, convention: str) -> None:
    """Entered offloaded; left offloaded or not: the current weights are back wherever the model is by then."""
    (plain,) = run_ranks(look_back_offloaded, 1, name, convention, False)
    (looked,) = run_ranks(look_back_offloaded, 1, name, convention, True)
    assert plain == looked


def stale_host_copy(rank: int, convention: str) -> None:
    """Use the tree after the model is back, when the host copy is of an older version."""
    model = Trained(rank)
    chunks, tree = model.chunks, model.tree
    offload(chunks, convention)
    onload(chunks, convention)
    copies = [copy.clone() for copy in host_copies(chunks, convention)]
    train_step(chunks, model.adam, batch(2, rank))
    current = keep(chunks, tree, model.look)
    assert not torch.equal(current.kept.chunks[0].buffers[0], copies[0]), (
        "the host copy is not stale: nothing is tested"
    )
    load(tree, model.version.kept)
    assert torch.equal(model.look(), model.version.seen)
    assert all(torch.equal(copy, old) for copy, old in zip(host_copies(chunks, convention), copies, strict=True))
    with swapped(tree, current.kept):
        assert torch.equal(model.look(), current.seen)
    assert torch.equal(model.look(), model.version.seen)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_stale_host_copy_is_left_alone(convention: str) -> None:
    """Both conventions leave their copies behind; they count only while the buffer has no memory."""
    run_ranks(stale_host_copy, 1, convention)


def freed(rank: int, name: str, convention: str | None) -> list[str]:
    """Use a tree whose first buffer was freed, perhaps with a host copy that does not fit."""
    model = Trained(rank, **OPTIONS[name])
    chunks, tree = model.chunks, model.tree
    data = chunks[0].buffers[0].param_data
    if convention == "megatron":
        chunks[0].buffers[0].param_data_cpu = data[:-1].clone()
    if convention == "verl":
        data.cpu_data = data.double()
    data.untyped_storage().resize_(0)
    before = [
        bytes(t.reshape(-1).view(torch.uint8).tolist()) for c in chunks for _, t in c.named_buffers() if t.numel()
    ]
    told = []
    for use in (snapshot, partial(load, snap=model.version.kept), fingerprint, partial(enter, kept=model.version.kept)):
        with pytest.raises(NotResident) as caught:
            use(tree)
        told.append(str(caught.value))
    after = [bytes(t.reshape(-1).view(torch.uint8).tolist()) for c in chunks for _, t in c.named_buffers() if t.numel()]
    assert before == after
    return told


def enter(tree: Any, kept: Any) -> None:
    """Enter a look-back, which has to be refused."""
    with swapped(tree, kept):
        raise AssertionError("the body was entered")


@pytest.mark.parametrize("convention", [None, *CONVENTIONS])
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_freed_memory_without_a_host_copy_is_refused(name: str, convention: str | None) -> None:
    """The buffer is named; a copy of another size or dtype does not stand for it."""
    (told,) = run_ranks(freed, 1, name, convention)
    assert all("chunks[0].buffers[0]" in message for message in told), told


def gradients_offloaded(rank: int) -> None:
    """Use a tree while only the gradients have no memory."""
    model = Trained(rank)
    chunks, tree = model.chunks, model.tree
    current = keep(chunks, tree, model.look)
    sizes = offload_gradients(chunks)
    assert bitwise_equal(snapshot(tree), current.kept)
    with swapped(tree, model.version.kept):
        assert torch.equal(model.look(), model.version.seen)
    load(tree, model.version.kept)
    assert torch.equal(model.look(), model.version.seen)
    assert not any(buffer.grad_data.untyped_storage().nbytes() for buffer in chunks[0].buffers)
    onload_gradients(chunks, sizes)
    train_step(chunks, model.adam, batch(2, rank))


def test_gradients_may_be_offloaded_alone() -> None:
    """They are no part of the tree, and nothing looks at them."""
    run_ranks(gradients_offloaded, 1)


def moved(rank: int, name: str, convention: str) -> None:
    """Move what no buffer holds by ``.data``, as verl does, and offload the buffers."""
    model = Trained(rank, **OPTIONS[name])
    chunks, tree = model.chunks, model.tree
    outside = [p for chunk in chunks for p in chunk.parameters() if not p.requires_grad]
    old = [p.data for p in outside]
    move_outside(chunks)
    offload(chunks, convention)
    untouched = [t.clone() for t in old]
    with swapped(tree, model.version.kept):
        onload(chunks, convention)
        move_outside(chunks)  # in the body, too
        assert torch.equal(model.look(), model.version.seen)
    for p in outside:
        p.data.mul_(1.5)
    assert not torch.equal(model.look(), model.version.seen)
    load(tree, model.version.kept)
    assert torch.equal(model.look(), model.version.seen)
    assert all(torch.equal(a, b) for a, b in zip(old, untouched, strict=True)), "dead memory was written"


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_memory_that_moved_is_found_again(convention: str) -> None:
    """A frozen base is moved to new memory; the tree follows it, and writes nothing to the old."""
    run_ranks(moved, 1, "frozen base", convention)
