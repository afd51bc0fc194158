"""Many threads, and ends of leases at any moment: nobody waits for ever, and nobody gets another's memory."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from held_copies import finish, in_thread
from torch import nn

from mcore_snap import HostMemory, bitwise_equal, load, model_tree, snapshot, snapshot_async, swapped
from mcore_snap.testing.asserts import assert_bitwise_equal


def _in_threads(count: int, function: Callable[[int], None]) -> None:
    """Run a function in so many threads at once, and raise what any of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(60)
            function(number)
        except BaseException as error:
            errors.append(error)

    finish(*[in_thread(lambda number=number: run(number), f"thread {number}") for number in range(count)])  # type: ignore[misc]
    if errors:
        raise errors[0]


@pytest.fixture
def restless() -> Iterator[None]:
    """Collect garbage all the time, wherever objects are made."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.parametrize("kind", ["pageable", "shared"])
def test_different_models_at_once(kind: Any) -> None:
    """Eight threads train, keep versions and go back to them, all in memory of one size."""
    memory = HostMemory(kind=kind)

    def work(number: int) -> None:
        rng = random.Random(number)
        model = nn.Linear(40, 40)
        tree = model_tree(model)
        versions: list[tuple[float, Any]] = []
        for step in range(40):
            value = float(number * 1000 + step)
            with torch.no_grad():
                model.weight.fill_(value)
                model.bias.fill_(value)
            later = rng.random() < 0.3
            kept = snapshot_async(tree, memory=memory).result(60) if later else snapshot(tree, memory=memory)
            versions.append((value, kept))
            if len(versions) > rng.randint(1, 4):
                del versions[rng.randrange(len(versions))]
            for expected, version in versions:
                load(tree, version)
                assert bool((model.weight == expected).all())
                assert bool((model.bias == expected).all())

    _in_threads(8, work)
    assert memory.stats().leased == 0
    assert memory.trim() > 0


def test_two_threads_on_one_model() -> None:
    """Both take the same snapshot, in the background and not."""
    model = nn.Sequential(*[nn.Linear(30, 30) for _ in range(20)])
    tree = model_tree(model)
    expected = snapshot(tree)

    def work(number: int) -> None:
        for _ in range(20):
            pending = snapshot_async(tree)
            assert_bitwise_equal(snapshot(tree), expected)
            assert_bitwise_equal(pending.result(60), expected)

    _in_threads(2, work)


def test_one_snapshot_in_many_threads() -> None:
    """Readers of one snapshot, each with a model of its own, go back to it while others do."""
    first = nn.Linear(50, 50)
    kept = snapshot(model_tree(first))

    def work(number: int) -> None:
        model = nn.Linear(50, 50)
        tree = model_tree(model)
        for _ in range(20):
            with swapped(tree, kept):
                assert bitwise_equal(tree, kept)
            assert not bitwise_equal(tree, kept)

    _in_threads(8, work)
    assert bitwise_equal(kept, model_tree(first))


@pytest.mark.parametrize("kind", ["pageable", "shared"])
def test_leases_that_end_while_others_begin(kind: Any, restless: None) -> None:
    """In any thread, by count or by the garbage collector, which may run in the middle of any call."""
    memory = HostMemory(kind=kind, keep=2)

    def work(number: int) -> None:
        rng = random.Random(number)
        held: list[tuple[int, torch.Tensor]] = []
        for step in range(150):
            stamp = (number * 31 + step) % 251
            tensor = memory.lease(rng.choice([100, 100, 5000]), f"{number}")
            tensor.fill_(stamp)
            if rng.random() < 0.5:
                cycle: list[Any] = [tensor]
                cycle.append(cycle)
                del cycle
            held.append((stamp, tensor))
            del tensor
            if len(held) > 4:
                del held[rng.randrange(4)]
            for expected, one in held:
                assert bool((one == expected).all())
            if step % 10 == 0:
                memory.stats()
            if step % 40 == 0:
                memory.trim()

    _in_threads(6, work)
    gc.collect()
    assert memory.stats().leases == ()
    assert memory.stats().free == sum(len(slabs) * size for size, slabs in memory._free.items())


def test_leases_that_end_in_the_middle_of_our_own_calls(restless: None) -> None:
    """In one thread: the collector runs inside `stats`, `lease` and `trim`, and lets leases end there."""
    memory = HostMemory(keep=3)
    kept = [memory.lease(50, f"kept {i}").fill_(i) for i in range(5)]
    for step in range(300):
        for _ in range(3):
            cycle: list[Any] = [memory.lease(50 + step % 3)]
            cycle.append(cycle)
            del cycle
        stats = memory.stats()
        assert len(stats.leases) >= 5
        if step % 7 == 0:
            memory.trim()
    gc.collect()
    assert [label for label, _ in memory.stats().leases] == [f"kept {i}" for i in range(5)]
    assert [int(one[0]) for one in kept] == list(range(5))
    assert memory.stats().free <= 3 * (50 + 51 + 52)


def test_a_lease_that_ends_inside_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by chance: something that dies while the account is being read, or while idle memory is given back."""
    memory = HostMemory(keep=5)
    held = [memory.lease(10, f"{i}") for i in range(6)]

    class Ending(dict[int, Any]):
        """The leases, one of which ends whenever they are looked at."""

        def values(self) -> Any:
            for value in super().values():
                if held:
                    held.pop()
                yield value

    memory._leases = Ending(memory._leases)
    assert memory.stats().leased == 60
    assert memory.stats().leased == 0
    assert memory.stats().free == 50
    assert memory.trim() == 50


def test_names_of_shared_memory_while_it_comes_and_goes() -> None:
    """Pickling looks for the slab that a leaf lies in, while other threads lease and drop some."""
    memory = HostMemory(kind="shared", keep=0)
    kept = snapshot({"w": torch.ones(100)}, memory=memory)

    def work(number: int) -> None:
        for _ in range(100):
            if number % 2:
                memory.lease(64).fill_(1)
            else:
                assert b"mcore_snap-" in bytes(ForkingPickler.dumps(kept))

    _in_threads(4, work)
    assert memory.stats().leased == 400


def test_preparing_and_leasing_at_once() -> None:
    """Leases that wait for what is prepared, and others that take it away, all get theirs."""
    memory = HostMemory()

    def work(number: int) -> None:
        for step in range(25):
            if number % 2:
                memory.prepare(1000 + step % 3, 2)
            else:
                one = memory.lease(1000 + step % 3)
                one.fill_(number)
                assert bool((one == number).all())

    _in_threads(6, work)
    finish(*[thread for thread in threading.enumerate() if thread.name == "mcore_snap-prepare"])
    assert memory.stats().leased == 0
    assert memory._held() == memory.stats().free
    assert all(len(slabs) <= 2 for slabs in memory._free.values())
