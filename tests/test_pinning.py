"""Page-locking: all of a range or nothing of it, and never in silence."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_snap.pinning import CHUNK, pieces, pin


class Driver:
    """A driver that keeps to the rules of host registration, and may refuse at a call."""

    def __init__(self, refuses: int | None = None, keeps: frozenset[int] = frozenset()) -> None:
        self.ranges: dict[int, int] = {}
        self.calls = 0
        self.refuses = refuses
        self.keeps = set(keeps)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range that is locked nowhere yet."""
        self.calls += 1
        if self.calls - 1 == self.refuses:
            raise RuntimeError("no memory left to lock")
        assert nbytes > 0
        assert all(address + nbytes <= a or a + n <= address for a, n in self.ranges.items())
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        """Undo it, for a range that is locked."""
        if address in self.keeps:
            raise RuntimeError("it is in use")
        del self.ranges[address]


@given(st.integers(1, 1 << 47), st.integers(0, 4 * CHUNK), st.data())
def test_a_range_is_registered_to_the_byte_and_released(address: int, nbytes: int, data: st.DataObject) -> None:
    """Nothing beside it, in as few pieces as can be; and copies of any part of it keep to the pieces."""
    driver = Driver()
    pins = pin(address, nbytes, lambda: driver)
    assert pins is not None
    assert sum(driver.ranges.values()) == nbytes
    assert len(driver.ranges) == -(-nbytes // CHUNK)
    assert all(address <= a and a + n <= address + nbytes and n <= CHUNK for a, n in driver.ranges.items())
    assert dict(pieces(address, nbytes)) == driver.ranges
    start = data.draw(st.sampled_from(range(0, nbytes + 1, CHUNK)) | st.integers(0, nbytes))
    size = data.draw(st.integers(0, nbytes - start))
    found = pieces(address + start, size)
    assert sum(n for _, n in found) == size
    assert [a for a, _ in found] == [address + start, *(a + n for a, n in found)][: len(found)]
    for a, n in found:
        assert n > 0
        assert any(b <= a and a + n <= b + m for b, m in driver.ranges.items())
    pins.release()
    assert driver.ranges == {}
    assert pieces(address, nbytes) == [(address, nbytes)][: nbytes > 0]
    pins.release()


@pytest.mark.parametrize("refuses", range(4))
def test_a_refusal_at_any_piece_leaves_nothing_registered(refuses: int) -> None:
    """And says so, once, with the driver's reason."""
    driver = Driver(refuses)
    with pytest.warns(RuntimeWarning, match="pageable.*no memory left to lock") as said:
        assert pin(CHUNK // 2, 3 * CHUNK + 1, lambda: driver) is None
    assert len(said) == 1
    assert driver.ranges == {}
    assert driver.calls == refuses + 1
    assert len(pieces(0, 4 * CHUNK)) == 1


def test_what_cannot_be_undone_is_said() -> None:
    """A piece that stays locked after a refusal is in the warning."""
    driver = Driver(refuses=2, keeps=frozenset({0}))
    with pytest.warns(RuntimeWarning, match=r"no memory left to lock; 1 range.*it is in use"):
        assert pin(0, 3 * CHUNK, lambda: driver) is None
    assert list(driver.ranges) == [0]


def test_release_goes_on_after_an_error_and_can_be_tried_again() -> None:
    """Memory that is still locked must not go back to the system, so it has to be known."""
    driver = Driver(keeps=frozenset({CHUNK}))
    pins = pin(0, 3 * CHUNK, lambda: driver)
    assert pins is not None
    with pytest.raises(RuntimeError, match=r"1 range\(s\).*it is in use"):
        pins.release()
    assert list(driver.ranges) == [CHUNK]
    driver.keeps.clear()
    assert len(pieces(0, 3 * CHUNK)) == 2
    pins.release()
    assert driver.ranges == {}
    assert len(pieces(0, 3 * CHUNK)) == 1


def test_without_a_device_memory_stays_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default way to find what registers says what it found."""
    for where in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(where, "is_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="CUDA and ROCm, found no accelerator"):
        assert pin(0, 10) is None


class Runtime:
    """CUDA's runtime: codes instead of exceptions, and an error that stays pending until asked for."""

    def __init__(self, codes: dict[str, int]) -> None:
        self.codes = codes
        self.calls: list[tuple[object, ...]] = []
        self.pending = 0

    def _call(self, name: str, *args: object) -> int:
        self.calls.append((name, *args))
        self.pending = self.codes.get(name, 0) or self.pending
        return self.codes.get(name, 0)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        """Page-lock."""
        return self._call("register", address, nbytes, flags)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Undo it."""
        return self._call("unregister", address)

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        """Say what a code means."""
        return f"error {code}"


def _runtime(monkeypatch: pytest.MonkeyPatch, codes: dict[str, int]) -> Runtime:
    runtime = Runtime(codes)

    def launch(*_: object, **__: object) -> torch.Tensor:
        # torch asks for the pending error after a kernel, which takes it back, and raises it.
        code, runtime.pending = runtime.pending, 0
        raise RuntimeError(f"CUDA error: error {code}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", launch)
    return runtime


def test_the_runtime_is_called_with_the_exact_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with the flag that locks for every device."""
    runtime = _runtime(monkeypatch, {})
    pins = pin(4096, 12345)
    assert pins is not None
    pins.release()
    assert runtime.calls == [("register", 4096, 12345, 1), ("unregister", 4096)]


def test_an_error_of_the_runtime_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the user's next kernel, which has nothing to do with it, would raise it."""
    runtime = _runtime(monkeypatch, {"register": 2})
    with pytest.warns(RuntimeWarning, match="registering 10 bytes failed: error 2"):
        assert pin(4096, 10) is None
    assert runtime.pending == 0
    runtime = _runtime(monkeypatch, {"unregister": 713})
    pins = pin(4096, 10)
    assert pins is not None
    with pytest.raises(RuntimeError, match="unregistering failed: error 713"):
        pins.release()
    assert runtime.pending == 0


def test_a_warning_made_an_error_leaves_nothing_registered() -> None:
    """Who has warnings raised gets the error, after everything was undone."""
    driver = Driver(refuses=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="pageable"):
            pin(0, 2 * CHUNK, lambda: driver)
    assert driver.ranges == {}
