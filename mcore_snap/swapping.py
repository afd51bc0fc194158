"""Another version of the weights for the length of a block, and then the current ones again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeVar

from mcore_snap.comparison import difference
from mcore_snap.errors import FrozenError, SnapError
from mcore_snap.host_memory import HostMemory
from mcore_snap.live import live_part
from mcore_snap.live_trees import read_once, sources_of
from mcore_snap.loading import planned, write_plan
from mcore_snap.snapshots import snapshot

__all__ = ["swapped"]

T = TypeVar("T")

_MOST_STOPS: Final = 100
"""How often putting back is begun anew after Ctrl-C or the like; then it is given up, and ``kept`` is on the error."""


@contextmanager
def swapped(tree: T, snap: Any, *, check: bool = False, memory: HostMemory | None = None) -> Iterator[T]:
    """Put a snapshot's weights in for the length of a ``with`` block.

    The current weights are kept as a second snapshot and are back, bit for bit, on leaving, also
    after an exception or KeyboardInterrupt; one that comes while they are put back is raised once they
    are. What the block changed, buffers that a forward pass updates included, is gone. Blocks nest, and
    the same snapshot may be entered again inside itself. No random numbers are drawn, no version counter
    moves, and Megatron-Core's param-sync flags are given back, so the block may stand anywhere in a
    training step, between forward and backward too. Collective where `snapshot` and `load` are.

    Blocks on one model have to nest, and a backward pass belongs in the block of its forward pass: since
    no version moves, autograd cannot tell that it reads other weights.

    Args:
        tree: What `model_tree` gave, or any pytree of tensors.
        snap: A snapshot of it.
        check: Whether to raise if the block changed weights; a comparison of all bytes.
        memory: Where the current weights are kept; by default memory that all snapshots share.

    Yields:
        The tree.

    Raises:
        StructureMismatch: The snapshot does not fit; the block is not entered, nothing was written.
        NotResident: Memory to write to or to read from is not there.
        NotReady: Weights are in flight and cannot be settled from here.
        OutOfHostMemory: There is no memory for the current weights; the block is not entered.
        FrozenError: With ``check``, the block changed weights; the kept ones are back by then.
        SnapError: On leaving, of any kind above: the block left the model so that it cannot be
            written (memory freed, a gather due). The error's ``kept`` is the snapshot of the weights
            to put back with `load`.

    >>> import torch
    >>> live = {"w": torch.ones(2)}
    >>> zeros = snapshot({"w": torch.zeros(2)})
    >>> with swapped(live, zeros):
    ...     print(live["w"])
    tensor([0., 0.])
    >>> live["w"]
    tensor([1., 1.])
    """
    changed: list[str] = []
    with ExitStack() as flags:
        for source in sources_of(tree):
            flags.enter_context(source.unchanged())
        now = read_once(tree)
        plan = planned(now, snap)
        kept = snapshot(now, memory=memory, label="weights set aside")
        try:
            write_plan(plan, tracked=False)
            yield tree
            if check:
                changed = _changed_weights(tree, snap)
        finally:
            _put_back(tree, kept)
    if changed:
        message = (
            "the block changed weights that were swapped in; the change is gone and the kept weights are back. "
            "Train outside the block"
        )
        raise FrozenError(message, changed)


def _put_back(tree: Any, kept: Any) -> None:
    stopped = again = _write_back(tree, kept)
    for _ in range(_MOST_STOPS):
        if again is None:
            break
        again = _write_back(tree, kept)
    if again is not None:
        vars(again)["kept"] = kept
        raise again
    if stopped is not None:
        raise stopped


def _write_back(tree: Any, kept: Any) -> BaseException | None:
    """Write the kept weights, and return what stopped it half-way, if that was no error."""
    try:
        # Planned anew: the block may have moved memory, and a first forward pass promotes dtypes.
        write_plan(planned(tree, kept), tracked=False)
    except SnapError as error:
        message = (
            f"on leaving the block, the kept weights could not be put back: {error.message}; mend it, then "
            "load(tree, error.kept)"
        )
        told = type(error)(message, error.problems)
        told.kept = kept
        raise told from error
    except Exception as error:
        vars(error)["kept"] = kept
        raise
    except BaseException as stop:  # noqa: BLE001 - Ctrl-C, or what a signal's handler raises
        return stop
    return None


def _changed_weights(tree: Any, snap: Any) -> list[str]:
    return [
        f"{one.name}: expected the snapshot's bits, found {found.differing:,} element(s) changed"
        for one in planned(tree, snap).writes
        # A forward pass may count tokens in a registered buffer, or have its dtype promoted.
        if not live_part(one.target).registered and (found := difference(one.name, one.target, one.source))
    ]
