"""What a process does with its accelerator: nothing that it did not begin itself, and on no device but its own."""

import contextlib
import os
import types
from pathlib import Path

import pytest
import torch

from mcore_snap import HostMemory, digests, fingerprint, pinning, snapshot
from mcore_snap.megatron.residency import resident
from mcore_snap.pinning import accelerator_in_use, pin
from mcore_snap.testing.fake_accelerator import fake_accelerator


class Driver:
    """Page-locks anything, for as long as it works."""

    def __init__(self):
        self.ranges, self.works = {}, True

    def register(self, address, nbytes):
        """Page-lock."""
        if not self.works:
            raise RuntimeError("the driver has no more")
        self.ranges[address] = nbytes

    def unregister(self, address):
        """Undo it."""
        del self.ranges[address]


@pytest.fixture
def never_asked(monkeypatch):
    """A machine with an accelerator, where asking for it would already take it into use."""

    def spoil(*_):
        raise AssertionError("asking for the accelerator spoils it for children")

    for owner, name in ((torch.accelerator, "is_available"), (torch.cuda, "is_available"), (torch.cuda, "cudart")):
        monkeypatch.setattr(owner, name, spoil)


def test_a_process_that_does_not_use_the_device_does_not_begin_to(never_asked):
    """Snapshots of host memory stay pageable there, whatever is plugged in."""
    assert not accelerator_in_use()
    memory = HostMemory()
    kept = snapshot({"w": torch.ones(3)}, memory=memory)
    memory.prepare(kept).result()
    assert kept["w"].sum() == 3


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_one_that_does_has_page_locked_memory(never_asked, monkeypatch, kind):
    """By default; of any kind of accelerator."""
    driver = Driver()
    monkeypatch.setattr(pinning, "_runtime", lambda: driver)
    monkeypatch.setattr(getattr(torch, kind), "is_initialized", lambda: True)
    memory = HostMemory()
    kept = memory.lease(1000)
    assert driver.ranges == {kept.data_ptr(): 1000}


def test_page_locked_memory_is_not_copied_at_a_fork(monkeypatch):
    """The child shares it, and may read it for as long as it likes: what is leased at a fork is not leased again."""
    driver = Driver()
    monkeypatch.setattr(pinning, "_runtime", lambda: driver)
    memory = HostMemory(kind="pinned")
    live = {"w": torch.arange(1000)}
    kept, idle = snapshot(live, memory=memory), memory.lease(100)
    del idle
    address = min(driver.ranges)
    assert permissions(address) == "rw-s"
    child = os.fork()
    if child == 0:
        os._exit(0 if int(kept["w"][999]) == 999 else 1)
    assert os.waitpid(child, 0)[1] == 0
    size = memory.stats().leased
    del kept
    assert memory.stats().free == 100
    again = memory.lease(100)
    del again
    assert memory.stats().free == 100
    memory.trim()
    assert driver.ranges == {}
    driver.works = False
    with pytest.warns(RuntimeWarning, match="stays pageable"):
        pageable = memory.lease(size)
    assert permissions(pageable.data_ptr()) == "rw-p"


def permissions(address):
    """How the system says that memory is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(border, 16) for border in span.split("-"))
        if start <= address < end:
            return permissions
    return "unmapped"


class Runtime:
    """CUDA's runtime, which always succeeds, and notes which device was current."""

    def __init__(self, current):
        self.current, self.on = current, []

    def cudaHostRegister(self, *_):  # noqa: N802 - CUDA's name
        """Page-lock."""
        self.on.append(self.current[-1])
        return 0

    def cudaHostUnregister(self, _):  # noqa: N802 - CUDA's name
        """Undo it."""
        self.on.append(self.current[-1])
        return 0


@pytest.mark.parametrize(("contexts", "expected"), [([2], 2), ([1, 3], 1), ([], 0)])
def test_page_locking_makes_no_context_on_another_rank_s_device(monkeypatch, contexts, expected):
    """In a new thread the first device is current; the call is made on one that this process uses already."""
    current = [0]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    runtime = Runtime(current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in contexts, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    pins = pin(0, 10, lambda: pinning._Runtime(runtime))
    pins.release()
    assert runtime.on == [expected, expected]


@pytest.mark.parametrize("error", [AssertionError("no cudart"), AttributeError("cudart")])
def test_a_stand_in_for_cuda_without_its_runtime_leaves_memory_pageable(monkeypatch, error):
    """As accelerators do that patch torch.cuda with their own."""

    def cudart():
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    memory = HostMemory(kind="pinned")
    with pytest.warns(RuntimeWarning, match="stays pageable.*found a stand-in without it"):
        assert memory.lease(100).numel() == 100


@pytest.mark.parametrize("eager", ["none", "others"])
def test_a_host_copy_is_read_once_it_has_arrived(eager):
    """From the second offload on Megatron-Core copies without waiting, and frees the memory at once."""
    with fake_accelerator(eager) as fake:
        memory, host = torch.full((4,), 7.0), torch.zeros(4)
        data, values = fake.tensor(memory), memory.clone()
        fake.put(lambda: host.copy_(values))
        memory.untyped_storage().resize_(0)
        found = resident(types.SimpleNamespace(param_data_cpu=host), data)
        assert found is host
        assert host.tolist() == [7] * 4


def test_digests_of_a_device_are_those_of_the_same_bytes_on_the_host(monkeypatch):
    """Brought over in large pieces, since the host waits for each."""
    memory = torch.arange(1000, dtype=torch.int32)
    with fake_accelerator() as fake:
        whole = fingerprint({"w": fake.tensor(memory)})
        monkeypatch.setattr(digests, "_STAGED", 64)
        assert whole == fingerprint({"w": fake.tensor(memory)}) == fingerprint({"w": memory})
