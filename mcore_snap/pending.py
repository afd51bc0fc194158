"""Snapshots that are taken in the background, while the model computes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, Final, Generic, TypeVar, final

import optree
from torch import Tensor

from mcore_snap import streams
from mcore_snap.checking import check_leaves, refuse_models
from mcore_snap.copying import capture
from mcore_snap.digests import digests_of
from mcore_snap.errors import FrozenError, SnapError
from mcore_snap.host_memory import HostMemory
from mcore_snap.in_flight import reading, wait_for_readers
from mcore_snap.live_trees import look_once
from mcore_snap.registration import Names, flatten
from mcore_snap.slabs import letting_go
from mcore_snap.snapshots import frozen_tree, leasing

__all__ = ["PendingSnapshot", "fence", "snapshot_async"]

T = TypeVar("T")

_MOST: Final = 2
"""Snapshots under way at once: each holds its memory, and they share the machine's bandwidth."""


@final
class PendingSnapshot(Generic[T]):
    """A snapshot that is being taken.

    Until it is done, the model may be read (a forward or backward pass) but not changed: no optimizer
    step, no writing to its weights. `load` and `swapped` wait by themselves.

    >>> import torch
    >>> pending = snapshot_async({"w": torch.ones(2)})
    >>> pending.result()["w"]
    tensor([1., 1.])
    >>> pending.done()
    True
    """

    __slots__ = ("_future", "_process")

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._process = os.getpid()

    def done(self) -> bool:
        """Tell whether the model may be changed again."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the model may be changed again.

        Args:
            timeout: Seconds to wait at most; ``None`` for as long as it takes.

        Returns:
            Whether it may; ``False`` only after the timeout.

        Raises:
            SnapError: It was under way when this process was forked off; ask the other one.
        """
        self._check_process()
        return not wait_for([self._future], timeout).not_done

    def result(self, timeout: float | None = None) -> T:
        """Wait, and return the snapshot.

        Args:
            timeout: Seconds to wait at most; ``None`` for as long as it takes.

        Raises:
            TimeoutError: It is not done by then; ask again.
            OutOfHostMemory: There is no memory for it.
            FrozenError: With ``check``, the model was changed before the snapshot was done.
            SnapError: It was under way when this process was forked off; ask the other one.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the snapshot is not done after {timeout} s; ask again")
        return self._future.result()

    def _check_process(self) -> None:
        if self._process != os.getpid() and not self.done():
            raise SnapError("this snapshot was being taken when the process was forked; only the parent has the copy")

    def __repr__(self) -> str:
        """Say how far it is."""
        state = "under way" if not self.done() else "failed" if self._future.exception() else "done"
        return f"PendingSnapshot({state})"


def snapshot_async(
    tree: T, *, memory: HostMemory | None = None, label: str = "a snapshot", check: bool = False
) -> PendingSnapshot[T]:
    """Begin to take a snapshot, and return at once.

    The tree is read and checked before this returns, so that what `snapshot` would raise about the
    tree is raised here; and where gathers are due, this is collective as `snapshot` is. The copy is
    made in the background. At most two are under way at once; a third waits for one of them to end.

    Args:
        tree: What `model_tree` gave, or any pytree of tensors.
        memory: Where the snapshot is to live; by default memory that all snapshots share.
        label: How `HostMemory.stats` and OutOfHostMemory call it, as in ``"version 7"``.
        check: For debugging: whether to find out if the model was changed too early, by digests of all
            bytes before and after. The caller waits for the first of them.

    Raises:
        StructureMismatch: As `snapshot`.
        NotResident: As `snapshot`.
        NotReady: As `snapshot`.

    >>> import torch
    >>> live = {"w": torch.ones(2)}
    >>> pending = snapshot_async(live)
    >>> fence(live)
    >>> _ = live["w"].zero_()
    >>> pending.result()["w"]
    tensor([1., 1.])
    """
    leaves, treespec = flatten(tree)
    check_leaves(leaves, Names(treespec), "snapshot_async")
    # What is conjugated or negated lazily is made by a kernel: here, where the work before it was issued.
    leaves = [one.resolve_conj().resolve_neg() if one.is_conj() or one.is_neg() else one for one in leaves]
    copies = streams.copies_for(leaves)  # remembers which stream of this thread computes the weights
    before = digests_of(leaves) if check else None
    future: Future[Any] = _background().submit(
        _take, leaves, treespec, leasing(memory, len(leaves), label), copies, before
    )
    reading(future, leaves)
    return PendingSnapshot(future)


def fence(tree: Any) -> None:
    """Wait until no snapshot that is under way reads this tree any more: it may be changed then.

    Args:
        tree: A live tree, or any pytree of tensors; or the pending snapshot itself. Nothing is settled, and nothing
            is collective. Memory that is not there any more is read by nobody.

    Raises:
        StructureMismatch: The model itself was passed, in the place of its tree.

    >>> fence({"a": []})
    """
    leaves, treespec = flatten(look_once(tree))
    refuse_models(leaves, Names(treespec), "fence: nothing was waited for")
    for leaf in leaves:
        if isinstance(leaf, PendingSnapshot):
            leaf.wait()
    wait_for_readers([leaf for leaf in leaves if isinstance(leaf, Tensor)])


@letting_go
def _take(
    leaves: Sequence[Tensor],
    treespec: optree.PyTreeSpec,
    allocate: Callable[[int], Tensor],
    copies: streams.Copies,
    before: Sequence[str] | None,
) -> Any:
    kept = capture(leaves, allocate, copies)
    if before is not None:
        after = digests_of([leaf.private for leaf in kept])
        names = Names(treespec)
        changed = [
            f"{names[index]}: expected the bytes that it had when snapshot_async was called, found others; call "
            "fence(tree) before you change the model"
            for index, (one, other) in enumerate(zip(before, after, strict=True))
            if one != other
        ]
        if changed:
            raise FrozenError("the model was changed while a snapshot of it was being taken", changed)
    return frozen_tree(kept, treespec)


class _Background(ThreadPoolExecutor):
    """One thread, and a bounded number of copies that wait for it or are under way."""

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="mcore_snap-copy")
        self.process = os.getpid()
        self._places = threading.BoundedSemaphore(_MOST)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Wait for a place, and submit."""
        self._places.acquire()
        try:
            future = super().submit(*args, **kwargs)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return future


_running: list[_Background] = []
_starting: Final = threading.Lock()


# A child must not find the lock taken by a thread that it does not have.
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def _background() -> _Background:
    # A forked child has the object but not its thread.
    with _starting:
        if not _running or _running[0].process != os.getpid():
            _running[:] = [_Background()]
        return _running[0]
