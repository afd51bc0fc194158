"""Law 9 and isolation, in any order: memory is used again only after the last tensor over it is gone."""

from __future__ import annotations

import copy
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import optree
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from mcore_snap import HostMemory, as_numpy, bitwise_equal, load, model_tree, snapshot, snapshot_async, thaw
from mcore_snap.frozen import FrozenLeaf
from mcore_snap.snapshots import frozen_entries
from mcore_snap.testing.raw_bytes import flip, to_bytes

SIZES: Final = (1, 24, 4096, 100_000)
"""Few, so that memory is leased again; the largest is no multiple of a page."""


def _span(array: Any) -> tuple[int, int]:
    """Return begin and end of a writable tensor, a private one, or a numpy array."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0], array.nbytes
    return array.data_ptr(), array.nbytes


class Holder:
    """Something that keeps a lease's memory alive, and what its bytes are.

    `lease` is the number of the lease, or a negative one for memory of its own.
    """

    def __init__(self, lease: int, thing: Any, read: Callable[[Any], list[bytes]], spans: Any) -> None:
        self.lease = lease
        self.thing = thing
        self.read = read
        self.spans = [span for span in map(_span, spans) if span[1]]
        self.content = read(thing)


def _read_leaves(tree: Any) -> list[bytes]:
    return [to_bytes(leaf) for leaf in optree.tree_leaves(tree)]


def _read_arrays(tree: Any) -> list[bytes]:
    return [leaf.tobytes() for leaf in optree.tree_leaves(tree)]


def _read_raw(buffers: list[memoryview]) -> list[bytes]:
    return [bytes(buffer) for buffer in buffers]


def _privates(snap: Any) -> list[Tensor]:
    return [entry.private for entry in frozen_entries(snap) if isinstance(entry, FrozenLeaf)]


class Leases(RuleBasedStateMachine):
    """A HostMemory, and all that can be done with what it leases."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.holders: list[Holder] = []
        self.leases: dict[int, int] = {}
        self.seed = 0
        self.owned = 0
        self.wanted: Counter[int] = Counter()
        self.module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.linear = model_tree(self.module)

    @initialize(kind=st.sampled_from(["pageable", "shared"]), keep=st.integers(0, 2))
    def begin(self, kind: Any, keep: int) -> None:
        """Choose what memory it is."""
        self.memory = HostMemory(kind=kind, keep=keep)
        self.kind, self.keep = kind, keep
        self.files_before = _names()

    def _live(self, data: st.DataObject) -> Any:
        # Different bytes each time: memory that is used too early then shows.
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        if data.draw(st.booleans()):
            with torch.no_grad():
                for param in self.module.parameters():
                    param.copy_(torch.rand(param.shape, generator=generator))
            return self.linear
        sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
        return {
            f"w{i}": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
            for i, size in enumerate(sizes)
        }

    def _leased(self) -> int:
        assert self.memory._leases, "what was just leased is held, and its memory counts as given back"
        lease = max(self.memory._leases)
        self.leases[lease] = self.memory.stats().leases[-1][1]
        return lease

    def _own(self) -> int:
        self.owned -= 1
        return self.owned

    @rule(size=st.sampled_from(SIZES))
    def lease(self, size: int) -> None:
        """Lease, and write to it."""
        self.seed += 1
        tensor = self.memory.lease(size)
        assert tensor.shape == (size,)
        assert tensor.dtype is torch.uint8
        tensor.random_(0, 256, generator=torch.Generator().manual_seed(self.seed))
        self.holders.append(Holder(self._leased(), tensor, _read_leaves, [tensor]))

    @rule(data=st.data(), later=st.booleans())
    def take(self, data: st.DataObject, later: bool) -> None:
        """Take a snapshot, in the background or not."""
        live = self._live(data)
        before = _read_leaves(live)
        snap = snapshot_async(live, memory=self.memory).result() if later else snapshot(live, memory=self.memory)
        assert _read_leaves(snap) == before
        self.holders.append(Holder(self._leased(), snap, _read_leaves, _privates(snap)))

    def _some(self, data: st.DataObject, read: Any = None) -> Holder | None:
        found = [one for one in self.holders if read is None or one.read is read]
        # By number: hypothesis keeps what it draws.
        return found[data.draw(st.integers(0, len(found) - 1))] if found else None

    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        """Hold parts of leaves and no more; of leaves that are kept, parts of what was handed out."""
        one = self._some(data, _read_leaves)
        if one is not None:
            parts = [leaf.reshape(-1)[leaf.numel() // 2 :] for leaf in optree.tree_leaves(one.thing)]
            self.holders.append(Holder(one.lease, parts, _read_leaves, []))

    @rule(data=st.data())
    def numpy(self, data: st.DataObject) -> None:
        """Hold numpy arrays over a snapshot."""
        one = self._some(data, _read_leaves)
        if one is not None and all(entry is not None for entry in frozen_entries(one.thing)):
            arrays = as_numpy(one.thing)
            assert _read_arrays(arrays) == one.content
            self.holders.append(Holder(one.lease, arrays, _read_arrays, _arrays(arrays)))

    @rule(data=st.data(), out_of_band=st.booleans())
    def pickle(self, data: st.DataObject, out_of_band: bool) -> None:
        """Hold buffers that were exported by a pickle, or what was made from them."""
        one = self._some(data, _read_leaves)
        if one is None or not isinstance(one.thing, type(self.linear)):
            return
        buffers: list[pickle.PickleBuffer] | None = [] if out_of_band else None
        text = pickle.dumps(one.thing, protocol=5, buffer_callback=buffers.append if buffers is not None else None)
        back = pickle.loads(text, buffers=buffers)
        assert _read_leaves(back) == one.content
        self.holders.append(Holder(self._own(), back, _read_leaves, _privates(back)))
        if buffers:
            raw = [buffer.raw() for buffer in buffers]
            self.holders.append(Holder(one.lease, raw, _read_raw, [np.frombuffer(part, np.uint8) for part in raw]))

    @rule(data=st.data())
    def deep_copy(self, data: st.DataObject) -> None:
        """Hold a deep copy of a snapshot, which is the snapshot."""
        one = self._some(data, _read_leaves)
        if one is not None and isinstance(one.thing, type(self.linear)):
            self.holders.append(Holder(one.lease, copy.deepcopy(one.thing), one.read, []))
            self.holders.append(Holder(one.lease, copy.deepcopy(one.thing.chunks[0]), one.read, []))

    @rule(data=st.data())
    def thaw(self, data: st.DataObject) -> None:
        """Hold a writable copy, and write to it."""
        one = self._some(data, _read_leaves)
        if one is not None:
            warm = thaw(one.thing)
            flip(optree.tree_leaves(warm))
            self.holders.append(Holder(self._own(), warm, _read_leaves, optree.tree_leaves(warm)))

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """Put a snapshot of the module back."""
        one = self._some(data, _read_leaves)
        if one is not None and isinstance(one.thing, type(self.linear)):
            load(self.linear, one.thing)
            assert bitwise_equal(self.linear, one.thing)

    @rule(data=st.data(), several=st.booleans())
    def drop(self, data: st.DataObject, several: bool) -> None:
        """Let go of something, or of all that is over one lease."""
        one = self._some(data)
        if one is not None:
            self.holders = [
                other for other in self.holders if other is not one and not (several and other.lease == one.lease)
            ]

    @rule()
    def trim(self) -> None:
        """Give idle memory back."""
        free = self.memory.stats().free
        assert self.memory.trim() == free
        assert self.memory.stats().free == 0
        self.wanted.clear()

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 2))
    def prepare(self, size: int, count: int) -> None:
        """Have memory ready."""
        self.memory.prepare(size, count).result()
        self.wanted[size] = max(count, self.wanted[size])
        assert self._idle()[size] >= count

    def _idle(self) -> Counter[int]:
        return Counter({size: len(slabs) for size, slabs in self.memory._free.items()})

    @invariant()
    def nothing_lost_its_bytes(self) -> None:
        """Whatever was leased, written, prepared or trimmed since."""
        for one in self.holders:
            assert one.read(one.thing) == one.content

    @invariant()
    def no_two_share_bytes(self) -> None:
        """Address ranges of different leases, and of leaves in one, are apart."""
        taken = sorted((start, start + length, one.lease) for one in self.holders for start, length in one.spans)
        for (_, end, mine), (start, _, other) in pairwise(taken):
            assert end <= start or mine == other
        for one in self.holders:
            spans = sorted(one.spans)
            assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))

    @precondition(lambda self: hasattr(self, "memory"))
    @invariant()
    def the_account_is_right(self) -> None:
        """Leased is what is held, by size; free is no more than is to be kept; names are those of slabs that exist."""
        held = {one.lease for one in self.holders if one.lease >= 0}
        stats = self.memory.stats()
        assert Counter(size for _, size in stats.leases) == Counter(self.leases[lease] for lease in held)
        assert stats.leased == sum(size for _, size in stats.leases)
        assert stats.peak >= stats.leased + stats.free
        for size, count in self._idle().items():
            assert count <= max(self.keep, self.wanted[size])
        if self.kind == "shared":
            assert len(_names() - self.files_before) == len(stats.leases) + sum(self._idle().values())

    def teardown(self) -> None:
        """Drop everything: all memory is free, and after a trim the system has it."""
        if not hasattr(self, "memory"):
            return
        self.holders.clear()
        stats = self.memory.stats()
        assert stats.leased == 0
        assert stats.leases == ()
        assert self.memory.trim() == stats.free
        assert self.memory.stats().free == 0
        assert _names() <= self.files_before


def _arrays(tree: Any) -> Iterator[Any]:
    for array in optree.tree_leaves(tree):
        assert isinstance(array, np.ndarray)
        yield array


def _names() -> set[str]:
    """Return the names of this process's shared slabs."""
    return {path.name for path in Path("/dev/shm").glob(f"mcore_snap-{os.getpid()}-*")}


TestLeases = Leases.TestCase
