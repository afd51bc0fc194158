"""The only place that copies weights: out of live memory into a slab, and back in place."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from mcore_snap import streams
from mcore_snap.errors import SnapError
from mcore_snap.frozen import FrozenLeaf
from mcore_snap.neighbours import Pair, as_one, neighbours
from mcore_snap.slabs import letting_go
from mcore_snap.specs import aligned_offsets, overlaps_itself, span_of
from mcore_snap.words import plain, storage_strides, words

__all__ = ["Write", "capture", "overlap_problems", "write"]

_SMALL: Final = 1 << 16
"""Bytes below which leaves are copied many at a time: one call costs as much as copying a few thousand bytes."""

_COPIED_AS_BITS: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
"""Dtypes whose copy moves bits and nothing else; of the others it is made through integers."""

_BATCH: Final = 512
"""Copies made at a time at most: if one fails, the leaves of all are named as perhaps written."""


@letting_go
def capture(
    leaves: Sequence[Tensor], allocate: Callable[[int], Tensor], copies: streams.Copies | None = None
) -> list[FrozenLeaf]:
    """Copy tensors into one slab of host memory.

    One allocation serves the whole snapshot, and each byte is copied once. Dense layouts are kept;
    others become row-major.

    Args:
        leaves: What to copy, checked before.
        allocate: Gives so many bytes as a uint8 tensor.
        copies: What copies, if it was chosen before, in another thread.
    """
    # Leaves that are neighbours in live memory are so in the slab, where no gap has to follow them there.
    ordinary = [index for index, leaf in enumerate(leaves) if _is_ordinary(leaf)]
    together = [[ordinary[place] for place in run] for run in neighbours([(leaves[index],) for index in ordinary])]
    sizes = [leaf.nbytes for leaf in leaves]
    offsets, total = aligned_offsets(sizes, [index for run in together for index in run])
    with torch.inference_mode(mode=False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        slab = allocate(total)
        typed: dict[torch.dtype, Tensor] = {}
        targets = [_place(slab, offset, leaf, typed) for leaf, offset in zip(leaves, offsets, strict=True)]
        copies = copies or streams.copies_for(leaves)
        units = [unit for run in together for unit in _without_gaps(run, offsets, sizes)]
        pairs = [as_one([(targets[index], leaves[index]) for index in unit]) for unit in units]
        joined = {index for unit in units for index in unit}
        pairs += [(targets[index], leaves[index]) for index in ordinary if index not in joined]
        for index in sorted(set(range(len(leaves))).difference(ordinary)):
            if pair := _as_words(targets[index], plain(leaves[index])):
                pairs.append(pair)
            else:
                targets[index].copy_(plain(leaves[index]))  # conjugated or negated, lazily: not in memory yet
        for start in range(0, len(pairs), _BATCH):
            copies.copy(*zip(*pairs[start : start + _BATCH], strict=True))
        copies.wait()
    return [FrozenLeaf(target) for target in targets]


def _without_gaps(run: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    # The slab aligns each leaf, so that neighbours are cut apart there behind one whose size is no multiple of that.
    units = [[run[0]]]
    for index, after in itertools.pairwise(run):
        if offsets[index] + sizes[index] == offsets[after]:
            units[-1].append(after)
        else:
            units.append([after])
    return units


def _place(slab: Tensor, offset: int, leaf: Tensor, typed: dict[torch.dtype, Tensor]) -> Tensor:
    dtype = leaf.dtype
    whole = typed.get(dtype)
    if whole is None:
        whole = typed[dtype] = slab[: slab.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    strides = leaf.stride() if leaf.is_contiguous() else storage_strides(leaf)
    return whole.as_strided(leaf.shape, strides, offset // dtype.itemsize)


def _is_ordinary(tensor: Tensor) -> bool:
    # Of these the bytes are copied as they lie, in the dtype that they have. None of the dtypes can be conjugated.
    return tensor.dtype in _COPIED_AS_BITS and tensor.is_contiguous() and not tensor.is_neg()


def _are_ordinary(target: Tensor, source: Tensor) -> bool:
    return target.dtype is source.dtype and _is_ordinary(target) and _is_ordinary(source)


def _as_words(target: Tensor, source: Tensor) -> Pair | None:
    # Other layouts and dtypes of which a copy through integers moves all bits, and nothing else.
    lazy = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
    if lazy or target.dtype != source.dtype or _overlapping(target):
        return None
    return words(target), words(source)


@dataclass(frozen=True, slots=True)
class Write:
    """One leaf to be written: where to, where from, and what to call it.

    Attributes:
        names: Names of all leaves of the tree.
        index: Which of them it is.
        target: Live memory.
        source: What to copy there.
    """

    names: Sequence[str]
    index: int
    target: Tensor
    source: Tensor

    @property
    def name(self) -> str:
        """Its readable name."""
        return self.names[self.index]


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
    done: list[Write] = []
    copies = streams.copies_for([one.target for one in writes])
    with torch.no_grad():
        for batch in _batches(writes):
            try:
                _write_batch(batch, copies, tracked=tracked)
            except Exception as error:
                with contextlib.suppress(Exception):
                    copies.wait()  # what is said to be written has to be there
                raise _failed(error, done, [one for unit in batch for one in unit]) from error
            done += [one for unit in batch for one in unit]
        try:
            copies.wait()
        except Exception as error:
            raise _failed(error, [], done) from error


_Unit: TypeAlias = list[Write]
"""What one copy writes: a leaf, or several that are neighbours."""


def _batches(writes: Sequence[Write]) -> Iterator[list[_Unit]]:
    # Small ordinary leaves many at a time, every other one alone.
    ordinary = {
        index: (one.target, one.source)
        for index, one in enumerate(writes)
        if _are_ordinary(one.target, one.source) and not one.target.is_inference()
    }
    places = list(ordinary)
    apart = [side for index, one in enumerate(writes) if index not in ordinary for side in (one.target, one.source)]
    units = [[places[index] for index in run] for run in neighbours(list(ordinary.values()), apart)]
    joined = {index for unit in units for index in unit}
    units += [[index] for index in range(len(writes)) if index not in joined]
    batch: list[_Unit] = []
    for indices in sorted(units, key=min):
        unit = [writes[index] for index in indices]
        small = indices[0] in ordinary and sum(one.target.nbytes for one in unit) < _SMALL
        if small and len(batch) < _BATCH:
            batch.append(unit)
            continue
        if batch:
            yield batch
        batch = [unit] if small else []
        if not small:
            yield [unit]
    if batch:
        yield batch


def _write_batch(batch: Sequence[_Unit], copies: streams.Copies, *, tracked: bool) -> None:
    targets = [plain(unit[0].target) if tracked else plain(unit[0].target).data for unit in batch]
    sources = [plain(unit[0].source) for unit in batch]
    with torch.inference_mode(targets[0].is_inference()):
        if _are_ordinary(targets[0], sources[0]):
            rest = [[(one.target, one.source) for one in unit[1:]] for unit in batch]
            pairs = [as_one([pair, *more]) for pair, more in zip(zip(targets, sources, strict=True), rest, strict=True)]
            copies.copy(*zip(*pairs, strict=True))
            if tracked and any(rest):  # written as part of another, so that only that one's version has moved
                torch.autograd.graph.increment_version([target for more in rest for target, _ in more])
        elif pair := _as_words(targets[0], sources[0]):
            copies.copy(pair[:1], pair[1:])
        elif _overlapping(targets[0]):
            _copy_overlapping(targets[0], sources[0])
        else:
            targets[0].copy_(sources[0])  # lazily conjugated or negated; or widened, which the plan found exact


def _failed(error: Exception, done: Sequence[Write], doubtful: Sequence[Write]) -> SnapError:
    several = f"{doubtful[0].name} and {len(doubtful) - 1} more" if len(doubtful) > 1 else doubtful[0].name
    message = f"the copy into {several} failed ({error}); written by then, those last perhaps in part or not at all:"
    return SnapError(message, [one.name for one in (*done, *doubtful)])


def _overlapping(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and overlaps_itself(tuple(tensor.shape), tuple(tensor.stride()))


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
