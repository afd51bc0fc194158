"""Slabs: host memory of an exact size, straight from the system, and given back to it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import secrets
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import Finalize
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from mcore_snap.pinning import Pins, pin

__all__ = ["Kind", "Slab", "attach", "find_shared", "letting_go"]

Kind: TypeAlias = Literal["pageable", "pinned", "shared"]
"""Ordinary memory; memory that devices reach without staging; memory that other processes can map."""

P = ParamSpec("P")
R = TypeVar("R")

_HUGE: Final = 2 << 20
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it
_MOST_THREADS: Final = 8
_SHARED_IN: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory lies on Linux


class Slab:
    """One mapping of host memory.

    Mapped by the system, not by the allocator: the size is exact, huge pages can be asked for (a first
    copy into them costs a fraction of the faults), and closing shows in resident memory at once. One that
    nobody holds any more closes itself.

    Args:
        nbytes: Its size, at least 1.
        kind: What it is for.

    Attributes:
        nbytes: Its size.
        kind: What it is: ``"pageable"`` where pinning was asked for and failed.
        name: Of a shared slab, what `attach` takes in another process; else ``None``.
        address: Where it begins.
        exported: Whether other processes may have it mapped, so that it must not be used again.

    Raises:
        MemoryError: The system has no such amount of memory.

    >>> slab = Slab(100)
    >>> slab.nbytes, slab.kind
    (100, 'pageable')
    >>> slab.close()
    """

    __slots__ = ("__weakref__", "_base", "_map", "_pins", "_process", "address", "exported", "kind", "name", "nbytes")

    def __init__(self, nbytes: int, kind: Kind = "pageable") -> None:
        self._base: ctypes.Array[Any] | None = None  # first, since `close` looks at it, whatever fails below
        self.nbytes = nbytes
        self.kind: Kind = kind
        self.name: str | None = None
        self.exported = False
        self._process = os.getpid()
        self._pins: Pins | None = None
        try:
            self._map = self._map_shared() if kind == "shared" else _map(nbytes, _KEPT if kind == "pinned" else _OWN)
        except (OSError, OverflowError, ValueError) as error:
            message = f"the system has no {nbytes:,} bytes of {kind} host memory: {error}"
            raise MemoryError(message) from error
        self._base = (ctypes.c_ubyte * nbytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._base)
        if kind == "pinned":
            self._page_lock()

    def _page_lock(self) -> None:
        # Registering brings the pages in as well, but in one thread and under the driver's lock.
        self.prefault()
        self._pins = pin(self.address, self.nbytes)
        if self._pins is not None:
            _PINNED[self.address] = weakref.ref(self)
            return
        # The mapping is one that a forked child shares; ordinary memory is not to be.
        self.kind = "pageable"
        self._base = None
        self._map.close()
        self._map = _map(self.nbytes, _OWN)
        self._base = (ctypes.c_ubyte * self.nbytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._base)

    @property
    def is_inherited(self) -> bool:
        """Whether another process made it, and this one was forked off."""
        return self._process != os.getpid()

    def prefault(self) -> None:
        """Have the system bring every page in now, with several threads, so that no copy waits for one."""
        threads = max(1, min(torch.get_num_threads(), _MOST_THREADS, self.nbytes // _HUGE))
        # Whole pages each; the C library by ctypes, since that gives the interpreter's lock up meanwhile.
        step = -(-self.nbytes // threads // mmap.PAGESIZE) * mmap.PAGESIZE
        parts = [(start, min(step, self.nbytes - start)) for start in range(0, self.nbytes, step)]
        with ThreadPoolExecutor(threads, "mcore_snap-prefault") as pool:
            if not all(pool.map(self._populate, parts)):
                ctypes.memset(self.address, 0, self.nbytes)  # an older kernel

    def _populate(self, part: tuple[int, int]) -> bool:
        start, length = part
        code: int = ctypes.CDLL(None).madvise(
            ctypes.c_void_p(self.address + start), ctypes.c_size_t(length), _POPULATE_WRITE
        )
        return code == 0

    def lease(self) -> ctypes.Array[Any]:
        """Return a buffer over the slab, whose end is the end of the last tensor made from it."""
        return (ctypes.c_ubyte * self.nbytes).from_address(self.address)

    def close(self) -> None:
        """Give the memory back to the system. No tensor may be over it any more.

        What the driver does not let go of stays mapped, with a warning: it is page-locked.
        """
        base, self._base = self._base, None
        if base is None:
            return
        self.unlink()
        _PINNED.pop(self.address, None)
        try:
            if self._pins is not None and not self.is_inherited:
                self._pins.release()
        except RuntimeError as error:
            _STUCK.append(base)
            warnings.warn(f"{self.nbytes:,} bytes of host memory are lost: {error}", RuntimeWarning, stacklevel=2)
            return
        del base
        self._map.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close it, as when a HostMemory is dropped with idle slabs; not while the interpreter falls apart."""
        if not ending():
            self.close()

    def unlink(self) -> None:
        """Take a shared slab's name away; who has it mapped keeps it."""
        if self.name is not None and not self.is_inherited:
            _SHARED.pop(self.name, None)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_path(self.name))  # noqa: PTH108 - a name, no path object

    def _map_shared(self) -> mmap.mmap:
        name = f"mcore_snap-{os.getpid()}-{secrets.token_hex(8)}"
        handle = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Without this, a full file system shows as a SIGBUS in the middle of a copy.
            os.posix_fallocate(handle, 0, self.nbytes)
            mapped = mmap.mmap(handle, self.nbytes)
        except BaseException:
            os.unlink(_path(name))  # noqa: PTH108 - a name, no path object
            raise
        finally:
            os.close(handle)
        self.name = name
        _SHARED[name] = weakref.ref(self)
        _at_exit()
        return mapped


_STUCK: Final[list[ctypes.Array[Any]]] = []
"""Memory that stays page-locked, with its mapping."""

_SHARED: Final[dict[str, weakref.ref[Slab]]] = {}
_PINNED: Final[dict[int, weakref.ref[Slab]]] = {}
_ATTACHED: Final[weakref.WeakValueDictionary[str, mmap.mmap]] = weakref.WeakValueDictionary()


def _shared() -> list[Slab]:
    return _listed(_SHARED)


def _listed(slabs: dict[Any, weakref.ref[Slab]]) -> list[Slab]:
    # Listing a dict's values is one step, so that no other thread's slab gets in between.
    return [slab for ref in list(slabs.values()) if (slab := ref()) is not None]


def _unlink_all() -> None:
    """Take the names of all shared slabs away, as this process ends."""
    for slab in _shared():
        slab.unlink()


def find_shared(address: int) -> Slab | None:
    """Return the shared slab that an address lies in, if any: of this process, or of the one it was forked off."""
    return next((slab for slab in _shared() if slab.address <= address < slab.address + slab.nbytes), None)


def _before_fork() -> None:
    # The child has snapshots in shared memory too, and may send their names on: they are not to change.
    # Neither is page-locked memory, which the child shares as well: the system would copy all of it at the
    # fork if it were private, since a device may be writing to it.
    for slab in (*_shared(), *_listed(_PINNED)):
        slab.exported = True


os.register_at_fork(before=_before_fork)


def _at_exit() -> None:
    # Processes that multiprocessing forks off leave without `atexit`, but not without this.
    if os.getpid() not in _PROCESS:
        _PROCESS[:] = [os.getpid()]
        Finalize(None, _unlink_all, exitpriority=-1)  # once the children have been waited for


_PROCESS: Final[list[int]] = []
"""The process that has been told what to do as it ends."""


def attach(name: str) -> Tensor:
    """Map another process's shared slab, for reading, as a uint8 tensor; it stays mapped while that is used.

    Raises:
        FileNotFoundError: There is none of that name any more.
    """
    mapped = _ATTACHED.get(name)
    if mapped is None:
        handle = os.open(_path(name), os.O_RDONLY)
        try:
            mapped = mmap.mmap(handle, 0, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
        _ATTACHED[name] = mapped
    with warnings.catch_warnings():
        # torch warns that it has no read-only tensors. Nobody gets this one: it is private to a frozen leaf.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def letting_go(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function that fails give its memory back at once.

    Whoever keeps the error, a future or a log, keeps its traceback, and with it the variables of all
    frames below: host memory, and the model.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            del args, kwargs
            raise

    return wrapper


_OWN: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_KEPT: Final = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
"""Memory of which a forked child has a copy of its own; and memory that stays one, whoever is forked."""


def _map(nbytes: int, flags: int) -> mmap.mmap:
    mapped = mmap.mmap(-1, nbytes, flags=flags)
    if nbytes >= _HUGE:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _path(name: str) -> str:
    return f"{_SHARED_IN}/{name}"
