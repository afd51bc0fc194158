"""Snapshots in the background: the same bits, what changed too early by name, and nothing is kept alive."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from held_copies import TIMEOUT, Failing, begin, copying_with, finish, held, in_thread
from hypothesis import given
from torch import nn

from mcore_snap import (
    FrozenError,
    HostMemory,
    NotResident,
    StructureMismatch,
    fence,
    load,
    model_tree,
    named_leaves,
    named_parameters,
    snapshot,
    snapshot_async,
    verify,
)
from mcore_snap.testing.asserts import assert_bitwise_equal
from mcore_snap.testing.model_state import model_bytes, model_tensors
from mcore_snap.testing.model_strategies import Models, model_trees
from mcore_snap.testing.raw_bytes import flip, to_bytes
from mcore_snap.testing.strategies import trees

# --- what comes out


@given(model_trees())
def test_the_same_as_a_snapshot(pair: tuple[Models, Any]) -> None:
    """Bit for bit, with the same structure, frozen, and loadable."""
    models, tree = pair
    before = model_bytes(models)
    pending = snapshot_async(tree, check=True)
    assert pending.wait()
    flip(tensor for _, tensor in model_tensors(models))
    kept = pending.result()
    load(tree, kept)
    assert model_bytes(models) == before
    assert type(kept) is type(tree)
    assert_bitwise_equal(kept, snapshot(tree))
    assert list(named_parameters(kept)) == list(named_parameters(tree))
    for leaf in named_leaves(kept).values():
        if leaf.numel():
            with pytest.raises(RuntimeError):
                leaf.zero_()


@given(trees())
def test_of_any_pytree(live: Any) -> None:
    """Whatever its dtypes and layouts."""
    kept = snapshot(live)
    assert_bitwise_equal(snapshot_async(live).result(), kept)
    assert_bitwise_equal(snapshot_async(kept).result(), kept)


def test_done_wait_and_result() -> None:
    """Before and after; both may be asked again, and a timeout says so."""
    live = {"w": torch.arange(5)}
    with held() as copies:
        pending = begin(live, copies)
        assert copies.begun.wait(TIMEOUT)
        assert not pending.done()
        assert repr(pending) == "PendingSnapshot(under way)"
        assert pending.wait(0) is False
        assert pending.wait(0.01) is False
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError, match="not done after"):
                pending.result(timeout)
    assert pending.wait() is True
    assert pending.done()
    assert pending.wait(0) is True
    assert repr(pending) == "PendingSnapshot(done)"
    assert pending.result(0) is pending.result()
    assert pending.result()["w"].tolist() == [0, 1, 2, 3, 4]


def test_it_returns_before_anything_was_copied() -> None:
    """And the model may be read meanwhile: forward, backward, fingerprints, snapshots."""
    model = nn.Linear(3, 3)
    tree = model_tree(model)
    with held() as copies:
        pending = begin(tree, copies)
        model(torch.ones(1, 3)).sum().backward()
        other = snapshot(tree)
        assert copies.calls == 0
        assert not pending.done()
    assert_bitwise_equal(pending.result(), other)


# --- what changed too early


def test_a_change_made_too_early_is_found_by_name() -> None:
    """With check=True: of all leaves those that changed, with what to do; the memory is given back."""
    live = {"a": torch.ones(4), "b": [torch.ones(4), torch.zeros(4)], "c": torch.ones(2, dtype=torch.bfloat16)}
    memory = HostMemory()
    with held() as copies:
        pending = begin(live, copies, check=True, memory=memory)
        live["b"][0][2] = 5  # type: ignore[index]
        live["c"].neg_()  # type: ignore[union-attr]
    with pytest.raises(FrozenError, match="was changed while") as caught:
        pending.result()
    names = [line.split(":")[0] for line in caught.value.problems]
    assert names == ["['b'][0]", "['c']"]
    assert all("fence(tree)" in line for line in caught.value.problems)
    assert memory.stats().leased == 0


def test_without_a_change_the_check_is_silent() -> None:
    """Also for NaN and -0.0, and for a change right after a fence."""
    live = {"w": torch.tensor([float("nan"), -0.0, 1.0])}
    pending = snapshot_async(live, check=True)
    fence(live)
    live["w"].zero_()
    assert to_bytes(pending.result()["w"]) == to_bytes(torch.tensor([float("nan"), -0.0, 1.0]))


# --- errors, early and late


def test_what_is_wrong_with_the_tree_is_raised_at_once() -> None:
    """Nothing is begun."""
    memory = HostMemory()
    with pytest.raises(StructureMismatch, match="step"):
        snapshot_async({"step": 3, "w": torch.ones(1)}, memory=memory)
    with pytest.raises(NotResident, match="meta"):
        snapshot_async([torch.empty(1, device="meta")], memory=memory)
    model = nn.Linear(2, 2)
    tree = model_tree(model)
    del model
    gc.collect()
    with pytest.raises(NotResident, match="found it freed"):
        snapshot_async(tree, memory=memory)
    assert memory.stats().peak == 0


# --- lifetimes


def test_the_model_may_be_dropped_meanwhile() -> None:
    """The snapshot is whole all the same; after it, nothing keeps the model."""
    model = nn.Linear(30, 30)
    expected = snapshot(model_tree(model))
    gone = [weakref.ref(param) for param in model.parameters()]
    with held() as copies:
        pending = begin(model_tree(model), copies)
        assert copies.begun.wait(TIMEOUT)
        del model
        gc.collect()
    assert_bitwise_equal(pending.result(), expected)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_failure_does_not_keep_the_model_either() -> None:
    """While its handle and its error are held."""
    live = {"w": torch.ones(4)}
    gone = weakref.ref(live["w"])
    with copying_with(Failing(0, RuntimeError("the bus is on fire"))):
        pending = snapshot_async(live)
        assert pending.wait()
    with pytest.raises(RuntimeError, match="on fire"):
        pending.result()
    _idle()
    del live
    assert gone() is None


def _idle() -> None:
    """Return when the worker thread has nothing left, not even in its hands."""
    snapshot_async([torch.ones(1)]).result()


def test_a_handle_that_nobody_asks_gives_its_memory_back() -> None:
    """As does a result that is dropped; a result outlives its handle."""
    memory = HostMemory()
    snapshot_async({"w": torch.ones(4)}, memory=memory).wait()
    _idle()
    assert memory.stats().leased == 0
    pending = snapshot_async({"w": torch.ones(4)}, memory=memory)
    kept = pending.result()
    del pending
    _idle()
    assert memory.stats().leased == memory.stats().peak == 16
    assert kept["w"].tolist() == [1] * 4
    del kept
    assert memory.stats().leased == 0


def test_results_can_be_asked_for_by_several_threads() -> None:
    """Each gets the same one."""
    live = {"w": torch.rand(1000)}
    results: list[Any] = []
    with held() as copies:
        pending = begin(live, copies)
        threads = [in_thread(lambda: results.append(pending.result(TIMEOUT))) for _ in range(6)]
        assert threading.active_count() >= 6
    finish(*threads)
    assert len(results) == 6
    assert all(result is results[0] for result in results)
    verify_all(results[0], live)


def verify_all(kept: Any, live: Any) -> None:
    """Compare, and check that digests are recorded for it as for any snapshot."""
    from mcore_snap import fingerprint

    assert fingerprint(kept) == fingerprint(live)
    verify(kept)
