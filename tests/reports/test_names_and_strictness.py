"""Groups C and K: a leaf is found by its name or not at all, and what does not fit is refused before any write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optree
import pytest
import torch
from pictures import DTYPES, change_everything, picture
from torch import nn

import mcore_snap
from mcore_snap import StructureMismatch, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.chunks import DDPLike, Layer
from mcore_snap.testing.raw_bytes import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcore_snap.testing.model_strategies import Models


def _kept(models: Models) -> Any:
    return snapshot(model_tree(models))


def _is_refused(models: Models, snap: Any, *names: str) -> None:
    before = picture(models)
    for use in (load, lambda tree, wrong: swapped(tree, wrong).__enter__()):
        with pytest.raises(StructureMismatch) as caught:
            use(model_tree(models), snap)
        told = caught.value.problems
        assert [any(problem.startswith(f"{name}:") for problem in told) for name in names] == [True] * len(names), told
        assert picture(models) == before


CHUNKS: dict[str, Callable[[], list[nn.Module]]] = {
    "wrapped": lambda: [DDPLike(Layer()), DDPLike(Layer())],
    "bare": lambda: [Layer(), Layer(), Layer()],
    "of three kinds": lambda: [DDPLike(Layer()), DDPLike(Layer(), "none"), Layer()],
}


@pytest.mark.parametrize("kind", CHUNKS)
@pytest.mark.parametrize("container", [list, tuple, nn.ModuleList])
def test_chunks_whose_layers_have_the_same_names(kind: str, container: Callable[[Any], Any]) -> None:
    """NVIDIA-NeMo/RL #1038: every chunk of an interleaved pipeline numbers its layers from 0; the chunk is part of the
    name.
    """
    chunks = CHUNKS[kind]()
    models = container(chunks)
    before, snap = picture(chunks), snapshot(model_tree(models))
    names = named_leaves(snap)
    assert {name.partition(".")[0] for name in names} == {f"chunks[{i}]" for i in range(len(chunks))}
    change_everything(chunks)
    load(model_tree(models), snap)
    assert picture(chunks) == before


def test_one_chunk_is_a_list_of_one() -> None:
    """NVIDIA-NeMo/RL #1126: code that knows one module meets a list of one; the names are the same, and snapshots fit
    both.
    """
    layer = Layer()
    before, snap = picture(layer), snapshot(model_tree(layer))
    assert list(named_leaves(snap)) == list(named_leaves(model_tree([layer])))
    change_everything(layer)
    load(model_tree([layer]), snap)
    assert picture(layer) == before


def _with(extra: str, module: nn.Module) -> nn.Module:
    if extra == "weight":
        module.extra = nn.Parameter(torch.ones(1))
    elif extra == "buffer":
        module.register_buffer("extra", torch.ones(1))
    else:
        module.extra = nn.BatchNorm1d(2)
    return module


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ("weight", ["parameters['extra']"]),
        ("buffer", ["module_buffers['extra']"]),
        ("module", ["parameters['extra.weight']", "module_buffers['extra.running_var']"]),
    ],
)
def test_what_is_missing_and_what_is_too_much(extra: str, names: list[str]) -> None:
    """NVIDIA-NeMo/Megatron-Bridge #6032, pytorch/torchtitan #2498: no lenient mode hides that a part
    stayed as it was.
    """
    full = [f"chunks[0].{name}" for name in names]
    _is_refused(Layer(), _kept(_with(extra, Layer())), *full)
    _is_refused(_with(extra, Layer()), _kept(Layer()), *full)


def test_the_same_weights_under_other_names() -> None:
    """NVIDIA-NeMo/Megatron-Bridge #6032: one level more in the names is another model, though shapes and order are the
    same.
    """
    names = [f"chunks[0].parameters['{name}']" for name in ("weight", "bias", "0.weight", "0.bias")]
    _is_refused(nn.Linear(3, 3), _kept(nn.Sequential(nn.Linear(3, 3))), *names)
    _is_refused(nn.Sequential(nn.Linear(3, 3)), _kept(nn.Linear(3, 3)), *names)


MORE: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[], list[nn.Module]], str]] = {
    "chunk": (lambda: [DDPLike(Layer())], lambda: [DDPLike(Layer()), DDPLike(Layer())], "chunks[1].buffers[0]"),
    "bare chunk": (
        lambda: [DDPLike(Layer())],
        lambda: [DDPLike(Layer()), Layer()],
        "chunks[1].parameters['fc.weight']",
    ),
    "dense buffer": (
        lambda: [DDPLike(nn.ModuleList([nn.Linear(2, 2)]))],
        lambda: [DDPLike(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16)]))],
        "chunks[0].buffers[1]",
    ),
    "expert buffer": (
        lambda: [DDPLike(nn.ModuleDict({"fc": nn.Linear(3, 3)}))],
        lambda: [DDPLike(nn.ModuleDict({"fc": nn.Linear(3, 3), "layer": Layer()}))],
        "chunks[0].expert_parallel_buffers[0]",
    ),
}


@pytest.mark.parametrize("more", MORE)
def test_surplus_on_either_side(more: str) -> None:
    """sgl-project/sglang #9663, verl-project/verl #6095: saved and live buffers are never walked as far as the shorter
    list goes.
    """
    small, large, name = MORE[more]
    _is_refused(large(), _kept(small()), name)
    _is_refused(small(), _kept(large()), name)


def test_a_part_is_loaded_by_saying_so() -> None:
    """sgl-project/sglang #9663: a partial update is a load between two trees of the same part, and just as strict."""
    layer = Layer()
    snap = snapshot(model_tree(layer))
    change_everything(layer)
    live, kept = named_leaves(model_tree(layer)), named_leaves(snap)
    part = [name for name in live if "fc." in name]
    rest = {name: to_bytes(leaf) for name, leaf in live.items() if name not in part}
    load({name: live[name] for name in part}, {name: kept[name] for name in part})
    now = named_leaves(model_tree(layer))
    assert {name: to_bytes(now[name]) for name in part} == {name: to_bytes(kept[name]) for name in part}
    assert {name: to_bytes(now[name]) for name in rest} == rest
    with pytest.raises(StructureMismatch, match="out"):
        load({name: live[name] for name in part}, dict(kept))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", ["none", "shared", "bare"])
def test_a_flat_buffer_on_one_side_only(other: str, dtype: torch.dtype) -> None:
    """NVIDIA/Megatron-LM #2164: with and without the distributed optimizer are different trees, and the error says so
    by name.
    """
    flat = DDPLike(Layer(3, dtype))
    layer = Layer(3, dtype)
    separate = nn.ModuleDict({"module": layer}) if other == "bare" else DDPLike(layer, other)  # type: ignore[arg-type]
    names = ["chunks[0].buffers[0]", "chunks[0].expert_parallel_buffers[0]"]
    names += [f"chunks[0].parameters['module.{name}']" for name in ("fc.weight", "fc.bias", "out.weight")]
    _is_refused(flat, _kept(separate), *names)
    _is_refused(separate, _kept(flat), *names)


WRONG: dict[str, Callable[[], nn.Module]] = {
    "shape": lambda: nn.Linear(2, 3),
    "dtype": lambda: nn.Linear(2, 2, dtype=torch.bfloat16),
    "meta": lambda: nn.Linear(2, 2, device="meta"),
    "sparse": lambda: nn.ParameterDict({"weight": nn.Parameter(torch.eye(2).to_sparse()), "bias": torch.ones(2)}),
}


@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_the_first_layer_is_not_written_if_the_last_does_not_fit(what: str, layers: int) -> None:
    """vllm-project/vllm #57854, gittensor-ai-lab/sparkinfer #151: checking while writing leaves a mixture of old and
    new layers.
    """
    good = [nn.Linear(2, 2) for _ in range(layers - 1)]
    live, kept = nn.Sequential(*good, nn.Linear(2, 2)), nn.Sequential(*(nn.Linear(2, 2) for _ in good), WRONG[what]())
    _is_refused(live, _kept(kept), f"chunks[0].parameters['{layers - 1}.weight']")


@pytest.mark.parametrize("what", ["meta", "sparse"])
def test_the_first_layer_is_not_written_if_the_last_cannot_be(what: str) -> None:
    """vllm-project/vllm #57854: the same where it is the live side that cannot take the values."""
    live, kept = nn.Sequential(nn.Linear(2, 2), WRONG[what]()), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = live[0].weight.tolist()
    with pytest.raises(mcore_snap.SnapError, match=r"parameters\['1\.weight'\]"):
        load(model_tree(live), _kept(kept))
    assert live[0].weight.tolist() == before


def test_a_leaf_that_is_none_is_not_in_a_tree() -> None:
    """NVIDIA/Megatron-LM #2164: optree drops None without a word; the names then differ, and a load of the rest is
    refused.
    """
    live = {"buffer": torch.ones(2), "rest": torch.ones(1)}
    snap = snapshot({"buffer": None, "rest": torch.zeros(1)})
    assert list(named_leaves(snap)) == ["['rest']"]
    with pytest.raises(StructureMismatch, match=r"\['buffer'\]"):
        load(live, snap)
    assert live["rest"].tolist() == [1.0]


TWICE = """
import importlib, sys, torch
import mcore_snap as one

def ours():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "mcore_snap")

def works(library):
    model.weight.data.zero_()
    library.load(library.model_tree(model), kept)
    assert model.weight.tolist() == before
    assert library.bitwise_equal(library.model_tree(model), kept)
    assert library.bitwise_equal(library.snapshot(library.model_tree(model)), library.model_tree(model))

model = torch.nn.Linear(2, 2)
kept = one.snapshot(one.model_tree(model))
before = model.weight.tolist()
works(importlib.reload(one))
for name in ours():
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
import mcore_snap as two
assert two is not one and two.__file__ != one.__file__
works(two)
works(one)
"""


def test_imported_twice_in_one_process(tmp_path: Path) -> None:
    """pytorch/pytorch #112352, #112111, #112342: nothing is registered twice or taken back, and old snapshots still
    load.
    """
    (tmp_path / "mcore_snap").symlink_to(Path(mcore_snap.__file__).parent, target_is_directory=True)
    child = [sys.executable, "-W", "error", "-c", TWICE, str(tmp_path)]
    done = subprocess.run(child, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_nodes_of_other_packages_keep_their_registrations() -> None:
    """pytorch/pytorch #112352: a class that somebody else registered is a node of the tree, whatever namespace ours
    are in.
    """

    class Own:
        def __init__(self, w: torch.Tensor) -> None:
            self.w = w

    optree.register_pytree_node(Own, lambda own: ((own.w,), None, ("w",)), lambda _, w: Own(*w), namespace="elsewhere")
    live = Own(torch.ones(2))
    with pytest.raises(StructureMismatch, match="Own"):
        snapshot({"own": live})  # registered for another namespace only: no leaf, and not skipped
