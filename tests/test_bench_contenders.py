"""What the benchmark measures: every contender is right, wrong bits are noticed, and only the run is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import mcore_snap
from mcore_snap.bench import contenders, released_verl, timing
from mcore_snap.bench.contenders import Contender, problem_of
from mcore_snap.bench.memory import peak_bytes
from mcore_snap.bench.stand_in import SMALLEST, StandIn, many_leaves, one_buffer

CPU = torch.device("cpu")
CPU = torch.device("cpu")
ALL = {**contenders.LIMIT, **contenders.OURS, **contenders.ASYNC, **contenders.VERL, **contenders.OTHERS}


@pytest.mark.parametrize("name", ALL)
def test_contenders_are_right(name: str) -> None:
    """Each of them gives the right bits, again and again, and leaves the model as it has to."""
    subject = one_buffer(SMALLEST, CPU)
    contender = ALL[name](subject)
    assert [problem_of(contender, subject) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("name", contenders.SMALL)
def test_small_contenders_are_right(name: str) -> None:
    """So do those with many small leaves."""
    subject = many_leaves(7, CPU)
    assert problem_of(contenders.SMALL[name](subject), subject) is None


def one_bit_off(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return a copy that differs in one bit."""
    copy = tensor.clone()
    copy.view(torch.uint8)[place] ^= 1
    return copy


def looks_too_late(flat: torch.Tensor, look: Callable[[], object]) -> None:
    """Put the old weights in, and look when they are gone again."""
    flat.bitwise_not_().bitwise_not_()
    look()


WRONG: dict[str, tuple[str, Callable[[torch.Tensor], Contender]]] = {
    "a bit at the start": ("kept", lambda x: Contender("snapshot", lambda _: one_bit_off(x, 0), lambda t: [t])),
    "a bit at the end": ("kept", lambda x: Contender("snapshot", lambda _: one_bit_off(x, -1), lambda t: [t])),
    "too little": ("kept", lambda x: Contender("snapshot", lambda _: x[:-1].clone(), lambda t: [t])),
    "nothing": ("kept", lambda x: Contender("snapshot", lambda _: None)),
    "shifted": ("kept", lambda x: Contender("snapshot", lambda _: x.roll(8), lambda t: [t])),
    "a snapshot that writes": (
        "current weights",
        lambda x: Contender("snapshot", lambda _: (x.clone(), x.bitwise_not_())[0], lambda t: [t]),
    ),
    "finished wrongly": (
        "kept",
        lambda x: Contender("snapshot", lambda _: x.clone(), lambda t: [t], finish=lambda t: t.add_(1)),
    ),
    "no load": ("old weights", lambda x: Contender("load", lambda _: None)),
    "half a load": ("old weights", lambda x: Contender("load", lambda _: x[: len(x) // 2].bitwise_not_())),
    "no look": ("inside", lambda x: Contender("look-back", lambda _: None)),
    "a late look": ("inside", lambda x: Contender("look-back", lambda look: looks_too_late(x, look))),
    "no way back": (
        "current weights",
        lambda x: Contender("look-back", lambda look: (x.bitwise_not_(), look())),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_bits_are_noticed(name: str) -> None:
    """A contender that keeps other bits, or leaves others behind, is told apart, by what is wrong."""
    words, make = WRONG[name]
    subject = one_buffer(SMALLEST, CPU)
    problem = problem_of(make(subject.live[0]), subject)
    assert problem is not None
    assert words in problem


def test_rounds_are_interleaved() -> None:
    """Every contender runs once in each round, and every round begins with the next one."""
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    taken = timing.interleaved(runs, 4)
    assert "".join(order) == "abcbcacababc"
    assert taken == {"a": (1.0, 6.0, 8.0, 10.0), "b": (2.0, 4.0, 9.0, 11.0), "c": (3.0, 5.0, 7.0, 12.0)}


def test_only_the_run_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither making the current weights live, nor waiting for what was only begun, counts."""
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    subject = one_buffer(SMALLEST, CPU)
    subject.live[0].zero_()
    finished: list[bool] = []

    def run(look: object) -> bool:
        next(clock)
        return subject.holds()

    def finish(was_current: bool) -> None:
        next(clock)
        finished.append(was_current)

    assert timing.seconds_of(Contender("snapshot", run, finish=finish), subject) == 2.0
    assert finished == [True, True], "a steady state was not reached first"
    finished.clear()
    assert timing.seconds_of(Contender("snapshot", run, finish=finish, fresh=True), subject) == 2.0
    assert finished == [True]


def test_peak_memory_is_that_of_the_copy() -> None:
    """A snapshot takes its own size, a load nothing, and a contender that fails is an error with its words."""
    size = 64 << 20
    peaks = peak_bytes(["snapshot_cold", "load", "look_back"], size)
    assert size * 0.95 < peaks["snapshot_cold"] < size * 1.005 + (8 << 20)
    assert peaks["load"] < 8 << 20
    assert size * 0.95 < peaks["look_back"] < size * 1.005 + (8 << 20)
    with pytest.raises(RuntimeError, match=r"(?s)peak memory.*KeyError: 'no such'"):
        peak_bytes(["no such"], size)


def test_the_model_is_one_flat_buffer() -> None:
    """The model has exactly the size asked for, in one leaf, with all parameters in it."""
    for size in (SMALLEST, SMALLEST + 2, 1_000_002, 3 << 20):
        model = StandIn(size, CPU)
        (leaf,) = mcore_snap.named_leaves(mcore_snap.model_tree(model)).values()
        assert leaf.nbytes == size == sum(parameter.nbytes for parameter in model.parameters())
    assert len(mcore_snap.named_leaves(mcore_snap.model_tree(many_leaves(9, CPU).model))) == 9


def test_another_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code that was not what was released is not run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mcore_snap").mkdir()
    (tmp_path / "mcore_snap" / f"verl-{released_verl.VERSION}-py3-none-any.whl").write_bytes(b"else")
    with pytest.raises(released_verl.UnavailableError, match=r"expected sha256 \w+, found \w+; delete it"):
        released_verl.wheel()
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    with pytest.raises(released_verl.UnavailableError, match="set XDG_CACHE_HOME"):
        released_verl.wheel()


def test_pinning_is_given_back() -> None:
    """Where nothing can pin, the stand-in holds inside the block only."""
    with mock.patch.object(torch.accelerator, "is_available", return_value=False):
        original, tensor = torch.Tensor.pin_memory, torch.ones(1)
        with released_verl.unpinned():
            assert tensor.pin_memory() is tensor
        assert torch.Tensor.pin_memory is original
    with mock.patch.object(torch.accelerator, "is_available", return_value=True), released_verl.unpinned():
        assert torch.Tensor.pin_memory is original
