"""What runs in a spawned process that is sent snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree

from mcore_snap.errors import SnapError
from mcore_snap.snapshots import frozen_entries
from mcore_snap.testing.asserts import leaves_by_name
from mcore_snap.testing.raw_bytes import to_bytes


def serve(pipe: Any, queue: Any, torch_queue: Any) -> None:
    """Do what is asked for through the pipe, and answer; with an error's name and text where there was one."""
    kept: dict[str, Any] = {}
    queues = {"queue": queue, "torch queue": torch_queue}
    while True:
        try:
            command, key, value = pipe.recv()
            if command == "stop":
                return
            pipe.send(_answer(command, key, value, kept, queues))
        except SnapError as error:  # noqa: PERF203 - one message after the other
            pipe.send((type(error).__name__, str(error)))


def _answer(command: str, key: str, value: Any, kept: dict[str, Any], queues: dict[str, Any]) -> Any:
    if command == "keep":
        kept[key] = queues[value].get(timeout=60) if isinstance(value, str) else value
        return "kept"
    if command == "read":
        return {name: to_bytes(leaf) for name, leaf in leaves_by_name(kept[key]).items()}
    if command == "write":
        return [_write(leaf) for leaf in optree.tree_leaves(kept[key]) if leaf.numel()]
    if command == "where":
        return [_permissions(entry.private.data_ptr()) for entry in frozen_entries(kept[key]) if entry is not None]
    if command == "give back":
        return kept[key]
    if command == "names":
        return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "mcore_snap-" in line]
    del kept[key]
    return "dropped"


def _write(leaf: Any) -> str:
    try:
        leaf.view(-1)[:1].fill_(0)
    except RuntimeError:
        return "refused"
    return "written"


def _permissions(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            return permissions
    return "unmapped"


def leave_with_a_snapshot() -> None:
    """Take a snapshot in shared memory, and end with it."""
    import torch

    from mcore_snap import HostMemory, snapshot

    global _LEFT  # noqa: PLW0603 - alive until the process ends
    _LEFT = snapshot({"w": torch.ones(1000)}, memory=HostMemory(kind="shared"))


_LEFT: Any = None
