"""A device that is never in a hurry: copies happen when they are waited for, in any order, or not at all.

In the place of the real copy layer it makes a missing wait a failing test, on any machine.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from mcore_snap import streams
from mcore_snap.testing.raw_bytes import carrier, covered

__all__ = ["FakeDevice", "LateCopies", "late_copies"]

Order: TypeAlias = Callable[[int], Iterable[int]]
"""Given how many copies wait, the order in which to carry them out."""

POISON: Final = 0xA5
"""Every byte of a target, from the moment a copy is taken on until it has been carried out."""


class LateCopies:
    """The copy layer of a device that has not begun before it is waited for.

    Strict: it fails where a copy layer may go wrong, on copies whose two sides differ in shape or
    dtype, and on copies that depend on each other's order.

    Args:
        device: What keeps the account.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._written: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._read: defaultdict[int, list[Tensor]] = defaultdict(list)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Poison the targets, and leave it at that.

        Raises:
            AssertionError: The copies are not such as a copy layer has to take.
        """
        pairs = list(zip(targets, sources, strict=True))
        for target, source in pairs:
            _check(target, source)
            if not _same(target, source):
                self._check_order(target, source)
        self._pending += pairs
        self._device.count(len(pairs))
        for target, source in pairs:
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)  # as a copy that is queued does at once
            if not _same(target, source):
                _poison(target)

    def wait(self) -> None:
        """Carry everything out, in the device's order."""
        order = list(self._device.order(len(self._pending)))
        assert sorted(order) == list(range(len(self._pending))), f"{order} is no order of {len(self._pending)}"
        for index in order:
            target, source = self._pending[index]
            _write(target, carrier(source.data))
        for record in (self._pending, self._written, self._read):
            record.clear()

    @property
    def pending(self) -> int:
        """How many copies nobody has waited for."""
        return len(self._pending)

    def _check_order(self, target: Tensor, source: Tensor) -> None:
        message = "a source is the target of another copy: what is read depends on which comes first"
        assert not any(_overlap(source, other) for other in self._written[_storage(source)]), message
        assert not any(_overlap(target, other) for other in self._read[_storage(target)]), message
        self._written[_storage(target)].append(target)
        self._read[_storage(source)].append(source)


class FakeDevice:
    """What `late_copies` puts in the place of `copies_for`: gives out LateCopies, and keeps account of them.

    Attributes:
        taken: How many copies were taken on.
        order: The order in which copies that wait are carried out.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.taken = 0
        self._given: list[LateCopies] = []
        self._lock = threading.Lock()

    def copies_for(self, tensors: Iterable[Tensor]) -> LateCopies:
        """Return a copy layer for any tensors. It is kept, so that its end cannot hide what it owes."""
        del tensors
        copies = LateCopies(self)
        with self._lock:
            self._given.append(copies)
        return copies

    def count(self, copies: int) -> None:
        """Add to `taken`."""
        with self._lock:
            self.taken += copies

    @property
    def pending(self) -> int:
        """How many copies nobody has waited for."""
        return sum(copies.pending for copies in self._given)


@contextlib.contextmanager
def late_copies(order: Order | None = None) -> Iterator[FakeDevice]:
    """Have every copy of the library made by a device that is late.

    Args:
        order: The order in which copies are carried out, by default the reverse. With hypothesis:
            ``lambda n: data.draw(st.permutations(range(n)))``.

    Yields:
        The account.

    Raises:
        AssertionError: On leaving, unless an error is under way: copies were never waited for.

    >>> from mcore_snap import snapshot
    >>> live = {"w": torch.ones(2)}
    >>> with late_copies() as device:
    ...     kept = snapshot(live)
    ...     _ = live["w"].zero_()
    >>> kept["w"], device.taken
    (tensor([1., 1.]), 1)
    """
    device = FakeDevice(order or (lambda waiting: reversed(range(waiting))))
    real = streams.copies_for
    with contextlib.ExitStack() as patched:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "mcore_snap" and getattr(module, "copies_for", None) is real:
                patched.enter_context(mock.patch.object(module, "copies_for", device.copies_for))
        yield device
    assert device.pending == 0, f"{device.pending} of {device.taken} copies were never waited for"


def _check(target: Tensor, source: Tensor) -> None:
    assert target.shape == source.shape, f"shape {tuple(source.shape)} into {tuple(target.shape)}"
    assert target.dtype == source.dtype, f"{source.dtype} into {target.dtype}"
    for one in (target, source):
        assert not one.is_conj(), "the bytes of a lazily conjugated view are not its values"
        assert not one.is_neg(), "the bytes of a lazily negated view are not its values"
    assert not target.requires_grad, "autograd has a part in the target"


def _poison(target: Tensor) -> None:
    width = 1 if target.dtype is torch.bool else target.itemsize
    word = np.full(width, 0 if target.dtype is torch.bool else POISON, np.uint8)
    raw = carrier(target.data)
    _write(target, torch.from_numpy(word).view(raw.dtype)[0].expand(raw.shape))


def _write(target: Tensor, raw: Tensor) -> None:
    # By another handle, beside the version counter.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        carrier(target.data).copy_(raw)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same(a: Tensor, b: Tensor) -> bool:
    return _storage(a) == _storage(b) and (a.storage_offset(), a.stride()) == (b.storage_offset(), b.stride())


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not (a.numel() and b.numel()):
        return False
    return bool((covered(a) & covered(b)).any())
