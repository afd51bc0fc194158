"""What writing to a live leaf involves besides copying bytes: carried by the handle itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

__all__ = ["Live", "live_part", "mark_live"]

_ATTRIBUTE: Final = "_mcore_snap_live"


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """A live leaf's ties to its model.

    Attributes:
        covered: Tensors of the model that lie in the leaf but count their versions apart from it.
        accept: For extra state, which has no memory of its own: takes the bytes to the module.
        settable: Whether the module can take extra state at all.
        registered: Whether it is a registered buffer: a forward pass may change it, and
            Megatron-Core may promote its dtype.
        after: What to call once the leaf was written: caches to be dropped, shards to be gathered.
            Equal ones of several leaves are called once.
    """

    covered: tuple[Tensor, ...] = ()
    accept: Callable[[Tensor], None] | None = None
    settable: bool = True
    registered: bool = False
    after: tuple[Callable[[], None], ...] = ()


_NONE: Final = Live()


def mark_live(handle: Tensor, live: Live) -> Tensor:
    """Attach a leaf's ties to the handle that a tree gives out, and return the handle."""
    setattr(handle, _ATTRIBUTE, live)
    return handle


def live_part(handle: Tensor) -> Live:
    """Return what `mark_live` attached, or nothing in particular.

    >>> import torch
    >>> live_part(torch.ones(1)).covered
    ()
    """
    found = getattr(handle, _ATTRIBUTE, _NONE)
    return found if isinstance(found, Live) else _NONE
