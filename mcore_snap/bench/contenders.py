"""What is measured: each way of keeping weights or putting them back, by the key it has in the report."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

import mcore_snap
from mcore_snap.bench import released_verl
from mcore_snap.bench.stand_in import StandIn, Subject
from mcore_snap.host_memory import HostMemory

__all__ = ["ASYNC", "LIMIT", "OTHERS", "OURS", "SMALL", "VERL", "Contender", "Kind", "problem_of"]

Kind: TypeAlias = Literal["snapshot", "load", "look-back"]
"""What it has to do: keep the current weights; put the old ones in; put them in, and the current ones back."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One thing to measure.

    Attributes:
        kind: What it does.
        run: Does it, and returns what was kept. Calls its argument while the old weights are in.
        tensors: Of a snapshot: the kept weights in what `run` returned, in the order of the model.
        finish: Waits for what `run` only began; not measured.
        fresh: Whether it takes memory from the system each time, rather than memory that is there.
    """

    kind: Kind
    run: Callable[[Callable[[], object]], Any]
    tensors: Callable[[Any], Iterable[Tensor]] = lambda _: ()
    finish: Callable[[Any], Any] | None = None
    fresh: bool = False


def problem_of(contender: Contender, subject: Subject) -> str | None:
    """Run a contender once, and return in words which bits it got wrong, or ``None``."""
    subject.reset()
    seen: list[bool] = []
    result = contender.run(lambda: seen.append(subject.holds(old=True)))
    if contender.finish is not None:
        result = contender.finish(result)
    if contender.kind == "snapshot" and not subject.same(contender.tensors(result)):
        return "what was kept is not the model's bits"
    if contender.kind == "look-back" and seen != [True]:
        return "the old weights were not live inside"
    old = contender.kind == "load"
    if not subject.holds(old=old):
        return f"the {'old' if old else 'current'} weights were not live afterwards"
    return None


# The limit: nothing that ends with the same bytes on the host can be faster than one copy into memory
# that is there already.


def _limit(subject: Subject) -> Contender:
    source = subject.live[0] if len(subject.live) == 1 else torch.cat([one.reshape(-1) for one in subject.live])
    target = torch.empty(
        source.shape, dtype=source.dtype, device="cpu", pin_memory=torch.accelerator.is_available()
    ).zero_()
    return Contender("snapshot", lambda _: target.copy_(source), lambda kept: [kept])


LIMIT: Final = {"limit": _limit}

# This library.


def _leaves(snap: Any) -> Iterable[Tensor]:
    return mcore_snap.named_leaves(snap).values()


def _recycled(subject: Subject) -> Contender:
    tree = mcore_snap.model_tree(subject.model)
    return Contender("snapshot", lambda _: mcore_snap.snapshot(tree), _leaves)


def _cold(subject: Subject) -> Contender:
    tree = mcore_snap.model_tree(subject.model)
    return Contender("snapshot", lambda _: mcore_snap.snapshot(tree, memory=HostMemory(keep=0)), _leaves, fresh=True)


def _load(subject: Subject) -> Contender:
    tree = mcore_snap.model_tree(subject.model)
    old = subject.old_version("mcore_snap", lambda: mcore_snap.snapshot(tree))
    return Contender("load", lambda _: mcore_snap.load(tree, old))


def _look_back(subject: Subject) -> Contender:
    tree = mcore_snap.model_tree(subject.model)
    old = subject.old_version("mcore_snap", lambda: mcore_snap.snapshot(tree))

    def run(look: Callable[[], object]) -> None:
        with mcore_snap.swapped(tree, old):
            look()

    return Contender("look-back", run)


OURS: Final = {"snapshot_recycled": _recycled, "snapshot_cold": _cold, "load": _load, "look_back": _look_back}


def _async(subject: Subject) -> Contender:
    tree = mcore_snap.model_tree(subject.model)
    return Contender(
        "snapshot",
        lambda _: mcore_snap.snapshot_async(tree),
        _leaves,
        finish=lambda pending: pending.result(),
    )


ASYNC: Final = {"async_stall": _async}


def _pytree(subject: Subject) -> Contender:
    tree = {f"{number:09}": tensor for number, tensor in enumerate(subject.live)}
    return Contender("snapshot", lambda _: mcore_snap.snapshot(tree), lambda snap: snap.values())


SMALL: Final = {"small_limit": _limit, "small_pytree": _pytree, "small_model": _recycled}

# verl's released functions. Its trainers look back by saving the current weights, restoring the old ones, and
# restoring the current ones.


def _kept_by_verl(state: Any) -> Iterable[Tensor]:
    return [buffer["param_data"] for buffers in state["model_chunk_0"]["buffer_states"] for buffer in buffers]


def _verl(subject: Subject, kind: Kind) -> Contender:
    theirs = released_verl.functions(StandIn)
    models = [subject.model]
    save, restore = theirs.copy_megatron_model_to_cpu, theirs.restore_megatron_model_from_cpu

    def snapshot(_: object) -> Any:
        with released_verl.unpinned():
            return save(models)

    if kind == "snapshot":
        return Contender(kind, snapshot, _kept_by_verl, fresh=True)
    old = subject.old_version("verl", lambda: snapshot(None))

    def look_back(look: Callable[[], object]) -> None:
        current = snapshot(None)
        restore(models, old)
        look()
        restore(models, current)

    if kind == "look-back":
        return Contender(kind, look_back, fresh=True)
    return Contender(kind, lambda _: restore(models, old))


VERL: Final = {
    "verl_snapshot": lambda subject: _verl(subject, "snapshot"),
    "verl_load": lambda subject: _verl(subject, "load"),
    "verl_look_back": lambda subject: _verl(subject, "look-back"),
}

# torch's own: what checkpoints are staged with, into new memory or again into the same, and a deep copy.


def _stage(subject: Subject) -> Contender:
    # It brings in all of torch.distributed, which nothing else here needs.
    from torch.distributed.checkpoint.staging import BlockingAsyncStager  # noqa: PLC0415

    state, stager = subject.model.state_dict(), BlockingAsyncStager()
    return Contender("snapshot", lambda _: stager.stage(state), lambda kept: kept.values(), fresh=True)


def _stage_again(subject: Subject) -> Contender:
    from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict  # noqa: PLC0415

    state = subject.model.state_dict()
    kept = _create_cpu_state_dict(state, pin_memory=torch.accelerator.is_available())
    return Contender("snapshot", lambda _: _copy_state_dict(state, kept), lambda again: again.values())


def _deepcopy(subject: Subject) -> Contender:
    state = subject.model.state_dict()
    return Contender("snapshot", lambda _: copy.deepcopy(state), lambda kept: kept.values(), fresh=True)


OTHERS: Final = {"dcp_stage": _stage, "dcp_stage_reused": _stage_again, "deepcopy": _deepcopy}
