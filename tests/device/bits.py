"""Checks of bits, and of page-locked memory."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import optree
import torch
from findings import Check, NotHereError, Numbers, Setting, WrongBitsError, raw, same
from torch import Tensor

from mcore_snap import HostMemory, load, model_tree, named_leaves, pinning, snapshot, swapped
from mcore_snap.frozen import owner_of
from mcore_snap.pinning import pin


def odd_leaves(device: torch.device) -> list[Tensor]:
    """Return leaves of many dtypes and layouts, with random bits."""
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.complex64, torch.complex128, torch.bool]
    dtypes += [torch.float8_e4m3fn, torch.float16]
    made = []
    for dtype in dtypes:
        top = 2 if dtype is torch.bool else 256
        bits = torch.randint(top, (64, 48 * dtype.itemsize), dtype=torch.uint8).view(dtype).to(device)
        made += [bits, bits.clone().t(), bits.clone()[:, ::3], bits.clone()[0, 0], bits.clone()[:, :0]]
    return made


def model_like(at: Setting) -> list[Tensor]:
    """Return a few flat buffers and small leaves of the size that was asked for."""
    size = at.nbytes // 4 // 2
    flat = [torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16, device=at.device) for _ in range(4)]
    return [*(t.view(torch.bfloat16) for t in flat), *(torch.randn(17, device=at.device) for _ in range(50))]


def check_round_trip(at: Setting) -> Numbers:
    """Keep, clear, load, look back: odd leaves and large ones."""
    leaves = [*odd_leaves(at.device), *model_like(at)]
    before = [raw(leaf) for leaf in leaves]
    kept = snapshot(leaves)
    same("the snapshot", [raw(leaf) for leaf in kept], before)
    for leaf in leaves:
        leaf.zero_()
    cleared = [raw(leaf) for leaf in leaves]
    with swapped(leaves, kept):
        same("inside a look-back", [raw(leaf) for leaf in leaves], before)
    same("after a look-back", [raw(leaf) for leaf in leaves], cleared)
    load(leaves, kept)
    same("after a load", [raw(leaf) for leaf in leaves], before)
    return {"leaves": len(leaves), "bytes": sum(leaf.nbytes for leaf in leaves)}


def check_read_only_sources(at: Setting) -> Numbers:
    """Read-only leaves are sources of copies to the device, and no target of copies from it."""
    weights = torch.randint(256, (1 << 20,), dtype=torch.uint8).to(at.device)
    kept = snapshot({"w": weights})
    copied = torch.empty_like(weights).copy_(kept["w"], non_blocking=True)
    at.synchronize()
    others = [copied, kept["w"].to(at.device, copy=True), torch.empty_like(weights)]
    load({"w": others[2]}, optree.tree_map(lambda leaf: leaf.view(-1), kept))
    same("a read-only source", [raw(t) for t in others], [raw(weights)] * 3)
    try:
        kept["w"].copy_(torch.zeros_like(weights))
    except RuntimeError:
        same("a refused write", [raw(kept["w"])], [raw(weights)])
        return {"bytes": weights.nbytes}
    raise WrongBitsError("a copy from the device into a leaf of a snapshot was not refused")


def check_page_locking(at: Setting) -> Numbers:
    """Registered memory has the exact size, counts as pinned everywhere, and a refusal has no consequences."""
    at.needs_device()
    memory, nbytes = HostMemory(kind="pinned"), at.nbytes + 12_345
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lease = memory.lease(nbytes)
    if said:
        raise NotHereError(str(said[0].message))
    if memory.stats().leased != nbytes:
        raise WrongBitsError(f"{memory.stats().leased:,} bytes leased for {nbytes:,}")
    places = [0, nbytes // 3, nbytes - 1]
    if not all(lease[place : place + 1].is_pinned() for place in places):
        raise WrongBitsError("torch does not take registered memory for pinned")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = pin(lease.data_ptr(), nbytes)
    if again is not None or len(said) != 1:
        raise WrongBitsError("registering the same memory twice was not refused with one warning")
    torch.ones(1, device=at.device).add_(1)  # raises here if the refusal is still pending in the runtime
    return {"bytes": nbytes, "places": len(places)}


def check_borders(at: Setting) -> Numbers:
    """Memory registered in several ranges serves as any other; and whether this driver lets a copy cross a border."""
    at.needs_device()
    size, memory = 6 << 20, HostMemory(kind="pinned")
    leaves = [torch.randint(256, (size,), dtype=torch.uint8).to(at.device)]
    before = [raw(leaf) for leaf in leaves]
    with mock.patch.object(pinning, "CHUNK", 4 << 20):
        kept = snapshot(leaves, memory=memory)
    owner = owner_of(kept[0])
    if owner is None or len(pinning.pieces(owner.private.data_ptr(), size)) < 2:
        raise NotHereError("memory was not registered in several ranges")
    same("a snapshot over a border", [raw(leaf) for leaf in kept], before)
    leaves[0].zero_()
    load(leaves, kept)
    same("a load over a border", [raw(leaf) for leaf in leaves], before)
    try:
        same("a copy over a border", [raw(kept[0].to(at.device))], before)
    except RuntimeError as error:
        return {"a plain copy over a border": str(error).splitlines()[0]}
    return {"a plain copy over a border": "allowed"}


def check_megatron(at: Setting) -> Numbers:
    """A real model under DDP with the distributed optimizer: train, keep, train, load."""
    at.needs_device()
    try:
        models, step = megatron_model(at.device)
        step()
    except Exception as error:
        raise NotHereError(f"Megatron-Core does not run here: {type(error).__name__}: {error}") from error
    tree = model_tree(models)

    def state() -> list[Tensor]:
        return [raw(t) for m in models for t in (*m.module.parameters(), *m.module.buffers())]

    before, kept = state(), snapshot(tree)
    same("the snapshot of a model", [raw(t) for t in named_leaves(kept).values()], list(map(raw, leaves_of(tree))))
    step()
    later = state()
    with swapped(tree, kept):
        same("the model in a look-back", state(), before)
    same("the model after a look-back", state(), later)
    load(tree, kept)
    same("the model after a load", state(), before)
    return {"tensors": len(before), "leaves": len(leaves_of(tree))}


def leaves_of(tree: Any) -> list[Tensor]:
    """Return the live leaves."""
    return list(named_leaves(tree).values())


def megatron_model(device: torch.device) -> tuple[list[Any], Callable[[], object]]:
    """Build a small GPT on the device, and what trains it by one step."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from mcore_snap.testing.gpt import batch, gpt, optimizer, train_step

    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)
    models = gpt(moe=True)
    tokens, trainer = batch(1).to(device), optimizer(models)
    return models, lambda: train_step(models, trainer, tokens)


def check_several_devices(at: Setting) -> Numbers:
    """One tree over all devices."""
    at.needs_device()
    count = torch.accelerator.device_count()
    if count == 1:
        raise NotHereError("there is one device")
    leaves = [torch.randint(256, (1 << 24,), dtype=torch.uint8).to(f"{at.device.type}:{i}") for i in range(count)]
    before, kept = [raw(leaf) for leaf in leaves], snapshot(leaves)
    for leaf in leaves:
        leaf.zero_()
    load(leaves, kept)
    same("a tree over several devices", [raw(leaf) for leaf in leaves], before)
    return {"devices": count}


CHECKS: Final[tuple[Check, ...]] = (
    check_round_trip,
    check_read_only_sources,
    check_page_locking,
    check_borders,
    check_megatron,
    check_several_devices,
)
