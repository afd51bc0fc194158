"""How a copy is made: on the host, or in how many pieces and of what layout to and from a device."""

from __future__ import annotations

import faked_devices
import pytest
import torch
from faked_devices import numbers, on
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap import pinning, snapshot
from mcore_snap.streams import DeviceCopies, HostCopies, copies_for
from mcore_snap.testing.fake_accelerator import FakeAccelerator, fake_accelerator
from mcore_snap.testing.raw_bytes import to_bytes
from mcore_snap.testing.strategies import tensors

# Not imported by name: the tests' arguments would shadow the import.
accelerator = faked_devices.accelerator


# --- on the host


@given(st.lists(tensors(), max_size=4))
def test_host_copies_move_every_byte(sources: list[torch.Tensor]) -> None:
    """One or several, of any dtype and layout, as the bits they are."""
    targets = [torch.empty_like(s, memory_format=torch.contiguous_format) for s in sources]
    copies = HostCopies()
    bits = [s if s.dtype is torch.complex128 else s.view(_word(s)) for s in sources]
    copies.copy([t if t.dtype is torch.complex128 else t.view(_word(t)) for t in targets], bits)
    assert [to_bytes(t) for t in targets] == [to_bytes(s) for s in sources]
    copies.wait()


def _word(tensor: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]


@pytest.mark.parametrize("surrounding", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_host_copies_write_inference_tensors_and_others_in_any_mode(surrounding: bool, count: int) -> None:
    """Together, too; and the version of an ordinary tensor moves also inside inference mode."""
    with torch.inference_mode():
        special = [torch.zeros(3) for _ in range(count)]
    ordinary = [torch.zeros(3) for _ in range(count)]
    before = [t._version for t in ordinary]
    with torch.inference_mode(surrounding):
        HostCopies().copy([*special, *ordinary], [torch.ones(3)] * (2 * count))
    assert all(bool((t == 1).all()) for t in (*special, *ordinary))
    assert [t._version for t in ordinary] == [v + 1 for v in before]


# --- to and from devices


def test_the_host_waits_for_events_only(accelerator: FakeAccelerator) -> None:
    """Once per batch and device, after all copies were queued; nothing that blocks before."""
    sources = [accelerator.tensor(numbers(n)) for n in range(3)]
    copies = copies_for(sources)
    copies.copy([torch.zeros(4, dtype=torch.int32) for _ in sources], sources)
    assert ("synchronize",) not in accelerator.log
    assert [quick for *_, quick in accelerator.copies()] == [True] * 3
    copies.wait()
    copies.wait()
    assert accelerator.log.count(("synchronize",)) == 1


@given(tensors(), st.sampled_from(["to", "from"]))
def test_any_layout_arrives(memory: torch.Tensor, direction: str) -> None:
    """Dense ones as one run whatever their order; those with gaps in a way that blocks."""
    with fake_accelerator() as fake:
        if memory.dtype is not torch.complex128:
            memory = memory.view(_word(memory))
        other = torch.empty_like(memory)
        there = fake.tensor(memory if direction == "from" else other)
        target, source = (other, there) if direction == "from" else (there, memory)
        copies = copies_for([there])
        copies.copy([target], [source])
        copies.wait()
        assert to_bytes(other) == to_bytes(memory)
        blocked = [not quick for *_, quick in fake.copies()]
        if memory.numel() and memory.stride() == other.stride():
            assert blocked == [False]


def test_a_device_that_was_not_named_before(accelerator: FakeAccelerator) -> None:
    """What is copied between two devices is there for work on either, whichever was known beforehand."""
    source, memory = on(accelerator, numbers(3), 0)
    target, there = on(accelerator, torch.zeros(4, dtype=torch.int32), 1)
    copies = DeviceCopies([])
    accelerator.put(lambda: memory.add_(1))
    copies.copy([target], [source])
    seen: list[list[int]] = []
    accelerator.put(lambda: seen.append(there.tolist()), 1)
    copies.wait()
    accelerator.current_stream(accelerator.device(1)).run()
    assert seen == [numbers(4).tolist()]


class Driver:
    """Page-locks anything."""

    def register(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def unregister(self, address: int) -> None:
        """Do nothing."""


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch):
    """Host memory that was page-locked in several ranges."""
    monkeypatch.setattr(pinning, "CHUNK", 64)
    host = torch.arange(100, dtype=torch.int32)
    pins = pinning.pin(host.data_ptr(), host.nbytes, Driver)
    assert pins is not None
    yield host
    pins.release()


@pytest.mark.parametrize("part", [slice(0, 100), slice(3, 90), slice(17, 20)])
def test_no_copy_crosses_a_border_of_page_locked_ranges(
    accelerator: FakeAccelerator, locked: torch.Tensor, part: slice
) -> None:
    """The driver refuses those; one that lies within is not split."""
    host = locked[part]
    there, memory = on(accelerator, torch.zeros(host.numel(), dtype=torch.int32))
    copies = copies_for([there])
    copies.copy([there], [host])
    copies.wait()
    assert memory.tolist() == host.tolist()
    made = [(source.data_ptr(), source.nbytes) for _, source, _ in accelerator.copies()]
    assert made == pinning.pieces(host.data_ptr(), host.nbytes)
    for address, nbytes in made:
        assert (address - locked.data_ptr()) // 64 == (address + nbytes - 1 - locked.data_ptr()) // 64


@pytest.mark.parametrize("surrounding", [False, True])
def test_inference_tensors_and_others_in_any_mode(accelerator: FakeAccelerator, surrounding: bool) -> None:
    """A rollout's weights may be inference tensors; a snapshot may be taken in inference mode."""
    with torch.inference_mode():
        special = torch.zeros(3)
        of_special = accelerator.tensor(torch.ones(3))
    ordinary = torch.zeros(3)
    with torch.inference_mode(surrounding):
        copies = copies_for([of_special])
        copies.copy([special, ordinary], [of_special, accelerator.tensor(torch.ones(3))])
        copies.wait()
    assert special.tolist() == ordinary.tolist() == [1, 1, 1]


def test_read_only_leaves_can_be_sources(accelerator: FakeAccelerator) -> None:
    """What a tree_map passes on as it is, is a read-only alias: it has no address to write to, and needs none."""
    kept = snapshot({"w": torch.arange(5)})
    target, memory = on(accelerator, torch.zeros(5, dtype=torch.int64))
    copies = copies_for([target])
    copies.copy([target], [kept["w"]])
    copies.wait()
    assert memory.tolist() == [0, 1, 2, 3, 4]


def test_memory_that_gives_no_address_is_copied_in_one_piece(locked: torch.Tensor) -> None:
    """Older releases of torch have no address for read-only leaves: they are copied all the same."""

    class Older(torch.Tensor):
        const_data_ptr = property(lambda self: self.data_ptr)

        def data_ptr(self) -> int:
            raise RuntimeError("Cannot access data pointer of Tensor")

    with fake_accelerator() as fake:
        target, memory = on(fake, torch.zeros(100, dtype=torch.int32))
        copies = copies_for([target])
        copies.copy([target], [locked.as_subclass(Older)])
        copies.wait()
        assert memory.tolist() == locked.tolist()
        assert len(fake.copies()) == 1


def test_empty_tensors_and_no_tensors(accelerator: FakeAccelerator) -> None:
    """Nothing to copy is no error."""
    source = accelerator.tensor(torch.zeros(0, 3))
    copies = copies_for([source])
    copies.copy([], [])
    copies.copy([torch.zeros(0, 3)], [source])
    copies.wait()
    HostCopies().copy([], [])
