"""Measurements against the link of the machine: one pinned copy in one direction, in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from bits import model_like
from findings import Check, MissedError, NotHereError, Numbers, Setting, WrongBitsError

from mcore_snap import HostMemory, load, snapshot, snapshot_async, swapped

GOAL: Final = 0.97
"""Of the link's rate."""

STALL: Final = 1e-3
"""Seconds that a snapshot in the background may keep its caller."""

EXTRA: Final = 0.02
"""Device memory, as a share of the model's size, that may be used on the way; plus 16 MiB."""


def seconds(at: Setting, action: Callable[[], object]) -> float:
    """Return how long an action and the device's work for it take."""
    at.synchronize()
    began = time.perf_counter()
    action()
    at.synchronize()
    return time.perf_counter() - began


def check_rates(at: Setting) -> Numbers:
    """Snapshot into recycled memory and load, each next to a bare copy of the same size; best of the run."""
    at.needs_device()
    tree, memory = model_like(at), HostMemory(kind="pinned")
    nbytes = sum(leaf.nbytes for leaf in tree)
    # torch rounds pinned memory up to a power of two, so the link is measured with one.
    size = 1 << (nbytes.bit_length() - 1)
    host, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=at.device),
    )
    cold = seconds(at, lambda: snapshot(tree, memory=memory))
    best = dict.fromkeys(("from", "snapshot", "to", "load"), float("inf"))
    for _ in range(at.repeats):
        took = {
            "from": seconds(at, lambda: host.copy_(there, non_blocking=True)) / size,
            "snapshot": seconds(at, lambda: snapshot(tree, memory=memory)) / nbytes,
            "to": seconds(at, lambda: there.copy_(host, non_blocking=True)) / size,
        }
        kept = snapshot(tree, memory=memory)
        took["load"] = seconds(at, lambda kept=kept: load(tree, kept)) / nbytes
        del kept
        best = {name: min(best[name], value) for name, value in took.items()}
    told: Numbers = {f"{name} GB/s": round(1e-9 / value, 2) for name, value in best.items()}
    told["snapshot / link"] = round(best["from"] / best["snapshot"], 3)
    told["load / link"] = round(best["to"] / best["load"], 3)
    told["first snapshot GB/s"] = round(1e-9 * nbytes / cold, 2)
    if best["from"] < GOAL * best["snapshot"] or best["to"] < GOAL * best["load"]:
        raise MissedError(told)
    return told


def check_device_memory(at: Setting) -> Numbers:
    """The peak of the device's memory during snapshot, load and look-back."""
    at.needs_device()
    module = torch.get_device_module(at.device)
    if not hasattr(module, "max_memory_allocated"):
        raise NotHereError("this device keeps no account of its memory")
    tree = model_like(at)
    nbytes = sum(leaf.nbytes for leaf in tree)
    at.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    kept = snapshot(tree)
    load(tree, kept)
    with swapped(tree, kept):
        pass
    told: Numbers = {"extra bytes": module.max_memory_allocated() - before, "model bytes": nbytes}
    if told["extra bytes"] > EXTRA * nbytes + (16 << 20):
        raise MissedError(told)
    return told


def check_background(at: Setting) -> Numbers:
    """How long a snapshot in the background keeps its caller, and how much is computed meanwhile."""
    at.needs_device()
    tree, memory = model_like(at), HostMemory(kind="pinned")
    snapshot(tree, memory=memory)
    x = torch.randn(2048, 2048, device=at.device)
    expected = [leaf.clone() for leaf in tree]
    stall, turns = float("inf"), 0
    for _ in range(at.repeats):
        at.synchronize()
        began = time.perf_counter()
        pending = snapshot_async(tree, memory=memory)
        stall = min(stall, time.perf_counter() - began)
        turns = 0
        while not pending.done():
            torch.mm(x, x)
            turns += 1
            torch.accelerator.current_stream().synchronize()
        kept = pending.result()
        if not all(
            torch.equal(a.to(at.device).view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(kept, expected, strict=True)
        ):
            raise WrongBitsError("a snapshot taken in the background differs")
        del kept, pending
    told: Numbers = {"stall s": round(stall, 6), "products meanwhile": turns}
    if stall > STALL:
        raise MissedError(told)
    return told


CHECKS: Final[tuple[Check, ...]] = (check_rates, check_device_memory, check_background)
