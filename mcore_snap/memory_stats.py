"""What a HostMemory holds, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostMemoryStats"]


@dataclass(frozen=True, slots=True)
class HostMemoryStats:
    """What a HostMemory holds, in bytes.

    Attributes:
        leased: Held by tensors.
        free: Kept to be leased again.
        peak: The most that was held at once, leased and free.
        leases: Label and size of every lease, the oldest first.
    """

    leased: int
    free: int
    peak: int
    leases: tuple[tuple[str, int], ...]
