"""The main job in small, and what importing costs: also run against the installed wheel."""

import subprocess
import sys

import pytest
import torch

import mcore_snap


def test_a_model_comes_back():
    """Snapshot, train, look back, return, load."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    tree = mcore_snap.model_tree(model)
    version_1 = mcore_snap.snapshot(tree)
    data = torch.randn(5, 3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(data).square().sum().backward()
    optimizer.step()
    current = mcore_snap.fingerprint(tree)
    assert current != mcore_snap.fingerprint(version_1)
    with mcore_snap.swapped(tree, version_1, check=True):
        assert mcore_snap.bitwise_equal(tree, version_1)
        model(data)  # in training mode: batch statistics move, and must come back
    assert mcore_snap.fingerprint(tree) == current
    mcore_snap.load(tree, version_1)
    assert mcore_snap.verify(version_1) == mcore_snap.fingerprint(tree)


def test_importing_brings_in_nothing_optional():
    """Neither Megatron-Core nor hypothesis nor rich is imported with the library."""
    code = (
        "import sys, mcore_snap\n"
        "heavy = {'megatron', 'hypothesis', 'rich', 'transformer_engine'} & {m.split('.')[0] for m in sys.modules}\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_documented():
    """`__all__` holds what it promises, sorted, each with a docstring."""
    assert list(mcore_snap.__all__) == sorted(mcore_snap.__all__)
    for name in mcore_snap.__all__:
        assert getattr(mcore_snap, name).__doc__, name


@pytest.mark.parametrize("name", [name for name in mcore_snap.__all__ if name[0].islower()])
def test_every_function_gives_an_example(name):
    """The examples run as doctests."""
    assert ">>>" in getattr(mcore_snap, name).__doc__
