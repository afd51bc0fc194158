"""Tensors that are made of other tensors: the plain memory inside, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mcore_snap.megatron.transformer_engine import Refresh, engine_parts, from_engine

__all__ = ["Inner", "inner_tensors"]


@dataclass(frozen=True, slots=True)
class Inner:
    """What a tensor is made of.

    Attributes:
        parts: Pairs of a suffix and a live tensor, the tensor's own memory and no copy. The suffix is
            the path of attributes; it is empty for the local shard of a distributed tensor. A part
            may itself be of a kind that cannot be kept: it is for the reader to refuse.
        after: What to call once bytes were written to the parts, if anything. It keeps the tensor
            alive; two of them are equal for the same tensor.
    """

    parts: tuple[tuple[str, Tensor], ...]
    after: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _All:
    """Several things to do, one after another; equal if they are."""

    each: tuple[Callable[[], None], ...]

    def __call__(self) -> None:
        for one in self.each:
            one()


def inner_tensors(tensor: Tensor) -> Inner | None:
    """Return the plain memory that a tensor subclass is made of, or None.

    Handled are distributed tensors (this rank's shard, nothing is gathered), Transformer Engine's
    quantized tensors, and every subclass with ``__tensor_flatten__``, in one another as well. None
    stands for plain memory, and for subclasses that do not tell what they are made of; the latter
    are refused by `mcore_snap.words.problem_with`.

    >>> import torch
    >>> inner_tensors(torch.nn.Parameter(torch.ones(2))) is None
    True
    >>> from torch.testing._internal.two_tensor import TwoTensor
    >>> pair = inner_tensors(TwoTensor(torch.zeros(1), torch.ones(1)))
    >>> pair.parts
    (('a', tensor([0.])), ('b', tensor([1.])))
    """
    if not _is_wrapper(tensor):  # nearly every one
        return None
    after: list[Callable[[], None]] = []
    parts = _expand(tensor, "", after)
    if len(parts) == 1 and parts[0][1] is tensor:
        return None
    return Inner(parts, after[0] if len(after) == 1 else _All(tuple(after)) if after else None)


def _expand(tensor: Tensor, path: str, after: list[Callable[[], None]]) -> tuple[tuple[str, Tensor], ...]:
    itself = ((path, tensor),)
    if not _is_wrapper(tensor):
        return itself
    if _is_a("AsyncCollectiveTensor", tensor):
        waited: Any = tensor
        waited.trigger_wait()
        return _expand(waited.elem, path, after)
    if _is_a("DTensor", tensor) and hasattr(tensor, "_local_tensor"):
        return _expand(tensor._local_tensor, path, after)
    if from_engine(tensor):
        # Its own account in `__tensor_flatten__`, where there is one, takes caches for weights.
        found = engine_parts(tensor)
        if found is None:
            return itself
        after.append(Refresh(tensor))
    else:
        found = _flattened(tensor)
    return (
        tuple(leaf for name, part in found or () for leaf in _expand(part, f"{path}.{name}" if path else name, after))
        or itself
    )


def _flattened(tensor: Any) -> tuple[tuple[str, Tensor], ...]:
    # Jagged tensors remember lengths that they computed from their offsets, and would not notice a change.
    if not hasattr(tensor, "__tensor_flatten__") or _is_a("NestedTensor", tensor):
        return ()
    names, _ = tensor.__tensor_flatten__()
    found = tuple((name, getattr(tensor, name)) for name in names)
    return found if all(isinstance(part, Tensor) for _, part in found) else ()


def _is_wrapper(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_a(name: str, tensor: Tensor) -> bool:
    # By name: importing torch.distributed.tensor takes longer than most snapshots.
    return any(cls.__name__ == name for cls in type(tensor).__mro__)
