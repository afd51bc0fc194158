"""Where snapshots live: host memory that is leased, taken back when the last tensor is gone, and leased again."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor

from mcore_snap.checking import check_leaves
from mcore_snap.errors import OutOfHostMemory
from mcore_snap.live_trees import look_once
from mcore_snap.memory_stats import HostMemoryStats
from mcore_snap.pinning import accelerator_in_use
from mcore_snap.registration import Names, flatten
from mcore_snap.slabs import Kind, Slab
from mcore_snap.specs import aligned_offsets

__all__ = ["HostMemory", "default_memory"]


@final
class HostMemory:
    """Leases slabs of host memory, one per snapshot, and takes each back when its last tensor is gone.

    The first copy into fresh memory costs several times the copy itself, since the system brings its pages in
    one by one. Memory that was leased before has them. A slab is leased again only for the exact size that it
    has, and only when no tensor is over it any more: views, numpy arrays and exported buffers count.

    Args:
        kind: ``"pageable"``; ``"pinned"`` (page-locked, for a device; pageable, with one warning, where that fails);
            ``"shared"`` (other processes on the host can map a snapshot instead of copying it); or ``None`` for
            what the process has use for: pinned once it uses an accelerator.
        limit: The most bytes that may be held, leased and free together; ``None`` for no limit.
        keep: How many idle slabs of one size are kept. More than that goes back to the system as it becomes free, so
            that versions that were dropped show in resident memory.

    Raises:
        ValueError: An argument is out of range.

    >>> memory = HostMemory(limit=1 << 20)
    >>> kept = memory.lease(1000)
    >>> memory.stats().leased, memory.stats().free
    (1000, 0)
    >>> del kept
    >>> memory.stats().leased, memory.stats().free
    (0, 1000)
    """

    def __init__(self, *, kind: Kind | None = None, limit: int | None = None, keep: int = 1) -> None:
        if kind not in {None, "pageable", "pinned", "shared"}:
            message = f"expected kind to be 'pageable', 'pinned', 'shared' or None, found {kind!r}"
            raise ValueError(message)
        if (limit is not None and limit < 0) or keep < 0:
            message = f"expected limit and keep to be no less than 0, found limit={limit}, keep={keep}"
            raise ValueError(message)
        self._kind = kind
        self._limit = limit
        self._keep = keep
        self._leases: dict[int, tuple[str, Slab]] = {}
        self._number = 0
        self._peak = 0
        self._wanted: Counter[int] = Counter()
        # Leases end wherever a tensor dies, in the middle of anything: they only queue up here.
        self._ended: deque[int] = deque()
        self._begin()
        _EVERY.add(self)

    def _begin(self) -> None:
        # Also in a forked child, where another thread's lock would stay taken and nobody prepares. What is
        # leased stays, since tensors are over it.
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._coming: Counter[int] = Counter()
        self._arriving = 0  # bytes that are neither leased nor free yet
        self._free: defaultdict[int, list[Slab]] = defaultdict(list)

    def lease(self, nbytes: int, label: str = "a lease") -> Tensor:
        """Return a slab as an uninitialised uint8 tensor of shape ``(nbytes,)``.

        Args:
            nbytes: How many bytes.
            label: How `stats` and errors call it.

        Raises:
            OutOfHostMemory: The limit would be passed, or the system has no such amount. Nothing was
                allocated; the message lists who holds the memory.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._locked():
            while self._coming[nbytes] and not self._free[nbytes]:
                self._arrived.wait()
                self._take_back()
            slab = self._free[nbytes].pop() if self._free[nbytes] else self._make(self._admit(nbytes))
            slab.exported = False
            number = self._number = self._number + 1
            self._leases[number] = (label, slab)
            self._peak = max(self._peak, self._held())
            buffer = slab.lease()
            weakref.finalize(buffer, self._end, number).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def prepare(self, tree: Any, count: int = 1) -> Future[None]:
        """Allocate slabs in the background, with every page brought in, so that no lease has to wait.

        A lease of that size which comes before it is done waits for it. From then on, so many idle ones are kept.

        Args:
            tree: What snapshots will be taken of; or their size in bytes.
            count: How many idle slabs there are to be.

        Returns:
            What to wait for, if at all; it has the error, should there be no such memory.
        """
        nbytes = tree if isinstance(tree, int) else _snapshot_nbytes(tree)
        done: Future[None] = Future()
        with self._locked():
            self._wanted[nbytes] = max(count, self._wanted[nbytes])
            missing = max(0, count - len(self._free[nbytes]) - self._coming[nbytes]) if nbytes else 0
            self._coming[nbytes] += missing
        bring = threading.Thread(
            target=self._bring, args=(nbytes, missing, done), daemon=True, name="mcore_snap-prepare"
        )
        try:
            bring.start()
        except RuntimeError:  # no more threads
            with self._locked():
                self._coming[nbytes] -= missing
                self._arrived.notify_all()
            raise
        return done

    def trim(self) -> int:
        """Give all idle memory back to the system.

        Returns:
            How many bytes that was.
        """
        with self._locked():
            self._wanted.clear()
            return self._drop_idle()

    def stats(self) -> HostMemoryStats:
        """Return what is held now."""
        with self._locked():
            leases = tuple((label, slab.nbytes) for label, slab in self._leases.values())
            return HostMemoryStats(self._leased_bytes(), self._free_bytes(), self._peak, leases)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._take_back()
            yield
        self._sweep()

    def _free_bytes(self) -> int:
        return sum(slab.nbytes for slabs in self._free.values() for slab in slabs)

    def _leased_bytes(self) -> int:
        return sum(slab.nbytes for _, slab in self._leases.values())

    def _held(self) -> int:
        return self._free_bytes() + self._arriving + self._leased_bytes()

    def _holders(self) -> list[str]:
        return [f"{label}: {slab.nbytes:,} bytes" for label, slab in list(self._leases.values())]

    def _drop_idle(self, but: int = 0) -> int:
        slabs = [slab for nbytes in list(self._free) if nbytes != but for slab in self._free.pop(nbytes)]
        for slab in slabs:
            slab.close()
        return sum(slab.nbytes for slab in slabs)

    def _admit(self, nbytes: int) -> int:
        if self._limit is not None and self._held() + nbytes > self._limit:
            self._drop_idle(but=nbytes)  # makes room; of this size there is none, unless it is being prepared
        held = self._held()
        if self._limit is not None and held + nbytes > self._limit:
            raise OutOfHostMemory(
                f"expected at most {self._limit:,} bytes of host memory, found {held:,} held and {nbytes:,} more "
                "asked for; drop a snapshot, or raise the limit",
                self._holders(),
            )
        return nbytes

    def _make(self, nbytes: int) -> Slab:
        kind: Kind = self._kind or ("pinned" if accelerator_in_use() else "pageable")
        try:
            slab = Slab(nbytes, kind)
        except MemoryError as error:
            raise OutOfHostMemory(str(error), self._holders()) from error
        if kind == "pinned" and slab.kind == "pageable":
            self._kind = "pageable"  # it has been said once why
        return slab

    def _bring(self, nbytes: int, count: int, done: Future[None]) -> None:
        try:
            while count:
                self._bring_one(nbytes)
                count -= 1
        except BaseException as error:  # noqa: BLE001 - it is the waiting caller's to see
            with self._locked():
                self._coming[nbytes] -= count
                self._arrived.notify_all()
            done.set_exception(error)
        else:
            done.set_result(None)

    def _bring_one(self, nbytes: int) -> None:
        with self._locked():
            self._arriving += self._admit(nbytes)
        try:
            slab = self._make(nbytes)  # not under the lock: bringing in or page-locking so much can take many seconds
            slab.prefault()
        except BaseException:
            with self._locked():
                self._arriving -= nbytes
            raise
        with self._locked():
            self._peak = max(self._peak, self._held())
            self._arriving -= nbytes
            self._coming[nbytes] -= 1
            if not self._keep_idle(slab):  # others came back meanwhile
                slab.close()
            self._arrived.notify_all()

    def _end(self, number: int) -> None:
        self._ended.append(number)
        self._sweep()

    def _sweep(self) -> None:
        # Whoever has the lock does this after giving it up. That may be this very thread: a tensor dies
        # in the middle of one of our own calls when the garbage collector runs there.
        while self._ended and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._ended:
            _, slab = self._leases.pop(self._ended.popleft())
            # What other processes have mapped would change under them.
            shared = slab.exported or (slab.kind != "pageable" and slab.is_inherited)
            if shared or not self._keep_idle(slab):
                slab.close()

    def _keep_idle(self, slab: Slab) -> bool:
        idle = self._free[slab.nbytes]
        if len(idle) >= max(self._keep, self._wanted[slab.nbytes]):
            return False
        idle.append(slab)
        return True


def _snapshot_nbytes(tree: Any) -> int:
    leaves, treespec = flatten(look_once(tree))
    check_leaves(leaves, Names(treespec), "prepare")
    return aligned_offsets([leaf.nbytes for leaf in leaves])[1]


_EVERY: Final[weakref.WeakSet[HostMemory]] = weakref.WeakSet()
_DEFAULT: Final = HostMemory()


def default_memory() -> HostMemory:
    """Return the memory that `snapshot` uses if it is given none.

    >>> default_memory() is default_memory()
    True
    """
    return _DEFAULT


def _after_fork() -> None:
    for memory in _EVERY:
        memory._begin()


os.register_at_fork(after_in_child=_after_fork)
