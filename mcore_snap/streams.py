"""How bytes travel: at once on the host; on a stream of its own to and from a device."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, final

import torch
from torch import Tensor

from mcore_snap.neighbours import Pair
from mcore_snap.pinning import pieces
from mcore_snap.specs import dense_strides

__all__ = ["Copies", "DeviceCopies", "HostCopies", "copies_for"]


_STREAMS: Final[dict[torch.device, torch.Stream]] = {}
"""Each device's stream for copies. One for good: torch hands out 32 in turn, its users' and its collectives' among
them, and keeps memory for each that a copy needed some on."""


class Copies(Protocol):
    """Carries copies out, at once or late.

    Targets and sources are plain tensors without autograd history, of pairwise the same shape and
    dtype. A target overlaps no source of copies that have not been waited for, since copies may be
    carried out late and in any order.
    """

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Take copies on. Neither side may be touched before `wait`."""

    def wait(self) -> None:
        """Return when every byte taken on so far has arrived."""


@final
class HostCopies:
    """Copies between tensors that the CPU reaches, done when `copy` returns.

    A target's version counter moves, in inference mode as well, unless it is an inference tensor.

    >>> target = torch.zeros(2)
    >>> copies = HostCopies()
    >>> copies.copy([target], [torch.ones(2)])
    >>> copies.wait()
    >>> target
    tensor([1., 1.])
    """

    __slots__ = ()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy now, with as many threads as torch is set to use."""
        # Inference tensors can be written in inference mode only, and writes to others count only outside.
        for mode in {target.is_inference() for target in targets}:
            pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].is_inference() == mode]
            with torch.inference_mode(mode), torch.no_grad():
                if len(pairs) == 1:
                    pairs[0][0].copy_(pairs[0][1])
                else:
                    torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    def wait(self) -> None:
        """Return: nothing is ever late."""


@final
class DeviceCopies:
    """Copies to and from devices of one kind, each device's on a stream of its own.

    Device work issued before `copy` is seen by it; device work issued after it, on the stream that was
    current, sees what was copied to the device. Work that changes what is copied *from* a device has to
    wait for `wait`, as the host has. Only events are waited for, never a whole device.

    Both sides are kept alive until `wait`, or until this object is gone, which waits as well: host
    memory must not be leased again, and a device's not be handed out again, while a copy is under way.

    Args:
        devices: Where the tensors lie, the CPU aside. The streams that are current here and now count
            as the ones that produce and use the weights, whatever thread calls `copy`.
    """

    __slots__ = ("_flights", "_home", "_producers")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._home = threading.get_ident()
        self._flights: deque[tuple[torch.Event, list[Pair]]] = deque()
        self._producers: dict[torch.device, torch.Stream] = {}
        for device in devices:
            self._stream_of(device)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies. Those between host tensors are done at once."""
        host: list[Pair] = []
        groups: dict[torch.device, list[Pair]] = {}
        for target, source in zip(targets, sources, strict=True):
            devices = _devices((source, target))  # a copy between two devices is its source's, as in torch
            (groups.setdefault(devices[0], []) if devices else host).append((target, source))
        if host:
            HostCopies().copy(*zip(*host, strict=True))
        for device, pairs in groups.items():
            self._send(device, pairs)

    def wait(self) -> None:
        """Return when every byte has arrived, and let go of both sides."""
        while self._flights:
            self._flights[0][0].synchronize()
            self._flights.popleft()

    def __del__(self) -> None:
        """Wait, so that nothing under way outlives its memory. There is nobody left to tell of an error."""
        with contextlib.suppress(Exception):
            self.wait()

    def _send(self, device: torch.device, pairs: list[Pair]) -> None:
        stream = self._stream_of(device)
        at_home = threading.get_ident() == self._home
        # This thread may have issued work since, such as casts. Another one has issued none that is copied, and
        # its current stream is the one that the trainer fills: waiting for that would be waiting for the next step.
        here = {other: torch.accelerator.current_stream(other) for other in _devices(_both(pairs)) if at_home}
        with _current(stream, back=at_home):
            for other in _devices(_both(pairs)):
                self._stream_of(other)
            for working in here.values():
                stream.wait_stream(working)
            try:
                _issue(pairs, stream)
            finally:
                # Also after an error: what was issued before it is under way.
                event = stream.record_event()
                self._flights.append((event, pairs))
            for other in _devices(target for target, _ in pairs):
                for user in {self._producers[other], here.get(other, self._producers[other])}:
                    user.wait_event(event)

    def _stream_of(self, device: torch.device) -> torch.Stream:
        stream = _STREAMS.get(device) or _STREAMS.setdefault(device, torch.Stream(device=device))
        if device not in self._producers:
            # Current streams belong to a thread: remember this one's.
            producer = self._producers[device] = torch.accelerator.current_stream(device)
            stream.wait_stream(producer)
        return stream


def copies_for(tensors: Iterable[Tensor]) -> Copies:
    """Return what copies tensors to or from these: on the host, or to and from their devices.

    Called where the work on the tensors was issued, since a device's current stream is a thread's own.

    >>> copies_for([torch.zeros(1)])
    <mcore_snap.streams.HostCopies object at ...>
    """
    devices = _devices(tensors)
    return DeviceCopies(devices) if devices else HostCopies()


def _devices(tensors: Iterable[Tensor]) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu))


def _both(pairs: Iterable[Pair]) -> Iterator[Tensor]:
    return (tensor for pair in pairs for tensor in pair)


@contextlib.contextmanager
def _current(stream: torch.Stream, *, back: bool) -> Iterator[None]:
    """Make a stream current, and its device with it; torch.Stream does it itself only from torch 2.7 on.

    Args:
        stream: Which one.
        back: Whether the device that was current becomes it again. In a thread that was started for
            copies that is device 0 by default, and making it current would take its memory.
    """
    before = torch.accelerator.current_stream() if back else None
    displaced = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(displaced)
        if before is not None:
            torch.accelerator.set_stream(before)


def _issue(pairs: Sequence[Pair], stream: torch.Stream) -> None:
    direct: list[Pair] = []
    for pair in pairs:
        for tensor in pair:
            if not tensor.is_cpu:
                # Its memory may be freed under the tensor, as offloading does. By another handle: no version moves.
                tensor.data.record_stream(stream)
        flat = _flat(*pair)
        if flat is None:
            # torch makes a dense copy on the way; asked not to block, it would put it in pageable memory.
            HostCopies().copy(*zip(pair, strict=True))
        else:
            direct += _registered(*flat)
    for mode in {target.is_inference() for target, _ in direct}:
        chosen = [pair for pair in direct if pair[0].is_inference() == mode]
        with torch.inference_mode(mode), torch.no_grad():
            targets, sources = [target for target, _ in chosen], [source for _, source in chosen]
            torch._foreach_copy_(targets, sources, non_blocking=True)


def _flat(target: Tensor, source: Tensor) -> Pair | None:
    """Return both as runs of elements, if they lie in memory alike and without gaps."""
    shape = tuple(target.shape)
    order = dense_strides(shape, tuple(target.stride()))
    if order is None or order != dense_strides(shape, tuple(source.stride())):
        return None
    run = (target.numel(),)
    return target.as_strided(run, (1,)), source.as_strided(run, (1,))


def _registered(target: Tensor, source: Tensor) -> Iterator[Pair]:
    """Split a copy between runs where page-locking of the host's side does."""
    host = target if target.is_cpu else source
    first = _address(host) if host.is_cpu else None
    found = [] if first is None else pieces(first, host.nbytes)
    if first is None or len(found) == 1:
        yield target, source
        return
    to, of = target.view(torch.uint8), source.view(torch.uint8)
    for address, nbytes in found:
        part = slice(address - first, address - first + nbytes)
        yield to[part], of[part]


def _address(host: Tensor) -> int | None:
    # Leaves of a snapshot refuse `data_ptr`, which could be written through, and the one that could not
    # be is younger than they are. What is ours is copied from private tensors; the rest goes unsplit.
    try:
        address: int = getattr(host, "const_data_ptr", host.data_ptr)()
    except RuntimeError:
        return None
    return address
