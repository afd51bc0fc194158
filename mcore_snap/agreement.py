"""Whether all ranks of a data-parallel group hold the same version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import optree
from torch import distributed

from mcore_snap.digests import combine, leaf_digests
from mcore_snap.errors import Corrupt, NotReady, SnapError, StructureMismatch
from mcore_snap.live_trees import layouts_of, read_once
from mcore_snap.nodes import ChunkTree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["agree"]

Held: TypeAlias = "dict[str, str] | SnapError"
"""Leaf name to digest; or, where a rank's tree could not be read, why."""

Kind: TypeAlias = Literal["replicated", "expert", "local"]
"""Over which ranks a leaf has to be the same: the group, the replicas of an expert, none."""

_SHOWN: Final = 12  # hex digits of a digest in a message
_T = TypeVar("_T")


def agree(snap: Any, group: ProcessGroup | None, *, expert_group: ProcessGroup | None = None) -> str:
    """Check that all ranks of a data-parallel group hold the same version, and return its digest.

    A load of different versions on different ranks raises nothing by itself: with the distributed
    optimizer the next parameter gather mixes them, and without it the ranks train apart.

    Of a model tree, parameters and flat buffers are compared. Registered buffers and extra state are
    left out: routers count each rank's own tokens there. Of any other pytree all leaves are compared.
    What is exchanged is one digest per rank; only if they differ, the digest of every leaf.

    Call it before a load: where a gather is due, loading mixes two versions into one, on which all ranks
    agree.

    Collective: every rank of `group`, and of `expert_group` if given, has to call it, in the same order
    as other collectives. Of a live tree, a parameter gather that is due is done first.

    Args:
        snap: A snapshot, or a live tree.
        group: The data-parallel group, for instance what ``parallel_state.get_data_parallel_group(
            with_context_parallel=True)`` gives; ``None`` for all ranks. Of a fully sharded model, whose
            ranks hold different shards, the group over which equal shards are replicated.
        expert_group: With expert parallelism, the group over which the same experts are replicated:
            ``parallel_state.get_expert_data_parallel_group()``. Leaves of experts are compared over
            it, all others over `group`. Without it, everything is compared over `group`.

    Returns:
        The digest over what was compared in `group`, as 32 hex digits: the same on all its ranks. If
        that is the whole tree, it is the tree's fingerprint.

    Raises:
        Corrupt: The ranks hold different versions, or some rank's tree could not be read. All ranks
            of `group` raise the same error; it names the leaves, and which ranks hold what.
        StructureMismatch: The tree keeps data-parallel slices, of which every rank has others. Raised
            before anything is exchanged, as is the next one.
        NotReady: There is no process group.

    >>> import torch
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> agree({"w": torch.zeros(2)}, distributed.group.WORLD)
    '...'
    >>> distributed.destroy_process_group()
    """
    _check_groups(group, expert_group)
    rest, experts = _hold(snap, apart=expert_group is not None)
    expert_problems = [] if expert_group is None else _exchange(experts, [], expert_group)
    problems = _exchange(rest, expert_problems, group)
    if problems:
        cause = rest if isinstance(rest, SnapError) else None
        raise Corrupt("the ranks do not hold the same version", problems) from cause
    if isinstance(rest, SnapError):
        raise rest  # as every rank does
    return combine(rest, rest.values())


def _check_groups(*groups: ProcessGroup | None) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        message = "agree: expected a process group, found none; call torch.distributed.init_process_group first"
        raise NotReady(message)
    if any(distributed.get_rank(group) < 0 for group in groups):
        message = "agree: expected groups that this rank belongs to, found one that it does not; pass its own"
        raise StructureMismatch(message)


def _hold(snap: Any, *, apart: bool) -> tuple[Held, Held]:
    """Return what this rank has to compare in the group, and what among the replicas of its experts."""
    # If a tree cannot be read, the other ranks are waiting for this one: it takes part, and says why.
    try:
        tree = read_once(snap)
    except SnapError as error:
        return error, error
    _check_whole(tree)
    try:
        names, digests = leaf_digests(tree)
    except SnapError as error:
        return error, error
    rest: dict[str, str] = {}
    experts: dict[str, str] = {}
    for name, digest, kind in zip(names, digests, _kinds(tree), strict=True):
        if kind != "local":
            held = experts if apart and kind == "expert" else rest
            held[name] = held.get(name, "") + digest  # two paths may read the same
    return rest, experts


def _check_whole(tree: Any) -> None:
    problems = [
        f"chunk {index}: expected whole flat buffers, found this rank's slices; "
        "take the snapshot from model_tree(models) without dp_sharded"
        for index, layout in enumerate(layouts_of(tree))
        if layout.data_parallel is not None
    ]
    if problems:
        raise StructureMismatch("data-parallel slices cannot be compared: every rank has others", problems)


def _kinds(tree: Any) -> Iterator[Kind]:
    """Yield one kind per leaf, in the order of flattening."""
    for top in optree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, ChunkTree)):
        if isinstance(top, ChunkTree):
            yield from _chunk_kinds(top)
        else:
            yield "replicated"


def _chunk_kinds(chunk: ChunkTree) -> Iterator[Kind]:
    buffers, expert_buffers, *named = chunk.entries()
    experts = {place.name for place in chunk.layout.placements if place.expert}
    for _ in buffers:
        yield "replicated"
    for _ in expert_buffers:
        yield "expert"
    for name in named[0]:
        yield "expert" if name in experts else "replicated"
    for _ in (*named[1], *named[2]):
        yield "local"


def _exchange(mine: Held, told: Sequence[str], group: ProcessGroup | None) -> list[str]:
    """Compare over a group; return what differs on its ranks, and what any of them was told before."""
    digest = combine(mine, mine.values()) if isinstance(mine, dict) else None
    if len(set(_gather((digest, bool(told)), group))) == 1 and not told:
        return []
    everything = _gather((mine if isinstance(mine, dict) else str(mine), list(told)), group)
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    by_rank = dict(zip(ranks, (held for held, _ in everything), strict=True))
    return [*_differences(by_rank), *dict.fromkeys(line for _, lines in everything for line in lines)]


def _gather(value: _T, group: ProcessGroup | None) -> list[_T]:
    # Knows by itself which device the group's backend needs.
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, value, group=group)
    return found


def _differences(by_rank: Mapping[int, dict[str, str] | str]) -> list[str]:
    """Return one line per rank that could not read its tree, and one per leaf in which the others differ.

    >>> _differences({0: {"w": "aa"}, 1: {"w": "bb"}, 2: {"w": "aa"}})
    ['w: expected the same bytes on every rank, found aa on ranks 0, 2; bb on rank 1; load one version on all of them']
    """
    lines = [
        f"rank {rank}: expected a tree that can be read, found: {' '.join(held.split())}"
        for rank, held in by_rank.items()
        if isinstance(held, str)
    ]
    read = {rank: held for rank, held in by_rank.items() if isinstance(held, dict)}
    for name in dict.fromkeys(name for held in read.values() for name in held):
        where: dict[str | None, list[int]] = {}
        for rank, held in read.items():
            where.setdefault(held.get(name), []).append(rank)
        if len(where) > 1:
            found = "; ".join(
                f"{digest[:_SHOWN] if digest else 'no such leaf'} on {_ranks(ranks)}" for digest, ranks in where.items()
            )
            lines.append(
                f"{name}: expected the same bytes on every rank, found {found}; load one version on all of them"
            )
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
