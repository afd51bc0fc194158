"""Page-locking host memory that is there already, so that a device reaches it without staging."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

__all__ = ["CHUNK", "Pins", "Registrar", "accelerator_in_use", "pieces", "pin"]

CHUNK: Final = 1 << 38
"""Bytes registered at a time, 256 GiB: some drivers refuse 512 GiB and more in one call. As large as can
be, since a copy that reaches from one registered range into the next is refused as well."""

_borders: Final[set[int]] = set()
"""Addresses at which one registered range of a slab ends and the next begins; nearly always none."""


def accelerator_in_use() -> bool:
    """Tell whether this process computes on an accelerator already, and do not make it begin to.

    A process that only holds snapshots in host memory has no use for a context on the device, which takes
    half a gigabyte there, and after which no child that it forks can use the device.

    >>> accelerator_in_use()
    False
    """
    # Not `torch.accelerator.is_available`: asking that may initialise the driver, and spoil the device for children.
    kinds = ("cuda", "xpu", "mtia", torch._C._get_privateuse1_backend_name())
    return any(getattr(getattr(torch, kind, None), "is_initialized", bool)() for kind in kinds)


def pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    """Split a range of host memory where registration did, so that each piece can be copied to a device.

    Args:
        address: Where the range begins.
        nbytes: How long it is.

    Returns:
        Address and size in bytes of each piece, in order.

    >>> pieces(4096, 100), pieces(4096, 0)
    ([(4096, 100)], [])
    """
    end = address + nbytes
    inside = sorted(border for border in tuple(_borders) if address < border < end)
    starts = [address, *inside] if nbytes else []
    return [(start, stop - start) for start, stop in zip(starts, [*inside, end], strict=False)]


class Registrar(Protocol):
    """What page-locks memory; each call raises RuntimeError if it cannot."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range."""

    def unregister(self, address: int) -> None:
        """Undo `register` of the range that begins there."""


class Pins:
    """Registered ranges, to be released together."""

    __slots__ = ("_addresses", "_registrar")

    def __init__(self, registrar: Registrar, addresses: list[int]) -> None:
        self._registrar = registrar
        self._addresses = addresses

    def release(self) -> None:
        """Unregister every range, the last one first.

        Raises:
            RuntimeError: Some are still registered, so the memory must not be given back to the system.
                The others are released, and another call tries again.
        """
        left, why = [], None
        while self._addresses:
            address = self._addresses.pop()
            try:
                self._registrar.unregister(address)
            except RuntimeError as error:
                left.append(address)
                why = error
            else:
                _borders.discard(address)
        self._addresses = left[::-1]
        if why is not None:
            message = f"{len(left)} range(s) of host memory stay page-locked: {why}"
            raise RuntimeError(message) from why


def pin(address: int, nbytes: int, find: Callable[[], Registrar] | None = None) -> Pins | None:
    """Page-lock a range of host memory, in as few pieces as drivers allow.

    Registering keeps the size exact; torch's own pinned allocator rounds it up to a power of two.

    Args:
        address: Where the range begins.
        nbytes: How long it is.
        find: Gives what registers, by default the runtime of the current accelerator.

    Returns:
        What to release, or ``None`` if it cannot be done: then nothing is left registered, and one
        RuntimeWarning has said why.
    """
    # torch takes registered memory for pinned: `is_pinned` asks cudaPointerGetAttributes, which calls
    # it host memory of the device's (aten/src/ATen/cuda/detail/CUDAHooks.cpp), and `copy_` with
    # non_blocking=True hands any host pointer to cudaMemcpyAsync, so that the driver decides by the
    # same registration whether the copy is asynchronous (aten/src/ATen/native/cuda/Copy.cu).
    done: list[int] = []
    registrar: Registrar | None = None
    try:
        registrar = (find or _runtime)()
        for start in range(address, address + nbytes, CHUNK):
            registrar.register(start, min(CHUNK, address + nbytes - start))
            done.append(start)
        _borders.update(done[1:])
    except RuntimeError as error:
        why = str(error)
        if registrar is not None:
            try:
                Pins(registrar, done).release()
            except RuntimeError as stuck:
                why = f"{why}; {stuck}"
        warnings.warn(
            f"host memory stays pageable, and copies to and from the device are slower: {why}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return Pins(registrar, done)


class _Runtime:
    """CUDA's runtime, which ROCm's torch has under the same names."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def register(self, address: int, nbytes: int) -> None:
        with _device_in_use():
            # Portable (1): page-locked for every device of this process.
            self._check(self._runtime.cudaHostRegister(address, nbytes, 1), f"registering {nbytes:,} bytes")

    def unregister(self, address: int) -> None:
        with _device_in_use():
            self._check(self._runtime.cudaHostUnregister(address), "unregistering")

    def _check(self, code: Any, doing: str) -> None:
        if int(code) != 0:
            message = f"{doing} failed: {self._runtime.cudaGetErrorString(code)}"
            _forget_error()
            raise RuntimeError(message)


def _device_in_use() -> contextlib.AbstractContextManager[object]:
    # In a thread of our own, or wherever the last tensor over the memory died, the first device is the current
    # one. The runtime makes a context there if there is none, which on all but one rank is another rank's device.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", bool)  # builds for CUDA alone have it
    index = next((index for index in range(torch.cuda.device_count()) if has_context(index)), None)
    return contextlib.nullcontext() if index is None else torch.cuda.device(index)


def _forget_error() -> None:
    # The runtime keeps the last error of a thread until somebody asks for it, and torch asks after
    # each kernel: the user's next one would raise ours. torch has no call to take it back, so launch one.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def _runtime() -> Registrar:
    if not torch.cuda.is_available():
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "no accelerator"
        message = f"torch offers host registration for CUDA and ROCm, found {found}"
        raise RuntimeError(message)
    try:
        return _Runtime(torch.cuda.cudart())  # type: ignore[no-untyped-call]  # torch has no types for it
    except (AssertionError, AttributeError) as error:  # another accelerator that stands in for CUDA in torch
        message = f"torch offers host registration for CUDA and ROCm, found a stand-in without it ({error})"
        raise RuntimeError(message) from error
