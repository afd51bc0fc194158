"""Group K, life of a swap: it is undone whatever happens, and the optimizer's own copies are the caller's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pictures import DTYPES, WRAPPERS, change_everything, layer_in, picture, places
from torch import nn

from mcore_snap import FrozenError, SnapError, bitwise_equal, load, model_tree, rollback, snapshot, swapped
from mcore_snap.testing.chunks import Layer
from mcore_snap.testing.raw_bytes import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

wrapped = pytest.mark.parametrize("wrapper", WRAPPERS)

ENDS: dict[str, type[BaseException] | None] = {
    "returns": None,
    "raises": ValueError,
    "is interrupted": KeyboardInterrupt,
    "exits": SystemExit,
    "is closed": GeneratorExit,
}


def _end(error: type[BaseException] | None) -> None:
    if error is not None:
        raise error


@wrapped
@pytest.mark.parametrize("end", ENDS)
def test_a_swap_is_undone_however_its_body_ends(end: str, wrapper: str) -> None:
    """huggingface/peft #367, NVIDIA-NeMo/RL #2053, huggingface/trl #6730: the error comes through, and the model is
    what it was, bit for bit.
    """
    models = WRAPPERS[wrapper](Layer())
    tree = model_tree(models)
    reference = snapshot(tree)
    change_everything(models)
    before, where = picture(models), places(models)
    error = ENDS[end]
    with contextlib.nullcontext() if error is None else pytest.raises(error), swapped(tree, reference):
        assert bitwise_equal(tree, reference)
        change_everything(models)
        _end(error)
    assert picture(models) == before
    assert places(models) == where


@wrapped
def test_swaps_nest(wrapper: str) -> None:
    """NVIDIA-NeMo/RL #2053: a reference inside a teacher inside the policy, each undone in turn, also when the inner
    one fails.
    """
    models = WRAPPERS[wrapper](Layer())
    tree = model_tree(models)
    versions, pictures = [], []
    for _ in range(3):
        versions.append(snapshot(tree))
        pictures.append(picture(models))
        with torch.no_grad():
            layer_in(models).fc.weight.add_(1)
            layer_in(models).scale.add_(1)
    policy = picture(models)
    with swapped(tree, versions[0]):
        with swapped(tree, versions[1]):
            with pytest.raises(ValueError, match="inner"), swapped(tree, versions[2]):
                raise ValueError("inner")
            assert picture(models) == pictures[1]
            with swapped(tree, versions[1]):  # the same once more
                assert picture(models) == pictures[1]
        assert picture(models) == pictures[0]
    assert picture(models) == policy


NONE: dict[str, Callable[[Any], object]] = {
    "load": lambda tree: load(tree, None),
    "swapped": lambda tree: swapped(tree, None).__enter__(),
    "empty": lambda tree: load(tree, {}),
    "text": lambda tree: load(tree, "reference"),
}


@wrapped
@pytest.mark.parametrize("use", NONE)
def test_no_snapshot_is_a_clear_error(use: str, wrapper: str) -> None:
    """NVIDIA-NeMo/RL #1968: a reference that was never taken is refused by name, and not half swapped in."""
    models = WRAPPERS[wrapper](Layer())
    before = picture(models)
    with pytest.raises(SnapError, match=r"chunks\[0\]"):
        NONE[use](model_tree(models))
    assert picture(models) == before


@pytest.mark.parametrize("check", [False, True])
@wrapped
def test_what_the_body_changed_is_gone(wrapper: str, check: bool) -> None:
    """modal-projects/training-gym #546, NVIDIA-NeMo/RL #3722: no weight of the reference survives the block, and
    `check` tells of changes.
    """
    models = WRAPPERS[wrapper](Layer())
    tree = model_tree(models)
    reference = snapshot(tree)
    change_everything(models)
    before = picture(models)
    told = pytest.raises(FrozenError, match=r"fc\.weight|buffers\[0\]") if check else contextlib.nullcontext()
    with told, swapped(tree, reference, check=check), torch.no_grad():
        layer_in(models).fc.weight.add_(1)
    assert picture(models) == before


def test_a_reference_is_the_moment_it_was_taken() -> None:
    """NVIDIA-NeMo/RL #3722: taken before weights are loaded from elsewhere, it is not those; the order is the
    caller's.
    """
    layer, checkpoint = Layer(), Layer()
    tree = model_tree(layer)
    reference, before = snapshot(tree), picture(layer)
    load(tree, snapshot(model_tree(checkpoint)))
    assert picture(layer) == picture(checkpoint)
    with swapped(tree, reference):
        assert picture(layer) == before
    assert picture(layer) == picture(checkpoint)


class Mastered:
    """An optimizer with fp32 masters, as those of mixed precision are."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        """Copy the weights into masters."""
        self.params = params
        self.float16_groups = [params]  # where Megatron-Core keeps the model's own
        self.masters = [param.detach().float().clone() for param in params]
        self.param_groups = [{"params": self.masters}]

    def step(self, change: float) -> None:
        """Step the masters, and round them into the weights."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.add_(change)
            param.data.copy_(master)

    def reload_model_params(self) -> None:
        """Take the masters from the weights."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.copy_(param.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["load alone", "load and refresh", "rollback"])
def test_masters_are_refreshed_by_the_caller(how: str, dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #174, #5071, NovaSky-AI/SkyRL #2149, databricks/megablocks #80: `rollback`, or
    `reload_model_params()` after a load, or the next step brings the old weights back.
    """
    layer = nn.Linear(2, 2, dtype=dtype)
    optimizer = Mastered(list(layer.parameters()))
    tree = model_tree(layer)
    version_1 = snapshot(tree)
    optimizer.step(1.0)
    if how == "rollback":
        rollback(tree, version_1, optimizer)
    else:
        load(tree, version_1)
    assert bitwise_equal(tree, version_1)
    if how == "load and refresh":
        optimizer.reload_model_params()
    optimizer.step(0.0)
    assert bitwise_equal(tree, version_1) == (how != "load alone")


def test_the_documentation_names_the_call() -> None:
    """NVIDIA/Megatron-LM #174: who loads is told that the optimizer does not know, and what tells it."""
    assert "rollback" in str(load.__doc__)
    assert "reload_model_params" in str(rollback.__doc__)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_look_back_needs_no_refresh(dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #174: the masters belong to the current weights, which are back when the optimizer steps."""
    layer = nn.Linear(2, 2, dtype=dtype)
    optimizer = Mastered(list(layer.parameters()))
    tree = model_tree(layer)
    version_1 = snapshot(tree)
    optimizer.step(1.0)
    with swapped(tree, version_1):
        assert bitwise_equal(tree, version_1)
    now = [to_bytes(param) for param in layer.parameters()]
    optimizer.step(0.0)
    assert [to_bytes(param) for param in layer.parameters()] == now
