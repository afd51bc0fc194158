"""Snapshots in shared memory: other processes map them, and can do nothing to them nor to us."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_child import serve
from torch import nn

from mcore_snap import HostMemory, fingerprint, load, model_tree, named_parameters, snapshot, verify
from mcore_snap.testing.asserts import assert_bitwise_equal, leaves_by_name
from mcore_snap.testing.raw_bytes import to_bytes

MIB = 1 << 20


class Child:
    """A spawned process that is sent snapshots."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.queues = {"queue": context.Queue(), "torch queue": torch.multiprocessing.get_context("spawn").Queue()}
        arguments = (theirs, self.queues["queue"], self.queues["torch queue"])
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()

    def ask(self, command: str, key: str = "", value: Any = None) -> Any:
        """Have something done, and return the answer."""
        self.pipe.send((command, key, value))
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        assert self.pipe.poll(100), "the child does not answer"
        return self.pipe.recv()

    def keep(self, key: str, snap: Any, way: str) -> None:
        """Send a snapshot one of three ways."""
        if way == "pipe":
            assert self.ask("keep", key, snap) == "kept"
        else:
            self.queues[way].put(snap)
            assert self.ask("keep", key, way) == "kept"


@pytest.fixture(scope="module")
def spawned() -> Iterator[Child]:
    """Start one child for all tests: it takes seconds."""
    child = Child()
    yield child
    child.pipe.send(("stop", "", None))
    child.process.join(60)
    assert child.process.exitcode == 0


@pytest.fixture
def child(spawned: Child) -> Iterator[Child]:
    """Give the child, and see to it that nothing of a test is left in /dev/shm or mapped."""
    before = _names()
    yield spawned
    gc.collect()
    assert _names() == before
    assert spawned.ask("names") == []


def _names() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"mcore_snap-{os.getpid()}-*")}


def _model() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10, dtype=torch.bfloat16), nn.BatchNorm1d(4))
    return model, model_tree(model)


def _content(tree: Any) -> dict[str, bytes]:
    return {name: to_bytes(leaf) for name, leaf in leaves_by_name(tree).items()}


LIVES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "model": _model,
    "dict": lambda: (None, {"w": torch.rand(50, 3), "scalar": torch.tensor(3), "none": [torch.empty(0, 2)]}),
    "layouts": lambda: (None, [torch.rand(6, 5).t(), torch.ones(3).expand(2, 3), torch.rand(4).to(torch.complex128)]),
}


@pytest.mark.parametrize("way", ["pipe", "queue", "torch queue"])
@pytest.mark.parametrize("kind", LIVES)
def test_another_process_sees_the_bytes_and_cannot_write(child: Child, kind: str, way: str) -> None:
    """By a mapping for reading; it can hand the snapshot back, which is another copy then."""
    _owner, live = LIVES[kind]()
    memory = HostMemory(kind="shared")
    kept = snapshot(live, memory=memory)
    child.keep("a", kept, way)
    assert child.ask("read", "a") == _content(kept)
    full = [leaf for leaf in _leaves(kept) if leaf.numel()]
    assert child.ask("write", "a") == ["refused"] * len(full)
    assert child.ask("where", "a").count("r--s") >= len(full)
    back = child.ask("give back", "a")
    assert_bitwise_equal(back, kept)
    assert type(back) is type(kept)
    assert child.ask("drop", "a") == "dropped"


def _leaves(tree: Any) -> list[torch.Tensor]:
    return list(leaves_by_name(tree).values())


def test_what_is_sent_is_a_name() -> None:
    """Not the bytes; `pickle`, which may write to a file, takes the bytes as ever."""
    live = {"a": torch.ones(8 * MIB, dtype=torch.uint8), "b": torch.ones(MIB)}
    kept = snapshot(live, memory=HostMemory(kind="shared"))
    assert len(ForkingPickler.dumps(kept)) < 2000
    model = nn.Linear(1000, 1000)
    named = snapshot(model_tree(model), memory=HostMemory(kind="shared"))
    assert len(ForkingPickler.dumps(named)) < 2000
    assert len(pickle.dumps(named, protocol=5)) > 4_000_000
    ordinary = snapshot(model_tree(model))
    assert len(ForkingPickler.dumps(ordinary)) > 4_000_000


def test_the_digest_and_the_names_of_parameters_travel(child: Child) -> None:
    """As with any pickle."""
    _owner, tree = _model()
    kept = snapshot(tree, memory=HostMemory(kind="shared"))
    digest = fingerprint(kept)
    child.keep("a", kept, "queue")
    back = child.ask("give back", "a")
    assert verify(back) == digest
    assert list(named_parameters(back)) == list(named_parameters(kept))
    load(tree, back)
    child.ask("drop", "a")


@pytest.mark.parametrize("way", ["pipe", "queue", "torch queue"])
def test_the_mapping_outlives_the_sender_s_snapshot(child: Child, way: str) -> None:
    """And its HostMemory; the bytes stay, since memory that was sent is never leased again."""
    memory = HostMemory(kind="shared", keep=3)
    kept = snapshot({"w": torch.full((5000,), 1.0)}, memory=memory)
    child.keep("a", kept, way)
    before = child.ask("read", "a")
    del kept
    assert memory.stats() == memory.stats().__class__(0, 0, 20_000, ())
    versions = [snapshot({"w": torch.full((5000,), float(i))}, memory=memory) for i in range(2, 5)]
    assert child.ask("read", "a") == before
    assert len(child.ask("names")) == 1
    assert child.ask("where", "a") == ["r--s"]
    del versions, memory
    assert child.ask("read", "a") == before
    child.ask("drop", "a")


def test_memory_that_was_not_sent_is_leased_again() -> None:
    """As any other."""
    memory = HostMemory(kind="shared")
    one = snapshot({"w": torch.ones(5000)}, memory=memory)
    names = _names()
    del one
    two = snapshot({"w": torch.ones(5000)}, memory=memory)
    assert _names() == names
    assert memory.stats().peak == 20_000
    del two


@pytest.mark.parametrize("way", ["pipe", "torch queue"])
def test_a_snapshot_that_is_gone_before_it_is_opened(child: Child, way: str) -> None:
    """Is NotResident where it is opened, with what to do; the next one arrives."""
    memory = HostMemory(kind="shared")
    text = ForkingPickler.dumps(("keep", "a", snapshot({"w": torch.ones(50)}, memory=memory)))
    child.pipe.send_bytes(text)
    name, message = child.answer()
    assert name == "NotResident"
    assert "keep it there until it has arrived" in message
    kept = snapshot({"w": torch.ones(50)}, memory=memory)
    child.keep("a", kept, way)
    assert child.ask("read", "a") == _content(kept)
    child.ask("drop", "a")


def test_one_leaf_of_a_snapshot(child: Child) -> None:
    """Keeps the whole mapping, here and there, for as long as it is held."""
    memory = HostMemory(kind="shared")
    kept = snapshot({"a": torch.arange(1000), "b": torch.arange(7)}, memory=memory)
    leaf = {"only": kept["b"]}
    child.keep("a", leaf, "pipe")
    content = _content(leaf)
    del kept, leaf
    assert memory.stats().leased == 0
    assert child.ask("read", "a") == content
    child.ask("drop", "a")


def test_ordinary_snapshots_and_tensors_travel_as_ever(child: Child) -> None:
    """By their bytes, or as torch sends them."""
    kept = snapshot({"w": torch.rand(300)})
    model = nn.Linear(3, 3)
    mixed = {"kept": kept["w"], "plain": torch.rand(5), "model": snapshot(model_tree(model))}
    for way in ("pipe", "torch queue"):
        child.keep("a", mixed, way)
        assert child.ask("read", "a") == _content(mixed)
        child.ask("drop", "a")


def test_idle_memory_leaves_no_name_when_its_host_memory_is_dropped() -> None:
    """Nor when it is trimmed."""
    before = _names()
    for trim in (False, True):
        memory = HostMemory(kind="shared", keep=2)
        held = [memory.lease(1000), memory.lease(2000)]
        assert len(_names() - before) == 2
        held.clear()
        assert len(_names() - before) == 2
        if trim:
            assert memory.trim() == 3000
            assert _names() == before
        del memory
        assert _names() == before
