"""Snapshots in shared memory, for other processes on the host: what is sent is a name, not the bytes."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from mcore_snap.errors import NotResident
from mcore_snap.frozen import FrozenLeaf, owner_of
from mcore_snap.slabs import attach, find_shared
from mcore_snap.words import spec_of

__all__: Final[list[str]] = []


def _reduce(leaf: FrozenLeaf) -> tuple[Any, ...]:
    """Send the name of a leaf's memory if it is shared, else its bytes.

    Pipes and queues of multiprocessing, torch's included, pickle with this; `pickle` itself, which may
    write to a file, does not.
    """
    private = leaf.private
    slab = find_shared(private.data_ptr()) if private.numel() else None
    if slab is None or slab.name is None:
        return leaf.__reduce_ex__(4)  # pipes and queues use no protocol that takes buffers
    # Who has it mapped may keep it for as long as it likes, and this process would not know.
    slab.exported = True
    spec = spec_of(private)
    offset = private.data_ptr() - slab.address
    return _rebuild, (slab.name, offset, spec.dtype, spec.shape, tuple(private.stride()), leaf.recorded_digest)


def _rebuild(  # noqa: PLR0913, PLR0917 - what was sent
    name: str, offset: int, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], digest: str | None
) -> FrozenLeaf:
    try:
        memory = attach(name)
    except FileNotFoundError as error:
        message = (
            f"the shared memory of a snapshot is gone ({name}): the process that took it dropped it, or ended, before "
            "this one opened it; keep it there until it has arrived"
        )
        raise NotResident(message) from error
    kind = getattr(torch, dtype)
    flat = memory[offset:]
    typed = flat[: flat.numel() // kind.itemsize * kind.itemsize].view(kind)
    return FrozenLeaf(typed.as_strided(shape, stride, typed.storage_offset()), digest)


def _reduce_tensor(tensor: Tensor) -> Any:
    """Send a frozen leaf that stands in an ordinary container as what it is, and other tensors as torch does.

    torch would move the leaf's storage into shared memory, where the other process can write to it.
    """
    owner = owner_of(tensor)
    return reduce_tensor(tensor) if owner is None else (_open, (owner,))  # type: ignore[no-untyped-call]


def _open(leaf: FrozenLeaf) -> Tensor:
    return leaf.read(owned=True)


ForkingPickler.register(FrozenLeaf, _reduce)
ForkingPickler.register(Tensor, _reduce_tensor)
