"""Tensors that are made of other tensors: every part is the memory itself, and what does not tell is refused."""

import subprocess
import sys
import textwrap

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from mcore_snap.megatron.inner_tensors import inner_tensors
from mcore_snap.testing.quantized import EXAMPLES, GroupedTensor, MXFP8Tensor, QuantizedTensor
from mcore_snap.testing.raw_bytes import to_bytes
from mcore_snap.words import problem_with


def names(tensor):
    """Return the suffixes of the parts."""
    return tuple(name for name, _ in inner_tensors(tensor).parts)


def with_cache(kind):
    """Make one whose columns were used."""
    tensor = EXAMPLES[kind]()
    tensor.update_usage(columnwise=True)
    return tensor


def change(tensor):
    """Write into every part."""
    for _, part in inner_tensors(tensor).parts:
        part.add_(1)


def agree(tensor):
    """Tell whether both ways to read a tensor give the same bits."""
    return to_bytes(tensor.by_rows()) == to_bytes(tensor.by_columns().T)


def test_plain_memory_has_no_parts():
    """A subclass without a dispatch of its own is plain memory too."""

    class Named(torch.Tensor):
        pass

    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Named), torch.ones(4)[1:]):
        assert inner_tensors(tensor) is None
        assert problem_with(tensor) is None


def test_a_subclass_is_taken_apart_as_it_tells_itself():
    """By __tensor_flatten__, a parameter as well."""
    a, b = torch.zeros(2), torch.ones(2)
    for tensor in (TwoTensor(a, b), nn.Parameter(TwoTensor(a, b))):
        inner = inner_tensors(tensor)
        assert inner.after is None
        assert [(name, part.data_ptr()) for name, part in inner.parts] == [("a", a.data_ptr()), ("b", b.data_ptr())]


def test_inside_one_another():
    """The path of attributes is the name, and all caches are refreshed."""
    two = TwoTensor(TwoTensor(torch.zeros(2), torch.ones(2)), TwoTensor(torch.ones(2), torch.zeros(2)))
    assert names(two) == ("a.a", "a.b", "b.a", "b.b")

    class Around(QuantizedTensor):  # as torchao's, around what is quantized
        fields = ("tensor_impl", "zero")

    tensor = Around((4, 6), tensor_impl=with_cache("float8"), zero=with_cache("blockwise"))
    expected = ("tensor_impl._data", "tensor_impl._scale_inv", "zero._rowwise_data", "zero._rowwise_scale_inv")
    assert names(tensor) == expected
    change(tensor)
    inner_tensors(tensor).after()
    assert agree(tensor.tensor_impl)
    assert agree(tensor.zero)
    assert inner_tensors(tensor).after == inner_tensors(tensor).after


def test_hooks_are_equal_for_the_same_tensor():
    """So that a load calls each once."""
    one, other = with_cache("float8"), with_cache("float8")
    assert inner_tensors(one).after == inner_tensors(one).after
    assert len({inner_tensors(one).after, inner_tensors(one).after, inner_tensors(other).after}) == 2


def test_what_does_not_tell_what_it_is_made_of_is_refused_by_name():
    """At the top and inside another."""

    class Silent(QuantizedTensor):
        __tensor_flatten__ = property()

    class Empty(QuantizedTensor):
        pass

    class Loose(QuantizedTensor):
        fields = ("a", "b")

    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor in (Silent((2,)), Empty((2,)), Loose((2,), a=torch.ones(2), b=3), jagged):
        assert inner_tensors(tensor) is None
        assert problem_with(tensor)[0] == "unsupported"
        assert type(tensor).__name__ in problem_with(tensor)[1]
    # Inside another, it stands where its parts would, for the reader to refuse.
    silent = Silent((2,))
    around = Loose((2,), a=silent, b=torch.ones(2))
    assert names(around) == ("a", "b")
    assert inner_tensors(around).parts[0][1] is silent


def hybrid(rows, columns):
    """Compose two formats."""
    made = type("HybridQuantizedTensor", (QuantizedTensor,), {})
    return made((4, 6), _rowwise_storage=rows, _columnwise_storage=columns)


def test_a_tensor_with_a_format_per_direction():
    """Each half is what it is, and an unknown half refuses the whole."""

    class IdentityTensorStorage:
        _hp_data = torch.ones(4, 6)

    cached = with_cache("blockwise")
    tensor = hybrid(cached, IdentityTensorStorage())
    assert names(tensor) == (
        "_rowwise_storage._rowwise_data",
        "_rowwise_storage._rowwise_scale_inv",
        "_columnwise_storage._hp_data",
    )
    change(tensor)
    inner_tensors(tensor).after()
    assert agree(cached)
    assert names(hybrid(None, EXAMPLES["mxfp8"]())) == tuple(
        f"_columnwise_storage.{name}" for name in MXFP8Tensor.fields
    )
    assert inner_tensors(hybrid(EXAMPLES["mxfp8"](), object())) is None
    assert inner_tensors(hybrid(None, None)) is None


def test_a_group_of_tensors_in_one_memory():
    """The group has the weights, its members the caches."""
    tensor = GroupedTensor.of(torch.ones(3, 4, 6, dtype=torch.uint8), torch.rand(3) + 0.5)
    assert names(tensor) == ("rowwise_data", "scale_inv")
    for member in tensor.quantized_tensors:
        member.update_usage(columnwise=True)
    assert names(tensor) == ("rowwise_data", "scale_inv")
    change(tensor)
    inner_tensors(tensor).after()
    for member in tensor.quantized_tensors:
        assert agree(member)
    tensor.columnwise_data = torch.ones(72, dtype=torch.uint8)
    assert names(tensor) == ("rowwise_data", "scale_inv", "columnwise_data")
    tensor.quantized_tensors = None
    assert names(tensor) == ("rowwise_data", "scale_inv", "columnwise_data")
    inner_tensors(tensor).after()


def test_a_member_with_memory_of_its_own_would_be_left_out():
    """So the group is refused."""
    tensor = GroupedTensor.of(torch.ones(3, 4, 6, dtype=torch.uint8), torch.rand(3))
    tensor.quantized_tensors[1]._data = torch.ones(4, 6)
    assert inner_tensors(tensor) is None
    tensor.quantized_tensors[1]._data = None
    assert inner_tensors(tensor) is None
    tensor.quantized_tensors = [tensor.rowwise_data[:24], torch.ones(4, 6)]
    assert inner_tensors(tensor) is None
    tensor.quantized_tensors = [tensor.rowwise_data[:24].view(4, 6)]
    assert names(tensor) == ("rowwise_data", "scale_inv")


_DISTRIBUTED = """
    import sys
    import torch
    import torch.distributed as dist
    from mcore_snap.megatron.inner_tensors import inner_tensors

    assert inner_tensors(torch.ones(1)) is None
    assert "torch.distributed.tensor" not in sys.modules
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.two_tensor import TwoTensor

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.arange(3.0)
    sharded = DTensor.from_local(local, mesh, [Shard(0)])
    for tensor in (sharded, torch.nn.Parameter(sharded)):
        inner = inner_tensors(tensor)
        [(suffix, part)] = inner.parts
        assert (suffix, part.data_ptr(), part.shape, inner.after) == ("", local.data_ptr(), local.shape, None)
        assert type(part) is torch.Tensor

    pair = DTensor.from_local(TwoTensor(torch.zeros(2), torch.ones(2)), mesh, [Replicate()])
    assert [name for name, _ in inner_tensors(pair).parts] == ["a", "b"]

    waiting = AsyncCollectiveTensor(local)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    tensor._local_tensor = waiting
    [(suffix, part)] = inner_tensors(tensor).parts
    assert (suffix, part.data_ptr(), waiting.completed) == ("", local.data_ptr(), True)
"""


def test_a_distributed_tensor_is_its_local_shard():
    """Nothing is gathered, and what is under way is waited for."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_DISTRIBUTED)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
