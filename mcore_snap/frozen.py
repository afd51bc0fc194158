"""One immutable array: private bytes, and read-only aliases of them on demand."""

from __future__ import annotations

import functools
import pickle
import warnings
from typing import Any, Final, SupportsIndex, final

import torch
from torch import Tensor

from mcore_snap.words import dtype_name, spec_of, words

__all__ = ["FrozenLeaf", "owner_of"]

_OWNER: Final = "_mcore_snap_owner"


def _alias(tensor: Tensor) -> Tensor:
    # DLPack makes a second storage over the same bytes. It cannot be resized, and the flag on it
    # makes the C++ core refuse every mutable pointer, while `tensor` itself stays writable.
    alias: Tensor = torch._C._from_dlpack(torch._C._to_dlpack(tensor))
    torch._C._set_throw_on_mutable_data_ptr(alias)
    return alias


@functools.cache
def _can_flag() -> bool:
    """Whether this torch refuses writes to flagged storages; tried once, since the API is private."""
    try:
        _alias(torch.zeros(1)).add_(1)
    except (AttributeError, TypeError) as error:
        why = f"{error}"
    except RuntimeError:
        return True
    else:
        why = "a write to a flagged storage went through"
    warnings.warn(
        f"this torch ({torch.__version__}) has no read-only storages ({why}); every read of a snapshot is a copy",
        RuntimeWarning,
        stacklevel=4,
    )
    return False


@final
class FrozenLeaf:
    """The bytes of one leaf of a snapshot.

    The private tensor is never handed out: `read` gives a fresh alias each time, so that what a
    caller does to the handle (``set_``, ``resize_``, ``.data =``) ends with the handle.

    >>> leaf = FrozenLeaf(torch.ones(2))
    >>> leaf.read().sum()
    tensor(2.)
    >>> leaf.read().add_(1)
    Traceback (most recent call last):
        ...
    RuntimeError: Cannot access data pointer of Tensor...
    """

    __slots__ = ("_digest", "_private")

    def __init__(self, private: Tensor, digest: str | None = None) -> None:
        self._private = private
        self._digest = digest

    def read(self, *, owned: bool = False) -> Tensor:
        """Return a read-only tensor over the bytes.

        Args:
            owned: Whether the alias remembers this leaf, for trees whose containers hold the alias
                itself (a dict of leaves).
        """
        handle = self._read_only() if _can_flag() else self._private.clone()
        if owned:
            setattr(handle, _OWNER, self)
        return handle

    def _read_only(self) -> Tensor:
        # DLPack has no code for some dtypes (float4, bcomplex32): those travel as integers.
        try:
            return _alias(self._private)
        except (BufferError, RuntimeError):
            return _alias(words(self._private)).view(self._private.dtype)

    @property
    def private(self) -> Tensor:
        """The writable tensor itself, for this library's own copies only."""
        return self._private

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._private.nbytes

    @property
    def recorded_digest(self) -> str | None:
        """The digest that `record` kept, if any."""
        return self._digest

    def record(self, digest: str) -> None:
        """Keep the digest of the bytes, made while they were known to be good."""
        self._digest = digest

    def buffer(self) -> memoryview:
        """Return the bytes, in the order in which they lie in memory, as a read-only buffer."""
        flat = self._private.as_strided((self._private.numel(),), (1,), self._private.storage_offset())
        return memoryview(flat.view(torch.uint8).numpy().data).toreadonly()

    def __copy__(self) -> FrozenLeaf:
        """Return itself: what cannot change need not be copied."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenLeaf:
        """Return itself: what cannot change need not be copied."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle as dtype, shape, strides and one buffer, out of band from protocol 5 on."""
        data = self.buffer()
        payload = pickle.PickleBuffer(data) if int(protocol) >= 5 else bytes(data)  # noqa: PLR2004 - PEP 574
        spec = spec_of(self._private)
        return _rebuild, (spec.dtype, spec.shape, tuple(self._private.stride()), payload, self._digest)

    def __repr__(self) -> str:
        """Return dtype and shape."""
        return f"FrozenLeaf({dtype_name(self._private.dtype)}{list(self._private.shape)})"


def _rebuild(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], data: Any, digest: str | None) -> FrozenLeaf:
    flat = torch.empty(memoryview(data).nbytes, dtype=torch.uint8)
    if flat.numel():
        # The buffer may belong to a socket or a map that somebody else writes to: copy it.
        flat.numpy().data[:] = memoryview(data).cast("B")
    return FrozenLeaf(flat.view(getattr(torch, dtype)).as_strided(shape, stride), digest)


def owner_of(tensor: object) -> FrozenLeaf | None:
    """Return the frozen leaf that an alias inside an ordinary container belongs to, if any."""
    owner = getattr(tensor, _OWNER, None)
    return owner if isinstance(owner, FrozenLeaf) else None
