"""The order of copies to and from devices, and the memory on both sides.

Devices are faked, streams and events included: work is done as late as its dependencies allow, or as early.
"""

from __future__ import annotations

import gc
import threading
import weakref

import faked_devices
import pytest
import torch
from faked_devices import numbers, on

from mcore_snap.streams import Copies, DeviceCopies, HostCopies, copies_for
from mcore_snap.testing.fake_accelerator import FakeAccelerator, fake_accelerator

# Not imported by name: the tests' arguments would shadow the import.
accelerator = faked_devices.accelerator


def test_only_tensors_on_a_device_need_a_device(accelerator: FakeAccelerator) -> None:
    """The layer is chosen by where the tensors lie."""
    assert isinstance(copies_for([]), HostCopies)
    assert isinstance(copies_for([torch.zeros(1)]), HostCopies)
    assert isinstance(copies_for([torch.zeros(1), accelerator.tensor(torch.zeros(1))]), DeviceCopies)


def test_each_device_has_one_stream_for_copies(accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many snapshots there are: torch's own go round, and are the user's and the collectives' as well."""
    made = []
    stream = accelerator.stream
    monkeypatch.setattr(torch, "Stream", lambda device: made.append(device) or stream(device))
    for index in (0, 1, 0):
        copies = copies_for([accelerator.tensor(numbers(0), index)])
        copies.copy([torch.zeros(4, dtype=torch.int32)], [accelerator.tensor(numbers(0), index)])
        copies.wait()
    assert made == [accelerator.device(0), accelerator.device(1)]


# --- from a device


def test_work_issued_before_is_seen(accelerator: FakeAccelerator) -> None:
    """A kernel that writes the weights and has not run yet comes before the copy."""
    source, memory = on(accelerator, numbers(0))
    target = torch.zeros(4, dtype=torch.int32)
    accelerator.put(lambda: memory.add_(10))
    copies = copies_for([source])
    accelerator.put(lambda: memory.add_(100))
    copies.copy([target], [source])
    copies.wait()
    assert target.tolist() == numbers(110).tolist()


def _copy_in_another_thread(copies: Copies, target: torch.Tensor, source: torch.Tensor) -> None:
    def copy() -> None:
        copies.copy([target], [source])
        copies.wait()

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()


def test_another_thread_does_not_wait_for_work_that_was_issued_later() -> None:
    """The trainer queues its next step while the copy is made; that it does not change the weights is its promise."""
    with fake_accelerator() as accelerator:
        source, memory = on(accelerator, numbers(0))
        target = torch.zeros(4, dtype=torch.int32)
        accelerator.put(lambda: memory.add_(10))
        copies = copies_for([source])
        later: list[int] = []
        accelerator.put(lambda: later.append(1))
        _copy_in_another_thread(copies, target, source)
        assert target.tolist() == numbers(10).tolist()
        assert later == []


def test_the_stream_that_was_current_counts_also_in_another_thread(accelerator: FakeAccelerator) -> None:
    """Each thread has current streams of its own: the one that produced the weights is the caller's."""
    source, memory = on(accelerator, numbers(0))
    target = torch.zeros(4, dtype=torch.int32)
    accelerator.set_stream(accelerator.stream(accelerator.device()))
    accelerator.put(lambda: memory.add_(10))
    copies = copies_for([source])
    _copy_in_another_thread(copies, target, source)
    assert target.tolist() == numbers(10).tolist()


def test_several_devices_in_one_tree(accelerator: FakeAccelerator) -> None:
    """Each device's copies go through a stream of that device, behind that device's work; host pairs as well."""
    memories = [numbers(0), numbers(50), numbers(70)]
    sources = [accelerator.tensor(memories[0], 0), accelerator.tensor(memories[1], 1), memories[2]]
    targets = [torch.zeros(4, dtype=torch.int32) for _ in sources]
    for index in (0, 1):
        accelerator.put(lambda index=index: memories[index].add_(1), index)
    copies = copies_for(sources)
    copies.copy(targets, sources)
    copies.wait()
    assert [t.tolist() for t in targets] == [numbers(n).tolist() for n in (1, 51, 70)]
    streams = {entry[1].device: entry[2].device for entry in accelerator.log if entry[0] == "record_stream"}
    assert streams == {accelerator.device(0): accelerator.device(0), accelerator.device(1): accelerator.device(1)}


# --- to a device


def test_work_issued_after_a_copy_to_the_device_sees_it(accelerator: FakeAccelerator) -> None:
    """Without the host having waited, and without a later kernel overtaking the copy."""
    target, memory = on(accelerator, numbers(0))
    seen: list[list[int]] = []
    accelerator.put(lambda: seen.append(memory.tolist()))
    copies = copies_for([target])
    copies.copy([target], [numbers(10)])
    accelerator.put(lambda: seen.append(memory.tolist()))
    accelerator.current_stream().run()
    copies.wait()
    assert seen == [numbers(0).tolist(), numbers(10).tolist()]


def test_the_stream_that_was_current_sees_what_another_thread_copied(accelerator: FakeAccelerator) -> None:
    """The forward pass after a load runs on the caller's stream."""
    target, memory = on(accelerator, numbers(0))
    accelerator.set_stream(accelerator.stream(accelerator.device()))
    copies = copies_for([target])
    thread = threading.Thread(target=copies.copy, args=([target], [numbers(10)]))
    thread.start()
    thread.join()
    seen: list[list[int]] = []
    accelerator.put(lambda: seen.append(memory.tolist()))
    accelerator.current_stream().run()
    assert seen == [numbers(10).tolist()]


def test_between_devices_both_sides_work_counts(accelerator: FakeAccelerator) -> None:
    """A source on one device and a target on another, not named when the layer was chosen."""
    source, produced = on(accelerator, numbers(0), 1)
    target, memory = on(accelerator, numbers(90), 0)
    seen: list[list[int]] = []
    accelerator.put(lambda: produced.add_(5), 1)
    accelerator.put(lambda: seen.append(memory.tolist()), 0)
    copies = copies_for([target])
    copies.copy([target], [source])
    accelerator.put(lambda: seen.append(memory.tolist()), 0)
    accelerator.current_stream(accelerator.device(0)).run()
    copies.wait()
    assert seen == [numbers(90).tolist(), numbers(5).tolist()]


# --- memory


def test_both_sides_live_until_they_are_waited_for(accelerator: FakeAccelerator) -> None:
    """Host memory is recycled when its last tensor is gone, a device's likewise."""
    source, target = accelerator.tensor(numbers(0)), torch.zeros(4, dtype=torch.int32)
    alive = [weakref.ref(source), weakref.ref(target)]
    copies = copies_for([source])
    copies.copy([target], [source])
    del source, target
    gc.collect()
    assert all(ref() is not None for ref in alive)
    copies.wait()
    accelerator.log.clear()
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_copies_that_are_dropped_are_waited_for(accelerator: FakeAccelerator) -> None:
    """Or memory would be leased again while a device still writes to it."""
    source, _ = on(accelerator, numbers(3))
    target = torch.zeros(4, dtype=torch.int32)
    copies = copies_for([source])
    copies.copy([target], [source])
    del copies
    gc.collect()
    assert target.tolist() == numbers(3).tolist()


def test_freed_device_memory_is_not_handed_out_under_a_copy(accelerator: FakeAccelerator) -> None:
    """Offloading frees storage under living tensors: the allocator knows of the stream that uses it, on both sides."""
    source, _ = on(accelerator, numbers(0))
    target, _ = on(accelerator, numbers(10))
    copies = copies_for([source, target])
    copies.copy([torch.zeros(4, dtype=torch.int32), target], [source, numbers(5)])
    recorded = {entry[1].data_ptr(): entry[2] for entry in accelerator.log if entry[0] == "record_stream"}
    copies.wait()
    assert set(recorded) == {source.data_ptr(), target.data_ptr()}
    assert accelerator.current_stream() not in recorded.values()
    assert source._version == 0


def test_an_error_half_way_leaves_nothing_under_way_and_the_current_stream_as_it_was(
    accelerator: FakeAccelerator,
) -> None:
    """What was issued before the error is waited for all the same."""
    sources = [accelerator.tensor(numbers(n)) for n in (0, 10)]
    targets = [torch.zeros(4, dtype=torch.int32) for _ in sources]
    here = accelerator.current_stream()
    copies = copies_for(sources)
    accelerator.fail_at = 1
    with pytest.raises(RuntimeError, match="refused"):
        copies.copy(targets, sources)
    assert accelerator.current_stream() is here
    copies.wait()
    assert targets[0].tolist() == numbers(0).tolist()


def test_current_stream_and_device_are_given_back(accelerator: FakeAccelerator) -> None:
    """Of every device, and which device is current."""
    mine = [accelerator.stream(accelerator.device(index)) for index in (0, 1)]
    accelerator.set_stream(mine[1])
    accelerator.set_stream(mine[0])
    sources = [accelerator.tensor(numbers(0), index) for index in (0, 1)]
    copies = copies_for(sources)
    copies.copy([torch.zeros(4, dtype=torch.int32) for _ in sources], sources)
    assert accelerator.current_stream() is mine[0]
    assert [accelerator.current_stream(accelerator.device(index)) for index in (0, 1)] == mine
    copies.wait()


def test_another_thread_never_makes_the_first_device_current(accelerator: FakeAccelerator) -> None:
    """It is current by default in a new thread, and a driver takes memory on it once it is made current again.

    Recording an event makes its device current for a moment, and then the one before.
    """
    source, produced = on(accelerator, numbers(0), 1)
    target = torch.zeros(4, dtype=torch.int32)
    here = accelerator.stream(accelerator.device(1))
    accelerator.set_stream(here)
    accelerator.put(lambda: produced.add_(1), 1)
    copies = copies_for([source])
    accelerator.log.clear()
    seen = []

    def other() -> None:
        copies.copy([target], [source])
        copies.wait()
        seen.append(accelerator.current_device())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert {entry[1] for entry in accelerator.log if entry[0] == "event"} == {accelerator.device(1)}
    assert seen == [accelerator.device(1)]
    assert accelerator.current_stream() is here
    assert target.tolist() == numbers(1).tolist()


def test_the_stream_that_hands_the_copy_over_sees_it_as_well(accelerator: FakeAccelerator) -> None:
    """Work may go on another stream than the one that was current when the layer was chosen."""
    target, memory = on(accelerator, numbers(0))
    copies = copies_for([target])
    accelerator.set_stream(accelerator.stream(accelerator.device()))
    copies.copy([target], [numbers(10)])
    seen: list[list[int]] = []
    accelerator.put(lambda: seen.append(memory.tolist()))
    accelerator.current_stream().run()
    assert seen == [numbers(10).tolist()]
