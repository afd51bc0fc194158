"""Group G and D8: tensors made of other tensors, shards, and caches derived from weights."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist
from pictures import picture, places
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from mcore_snap import StructureMismatch, bitwise_equal, fingerprint, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.testing.chunks import AnyState, DDPLike, Layer
from mcore_snap.testing.raw_bytes import flip, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mcore_snap.testing.model_strategies import Models

DTYPES: Final = (torch.float32, torch.bfloat16)
HOMES: Final[dict[str, Callable[[nn.Module], Models]]] = {
    "bare": lambda module: module,
    "wrapped": lambda module: _wrapped_before(module),  # noqa: PLW0108 - defined below
    "second chunk": lambda module: [DDPLike(Layer()), module],
}


def _wrapped_before(module: nn.Module) -> nn.Module:
    chunk = DDPLike(nn.ModuleDict({"layer": Layer()}))
    chunk.module.add_module("special", module)
    return chunk


def _holding(tensor: Tensor, *, parameter: bool) -> nn.Module:
    module = nn.Module()
    if parameter:
        module.w = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    else:
        module.register_buffer("w", tensor)
    return module


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_inner_tensors_come_back(dtype: torch.dtype, parameter: bool, home: str) -> None:
    """NVIDIA/Megatron-LM #2582, #5083, NVIDIA/TransformerEngine #1686: payload, scales and what else there is, each
    its own leaf.
    """
    module = _holding(TwoTensor(torch.arange(4.0).to(dtype), torch.arange(4.0).to(dtype) + 10), parameter=parameter)
    models = HOMES[home](module)
    tree = model_tree(models)
    before, where, snap = picture(models), places(models), snapshot(tree)
    inner = [name for name in named_leaves(snap) if name.endswith(("w.a']", "w.b']"))]
    assert len(inner) == 2
    flip([module.w.a, module.w.b])
    assert not bitwise_equal(tree, snap)
    changed = picture(models)
    with swapped(tree, snap, check=True):
        assert picture(models) == before
    assert picture(models) == changed
    load(tree, snap)
    assert picture(models) == before
    assert places(models) == where
    assert fingerprint(tree) == fingerprint(snap)


class BlockScaled(Tensor):
    """Bytes and one scale, which re-quantises whatever is copied into it, as block-scaled weights do."""

    payload: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, payload: Tensor, scale: Tensor) -> BlockScaled:  # noqa: PYI034 - plainer here
        """Wrap without memory of its own."""
        made = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=torch.float32)
        made.payload, made.scale = payload, scale
        return made

    @classmethod
    def quantized(cls, values: Tensor) -> BlockScaled:
        """Choose the scale as the smallest power of two that fits."""
        made = cls(torch.zeros(values.shape, dtype=torch.float8_e4m3fn), torch.ones(()))
        made.requantize(values)
        return made

    def requantize(self, values: Tensor) -> None:
        """Take values."""
        self.scale.copy_(torch.exp2(torch.ceil(torch.log2(values.abs().max() / 448))))
        self.payload.copy_((values / self.scale).to(torch.float8_e4m3fn))

    def values(self) -> Tensor:
        """Return what it stands for."""
        return self.payload.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the parts."""
        return ["payload", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, __: Any, ___: Any) -> BlockScaled:
        """Make it of parts."""
        return BlockScaled(inner["payload"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Go through values, but for aliases."""
        if func in {torch.ops.aten.detach.default, torch.ops.aten.alias.default}:
            return cls(args[0].payload, args[0].scale)
        plain_args = tree_map(lambda x: x.values() if isinstance(x, cls) else x, (args, kwargs or {}))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].requantize(plain_args[0][1])
            return args[0]
        return func(*plain_args[0], **plain_args[1])


@pytest.mark.parametrize("parameter", [True, False])
def test_quantised_bytes_are_not_quantised_again(parameter: bool) -> None:
    """NVIDIA/Megatron-LM #6666: de-quantise and re-quantise is not idempotent, so the stored bytes themselves come
    back.
    """
    weight = BlockScaled.quantized(torch.tensor([449.0, 1.0]))
    assert (weight.payload.view(torch.uint8).tolist(), weight.scale.item()) == ([118, 48], 2.0)
    again = BlockScaled.quantized(weight.values())
    assert (again.payload.view(torch.uint8).tolist(), again.scale.item()) == (
        [126, 56],
        1.0,
    )  # what going by value does
    module = _holding(weight, parameter=parameter)
    tree = model_tree(module)
    snap = snapshot(tree)
    module.w.payload.view(torch.uint8).zero_()
    module.w.scale.zero_()
    load(tree, snap)
    assert module.w.payload.view(torch.uint8).tolist() == [118, 48]
    assert module.w.scale.item() == 2.0


@pytest.mark.parametrize("parameter", [True, False])
def test_a_subclass_that_does_not_tell_its_parts_is_refused(parameter: bool) -> None:
    """NVIDIA/Megatron-LM #5083: by its name and its type, before anything is read."""
    module = _holding(torch.ones(1), parameter=False)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    if parameter:
        module.bad = nn.Parameter(jagged)
    else:
        module.register_buffer("bad", jagged)
    with pytest.raises(StructureMismatch, match=r"bad.*NestedTensor"):
        snapshot(model_tree(module))


@pytest.fixture
def four_ranks() -> Iterator[Any]:
    """Be rank 3 of 4, none of which would answer a collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def _distributed(mesh: Any, kind: str, dtype: torch.dtype) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = torch.arange(3.0).to(dtype).view(1, 3)
    placement, shape = {
        "uneven rows": (Shard(0), (7, 3)),
        "even rows": (Shard(0), (4, 3)),
        "columns": (Shard(1), (1, 10)),
        "nothing here": (Shard(0), (3, 3)),
        "everywhere": (Replicate(), (1, 3)),
    }[kind]
    part = local[:0] if kind == "nothing here" else local
    stride = (shape[1], 1)
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["uneven rows", "even rows", "columns", "nothing here", "everywhere"])
def test_of_a_distributed_weight_the_shard_is_kept(four_ranks: Any, kind: str, dtype: torch.dtype) -> None:
    """verl-project/verl #7251, ISEEKYAN/Megatron-LM #45, RLinf/RLinf #1400: this rank's shard under the weight's name,
    and no collective.
    """
    module = nn.Module()
    module.plain = nn.Parameter(torch.ones(2))
    module.w = nn.Parameter(_distributed(four_ranks, kind, dtype))
    local, shape, placements = module.w._local_tensor, module.w.shape, module.w.placements
    held, address = to_bytes(local), local.data_ptr()
    tree = model_tree(module)
    snap = snapshot(tree)
    leaf = snap.chunks[0].parameters["w"]
    assert type(leaf) is Tensor
    assert (leaf.dtype, leaf.shape, to_bytes(leaf)) == (dtype, local.shape, held)
    flip([local, module.plain])
    load(tree, snap)
    assert to_bytes(module.w._local_tensor) == held
    assert module.w._local_tensor.data_ptr() == address
    assert (module.w.shape, module.w.placements) == (shape, placements)
    assert module.plain.tolist() == [1.0, 1.0]


class Caching(nn.Linear):
    """Keeps a transposed copy for as long as its weight's version has not changed."""

    def transposed(self) -> Tensor:
        """Return the copy, made anew where it is stale."""
        if getattr(self, "made_of", None) != self.weight._version:
            self.made_of = self.weight._version
            self.copy = self.weight.detach().t().contiguous()
        return self.copy


@pytest.mark.parametrize("wrap", [lambda module: module, DDPLike, lambda module: DDPLike(module, "none")])
def test_a_cache_derived_from_a_weight_is_seen_to_be_stale(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """NVIDIA/TransformerEngine #524, #820: a load moves the version of every weight, also of one inside a
    flat buffer.
    """
    module = Caching(3, 2)
    model = wrap(module)
    snap = snapshot(model_tree(model))
    first = to_bytes(module.transposed())
    with torch.no_grad():
        module.weight.add_(1)
    assert to_bytes(module.transposed()) != first
    load(model_tree(model), snap)
    assert to_bytes(module.transposed()) == first


STATES: Final[dict[str, Callable[[], Any]]] = {
    "nothing": lambda: None,
    "no bytes": lambda: torch.empty(0, dtype=torch.uint8),
    "a file": lambda: io.BytesIO(b"amax\x00\xff"),
    "an empty file": io.BytesIO,
    "a tensor": lambda: torch.tensor([float("nan"), -0.0]),
    "objects": lambda: {"scale": torch.ones(2, dtype=torch.bfloat16), "recipe": [1, ("delayed", None)]},
}


@pytest.mark.parametrize("now", STATES)
@pytest.mark.parametrize("then", STATES)
def test_extra_state_comes_back_whatever_it_became(then: str, now: str) -> None:
    """NVIDIA/TransformerEngine #1686: scales and amax history live in extra state, which is None until the first
    forward.
    """
    model = nn.ModuleDict({"fc": nn.Linear(2, 2), "fp8": AnyState(STATES[then]())})
    tree = model_tree(model)
    first, snap = picture(model), snapshot(tree)
    model["fp8"].state = STATES[now]()
    second = picture(model)
    assert (set(named_leaves(tree)) == set(named_leaves(snap))) == ((then == "nothing") == (now == "nothing"))
    with swapped(tree, snap):
        assert picture(model) == first
    assert picture(model) == second
    load(tree, snap)
    assert picture(model) == first
