"""Ctrl-C and signals while a look-back ends: the current weights are back all the same."""

import itertools
import signal
import time

import pytest
import torch

from mcore_snap import HostMemory, OutOfHostMemory, snapshot, swapped, swapping
from mcore_snap.testing.raw_bytes import to_bytes


def stopping(monkeypatch, errors):
    """Have the writing of a plan stopped half-way: once for each error, after the first leaf."""
    write, left = swapping.write_plan, iter(errors)

    def stopped(plan, *, tracked):
        error = next(left, None)
        if error is None:
            write(plan, tracked=tracked)
            return
        write(type(plan)(plan.writes[:1], ()), tracked=tracked)
        raise error

    monkeypatch.setattr(swapping, "write_plan", stopped)


def weights():
    """Two leaves, the current weights and what is to be swapped in."""
    live = {"a": torch.ones(3), "b": torch.ones(2)}
    return live, snapshot({"a": torch.zeros(3), "b": torch.zeros(2)})


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("times", [1, 3])
def test_what_stops_the_end_of_a_block_is_raised_once_the_weights_are_back(monkeypatch, stop, times):
    """However often it comes; the first one is what the caller sees."""
    live, old = weights()
    errors = [stop(f"{number}") for number in range(times)]
    block = swapped(live, old)
    block.__enter__()
    stopping(monkeypatch, errors)
    with pytest.raises(stop) as caught:
        block.__exit__(None, None, None)
    assert caught.value is errors[0]
    assert [leaf.unique().tolist() for leaf in live.values()] == [[1], [1]]


def test_what_never_stops_has_the_weights(monkeypatch):
    """And so has an error that is none of this library's."""
    for error in (KeyboardInterrupt(), RuntimeError("the device is gone")):
        live, old = weights()
        block = swapped(live, old)
        block.__enter__()
        with monkeypatch.context() as patched:
            stopping(patched, itertools.repeat(error))
            with pytest.raises(type(error)) as caught:
                block.__exit__(None, None, None)
        assert [leaf.unique().tolist() for leaf in caught.value.kept.values()] == [[1], [1]]


def look_back_with_timer(live, old, after):
    """Have a signal arrive so many seconds after the body."""
    with swapped(live, old):
        signal.setitimer(signal.ITIMER_REAL, after)
    time.sleep(5)  # on a machine that is done by then


@pytest.mark.parametrize("after", [0.0005, 0.002, 0.005, 0.01])
def test_a_real_signal_while_many_leaves_are_put_back(after):
    """From a timer, as Ctrl-C arrives: at any step of it."""
    live = {f"{number}": torch.full((1000,), 1.0) for number in range(2000)}
    old = snapshot({name: torch.zeros(1000) for name in live})
    held = [to_bytes(leaf) for leaf in live.values()]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            look_back_with_timer(live, old, after)
        assert [to_bytes(leaf) for leaf in live.values()] == held
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_current_weights_are_kept_in_the_memory_that_was_given():
    """So that a limit holds for look-backs as well."""
    live, old = weights()
    memory = HostMemory(limit=200)
    with swapped(live, old, memory=memory):
        assert memory.stats().leases == (("weights set aside of 2 leaves", 64 + 8),)
    assert memory.stats().leased == 0
    with pytest.raises(OutOfHostMemory), swapped(live, old, memory=HostMemory(limit=10)):
        pass
    assert [leaf.unique().tolist() for leaf in live.values()] == [[1], [1]]
