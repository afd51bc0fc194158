"""The only place that copies weights: out of live memory into a slab, and back in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_snap.errors import SnapError
from mcore_snap.frozen import FrozenLeaf
from mcore_snap.specs import aligned_offsets, overlaps_itself, span_of
from mcore_snap.words import plain, storage_strides, words

__all__ = ["Write", "capture", "overlap_problems", "write"]


def capture(leaves: Sequence[Tensor]) -> list[FrozenLeaf]:
    """Copy tensors into one slab of host memory of their exact size.

    One allocation serves the whole snapshot, and each byte is copied once. Dense layouts are kept;
    others become row-major.
    """
    offsets, total = aligned_offsets(leaf.nbytes for leaf in leaves)
    with torch.inference_mode(mode=False), torch.no_grad():
        slab = torch.empty(total, dtype=torch.uint8, device="cpu")
        kept = []
        for leaf, offset in zip(leaves, offsets, strict=True):
            source = plain(leaf)
            flat = slab[offset : offset + source.nbytes].view(source.dtype)
            target = flat.as_strided(source.shape, storage_strides(source), flat.storage_offset())
            _copy(target, source)
            kept.append(FrozenLeaf(target))
    return kept


@dataclass(frozen=True, slots=True)
class Write:
    """One leaf to be written: where to, where from, and what to call it."""

    name: str
    target: Tensor
    source: Tensor


def overlap_problems(writes: Sequence[Write]) -> list[str]:
    """Return which sources hold two values for one place of a target that overlaps itself, as after an average."""
    return [
        f"{one.name}: expected equal values where the live tensor repeats its memory (strides "
        f"{list(one.target.stride())}), found different ones; expand the snapshot's leaf likewise"
        for one in writes
        if _overlapping(one.target) and not _consistent(one.target, one.source)
    ]


def write(writes: Sequence[Write], *, tracked: bool) -> None:
    """Copy in place. All checks are the caller's, and come before.

    Args:
        writes: What to copy where.
        tracked: Whether autograd's version counters move, so that a backward pass over a graph made
            before fails loudly. A look-back gives the same bits back and must not disturb them.

    Raises:
        SnapError: A copy failed; the message lists the leaves that had been written by then.
    """
    done: list[str] = []
    with torch.no_grad():
        for one in writes:
            target = plain(one.target) if tracked else plain(one.target).data
            try:
                with torch.inference_mode(target.is_inference()):
                    _copy(target, plain(one.source))
            except Exception as error:
                message = f"the copy into {one.name} failed ({error}); written by then, and perhaps in part this one:"
                raise SnapError(message, done) from error
            done.append(one.name)


def _copy(target: Tensor, source: Tensor) -> None:
    if _overlapping(target):
        _copy_overlapping(target, source)
    elif target.dtype == source.dtype:
        lazy = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
        target.copy_(source) if lazy else words(target).copy_(words(source))
    else:
        target.copy_(source)  # the plan let only an exact widening through


def _overlapping(tensor: Tensor) -> bool:
    return overlaps_itself(tuple(tensor.shape), tuple(tensor.stride()))


def _positions(target: Tensor) -> Tensor:
    # The index, counted from the first element in memory, of every element in logical order.
    shape, stride = tuple(target.shape), tuple(target.stride())
    return torch.arange(span_of(shape, stride)).as_strided(shape, stride).reshape(-1)


def _consistent(target: Tensor, source: Tensor) -> bool:
    where = _positions(target)
    flat = words(plain(source).to("cpu").resolve_conj().resolve_neg()).reshape(-1)
    scratch = flat.new_zeros(int(where.max()) + 1)
    scratch[where] = flat
    return torch.equal(_comparable(scratch[where]), _comparable(flat))


def _comparable(flat: Tensor) -> Tensor:
    # Only complex128 is still a float here; by value its NaNs would differ from themselves.
    return torch.view_as_real(flat).view(torch.int64) if flat.is_complex() else flat


def _copy_overlapping(target: Tensor, source: Tensor) -> None:
    where = _positions(target).to(target.device)
    span = words(target).as_strided((int(where.max()) + 1,), (1,), target.storage_offset())
    if target.dtype != source.dtype:
        source = source.to(target.dtype)
    span[where] = words(source.to(target.device).resolve_conj().resolve_neg()).reshape(-1)
