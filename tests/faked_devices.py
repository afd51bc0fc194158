"""Fake devices in each way to schedule them, and what the tests put on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mcore_snap.testing.fake_accelerator import FakeAccelerator, fake_accelerator


@pytest.fixture(params=["none", "first", "others"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[FakeAccelerator]:
    """Fake devices, once for each way to schedule them."""
    with fake_accelerator(request.param) as fake:
        yield fake


def numbers(start: int, count: int = 4) -> torch.Tensor:
    """Return `count` numbers from `start` on, in host memory."""
    return torch.arange(start, start + count, dtype=torch.int32)


def on(fake: FakeAccelerator, values: torch.Tensor, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same memory as a device tensor and as what a kernel of that device writes to."""
    return fake.tensor(values, index), values
