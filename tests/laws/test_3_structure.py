"""Law 3: a snapshot has the structure, the names, the dtypes and the shapes of its tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import torch
from hypothesis import given
from torch.utils import _pytree as torch_pytree

from mcore_snap import bitwise_equal, compare, fingerprint, named_leaves, named_parameters, snapshot, thaw, verify
from mcore_snap.testing.model_state import chunks_of, model_tensors
from mcore_snap.testing.model_strategies import model_trees
from mcore_snap.testing.raw_bytes import flip, to_bytes
from mcore_snap.testing.strategies import trees

if TYPE_CHECKING:
    from mcore_snap.testing.model_strategies import Models


def _agree(tree: Any, other: Any) -> None:
    """Assert that two trees go through both pytree libraries together, and that their leaves are alike."""
    assert optree.tree_structure(tree) == optree.tree_structure(other)
    assert torch_pytree.tree_structure(tree) == torch_pytree.tree_structure(other)
    left, right = named_leaves(tree), named_leaves(other)
    assert list(left) == list(right)
    for name, leaf in left.items():
        assert (leaf.dtype, leaf.shape) == (right[name].dtype, right[name].shape), name
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    optree.tree_map(lambda a, b: pairs.append((a, b)), tree, other)
    torch_pytree.tree_map(lambda a, b: a is None or pairs.append((a, b)), tree, other)  # None is a leaf there
    assert len(pairs) == 2 * len(left)
    assert all(to_bytes(a) == to_bytes(b) for a, b in pairs)


def _are_frozen(snap: Any) -> None:
    for name, leaf in named_leaves(snap).items():
        assert type(leaf) is torch.Tensor, name
        assert leaf.device.type == "cpu", name
        assert not leaf.requires_grad, name
        assert leaf.grad_fn is None, name


@given(trees())
def test_a_snapshot_of_any_tree_has_its_structure(tree: Any) -> None:
    """Dictionaries, ordered or not, lists, tuples, named tuples and None come back as what they were."""
    snap = snapshot(tree)
    _agree(tree, snap)
    _agree(snap, thaw(snap))
    _agree(snap, snapshot(snap))
    _are_frozen(snap)


@given(model_trees())
def test_a_snapshot_of_a_model_has_the_structure_of_its_tree(pair: tuple[Models, Any]) -> None:
    """The same for models, whose live tree reads the model each time it is flattened."""
    _, tree = pair
    snap = snapshot(tree)
    assert type(snap) is type(tree)
    _agree(tree, snap)
    _agree(snap, snapshot(snap))
    _are_frozen(snap)


@given(model_trees())
def test_every_byte_of_a_model_is_in_exactly_one_leaf(pair: tuple[Models, Any]) -> None:
    """Whichever byte of a parameter or buffer one asks for, one leaf has it and no other."""
    models, tree = pair
    live = {n: t for n, t in named_leaves(tree).items() if ".extra_state[" not in n}
    seen: dict[int, str] = {}
    for name, leaf in live.items():
        for at in _addresses(leaf):
            assert seen.setdefault(at, name) == name
    wanted = {at for _, tensor in model_tensors(models) for at in _addresses(tensor)}
    assert wanted == set(seen)


def _addresses(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of the elements of a tensor."""
    if not tensor.numel():
        return set()
    base = tensor.untyped_storage().data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offsets = torch.arange(tensor.storage_offset() + last + 1)
    picked = offsets.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    width = tensor.dtype.itemsize
    return {base + offset * width + byte for offset in picked for byte in range(width)}


@given(model_trees())
def test_named_parameters_are_those_of_the_model(pair: tuple[Models, Any]) -> None:
    """Parameters inside flat buffers are found under their own names, in a live tree and in a snapshot."""
    models, tree = pair
    held = {
        f"chunks[{i}].{name}": to_bytes(param)
        for i, chunk in enumerate(chunks_of(models))
        for name, param in chunk.named_parameters()
    }
    for each in (tree, snapshot(tree)):
        assert {name: to_bytes(param) for name, param in named_parameters(each).items()} == held


@given(trees(min_leaves=1))
def test_equality_and_digests_see_single_bits(tree: Any) -> None:
    """A tree equals its snapshot by bytes and by digest; after one flip it differs, and the report has the leaf."""
    snap = snapshot(tree)
    assert bitwise_equal(tree, snap)
    assert not compare(tree, snap)
    assert fingerprint(tree) == fingerprint(snap)
    verify(snap)
    leaves = named_leaves(tree)
    name = max(leaves, key=lambda each: leaves[each].numel())
    if leaves[name].numel():
        flip([leaves[name]])
        assert not bitwise_equal(tree, snap)
        assert fingerprint(tree) != fingerprint(snap)
        assert name in str(compare(tree, snap))
