"""How two trees differ, by bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_snap.checking import check_leaves, refuse
from mcore_snap.errors import StructureMismatch
from mcore_snap.live_trees import layouts_of, read_once
from mcore_snap.plans import pair_paths, pair_placements
from mcore_snap.registration import flatten, flatten_named
from mcore_snap.words import plain, spec_of, words

__all__ = ["Comparison", "LeafDifference", "bitwise_equal", "compare", "difference"]


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """One leaf that differs.

    Attributes:
        name: The leaf's name.
        dtype: Its dtype's name.
        elements: How many elements it has.
        differing: In how many of them any bit differs.
        largest: The largest absolute difference; ``None`` where the dtype is not a float, NaN where
            every differing element involves a NaN.
    """

    name: str
    dtype: str
    elements: int
    differing: int
    largest: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The leaves that differ; true as a condition if any does. Prints as a table.

    Attributes:
        differences: One entry per leaf that differs.
        leaves: How many leaves were compared.
    """

    differences: tuple[LeafDifference, ...]
    leaves: int

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.differences)

    def __str__(self) -> str:
        """Return a table, one line per leaf that differs."""
        head = ("leaf", "dtype", "differing", "of", "largest difference")
        rows = [
            (one.name, one.dtype, f"{one.differing:,}", f"{one.elements:,}", _shown(one.largest))
            for one in self.differences
        ]
        if not rows:
            return f"all {self.leaves} leaves are bitwise equal"
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)  # noqa: PLR2004 - words left, numbers right
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join([*lines, f"{len(rows)} of {self.leaves} leaves differ"])


def _shown(largest: float | None) -> str:
    return "-" if largest is None else f"{largest:.6g}"


def compare(a: Any, b: Any) -> Comparison:
    """Return the leaves in which two trees differ, by bytes: NaN payloads and signs of zero count.

    Raises:
        StructureMismatch: The trees do not have the same leaves, dtypes and shapes, or parameters lie elsewhere
            among them.
        NotResident: A leaf's memory is not there.

    >>> print(compare({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.5])}))
    leaf   dtype    differing  of  largest difference
    ['w']  float32          1   2                 0.5
    1 of 1 leaves differ
    """
    a, b = read_once(a), read_once(b)
    first, first_spec = flatten(a)
    second, second_spec = flatten(b)
    paths, names = flatten_named(first_spec)
    other_paths, other_names = flatten_named(second_spec)
    unpaired = pair_paths(dict(zip(paths, names, strict=True)), dict(zip(other_paths, other_names, strict=True)))
    placements = ([layout.placements for layout in layouts_of(side)] for side in (a, b))
    unpaired = unpaired or pair_placements(*placements)
    check_leaves(first, names, "compare, the first tree")
    check_leaves(second, other_names, "compare, the second tree")
    partner = dict(zip(other_paths, second, strict=True))
    problems = unpaired + [
        f"{name}: expected {spec_of(leaf)}, found {spec_of(partner[path])}; compare trees of one model"
        for path, name, leaf in zip(paths, names, first, strict=True)
        if path in partner and spec_of(leaf) != spec_of(partner[path])
    ]
    refuse("the trees cannot be compared", [("structure", line) for line in problems])
    pairs = ((name, leaf, partner[path]) for path, name, leaf in zip(paths, names, first, strict=True))
    found = [one for name, leaf, other in pairs if (one := difference(name, leaf, other))]
    return Comparison(tuple(found), len(names))


def bitwise_equal(a: Any, b: Any) -> bool:
    """Tell whether two trees have the same leaves with the same dtypes, shapes and bytes.

    >>> nan = float("nan")
    >>> bitwise_equal([torch.tensor(nan)], [torch.tensor(nan)])
    True
    >>> bitwise_equal([torch.tensor(0.0)], [torch.tensor(-0.0)])
    False
    """
    try:
        return not compare(a, b)
    except StructureMismatch:
        return False


def difference(name: str, leaf: Tensor, other: Tensor) -> LeafDifference | None:
    """Return how two tensors of one dtype and shape differ, or ``None``.

    >>> difference("w", torch.tensor([1, 2]), torch.tensor([1, 2]))
    """
    a, b = plain(leaf), plain(other).to(leaf.device)
    differs = _bits(a) != _bits(b)
    if a.is_complex():
        differs = differs.any(-1)
    count = int(differs.sum())
    if not count:
        return None
    return LeafDifference(name, spec_of(a).dtype, a.numel(), count, _largest(a, b, differs))


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
        return words(parts)
    return words(tensor.resolve_neg())


def _largest(a: Tensor, b: Tensor, differs: Tensor) -> float | None:
    if not (a.is_floating_point() or a.is_complex()):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    try:
        distance = (a.to(wide) - b.to(wide)).abs()[differs]
    except RuntimeError:
        return None  # a packed dtype such as float4: its elements have no single value
    known = distance[~distance.isnan()]
    return float(known.max()) if known.numel() else math.nan
