"""Asserts over whole trees, by bytes."""

from __future__ import annotations

from typing import Any

import optree
import torch

from mcore_snap.testing.raw_bytes import to_bytes


def assert_bitwise_equal(a: Any, b: Any) -> None:
    """Assert that two pytrees have the same leaves, bit for bit, and name every leaf that differs.

    NaN equals itself and -0.0 is not 0.0. Strides and addresses do not count, dtypes and shapes do.

    Raises:
        AssertionError: a leaf differs, or the structures do.
    """
    __tracebackhide__ = True
    left, right = leaves_by_name(a), leaves_by_name(b)
    problems = [f"{name}: only on the left" for name in left if name not in right]
    problems += [f"{name}: only on the right" for name in right if name not in left]
    for name in left:
        if name in right and (problem := _difference(left[name], right[name])):
            problems.append(f"{name}: {problem}")
    if problems:
        msg = f"{len(problems)} of {len(left | right)} leaves differ:\n  " + "\n  ".join(problems)
        raise AssertionError(msg)


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree under names such as `['layers'][0]`; a bare tensor has the name `(root)`."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
    names = [accessor.codify("") or "(root)" for accessor in accessors]
    return dict(zip(names, leaves, strict=True))


def _difference(a: Any, b: Any) -> str:
    """Say how two leaves differ, or return an empty string."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return "" if a is b or bool(a == b) else f"{a!r} is not {b!r}"
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} is not {b.dtype}"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)} is not {tuple(b.shape)}"
    left, right = to_bytes(a), to_bytes(b)
    if left == right:
        return ""
    width = a.dtype.itemsize
    wrong = [i for i in range(a.numel()) if left[i * width : (i + 1) * width] != right[i * width : (i + 1) * width]]
    first = wrong[0] * width
    patterns = f"{left[first : first + width].hex()} is not {right[first : first + width].hex()}"
    return f"{len(wrong)} of {a.numel()} elements, first at {wrong[0]}: bytes {patterns}"
