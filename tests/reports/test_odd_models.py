"""The laws once more, over models to which everything has happened that public reports tell of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from pictures import change_everything, flat_buffers, gradients, memory, picture, places

from mcore_snap import bitwise_equal, compare, fingerprint, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.model_strategies import odd_models
from mcore_snap.testing.raw_bytes import covered

if TYPE_CHECKING:
    from torch import Tensor, nn

odd = odd_models()


@given(odd)
def test_an_odd_model_comes_back(models: list[nn.Module]) -> None:
    """data-apis/array-api-tests #42, qthequartermasterman/hypothesis-torch #21: drawn as bytes, every bit returns, by
    load and after a look-back.
    """
    tree = model_tree(models)
    first, snap = picture(models), snapshot(tree)
    assert picture(models) == first
    change_everything(models)
    second = picture(models)
    with swapped(tree, snap):
        assert picture(models) == first
        change_everything(models)
    assert picture(models) == second
    load(model_tree(models), snap)
    assert picture(models) == first
    assert bitwise_equal(tree, snap)
    assert not compare(tree, snap)
    assert fingerprint(tree) == fingerprint(snap)


@given(odd)
def test_an_odd_model_stays_where_it_is(models: list[nn.Module]) -> None:
    """vllm-project/vllm #48941, NVIDIA/Megatron-LM #7383: no address, stride, object or attribute changes, and no
    gradient.
    """
    for buffer in flat_buffers(models):
        if not hasattr(buffer, "shared_buffer"):
            buffer.grad_data.fill_(7)
    tree = model_tree(models)
    where, grads = places(models), gradients(models)
    snap = snapshot(tree)
    change_everything(models)
    with swapped(tree, snap):
        assert places(models) == where
    load(tree, snap)
    assert places(models) == where
    assert gradients(models) == grads


@given(odd)
def test_every_byte_of_an_odd_model_is_in_exactly_one_leaf(models: list[nn.Module]) -> None:
    """safetensors/safetensors #379: no byte is kept twice, none is missed, and nothing but padding comes
    in addition.
    """
    held: dict[int, str] = {}
    for name, leaf in named_leaves(model_tree(models)).items():
        if ".extra_state[" not in name:
            for at in _addresses(leaf):
                assert held.setdefault(at, name) == name
    wanted = {at for _, tensor in memory(models) for at in _addresses(tensor)}
    assert wanted <= set(held)
    assert all("buffers[" in held[at] for at in set(held) - wanted)


def _addresses(tensor: Tensor) -> set[int]:
    base = tensor.untyped_storage().data_ptr()
    return {base + int(at) for at in covered(tensor).nonzero()[0]}


@given(odd, st.booleans())
def test_the_structure_of_an_odd_model_is_stable(models: list[nn.Module], reload: bool) -> None:
    """radixark/miles #2042: names, dtypes and shapes follow from the model alone, whatever was read, written or
    reloaded.
    """
    tree = model_tree(models)
    shape = {name: (leaf.dtype, leaf.shape) for name, leaf in named_leaves(tree).items() if "extra_state" not in name}
    snap = snapshot(tree)
    change_everything(models)
    if reload:
        for buffer in flat_buffers(models):
            buffer.reload()
    load(tree, snap)
    for each in (tree, snap, model_tree(models), snapshot(snap)):
        found = {name: (leaf.dtype, leaf.shape) for name, leaf in named_leaves(each).items()}
        assert {name: spec for name, spec in found.items() if "extra_state" not in name} == shape


@given(odd_models(offloaded=True), st.booleans())
def test_an_odd_model_comes_back_across_offload_and_reload(models: list[nn.Module], before: bool) -> None:
    """verl-project/verl #6026: taken offloaded and loaded resident, or taken resident and loaded offloaded, the bits
    are the same.
    """
    tree = model_tree(models)
    host = [buffer.host_copy() for buffer in flat_buffers(models)]
    if before:
        for buffer in flat_buffers(models):
            buffer.reload()
    first, snap = picture(models), snapshot(tree)
    change_everything(models)
    for buffer, copy in zip(flat_buffers(models), host, strict=True):
        if copy is not None and before:
            buffer.offload("param_data_cpu" if buffer.param_data_cpu is not None else "cpu_data")
        else:
            buffer.reload()
    load(tree, snap)
    assert picture(models) == first
    for buffer in flat_buffers(models):
        buffer.reload()
    assert picture(models) == first
