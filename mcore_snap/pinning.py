"""Page-locking host memory that is there already, so that a device reaches it without staging."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch

__all__ = ["CHUNK", "Pins", "Registrar", "pieces", "pin"]

CHUNK: Final = 1 << 30
"""Bytes registered at a time: one call for many gigabytes holds the driver's locks for seconds, and
from 512 GiB on some drivers refuse it."""


def pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Split a range of memory where registration does: at addresses that are multiples of `CHUNK`.

    The driver refuses a copy that reaches from one registered range into the next. As the borders are
    fixed in the address space, a copy can keep to them without knowing what was registered how.

    Args:
        address: Where the range begins.
        nbytes: How long it is.

    Yields:
        Address and size in bytes of each piece, in order.

    >>> list(pieces(CHUNK - 1, 3)) == [(CHUNK - 1, 1), (CHUNK, 2)]
    True
    """
    end = address + nbytes
    while address < end:
        border = min(end, (address // CHUNK + 1) * CHUNK)
        yield address, border - address
        address = border


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
        self._addresses = left[::-1]
        if why is not None:
            message = f"{len(left)} range(s) of host memory stay page-locked: {why}"
            raise RuntimeError(message) from why


def pin(address: int, nbytes: int, find: Callable[[], Registrar] | None = None) -> Pins | None:
    """Page-lock a range of host memory, piece by piece.

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
        for start, size in pieces(address, nbytes):
            registrar.register(start, size)
            done.append(start)
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
        # Portable (1): page-locked for every device of this process.
        self._check(self._runtime.cudaHostRegister(address, nbytes, 1), f"registering {nbytes:,} bytes")

    def unregister(self, address: int) -> None:
        self._check(self._runtime.cudaHostUnregister(address), "unregistering")

    def _check(self, code: Any, doing: str) -> None:
        if int(code) != 0:
            message = f"{doing} failed: {self._runtime.cudaGetErrorString(code)}"
            _forget_error()
            raise RuntimeError(message)


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
    return _Runtime(torch.cuda.cudart())  # type: ignore[no-untyped-call]  # torch has no types for it
