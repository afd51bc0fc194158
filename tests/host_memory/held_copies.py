"""Copy layers for tests: one that waits until it is let go, and one that fails at a copy of one's choice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from mcore_snap import PendingSnapshot, snapshot_async, streams
from mcore_snap.streams import Copies, HostCopies

TIMEOUT = 60
"""Seconds until what should never take long is taken for a deadlock."""


class Held:
    """Copies nothing before it is let go.

    Attributes:
        begun: Set when the first copy was asked for.
        calls: How many copies were carried out.
    """

    def __init__(self) -> None:
        """Hold everything back."""
        self.begun = threading.Event()
        self.calls = 0
        self._gate = threading.Event()

    def let_go(self) -> None:
        """Carry out what was asked for, and everything from now on."""
        self._gate.set()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy, once it is let go."""
        self.begun.set()
        assert self._gate.wait(TIMEOUT), "nobody let the copy go: whoever should have done so waits for it"
        HostCopies().copy(targets, sources)
        self.calls += 1

    def wait(self) -> None:
        """Return: what was copied has arrived."""


class Failing:
    """Copies one tensor after the other, and fails at one of them."""

    def __init__(self, at: int, error: BaseException) -> None:
        """Fail at this copy, counted from 0."""
        self.copied = 0
        self._at = at
        self._error = error

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy, or fail."""
        for target, source in zip(targets, sources, strict=True):
            if self.copied == self._at:
                raise self._error
            target.copy_(source)
            self.copied += 1

    def wait(self) -> None:
        """Return: what was copied has arrived."""


@contextlib.contextmanager
def copying_with(copies: Copies) -> Iterator[None]:
    """Have every snapshot and load that begins in here copied by this object."""
    # A lambda, since a mock would remember the tensors and keep them alive.
    with mock.patch.object(streams, "copies_for", lambda _: copies):  # noqa: PT008
        yield


@contextlib.contextmanager
def held() -> Iterator[Held]:
    """Hold copies of what begins in here back; they are let go on leaving, at the latest."""
    copies = Held()
    try:
        yield copies
    finally:
        copies.let_go()


def in_thread(function: Callable[[], object], name: str = "a test") -> threading.Thread:
    """Start a function in a thread that does not keep the process alive."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    return thread


def finish(*threads: threading.Thread) -> None:
    """Wait for threads, and fail if one does not end."""
    for thread in threads:
        thread.join(TIMEOUT)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"threads that wait for ever: {stuck}"


def begin(tree: Any, copies: Copies, **options: Any) -> PendingSnapshot[Any]:
    """Begin a snapshot in the background that is copied by this object."""
    with copying_with(copies):
        return snapshot_async(tree, **options)


def ordered(copies: Held, action: Callable[[], object]) -> list[str]:
    """Begin an action in a thread, let the copies go a little later, and say what came first."""
    order: list[str] = []
    thread = in_thread(lambda: (action(), order.append("done")))
    thread.join(0.1)
    order.append("let go")
    copies.let_go()
    finish(thread)
    return order
