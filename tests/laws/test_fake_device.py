"""The laws on a device that is late: nothing is read, changed or given back before its copies have been made.

Copies are carried out only when they are waited for, in any order; until then their targets hold poison.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcore_snap
from mcore_snap import fence, load, snapshot, snapshot_async, streams, swapped
from mcore_snap.testing.fake_device import FakeDevice, LateCopies, late_copies
from mcore_snap.testing.model_state import model_bytes, model_tensors
from mcore_snap.testing.model_strategies import Models, model_trees
from mcore_snap.testing.raw_bytes import flip, to_bytes
from mcore_snap.testing.strategies import trees


def _late(data: st.DataObject) -> Any:
    return late_copies(lambda waiting: data.draw(st.permutations(range(waiting))))


# --- the laws


@given(trees(), st.data())
def test_a_snapshot_is_there_when_it_is_returned(tree: Any, data: st.DataObject) -> None:
    """What happens to the tree from then on does not reach it."""
    leaves = optree.tree_leaves(tree)
    held = [to_bytes(leaf) for leaf in leaves]
    with _late(data):
        snap = snapshot(tree)
        flip(leaves)
    assert [to_bytes(leaf) for leaf in optree.tree_leaves(snap)] == held


@given(trees(), st.data())
def test_what_was_loaded_is_there_when_load_returns(tree: Any, data: st.DataObject) -> None:
    """And the snapshot may be dropped at once."""
    leaves = optree.tree_leaves(tree)
    held = [to_bytes(leaf) for leaf in leaves]
    with _late(data):
        snap = snapshot(tree)
        flip(leaves)
        load(tree, snap)
        found = [to_bytes(leaf) for leaf in leaves]
        del snap
    assert found == held
    assert [to_bytes(leaf) for leaf in leaves] == held


@given(trees(), st.data())
def test_a_look_back_is_whole_inside_and_outside(tree: Any, data: st.DataObject) -> None:
    """The kept weights are read before the others are written, and are back when the block is left."""
    leaves = optree.tree_leaves(tree)
    with _late(data):
        old, snap = [to_bytes(leaf) for leaf in leaves], snapshot(tree)
        flip(leaves)
        new = [to_bytes(leaf) for leaf in leaves]
        with swapped(tree, snap):
            inside = [to_bytes(leaf) for leaf in leaves]
            flip(leaves)
        assert [to_bytes(leaf) for leaf in leaves] == new
    assert inside == old


@given(model_trees(), st.data())
def test_a_model_makes_the_round_trip(pair: tuple[Models, Any], data: st.DataObject) -> None:
    """All that a model has, extra state and what follows a load included."""
    models, tree = pair
    with _late(data):
        old, snap = model_bytes(models), snapshot(tree)
        flip(tensor for _, tensor in model_tensors(models))
        new = model_bytes(models)
        with swapped(tree, snap):
            assert model_bytes(models) == old
        assert model_bytes(models) == new
        load(tree, snap)
        assert model_bytes(models) == old


@given(trees(), st.data())
def test_a_snapshot_in_the_background_is_there_when_it_is_done(tree: Any, data: st.DataObject) -> None:
    """From then on the tree may change; what is loaded meanwhile waits for it."""
    leaves = optree.tree_leaves(tree)
    held = [to_bytes(leaf) for leaf in leaves]
    with late_copies():
        pending = snapshot_async(tree)
        if data.draw(st.booleans()):
            fence(tree)
        else:
            pending.wait()
        flip(leaves)
        snap = pending.result()
    assert [to_bytes(leaf) for leaf in optree.tree_leaves(snap)] == held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_way_to_copy_weights_is_late_here(dtype: torch.dtype) -> None:
    """Or these laws would be about nothing."""
    live = {"w": torch.zeros(3, dtype=dtype), "v": torch.zeros(2, 2, dtype=dtype)}
    taken = []
    with late_copies() as device:
        snap = snapshot(live)
        taken.append(device.taken)
        snapshot_async(live).result()
        taken.append(device.taken)
        load(live, snap)
        taken.append(device.taken)
        with swapped(live, snap):
            taken.append(device.taken)
        taken.append(device.taken)
    assert taken == [2, 4, 6, 10, 12]


def test_versions_of_a_snapshot_do_not_share_late_copies() -> None:
    """Memory that is leased again still gets its own bytes only."""
    live = {"w": torch.zeros(1000)}
    with late_copies():
        for version in range(5):
            live["w"].fill_(version)
            kept = snapshot(live)
            live["w"].fill_(-1)
            assert bool((kept["w"] == version).all())
            del kept


# --- the double itself


def test_copies_are_late_and_poisoned_until_waited_for() -> None:
    """Not a byte of the source is there before, and the order is the one asked for."""
    target = torch.zeros(2)
    with late_copies(lambda waiting: [1, 0]) as device:
        copies = streams.copies_for([target])
        copies.copy([target, torch.zeros(2)], [torch.ones(2), torch.ones(2)])
        assert to_bytes(target) == b"\xa5" * 8
        assert device.pending == device.taken == 2
        copies.wait()
    assert target.tolist() == [1, 1]


def test_nobody_waits() -> None:
    """Leaving with copies that were never waited for fails, also when what made them is gone."""

    def forget() -> None:
        streams.copies_for([]).copy([torch.zeros(2)], [torch.ones(2)])

    with pytest.raises(AssertionError, match="1 of 1 copies were never waited for"), late_copies():
        forget()
    assert not isinstance(streams.copies_for([torch.zeros(1)]), LateCopies)


_SHARED = torch.zeros(8)


@pytest.mark.parametrize(
    ("targets", "sources", "complaint"),
    [
        ([torch.zeros(2)], [torch.ones(3)], "shape"),
        ([torch.zeros(2)], [torch.ones(2, dtype=torch.int32)], "int32 into"),
        ([torch.zeros(2, dtype=torch.complex64)], [torch.zeros(2, dtype=torch.complex64).conj()], "conjugated"),
        ([torch.zeros(2, requires_grad=True)], [torch.zeros(2)], "autograd"),
        ([_SHARED[:4], torch.zeros(4)], [torch.ones(4), _SHARED[2:6]], "depends on which comes first"),
        ([torch.zeros(4), _SHARED[:4]], [_SHARED[2:6], torch.ones(4)], "depends on which comes first"),
    ],
)
def test_what_a_copy_layer_need_not_take_is_refused(
    targets: list[torch.Tensor], sources: list[torch.Tensor], complaint: str
) -> None:
    """A real device would copy something, sometimes."""
    with late_copies(), pytest.raises(AssertionError, match=complaint):
        streams.copies_for(targets).copy(targets, sources)


def test_an_order_has_to_be_one() -> None:
    """Leaving copies out is not an order."""
    copies = LateCopies(FakeDevice(lambda waiting: [0] * waiting))
    copies.copy([torch.zeros(1), torch.zeros(1)], [torch.ones(1), torch.ones(1)])
    with pytest.raises(AssertionError, match="no order of 2"):
        copies.wait()


# --- it finds what it is for

_PACKAGE = Path(mcore_snap.__file__).parent
_WAIT = re.compile(r"^ +copies\.wait\(\)", re.MULTILINE)
_WAITS = [
    (path.relative_to(_PACKAGE).as_posix(), number)
    for path in sorted(_PACKAGE.glob("*.py"))
    if path.name != "streams.py"  # the layer itself, with an example
    for number, _ in enumerate(_WAIT.finditer(path.read_text()))
]
_TRY = """
import torch
from mcore_snap import SnapError, load, snapshot
from mcore_snap.testing.fake_device import LateCopies, late_copies
live = {"w": torch.ones(3), "v": torch.ones(2, 2)}
with late_copies():
    kept = snapshot(live)
    live["w"].zero_()
    load(live, kept)
    whole = all(bool((leaf == 1).all()) for tree in (live, kept) for leaf in tree.values())
assert whole

# Two leaves too large to be copied together, and a device that fails at the second one.
live = {"w": torch.ones(1 << 15), "v": torch.ones(1 << 15)}
with late_copies():
    kept = snapshot(live)
    live["v"].zero_()
    copy, calls = LateCopies.copy, []

    def fail(*args):
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("a device that fails")
        copy(*args)

    LateCopies.copy = fail
    try:
        load(live, kept)
    except SnapError as error:
        assert list(error.problems) == ["['v']", "['w']"], error
    else:
        raise AssertionError("nothing failed")
    assert bool((live["v"] == 1).all()), "said to be written, and is not"
"""


def test_snapshot_and_load_each_wait() -> None:
    """The places that the next test takes away one by one."""
    assert len(_WAITS) >= 2


@pytest.mark.parametrize("missing", [None, *_WAITS], ids=str)
def test_a_missing_wait_is_a_failing_test(missing: tuple[str, int] | None, tmp_path: Path) -> None:
    """In a private copy of the package with one wait removed, a round trip on the late device fails, or a load that
    fails half-way says what is not so; with all of them, neither.
    """
    shutil.copytree(_PACKAGE, tmp_path / "mcore_snap", ignore=shutil.ignore_patterns("__pycache__"))
    if missing is not None:
        path, number = tmp_path / "mcore_snap" / missing[0], missing[1]
        found = list(_WAIT.finditer(path.read_text()))[number]
        text = path.read_text()
        path.write_text(text[: found.start()] + found.group().replace("copies.wait()", "pass") + text[found.end() :])
    script = tmp_path / "script.py"
    script.write_text(_TRY)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, check=False, capture_output=True, text=True, env=_ENVIRONMENT
    )
    assert (done.returncode == 0) == (missing is None), done.stderr
    if missing is not None:
        assert "AssertionError" in done.stderr, done.stderr


_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
