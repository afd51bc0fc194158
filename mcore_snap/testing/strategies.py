"""Hypothesis strategies for tensors and for trees of tensors, with ties and views among the leaves.

`None` for a parameter means: draw it. Values are drawn as bit patterns, so that NaN payloads and signed zeros occur.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import optree
import torch
from hypothesis import strategies as st

from mcore_snap.testing.bit_patterns import DTYPES, elements, from_elements
from mcore_snap.testing.raw_bytes import carrier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hypothesis.strategies import DrawFn, SearchStrategy

Layout: TypeAlias = Literal["dense", "permuted", "strided", "offset", "expanded", "empty", "scalar"]
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)

_MATRIX: Final = 2  # dimensions that a permutation needs
_POOL: Final = 6  # different elements in one tensor
_names = st.text("abw._019", min_size=1, max_size=4)


class Pair(NamedTuple):
    """A named tuple, to have one among the containers of drawn trees."""

    left: Any
    right: Any


def dtypes() -> SearchStrategy[torch.dtype]:
    """Draw any dtype whose memory is plain bytes."""
    return st.sampled_from(DTYPES)


def shapes(min_dims: int = 0, max_dims: int = 3, min_side: int = 0) -> SearchStrategy[tuple[int, ...]]:
    """Draw a small shape; no dimensions and empty sides occur unless excluded."""
    return st.lists(st.integers(min_side, 3), min_size=min_dims, max_size=max_dims).map(tuple)


def _shapes_for(layout: Layout) -> SearchStrategy[tuple[int, ...]]:
    """Draw a shape that can have `layout`."""
    if layout == "scalar":
        return st.just(())
    if layout == "empty":
        return st.permutations([0, 2, 3]).map(tuple) | st.just((0,))
    if layout == "permuted":
        return shapes(min_dims=_MATRIX, min_side=1)
    if layout in {"strided", "expanded"}:
        return shapes(min_dims=1, min_side=1)
    return shapes(min_side=1)


def _layouts_for(shape: Sequence[int]) -> SearchStrategy[Layout]:
    """Draw a layout that a tensor of `shape` can have."""
    if 0 in shape:
        return st.just("empty")
    if not shape:
        return st.sampled_from(["scalar", "offset"])
    flat: list[Layout] = ["dense", "strided", "offset", "expanded"]
    return st.sampled_from(flat if len(shape) < _MATRIX else [*flat, "permuted"])


@st.composite
def tensors(
    draw: DrawFn,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    layout: Layout | None = None,
) -> torch.Tensor:
    """Draw a CPU tensor of any dtype, any bits and any layout: dense, permuted, strided, offset, expanded or empty."""
    if dtype is None:
        dtype = draw(dtypes())
    if shape is None:
        shape = draw(_shapes_for(draw(st.sampled_from(LAYOUTS)) if layout is None else layout))
    if layout is None:
        layout = draw(_layouts_for(shape))
    pool = draw(st.lists(elements(dtype), min_size=1, max_size=_POOL))
    if layout == "expanded":
        side = draw(st.integers(0, len(shape) - 1))
        base = from_elements(pool, dtype, [1 if i == side else n for i, n in enumerate(shape)])
        return base.expand(tuple(shape))
    dense = from_elements(pool, dtype, shape)
    if layout == "permuted":
        return permuted(dense, draw(st.permutations(range(len(shape)))))
    if layout == "strided":
        return spread(dense, draw(st.integers(2, 3)))
    if layout == "offset":
        return shifted(dense, draw(st.integers(1, 3)))
    return dense


def permuted(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the same values, dense in memory in another order of the dimensions."""
    out = empty_like_bytes(tensor, [tensor.shape[i] for i in order])
    back = sorted(range(len(order)), key=list(order).__getitem__)
    return _filled(out.permute(back), tensor)


def spread(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Return the same values, with `step - 1` unused elements behind each."""
    out = empty_like_bytes(tensor, [*tensor.shape[:-1], tensor.shape[-1] * step])
    return _filled(out[..., ::step], tensor)


def shifted(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the same values, behind `offset` unused elements and in front of one."""
    out = empty_like_bytes(tensor, [tensor.numel() + offset + 1])
    return _filled(out[offset : offset + tensor.numel()].view(tensor.shape), tensor)


def empty_like_bytes(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return zero bytes of the dtype of `tensor`: not every dtype can be filled with a number."""
    raw = torch.zeros(torch.Size(shape).numel() * tensor.dtype.itemsize, dtype=torch.uint8)
    return raw.view(tensor.dtype).view(*shape)


def _filled(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    carrier(target).copy_(carrier(source))
    return target


_VIEWS: Final[tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = (
    lambda t: t,
    torch.ops.aten.alias,
    lambda t: t.movedim(0, -1) if t.dim() else t.view(1),
    lambda t: t[0] if t.dim() and t.shape[0] else t.unsqueeze(0),
    lambda t: t[1:] if t.dim() else t.view(1, 1),
    lambda t: t.unsqueeze(-1),
    lambda t: t.detach(),
)


def views(tensor: torch.Tensor) -> SearchStrategy[torch.Tensor]:
    """Draw another name for memory of `tensor`: itself, or a view of all or some of it."""
    return st.sampled_from(_VIEWS).map(lambda view: view(tensor))


def _containers(children: SearchStrategy[Any]) -> SearchStrategy[Any]:
    mappings = st.dictionaries(_names, children, max_size=3)
    return (
        mappings
        | mappings.map(collections.OrderedDict)
        | st.lists(children, max_size=3)
        | st.lists(children, max_size=2).map(tuple)
        | st.builds(Pair, children, children | st.none())
    )


@st.composite
def trees(
    draw: DrawFn,
    leaves: SearchStrategy[torch.Tensor] | None = None,
    *,
    min_leaves: int = 0,
    max_leaves: int = 6,
    ties: bool | None = None,
) -> Any:
    """Draw a pytree of tensors; with `ties`, some leaves are other names for the memory of earlier ones."""
    strategy = tensors() if leaves is None else leaves
    shape: Any = draw(st.recursive(strategy, _containers, max_leaves=max_leaves))
    drawn, spec = optree.tree_flatten(shape)
    if (missing := min_leaves - len(drawn)) > 0:
        shape = [shape, *draw(st.lists(strategy, min_size=missing, max_size=missing))]
        drawn, spec = optree.tree_flatten(shape)
    if ties or (ties is None and draw(st.booleans())):
        for i in range(1, len(drawn)):
            if draw(st.integers(0, 2)) == 0:
                drawn[i] = draw(views(drawn[draw(st.integers(0, i - 1))]))
    return optree.tree_unflatten(spec, drawn)
