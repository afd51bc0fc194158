"""Checks of what is left behind on devices: memory that is kept for nothing, and contexts that nobody asked for."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO, Final

import torch
from findings import Check, MissedError, NotHereError, Numbers, Setting

from mcore_snap import HostMemory, snapshot

SNAPSHOTS: Final = 40
"""More than there are streams in torch's pool: as it hands them out in turn, each could keep memory of its own."""

CONTEXT: Final = 64 << 20
"""Bytes below which a device's memory has no new context in it: these take hundreds of MiB."""

ON_DEVICE_1: Final = """
import sys
import torch
from mcore_snap import HostMemory, snapshot_async

def pause(word):
    print(word, flush=True)
    sys.stdin.readline()

torch.cuda.set_device(1)
tree = {"w": torch.ones(1 << 20, device="cuda:1")}
torch.cuda.synchronize(1)
pause("ready")
memory = HostMemory(kind="pinned")
memory.prepare(tree).result()
kept = snapshot_async(tree, memory=memory).result()
gaps = snapshot_async({"w": tree["w"][::3]}, memory=memory).result()
pause("done")
"""


def check_reserved_memory(at: Setting) -> Numbers:
    """A leaf with gaps is made dense on the device: many snapshots of it need no more memory than a few."""
    at.needs_device()
    module = torch.get_device_module(at.device)
    if not (hasattr(module, "memory_reserved") and hasattr(module, "empty_cache")):
        raise NotHereError("this device keeps no account of its memory")
    leaf = torch.zeros(at.nbytes // 32 // 4, device=at.device)[::3]
    memory = HostMemory(kind="pinned")
    at.synchronize()
    module.empty_cache()  # what other checks left could serve
    for _ in range(3):
        snapshot([leaf], memory=memory)
    before = int(module.memory_reserved(at.device))
    for _ in range(SNAPSHOTS):
        snapshot([leaf], memory=memory)
    more = int(module.memory_reserved(at.device)) - before
    told: Numbers = {"reserved more": more, "leaf bytes": leaf.nbytes, "snapshots": SNAPSHOTS}
    if more > 0:
        raise MissedError(told)
    return told


def check_other_devices(at: Setting) -> Numbers:
    """A process whose tensors are all on device 1 gets no context on device 0, in whatever thread it is worked."""
    at.needs_device()
    if at.device.type != "cuda":
        raise NotHereError("it is about the contexts of CUDA and ROCm")
    if torch.cuda.device_count() == 1:
        raise NotHereError("there is one device")
    with subprocess.Popen(
        [sys.executable, "-c", ON_DEVICE_1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        watchdog = threading.Timer(60, child.kill)
        watchdog.start()
        try:
            before = _used_when(child.stdout, "ready")
            _go_on(child.stdin)
            more = _used_when(child.stdout, "done") - before
            _go_on(child.stdin)
        finally:
            watchdog.cancel()
            child.kill()
    told: Numbers = {"bytes more on device 0": more}
    if more > CONTEXT:
        raise MissedError(told)
    return told


def _used_when(output: IO[str] | None, word: str) -> int:
    # Asked from here: the other process would get its context by asking.
    line = "" if output is None else output.readline().strip()
    if line != word:
        raise RuntimeError(f"the process on device 1 ended before it was {word}")
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def _go_on(to: IO[str] | None) -> None:
    if to is not None:
        to.write("\n")
        to.flush()


CHECKS: Final[tuple[Check, ...]] = (check_reserved_memory, check_other_devices)
