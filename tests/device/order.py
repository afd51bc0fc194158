"""Checks of order: copies that have to wait for kernels, and for other copies, that are still under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch
from findings import Check, NotHereError, Numbers, Setting, WrongBitsError
from torch import Tensor, nn

from mcore_snap import HostMemory, load, model_tree, snapshot, snapshot_async, streams
from mcore_snap.testing.chunks import DDPLike

TURNS: Final = 3000
"""Kernels that are queued: more than a launch queue holds, and enough that a copy too early reads too little."""

TOO_LATE: Final = (
    "the kernels were done before the copy was queued, so that its order shows nothing; try a larger --gib"
)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Work on a stream that is not the default one."""
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(torch.Stream(device=device))
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        torch.accelerator.set_stream(before)


class Kernels:
    """Many additions of one, on the stream that is current.

    Attributes:
        overlapped: For each time that the library queued copies, whether they were still under way.
    """

    def __init__(self, device: torch.device) -> None:
        self.overlapped: list[bool] = []
        self._device = device
        self._last: torch.Event | None = None

    def queue(self, memory: Tensor) -> None:
        """Queue them, after all that there was is done."""
        torch.accelerator.synchronize()
        for _ in range(TURNS):
            memory.add_(1)
        self.mark()

    def mark(self) -> None:
        """Count what was queued since as a part of them."""
        self._last = torch.accelerator.current_stream(self._device).record_event()

    def look(self) -> None:
        """Note whether the last one is still under way."""
        self.overlapped.append(self._last is not None and not self._last.query())

    def check(self, times: int) -> None:
        """Raise NotHereError unless it was so each time, and as often as it has to be."""
        if len(self.overlapped) < times or not all(self.overlapped):
            raise NotHereError(TOO_LATE)


@contextlib.contextmanager
def watched(kernels: Kernels) -> Iterator[None]:
    """Have the kernels looked at whenever the library queues copies, in whatever thread."""
    copy = streams.DeviceCopies.copy

    def looking(self: streams.DeviceCopies, *args: Any) -> None:
        kernels.look()
        copy(self, *args)

    with mock.patch.object(streams.DeviceCopies, "copy", looking):
        yield


def all_are(what: str, found: Tensor, value: complex) -> None:
    """Raise WrongBitsError unless every element has this value."""
    if not bool((found == value).all()):
        raise WrongBitsError(f"{what}: expected {value} everywhere, found others")


def takes(memory: HostMemory) -> list[Callable[[Any], Any]]:
    """Return both ways to take a snapshot."""
    return [lambda tree: snapshot(tree, memory=memory), lambda tree: snapshot_async(tree, memory=memory).result()]


def warm(tree: Any) -> HostMemory:
    """Return memory that was leased: page-locking it takes longer than all kernels, which were done by then."""
    memory = HostMemory(kind="pinned")
    snapshot(tree, memory=memory)
    return memory


def check_order(at: Setting) -> Numbers:
    """Kernels before a snapshot and after a load, on a side stream, never overtake or are overtaken."""
    at.needs_device()
    kernels, kept = Kernels(at.device), None
    with side_stream(at.device):
        weights = torch.zeros(at.nbytes // 32, dtype=torch.int32, device=at.device)
        tree = {"w": weights}
        memory = warm(tree)
        for take in takes(memory):
            del kept  # or there would be no warm memory to lease
            weights.zero_()
            kernels.queue(weights)
            with watched(kernels):
                kept = take(tree)
            all_are("a snapshot, which has to wait for the kernels before it", kept["w"], TURNS)
            kernels.queue(weights)
            with watched(kernels):
                load(tree, kept)
            after = weights.clone()
            all_are("a load, between the kernels before it and those after it", after, TURNS)
    kernels.check(4)
    return {"kernels": TURNS, "bytes": weights.nbytes}


def check_conjugated(at: Setting) -> Numbers:
    """A conjugated leaf is computed on its way; so that has to wait for the kernels of a side stream as well."""
    at.needs_device()
    kernels, kept = Kernels(at.device), None
    with side_stream(at.device):
        values = torch.zeros(at.nbytes // 64, dtype=torch.complex64, device=at.device)
        tree = {"w": values.conj(), "beside": torch.zeros(16, device=at.device)}
        memory = warm(tree)
        for take in takes(memory):
            del kept
            values.zero_()
            kernels.queue(torch.view_as_real(values))
            kernels.look()
            kept = take(tree)
            all_are("a conjugated leaf", kept["w"], complex(TURNS, -TURNS))
    kernels.check(2)
    return {"kernels": TURNS, "bytes": values.nbytes}


class Offloadable:
    """A chunk with one flat buffer, which is offloaded as Megatron-Core does it from the second time on."""

    def __init__(self, at: Setting) -> None:
        net = nn.Module()
        with at.device:
            net.weight = nn.Parameter(torch.zeros(at.nbytes // 32))
            self.chunk = DDPLike(net, gap=0)
        flat: Any = self.chunk.buffers
        data: Tensor = flat[0].param_data
        self.data = data
        self.host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        flat[0].param_data_cpu = self.host  # the first time leaves it

    def offload(self) -> None:
        """Queue the copy to the host, and free the device's memory."""
        self.host.copy_(self.data, non_blocking=True)
        self.data.untyped_storage().resize_(0)

    def reload(self) -> None:
        """Give the memory back, and queue the copy from the host."""
        self.data.untyped_storage().resize_(self.host.nbytes)
        self.data.copy_(self.host, non_blocking=True)


def check_offload(at: Setting) -> Numbers:
    """While a copy to the host is under way, what it will leave is what is kept, and what is loaded comes after it."""
    at.needs_device()
    kernels, model = Kernels(at.device), Offloadable(at)
    tree = model_tree(model.chunk)
    kept = snapshot(tree)  # zeros
    memory = warm(tree)
    kernels.queue(model.data)
    model.offload()
    kernels.mark()
    kernels.look()
    found = snapshot(tree, memory=memory)
    all_are("a snapshot right after an offload", found.chunks[0].buffers[0], TURNS)
    model.reload()
    kernels.queue(model.data)
    model.offload()
    kernels.mark()
    kernels.look()
    load(tree, kept)
    model.reload()
    all_are("a load right after an offload, and the way back", model.data, 0)
    kernels.check(2)
    return {"kernels": TURNS, "bytes": model.host.nbytes}


CHECKS: Final[tuple[Check, ...]] = (check_order, check_conjugated, check_offload)
