"""What a rank does all day: trains a real model, takes snapshots, goes back, drops them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from mcore_snap import HostMemory, bitwise_equal, load, model_tree, snapshot, snapshot_async, swapped
from mcore_snap.testing.gpt import batch, gpt, optimizer, train_step


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def exactly_resident() -> int:
    """Return the same, counted page by page: the kernel's running count lags behind by some."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def rounds_of_one_version(rank: int, rounds: int) -> dict[str, Any]:
    """Train, take a snapshot, train, go back to it, drop it; measure after every round, and around our part of some."""
    chunks = gpt(layers=1, hidden=64)
    steps = optimizer(chunks)
    tokens = batch(1)
    tree = model_tree(chunks)
    memory = HostMemory()
    sizes, stats, ours = [], set(), []
    for number in range(rounds):
        measured = number % 4 == 0
        before = exactly_resident() if measured else 0
        if number % 2:
            pending = snapshot_async(tree, memory=memory)
            kept = pending.result()
            del pending
        else:
            kept = snapshot(tree, memory=memory)
        if not measured:
            train_step(chunks, steps, tokens)
            if number % 10 == 1:
                assert not bitwise_equal(tree, kept)
        load(tree, kept)
        if number % 10 == 1:
            assert bitwise_equal(tree, kept)
        del kept
        if measured:
            ours.append(exactly_resident() - before)
            train_step(chunks, steps, tokens)
        now = memory.stats()
        stats.add((now.leased, now.free, now.peak))
        sizes.append(resident())
    return {"resident": sizes, "stats": sorted(stats), "ours": ours}


def rounds_of_versions(rank: int, rounds: int, most: int) -> dict[str, Any]:
    """Train; keep up to so many versions, drop the oldest, look back at each."""
    chunks = gpt(hidden=64)
    steps = optimizer(chunks)
    tokens = batch(1)
    tree = model_tree(chunks)
    memory = HostMemory()
    versions: list[Any] = []
    sizes, stats = [], set()
    for number in range(rounds):
        train_step(chunks, steps, tokens)
        versions.append(snapshot(tree, memory=memory))
        if len(versions) > most:
            # Not always the oldest, and sometimes all of them.
            del versions[: (most if number % 50 == 49 else 1)]
        with swapped(tree, versions[0]):
            if number % 10 == 0:
                assert bitwise_equal(tree, versions[0])
        now = memory.stats()
        stats.add(now.peak)
        sizes.append(resident())
    size = memory.stats().leases[0][1]
    leased, count = memory.stats().leased, len(versions)
    versions.clear()
    free = memory.stats().free
    return {
        "resident": sizes,
        "size": size,
        "peak": max(stats) / size,
        "leased": leased / size,
        "count": count,
        "free": free / size,
        "after": (memory.trim() / size, memory.stats().leased, memory.stats().free),
    }
