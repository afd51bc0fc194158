"""Every kind of input that cannot be right is refused: one error, with all problems by name, and nothing written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from mcore_snap import (
    NotResident,
    SnapError,
    StructureMismatch,
    bitwise_equal,
    compare,
    load,
    model_tree,
    named_leaves,
    named_parameters,
    snapshot,
    swapped,
)
from mcore_snap.testing.chunks import DDPLike, ExtraState, Layer
from mcore_snap.testing.model_state import model_bytes
from mcore_snap.testing.raw_bytes import flip, to_bytes


def _refused(models: Any, snap: Any, error: type[SnapError], *names: str) -> SnapError:
    """Assert that load and swapped refuse by these leaf names, one problem each, and that no byte was written."""
    tree = model_tree(models)
    before = model_bytes(models)
    with pytest.raises(error) as caught:
        load(tree, snap)
    for name in names:
        assert any(problem.startswith(name) for problem in caught.value.problems), (name, caught.value.problems)
    assert len(caught.value.problems) == len(names)
    with pytest.raises(error), swapped(tree, snap):
        pytest.fail("the body ran")
    assert model_bytes(models) == before
    return caught.value


def _kept(models: Any) -> Any:
    """Take a snapshot of a model that nobody else holds: a tree would not keep it alive."""
    return snapshot(model_tree(models))


def _linear(inputs: int = 3, outputs: int = 2, **kwargs: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **kwargs)


def test_a_snapshot_of_another_model() -> None:
    """All names that one has and the other lacks are in the one error."""
    one, other = nn.Sequential(_linear()), nn.ModuleDict({"head": _linear()})
    names = [f"chunks[0].parameters['{name}']" for name in ("0.weight", "0.bias", "head.weight", "head.bias")]
    _refused(one, _kept(other), StructureMismatch, *names)


def test_a_missing_chunk_and_one_too_many() -> None:
    """Chunks are paired by index, never by order of leaves."""
    one, two = [_linear()], [_linear(), _linear()]
    names = ["chunks[1].parameters['weight']", "chunks[1].parameters['bias']"]
    _refused(two, _kept(one), StructureMismatch, *names)
    _refused(one, _kept(two), StructureMismatch, *names)


def test_flat_buffers_are_not_parameters() -> None:
    """A snapshot taken without the distributed optimizer does not fit a model that has it."""
    torch.manual_seed(0)
    flat, separate = DDPLike(_linear()), DDPLike(_linear(), backing="none")
    names = [f"chunks[0].parameters['module.{name}']" for name in ("weight", "bias")]
    _refused(flat, _kept(separate), StructureMismatch, "chunks[0].buffers[0]", *names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype(dtype: torch.dtype) -> None:
    """No cast of a parameter, not even one that is exact."""
    names = [f"chunks[0].parameters['{name}']" for name in ("weight", "bias")]
    error = _refused(_linear(), _kept(_linear(dtype=dtype)), StructureMismatch, *names)
    assert "float32" in str(error)
    assert str(dtype).removeprefix("torch.") in str(error)


@pytest.mark.parametrize("shape", [(3, 2), (1, 3), (2, 1), (1, 1), (6,), (3,), (), (1, 2, 3), (2, 3, 1), (0, 3)])
def test_another_shape(shape: tuple[int, ...]) -> None:
    """Not even shapes that would broadcast, or that have as many elements."""
    live, kept = nn.Module(), nn.Module()
    live.w, kept.w = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.zeros(shape))
    live.rest, kept.rest = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    _refused(live, _kept(kept), StructureMismatch, "chunks[0].parameters['w']")


def _router(dtype: torch.dtype) -> nn.Module:
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(2))
    module.register_buffer("expert_bias", torch.tensor([0.5, -0.0, float("inf"), 1e-39]).to(dtype))
    return module


def test_the_one_widening_there_is() -> None:
    """A bf16 buffer loads exactly into its promoted self, by load and by swapped, checked too; not the other way."""
    narrow, wide = _router(torch.bfloat16), _router(torch.float32)
    snap = _kept(narrow)
    expected = to_bytes(narrow.expert_bias.float())
    wide.expert_bias.zero_()
    before = model_bytes(wide)
    for check in (False, True):
        with swapped(model_tree(wide), snap, check=check):
            assert to_bytes(wide.expert_bias) == expected
        assert model_bytes(wide) == before
    load(model_tree(wide), snap)
    assert to_bytes(wide.expert_bias) == expected
    name = "chunks[0].module_buffers['expert_bias']"
    _refused(narrow, _kept(wide), StructureMismatch, name)
    _refused(wide, _kept(_router(torch.float16)), StructureMismatch, name)
    _refused(_router(torch.float64), snap, StructureMismatch, name)


def test_extra_state_of_another_length_is_no_mismatch() -> None:
    """Extra state is bytes of any number: also inside a checked look-back whose body makes it longer."""
    model = nn.Sequential(ExtraState([1]))
    tree = model_tree(model)
    snap = snapshot(tree)
    model[0].history = list(range(1000))
    with swapped(tree, snap, check=True):
        assert model[0].history == [1]
        model[0].history = list(range(500))
    assert model[0].history == list(range(1000))
    load(tree, snap)
    assert model[0].history == [1]


def test_everything_wrong_at_once_is_one_error() -> None:
    """Names, dtypes and shapes are not reported in rounds: who repairs the first finds no second."""
    live, kept = nn.Module(), nn.Module()
    for name, mine, theirs in (
        ("ok", torch.ones(2), torch.zeros(2)),
        ("dtype", torch.ones(2), torch.zeros(2, dtype=torch.bfloat16)),
        ("shape", torch.ones(2), torch.zeros(3)),
        ("mine", torch.ones(2), None),
        ("theirs", None, torch.zeros(2)),
    ):
        for module, tensor in ((live, mine), (kept, theirs)):
            if tensor is not None:
                module.register_parameter(name, nn.Parameter(tensor))
    names = [f"chunks[0].parameters['{name}']" for name in ("dtype", "shape", "mine", "theirs")]
    _refused(live, _kept(kept), StructureMismatch, *names)


def _freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that quantized tensors are on their way out
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


BAD: Final[dict[str, tuple[type[SnapError], Callable[[], Any]]]] = {
    "meta": (NotResident, lambda: torch.ones(4, device="meta")),
    "freed": (NotResident, _freed),
    "sparse": (StructureMismatch, lambda: torch.eye(2).to_sparse()),
    "quantized": (StructureMismatch, _quantized),
    "subclass": (StructureMismatch, lambda: TwoTensor(torch.ones(4), torch.ones(4))),
    "jagged": (StructureMismatch, lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)),
    "number": (StructureMismatch, lambda: 3.5),
    "text": (StructureMismatch, lambda: "weights"),
    "list of numbers": (StructureMismatch, lambda: [1, 2]),
}


def _load_from(tree: Any) -> None:
    load({"good": torch.ones(3), "bad": {"inner": torch.ones(4)}}, tree)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("use", [snapshot, lambda t: load(t, t), lambda t: load({"good": torch.ones(3)}, t)])
def test_a_leaf_of_a_wrong_kind(kind: str, use: Callable[[Any], Any]) -> None:
    """What is no plain tensor with memory is refused by name, as a source and as a target, and the others stay."""
    error, make = BAD[kind]
    good = torch.full((3,), 7.0)
    tree = {"good": good, "bad": {"inner": make()}}
    with pytest.raises((error, StructureMismatch)) as caught:
        use(tree)
    assert any(problem.startswith("['bad']['inner']") for problem in caught.value.problems)
    assert not any(problem.startswith("['good']") for problem in caught.value.problems)
    assert good.tolist() == [7.0] * 3


@pytest.mark.parametrize("kind", ["meta", "freed", "sparse", "jagged"])
def test_a_parameter_of_a_wrong_kind(kind: str) -> None:
    """The same inside a model, by the parameter's name, whether the tree was made before or not."""
    error, make = BAD[kind]
    model = nn.Module()
    model.good, model.bad = nn.Parameter(torch.ones(2)), nn.Parameter(make())
    with pytest.raises(error, match="bad") as caught:
        _kept(model)
    assert all("good" not in problem for problem in caught.value.problems)


def test_all_leaves_of_wrong_kinds_are_named_at_once() -> None:
    """Eight bad leaves of both errors, eight problems."""
    tree = {kind: make() for kind, (_, make) in BAD.items() if kind != "list of numbers"}
    with pytest.raises(StructureMismatch) as caught:
        snapshot(tree)
    assert len(caught.value.problems) == len(tree)


def test_a_freed_flat_buffer_is_not_read() -> None:
    """An offloaded DDP buffer has its shape but no memory: NotResident, and right again once it is back."""
    model = DDPLike(Layer())
    tree = model_tree(model)
    snap = snapshot(tree)
    flat = model.buffers[0].param_data  # type: ignore[index]
    kept, size = flat.clone(), flat.untyped_storage().nbytes()
    flat.untyped_storage().resize_(0)
    for use in (snapshot, lambda each: load(each, snap)):
        with pytest.raises(NotResident, match=r"buffers\[0\]"):
            use(tree)
    with pytest.raises(NotResident), swapped(tree, snap):
        pytest.fail("the body ran")
    flat.untyped_storage().resize_(size)
    flat.copy_(kept)
    assert bitwise_equal(tree, snap)
    flip([flat])
    load(tree, snap)
    assert to_bytes(flat) == to_bytes(kept)


def test_a_dead_model() -> None:
    """A tree whose model is gone says so, and its snapshots are good for another model of the kind."""
    torch.manual_seed(0)
    model: nn.Module | None = _linear()
    tree = model_tree(model)
    snap = snapshot(tree)
    del model
    for use in (snapshot, named_leaves, named_parameters, lambda each: load(each, snap)):
        with pytest.raises(NotResident):
            use(tree)
    other = _linear()
    load(model_tree(other), snap)
    assert bitwise_equal(model_tree(other), snap)


def test_parameters_that_overlap_in_part() -> None:
    """Neither equal, nor apart, nor one in the other: no set of leaves has every byte once."""
    memory, model = torch.ones(6), nn.Module()
    model.a, model.b, model.c = (nn.Parameter(memory[i : i + 3]) for i in (0, 2, 3))
    with pytest.raises(StructureMismatch) as caught:
        model_tree(model)
    assert any("b" in problem for problem in caught.value.problems)


@pytest.mark.parametrize("wrong", [3, None, "model", [3], [nn.Linear(1, 1), None]])
def test_what_is_no_model(wrong: Any) -> None:
    """model_tree says what it expected."""
    with pytest.raises((TypeError, SnapError), match=r"chunk|Module"):
        model_tree(wrong)


def test_trees_that_differ_cannot_be_compared_but_are_not_equal() -> None:
    """Comparison has an answer only for trees of one model; equality always has one."""
    one, other = snapshot({"a": torch.ones(2)}), snapshot({"a": torch.ones(3), "b": torch.ones(1)})
    assert not bitwise_equal(one, other)
    with pytest.raises(StructureMismatch) as caught:
        compare(one, other)
    assert {problem.split(":")[0] for problem in caught.value.problems} == {"['a']", "['b']"}
