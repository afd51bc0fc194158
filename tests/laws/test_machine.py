"""All laws at once, in any order: training by every kind of write, snapshots, loads, look-backs, averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import optree
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from torch import Tensor, nn

from mcore_snap import (
    ModelTree,
    as_numpy,
    bitwise_equal,
    fingerprint,
    load,
    model_tree,
    named_leaves,
    snapshot,
    swapped,
    thaw,
    verify,
)
from mcore_snap.testing.bit_patterns import MATH_DTYPES
from mcore_snap.testing.chunks import ExtraState
from mcore_snap.testing.model_state import chunks_of, model_bytes, model_places, model_tensors
from mcore_snap.testing.model_strategies import Models, trainable_models
from mcore_snap.testing.raw_bytes import carrier, flip, to_bytes

Write: TypeAlias = Callable[[list[nn.Parameter]], object]


def _optimize(kind: type[torch.optim.Optimizer], **options: Any) -> Write:
    def write(params: list[nn.Parameter]) -> None:
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        kind(params, lr=0.25, **options).step()  # type: ignore[call-arg]
        for param in params:
            param.grad = None

    return write


def _each(write: Callable[[Tensor], object]) -> Write:
    def write_all(params: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for param in params:
                write(param)

    return write_all


def _numpy(tensor: Tensor) -> None:
    array = carrier(tensor.detach()).numpy()  # no copy: the same memory
    array ^= 1


WRITES: Final[dict[str, Write]] = {
    "SGD": _optimize(torch.optim.SGD, momentum=0.5),
    "SGD, fused": _optimize(torch.optim.SGD, fused=True),
    "SGD, foreach": _optimize(torch.optim.SGD, foreach=True),
    "AdamW, fused": _optimize(torch.optim.AdamW, fused=True),
    ".data": _each(lambda t: t.data.add_(1)),
    "out=": _each(lambda t: torch.mul(t.detach(), -1, out=t.detach())),
    "numpy": _each(_numpy),
    "view": _each(lambda t: t.view(-1)[1:].neg_()),
    "copy_": _each(lambda t: t.copy_(torch.linspace(-2, 2, t.numel()).reshape(t.shape))),
    "setitem": _each(lambda t: t.__setitem__(..., 3)),
    "bits": _each(lambda t: carrier(t.detach()).bitwise_not_()),
    "storage": flip,
    "_foreach_add_": lambda params: torch._foreach_add_([param.data for param in params], 1.0),
    "nn.init": lambda params: [nn.init.uniform_(param) for param in params],
}


def _mean(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() * 0.5 + b.float() * 0.5).to(a.dtype) if a.dtype in MATH_DTYPES else a


def _bytes(snap: ModelTree) -> dict[str, bytes]:
    return {name: to_bytes(leaf) for name, leaf in named_leaves(snap).items()}


class BodyError(Exception):
    """What the body of a look-back raises that fails."""


def _fail_if(fails: bool) -> None:
    if fails:
        raise BodyError


class Kept:
    """A snapshot, and what must be true of it for ever: its bytes, and the model as it was."""

    def __init__(self, snap: ModelTree, models: Models) -> None:
        """Read the snapshot's bytes now."""
        self.snap = snap
        self.content = _bytes(snap)
        self.digest = fingerprint(snap)
        self.model = model_bytes(models)


class Snapshots(RuleBasedStateMachine):
    """A model that is trained, and snapshots of it that are used in every way."""

    kept = Bundle("kept")

    def __init__(self) -> None:
        """Begin without a model."""
        super().__init__()
        self.all: list[Kept] = []

    @initialize(models=trainable_models())
    def begin(self, models: Models) -> None:
        """Draw the model."""
        self.models = models
        self.tree = model_tree(models)
        self.places = model_places(models)

    @rule(kind=st.sampled_from(sorted(WRITES)))
    def train(self, kind: str) -> None:
        """Change the trainable weights."""
        params = [p for chunk in chunks_of(self.models) for p in chunk.parameters() if p.requires_grad]
        before = model_bytes(self.models)
        WRITES[kind](params)
        if kind in {".data", "bits", "storage", "numpy"} and all(p.isfinite().all() for p in params):
            assert model_bytes(self.models) != before

    @rule(data=st.data())
    def change_the_rest(self, data: st.DataObject) -> None:
        """Change buffers, frozen weights and extra state."""
        others = [t for _, t in model_tensors(self.models) if not t.requires_grad and t.dim() < 2]
        flip([data.draw(st.sampled_from(others))])
        for chunk in chunks_of(self.models):
            for module in chunk.modules():
                if isinstance(module, ExtraState):
                    module.history = data.draw(st.lists(st.integers(0, 9), max_size=3))

    @rule(target=kept)
    def take(self) -> Kept:
        """Take a snapshot, of the old tree or of one made now."""
        before = model_bytes(self.models)
        kept = Kept(snapshot(self.tree if len(self.all) % 2 else model_tree(self.models)), self.models)
        assert kept.model == before
        self.all.append(kept)
        return kept

    @rule(kept=kept)
    def load(self, kept: Kept) -> None:
        """Go back to a version."""
        assert load(self.tree, kept.snap) is self.tree
        assert model_bytes(self.models) == kept.model
        assert bitwise_equal(self.tree, kept.snap)

    @rule(outer=kept, inner=kept, kind=st.sampled_from(sorted(WRITES)), fails=st.booleans())
    def look_back(self, outer: Kept, inner: Kept, kind: str, fails: bool) -> None:
        """Look at two versions, one inside the other, and change weights in there."""
        before = model_bytes(self.models)
        try:
            with swapped(self.tree, outer.snap):
                assert model_bytes(self.models) == outer.model
                self.train(kind)
                changed = model_bytes(self.models)
                with swapped(self.tree, inner.snap):
                    assert model_bytes(self.models) == inner.model
                assert model_bytes(self.models) == changed
                _fail_if(fails)
        except BodyError:
            assert fails
        assert model_bytes(self.models) == before

    @rule(kept=kept)
    def scribble(self, kept: Kept) -> None:
        """Write to all that can be written to: thawed copies, and not to leaves and arrays."""
        flip(named_leaves(thaw(kept.snap)).values())
        for leaf in optree.tree_leaves(kept.snap):
            with pytest.raises(RuntimeError):
                leaf.zero_()
            leaf.data = torch.ones(1, dtype=leaf.dtype)
        assert not any(array.flags.writeable for array in optree.tree_leaves(as_numpy(kept.snap)))

    @rule(target=kept, one=kept, other=kept)
    def average(self, one: Kept, other: Kept) -> Kept:
        """Load the average of two versions, and keep it."""
        average = optree.tree_map(_mean, one.snap, other.snap)
        load(self.tree, average)
        kept = Kept(snapshot(self.tree), self.models)
        assert kept.content == {name: to_bytes(leaf) for name, leaf in named_leaves(average).items()}
        self.all.append(kept)
        return kept

    @rule(kept=consumes(kept), again=st.booleans())
    def drop(self, kept: Kept, again: bool) -> None:
        """Let go of a version, whose memory must not be that of another."""
        self.all.remove(kept)
        if again:
            self.all.append(kept)  # no rule uses it any more, but it still has its bytes

    @rule(target=kept, kept=kept)
    def take_of_a_snapshot(self, kept: Kept) -> Any:
        """A snapshot of a snapshot is the same, and another."""
        copied = snapshot(kept.snap)
        assert _bytes(copied) == kept.content
        return multiple()

    @invariant()
    def every_snapshot_has_its_bytes(self) -> None:
        """Nothing that was done changed any snapshot."""
        for kept in self.all:
            assert _bytes(kept.snap) == kept.content
            verify(kept.snap)
            assert fingerprint(kept.snap) == kept.digest

    @invariant()
    def nothing_moved(self) -> None:
        """Every tensor of the model is where it was, with its strides, flags and gradients."""
        if hasattr(self, "places"):
            assert model_places(self.models) == self.places


TestSnapshots = Snapshots.TestCase
