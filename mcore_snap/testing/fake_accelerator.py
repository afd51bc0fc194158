"""Streams, events and device tensors made of CPU memory, with the ordering guarantees of real ones and no more.

A queued operation runs when something that is waited for depends on it, or, on streams declared
eager, at once. Code that relies on an order it did not ask for gets another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias
from unittest import mock

import torch
from torch import Tensor

from mcore_snap import streams

__all__ = ["FakeAccelerator", "FakeEvent", "FakeStream", "fake_accelerator"]

Eager: TypeAlias = Literal["none", "first", "others"]
"""Which streams run at once: none, those that are current to begin with, or all others."""

KIND: Final = "cuda"


class FakeEvent:
    """A point in a stream's queue."""

    def __init__(self, stream: FakeStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def synchronize(self) -> None:
        """Run the stream up to here."""
        self._stream.accelerator.log.append(("synchronize",))
        self._stream.run(self._position)


class FakeStream:
    """A queue. It has no `synchronize`: whoever asks for it asks for too much."""

    def __init__(self, accelerator: FakeAccelerator, device: torch.device, *, eager: bool) -> None:
        self.accelerator = accelerator
        self.device = device
        self._eager = eager
        self._queue: list[Callable[[], None]] = []
        self._done = 0

    def put(self, operation: Callable[[], None]) -> None:
        """Queue an operation."""
        self._queue.append(operation)
        if self._eager:
            self.run(len(self._queue))

    def run(self, position: int | None = None) -> None:
        """Run what is queued before `position`, by default everything."""
        end = len(self._queue) if position is None else position
        while self._done < end:
            operation, self._queue[self._done] = self._queue[self._done], _nothing
            self._done += 1
            operation()

    def record_event(self) -> FakeEvent:
        """Return an event for all that is queued now."""
        self.accelerator.log.append(("event", self.accelerator.current_device()))
        return FakeEvent(self, len(self._queue))

    def wait_event(self, event: FakeEvent) -> None:
        """Let nothing queued from now on run before the event."""
        self.put(lambda: event._stream.run(event._position))

    def wait_stream(self, stream: FakeStream) -> None:
        """Let nothing queued from now on run before what the other stream has now."""
        self.wait_event(stream.record_event())


class FakeAccelerator:
    """Devices with streams, for one test.

    Attributes:
        log: What happened, in order, as tuples: ``("copy", target, source, non_blocking)``,
            ``("record_stream", tensor, stream)``, ``("synchronize",)`` for an event that the host waits
            for, and ``("event", device)`` for one recorded while that device was current.
        fail_at: The number of the copy that fails, counted from 0; ``None`` for none.
    """

    def __init__(self, eager: Eager = "none") -> None:
        self.log: list[Any] = []
        self.fail_at: int | None = None
        self._eager = eager
        self._first: dict[torch.device, FakeStream] = {}
        self._local = threading.local()
        self._copies = 0

    def device(self, index: int = 0) -> torch.device:
        """Return a device."""
        return torch.device(KIND, index)

    def current_device(self) -> torch.device:
        """Return the device that is current in this thread: the first, unless another was made it."""
        device: torch.device = getattr(self._local, "device", self.device())
        return device

    def stream(self, device: torch.device | None = None) -> FakeStream:
        """Make a stream, as ``torch.Stream`` does."""
        return FakeStream(self, device or self.device(), eager=self._eager == "others")

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        """Return the current stream of a device, in this thread."""
        where = device or self.current_device()
        streams = self._streams()
        if where not in streams:
            first = self._first.setdefault(where, FakeStream(self, where, eager=self._eager == "first"))
            streams[where] = first
        return streams[where]

    def set_stream(self, stream: FakeStream) -> None:
        """Make a stream and its device current, in this thread."""
        self._local.device = stream.device
        self._streams()[stream.device] = stream

    def put(self, operation: Callable[[], object], index: int = 0) -> None:
        """Queue work on the current stream of a device, as launching a kernel does."""
        self.current_stream(self.device(index)).put(lambda: _ignore(operation()))

    def tensor(self, memory: Tensor, index: int = 0) -> Tensor:
        """Return CPU memory as a tensor of a device."""
        kind: Any = type(f"On{index}", (_OnDevice,), {"accelerator": self, "place": self.device(index)})
        there: Tensor = memory.as_subclass(kind)
        return there

    def copies(self) -> list[tuple[Tensor, Tensor, bool]]:
        """Return target, source and whether it did not block, of every copy so far."""
        return [entry[1:] for entry in self.log if entry[0] == "copy"]

    def copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """Queue a copy on the current stream of the source's device, or else of the target's."""
        number, self._copies = self._copies, self._copies + 1
        if number == self.fail_at:
            message = "the device refused the copy"
            raise RuntimeError(message)
        if target.is_inference() and not torch.is_inference_mode_enabled():
            message = "torch writes to inference tensors in inference mode only"
            raise RuntimeError(message)
        self.log.append(("copy", target, source, non_blocking))
        stream = self.current_stream(target.device if source.is_cpu else source.device)
        stream.put(lambda: _move(target, source))
        if not non_blocking:
            stream.run()

    def _streams(self) -> dict[torch.device, FakeStream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        found: dict[torch.device, FakeStream] = self._local.streams
        return found


class _OnDevice(Tensor):
    """CPU memory that says it is a device's, and whose copies go through the accelerator."""

    accelerator: FakeAccelerator
    place: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def record_stream(self, stream: Any) -> None:
        self.accelerator.log.append(("record_stream", self, stream))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch._foreach_copy_:
            for target, source in zip(*args, strict=True):
                cls._copy(target, source, **options)
            return None
        if func is Tensor.copy_:
            cls._copy(*args, **options)
            return args[0]
        return super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]

    @classmethod
    def _copy(cls, target: Tensor, source: Tensor, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002
        if target.is_cpu and source.is_cpu:
            target.copy_(source)
        else:
            cls.accelerator.copy(target, source, non_blocking=non_blocking)


@contextlib.contextmanager
def fake_accelerator(eager: Eager = "none") -> Iterator[FakeAccelerator]:
    """Put a fake in the place of torch's accelerator, streams and events.

    Args:
        eager: Which streams run what is queued at once.

    Yields:
        The fake. Waiting for a whole device fails.
    """
    accelerator = FakeAccelerator(eager)
    with (
        mock.patch.dict(streams._STREAMS, clear=True),
        mock.patch.object(torch, "Stream", lambda device=None: accelerator.stream(device)),
        mock.patch.object(torch.accelerator, "current_stream", accelerator.current_stream),
        mock.patch.object(torch.accelerator, "set_stream", accelerator.set_stream),
        mock.patch.object(torch.accelerator, "synchronize", _refuse),
    ):
        yield accelerator


def _nothing() -> None:
    """Stand for an operation that ran, and keep nothing of it alive."""


def _move(target: Tensor, source: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(source)


def _ignore(result: object) -> None:
    del result


def _refuse(*_: object) -> None:
    message = "a copy needs no device-wide synchronisation"
    raise AssertionError(message)
