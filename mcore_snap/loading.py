"""Putting a snapshot back, in place and bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import optree
import torch
from torch import Tensor

from mcore_snap.checking import Problem, refuse, refuse_models
from mcore_snap.copying import Write, overlap_problems, write
from mcore_snap.errors import SnapError
from mcore_snap.in_flight import wait_for_readers
from mcore_snap.live import live_part
from mcore_snap.live_trees import layouts_of, read_once, stateless_of
from mcore_snap.plans import Expected, check_fit, pair_paths, pair_placements, pair_slices
from mcore_snap.registration import Names, flatten, flatten_named
from mcore_snap.snapshots import frozen_entries
from mcore_snap.words import plain, problem_with, spec_of, words

__all__ = ["load", "planned", "write_plan"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a load is going to do, checked.

    Attributes:
        writes: Copies into live memory.
        hand_over: Extra state to be handed to its module, which keeps it where no copy reaches.
    """

    writes: tuple[Write, ...]
    hand_over: tuple[Write, ...]


def load(tree: T, snap: Any) -> T:
    """Write a snapshot into a tree, in place, and return the tree.

    No address, stride, ``requires_grad``, tie, gradient or optimizer view changes. Version counters
    of the parameters move, so that a backward pass over a graph made before fails loudly. The
    optimizer is not told: with bf16 weights its fp32 masters overwrite the load at the next step;
    `rollback` tells it.

    Every rank of the data-parallel group has to load the same version, at the same point of the
    program: where overlapped parameter gathers are due, or the tree keeps slices, loading is
    collective, and the next gather would mix versions. `agree` checks that.

    Args:
        tree: What `model_tree` gave, or any pytree of tensors.
        snap: A snapshot of it, or what a tree_map made of snapshots.

    Raises:
        StructureMismatch: Names, dtypes or shapes differ, or a leaf is of a kind that cannot be
            written. The message lists all of them, and nothing was written.
        NotResident: Memory to write to or to read from is not there.
        NotReady: Weights are in flight and cannot be settled from here.
        SnapError: A copy failed half-way; the message lists what was written.

    >>> from mcore_snap import snapshot
    >>> live = {"w": torch.ones(2)}
    >>> kept = snapshot(live)
    >>> _ = live["w"].zero_()
    >>> load(live, kept)
    {'w': tensor([1., 1.])}
    """
    write_plan(planned(tree, snap), tracked=True)
    return tree


def planned(tree: Any, snap: Any) -> Plan:
    """Check everything and return what is to be written; touch nothing.

    Raises:
        StructureMismatch: As `load`; it lists every problem of every kind.
        NotResident: As `load`, where all that is wrong is that memory is not there.
    """
    tree, snap = read_once(tree), read_once(snap)
    targets, spec = flatten(tree)
    refuse_models(targets, Names(spec), "load writes to trees; nothing was written")
    sources, kept_spec = flatten(snap)
    # A handle in an ordinary container may have been re-pointed; the bytes it was made for have not.
    owned: list[Any] = [
        source if owner is None else owner.private for source, owner in zip(sources, frozen_entries(snap), strict=True)
    ]
    frozen = {id(target) for target, owner in zip(targets, frozen_entries(tree), strict=True) if owner is not None}
    candidates, unpaired = _paired((tree, snap), (targets, spec), (owned, kept_spec))
    slices = ([layout.data_parallel for layout in layouts_of(side)] for side in (tree, snap))
    problems = [("structure", line) for line in [*unpaired, *pair_slices(*slices)]]
    writes, hand_over = [], []
    for one in candidates:
        found = _problems(one)
        if id(one.target) in frozen:
            line = f"{one.name}: expected live memory, found a leaf of a snapshot; the live tree comes first"
            found = [("structure", line)]
        live = live_part(one.target)
        if found:
            problems += found
        elif live.accept is None:
            writes.append(one)
        elif _same_bytes(one.target, one.source):
            continue
        elif not live.settable:
            line = f"{one.name}: expected a module that defines set_extra_state, found one without"
            problems.append(("structure", line))
        else:
            hand_over.append(one)
    problems += [("structure", line) for line in overlap_problems(writes)]
    refuse("the snapshot does not fit; nothing was written", problems)
    return Plan(tuple(writes), tuple(hand_over))


_Flat: TypeAlias = tuple[Sequence[Any], optree.PyTreeSpec]


def _paired(trees: tuple[Any, Any], live: _Flat, kept: _Flat) -> tuple[list[Write], list[str]]:
    (targets, spec), (sources, kept_spec) = live, kept
    if spec == kept_spec:
        names = Names(spec)
        return [Write(names, i, *pair) for i, pair in enumerate(zip(targets, sources, strict=True))], []
    # By path, never by position.
    paths, called = flatten_named(spec)
    kept_paths, kept_names = flatten_named(kept_spec)
    found = dict(zip(kept_paths, sources, strict=True))
    writes = [Write(called, i, targets[i], found.pop(path)) for i, path in enumerate(paths) if path in found]
    # Extra state may have come or gone since, which is not a difference of structure.
    stateless = stateless_of(trees[0])
    writes += [Write([name], 0, handle, found.pop(path)) for path, (name, handle) in stateless.items() if path in found]
    kept_paths_of = dict(zip(kept_paths, kept_names, strict=True))
    gone = [i for i, path in enumerate(paths) if path not in kept_paths_of and live_part(targets[i]).accept]
    writes += [Write(called, i, targets[i], torch.empty(0, dtype=torch.uint8)) for i in gone]
    unpaired = pair_paths(
        {path: name for i, (path, name) in enumerate(zip(paths, called, strict=True)) if i not in set(gone)},
        {path: name for path, name in kept_paths_of.items() if path not in stateless},
    )
    placements = ([layout.placements for layout in layouts_of(side)] for side in trees)
    return writes, unpaired or pair_placements(*placements)


def _problems(one: Write) -> list[Problem]:
    unsound = [
        (problem[0], f"{one.name}: {where}: {problem[1]}")
        for where, tensor in (("in the tree to write to", one.target), ("in the snapshot", one.source))
        if (problem := problem_with(tensor))
    ]
    if unsound or (one.target.dtype is one.source.dtype and one.target.shape == one.source.shape):
        return unsound
    live = live_part(one.target)
    expected = Expected(one.name, spec_of(one.target), widens=live.registered, sized=live.accept is None)
    misfit = check_fit(expected, spec_of(one.source))
    return [("structure", misfit)] if misfit else []


def write_plan(plan: Plan, *, tracked: bool) -> None:
    """Do what was planned, once no snapshot in the background reads what is written.

    Args:
        plan: What `planned` returned.
        tracked: Whether autograd's version counters move; see `mcore_snap.copying.write`.
    """
    wait_for_readers([one.target for one in plan.writes])
    write(plan.writes, tracked=tracked)
    done = list(plan.writes)
    for one in plan.hand_over:
        accept = live_part(one.target).accept
        try:
            if accept is not None:
                accept(one.source)
        except Exception as error:
            message = f"the module of {one.name} refused its extra state ({error}); written by then:"
            raise SnapError(message, [other.name for other in done]) from error
        done.append(one)
    _finish(plan, done)
    if tracked:
        covered = [tensor for one in plan.writes for tensor in live_part(one.target).covered]
        torch.autograd.graph.increment_version([tensor for tensor in covered if not tensor.is_inference()])


def _finish(plan: Plan, done: list[Write]) -> None:
    hooks = dict.fromkeys(hook for one in plan.writes for hook in live_part(one.target).after)
    try:
        for hook in hooks:
            hook()
    except Exception as error:
        message = f"everything was written, but what has to follow failed ({error}); load again. Written:"
        raise SnapError(message, [one.name for one in done]) from error


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(words(plain(a)), words(plain(b)))
