"""What the two functions take, and what they refuse by name."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import released_verl
import torch
from torch import nn

from mcore_snap import ModelTree, NotResident, StructureMismatch, model_tree
from mcore_snap.compat import verl as ours
from mcore_snap.compat.verl import copy_megatron_model_to_cpu, restore_megatron_model_from_cpu
from mcore_snap.testing import model_bytes
from mcore_snap.testing.chunks import DDPLike, Layer


def make(seed: int = 0) -> list[nn.Module]:
    """Two chunks, one wrapped."""
    torch.manual_seed(seed)
    return [DDPLike(Layer()), Layer(2)]


def change(chunks: list[nn.Module]) -> None:
    """Change every parameter."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.add_(1)


@pytest.mark.parametrize("name", ours.__all__)
def test_the_arguments_are_verls(name: str) -> None:
    """Same names, same order, no more and no defaults."""
    theirs = released_verl.definition(released_verl.FUNCTIONS, name).args
    parameters = inspect.signature(getattr(ours, name)).parameters.values()
    assert [one.name for one in parameters] == [one.arg for one in theirs.args]
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty for one in parameters)
    assert not any([theirs.posonlyargs, theirs.kwonlyargs, theirs.defaults, theirs.vararg, theirs.kwarg])


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList, iter])
def test_any_iterable_of_chunks_will_do(kind: type) -> None:
    """The released functions enumerate what they are given, so callers may give more than lists."""
    chunks = make()
    kept = model_bytes(chunks)
    state = copy_megatron_model_to_cpu(kind(chunks))
    change(chunks)
    assert model_bytes(chunks) != kept
    assert restore_megatron_model_from_cpu(models=kind(chunks), cpu_state=state) is None
    assert model_bytes(chunks) == kept


def test_a_single_chunk_is_a_model_of_one() -> None:
    """The released functions crash on a module that is in no list."""
    model = Layer()
    kept = model_bytes(model)
    state = copy_megatron_model_to_cpu(model)
    change([model])
    restore_megatron_model_from_cpu([model], state)
    assert model_bytes(model) == kept


def test_a_copy_outlives_its_model_and_its_process() -> None:
    """It can be restored into another model of the same structure, after it travelled."""
    chunks = make()
    kept = model_bytes(chunks)
    state = pickle.loads(pickle.dumps(copy_megatron_model_to_cpu(chunks)))
    del chunks
    another = make(seed=1)
    assert model_bytes(another) != kept
    restore_megatron_model_from_cpu(another, copy.deepcopy(state))
    assert model_bytes(another) == kept


def test_chunks_that_nothing_else_holds_can_be_copied() -> None:
    """A generator may make them on the way."""
    assert copy_megatron_model_to_cpu(Layer() for _ in range(2)).chunks[1].parameters.keys()


def test_inference_mode_changes_nothing() -> None:
    """Workers compute log-probabilities in it."""
    chunks = make()
    kept = model_bytes(chunks)
    with torch.inference_mode():
        state = copy_megatron_model_to_cpu(chunks)
    change(chunks)
    with torch.inference_mode():
        restore_megatron_model_from_cpu(chunks, state)
    assert model_bytes(chunks) == kept
    chunks[1](torch.ones(2)).sum().backward()


def test_caches_registered_anew_stay_as_they_are() -> None:
    """Yarn's tables grow with the longest sequence: registered anew, in another shape, and no part of a version."""
    chunks = make()
    chunks[1].max_seq_len_cached = 4
    kept = model_bytes(chunks)
    chunks[1].register_buffer("cos_cached", torch.ones(4), persistent=False)
    state = copy_megatron_model_to_cpu(chunks)
    change(chunks)
    chunks[1].register_buffer("cos_cached", torch.ones(8), persistent=False)
    restore_megatron_model_from_cpu(chunks, state)
    restored = model_bytes(chunks)
    assert restored.pop("1:buffer:cos_cached").shape == (8,)
    assert restored == kept


THEIR_STATES = {
    "wrapped": {"model_chunk_0": {"buffer_states": [[{"param_data": torch.zeros(3)}], []], "is_ddp": True}},
    "not wrapped": {"model_chunk_0": {"model_state": {"fc.weight": {"data": torch.zeros(3)}}, "is_ddp": False}},
}


@pytest.mark.parametrize("kind", THEIR_STATES)
def test_a_state_that_verl_took_is_refused(kind: str) -> None:
    """A trainer that was switched over while it kept versions is told so."""
    chunks = make()
    kept = model_bytes(chunks)
    with pytest.raises(StructureMismatch, match="verl's own dict of model chunks") as caught:
        restore_megatron_model_from_cpu(chunks, THEIR_STATES[kind])
    assert len(caught.value.problems) == 1
    assert model_bytes(chunks) == kept


@pytest.mark.parametrize("state", [None, {}, {"fc": torch.zeros(3)}, [], (1, 2), torch.zeros(3)])
def test_what_is_no_copy_is_refused(state: object) -> None:
    """Missing versions (`dict.get`), states of other strategies and anything else."""
    with pytest.raises(TypeError, match=f"found {type(state).__name__}$"):
        restore_megatron_model_from_cpu(make(), state)


def test_a_live_tree_is_no_copy() -> None:
    """Restoring a model from its own memory would do nothing, and say nothing."""
    chunks = make()
    with pytest.raises(TypeError, match="found a live tree"):
        restore_megatron_model_from_cpu(chunks, model_tree(chunks))


def test_ours_given_to_theirs_is_not_skipped() -> None:
    """The released function looks chunks up by key; in our copy it finds that there are no keys."""
    theirs = released_verl.definition(released_verl.FUNCTIONS, "restore_megatron_model_from_cpu")
    module = released_verl.execute([theirs], {"torch": torch, "DDP": DDPLike}, released_verl.FUNCTIONS)
    chunks = make()
    with pytest.raises(TypeError, match="ModelTree"):
        module.restore_megatron_model_from_cpu(chunks, copy_megatron_model_to_cpu(chunks))


@pytest.mark.parametrize("models", [None, 3, "chunks", ["chunk"], {"a": 1}])
def test_what_is_no_model_is_refused(models: object) -> None:
    """By the type that was found; an engine that was not initialised has None."""
    state = copy_megatron_model_to_cpu(make())
    with pytest.raises(TypeError, match="expected a model chunk"):
        copy_megatron_model_to_cpu(models)
    with pytest.raises(TypeError, match="expected a model chunk"):
        restore_megatron_model_from_cpu(models, state)
    with pytest.raises(TypeError, match="found ModelTree"):
        copy_megatron_model_to_cpu(state)


def test_no_chunks_are_refused() -> None:
    """The released copy of nothing is an empty dict, which restores nothing into any model."""
    with pytest.raises(ValueError, match="at least one model chunk"):
        copy_megatron_model_to_cpu([])
    with pytest.raises(ValueError, match="at least one model chunk"):
        restore_megatron_model_from_cpu([], copy_megatron_model_to_cpu(make()))


def test_all_problems_are_listed_and_nothing_is_written() -> None:
    """A copy of another structure: each leaf at fault by name."""
    chunks = make()
    kept = model_bytes(chunks)
    with pytest.raises(StructureMismatch) as caught:
        restore_megatron_model_from_cpu(chunks, copy_megatron_model_to_cpu([Layer(4), DDPLike(Layer(2))]))
    for name in ("chunks[0].buffers[0]", "chunks[0].parameters", "chunks[1].buffers[0]", "chunks[1].parameters"):
        assert any(name in problem for problem in caught.value.problems), name
    assert model_bytes(chunks) == kept


def test_freed_memory_is_named() -> None:
    """Where nothing of an offloaded buffer is left on the host, there is nothing to copy."""
    chunks = make()
    chunks[0].buffers[0].param_data.untyped_storage().resize_(0)
    with pytest.raises(NotResident, match=r"chunks\[0\]\.buffers\[0\]"):
        copy_megatron_model_to_cpu(chunks)


def test_a_copy_is_a_frozen_tree() -> None:
    """It can go wherever a snapshot can."""
    state = copy_megatron_model_to_cpu(make())
    assert isinstance(state, ModelTree)
    assert repr(state).startswith("ModelTree(frozen, 2 chunk(s)")
