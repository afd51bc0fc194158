"""Elements as bit patterns: which dtypes there are, and which patterns break things."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Final

import torch
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Sequence

_FLOATS: Final = {
    # exponent and mantissa bits of the formats that have a sign, an exponent and a mantissa
    "float64": (11, 52),
    "float32": (8, 23),
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float8_e5m2": (5, 2),
    "float8_e5m2fnuz": (5, 2),
    "float8_e4m3fn": (4, 3),
    "float8_e4m3fnuz": (4, 3),
}
_PARTS: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def _has_plain_bytes(dtype: torch.dtype) -> bool:
    """Tell whether bytes can be viewed as `dtype`, copied and shown, as no quantized or sub-byte ones can."""
    try:
        probe = torch.zeros(32, dtype=torch.uint8).view(dtype)
        if probe.is_quantized:
            return False
        probe.copy_(probe.clone())
        repr(probe)
    except RuntimeError:
        return False
    return True


def _all_dtypes() -> tuple[torch.dtype, ...]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that complex32 is experimental: here, not amid a test
        plain = sorted(filter(_has_plain_bytes, found), key=str)
    # examples shrink towards the first: the familiar ones
    return tuple(sorted(plain, key=lambda dtype: dtype not in MATH_DTYPES))


MATH_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES: Final = _all_dtypes()
FLOAT_DTYPES: Final = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)


def special_words(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the patterns that equality, hashing and casts get wrong, as unsigned integers of one element's width.

    Signed zeros, infinities, quiet and signalling NaN with payloads, subnormals and the largest finite number; for
    other formats the extremes.
    """
    bits = 8 * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    if dtype is torch.bool:
        return (0, 1)
    if name not in _FLOATS:
        return (0, 1, 1 << (bits - 1), (1 << bits) - 1)
    exponent, mantissa = _FLOATS[name]
    infinity = ((1 << exponent) - 1) << mantissa
    sign = 1 << (bits - 1)
    quiet = infinity | 1 << (mantissa - 1)
    return (0, sign, infinity, sign | infinity, quiet, quiet | 1, infinity | 1, sign | infinity | 1, 1, infinity - 1)


def elements(dtype: torch.dtype) -> st.SearchStrategy[bytes]:
    """Draw the bytes of one element: any pattern, the special ones often, and for bool only 0 and 1."""
    part = _PARTS.get(dtype)
    if part is not None:
        return st.tuples(elements(part), elements(part)).map(b"".join)
    width = dtype.itemsize
    special = st.sampled_from(special_words(dtype))
    words = special if dtype is torch.bool else special | st.integers(0, (1 << 8 * width) - 1)
    return words.map(lambda word: word.to_bytes(width, "little"))


def from_elements(pool: Sequence[bytes], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make a dense tensor of `shape` whose elements go through `pool` again and again."""
    numel = torch.Size(shape).numel()
    raw = bytearray(b"".join(itertools.islice(itertools.cycle(pool), numel)))
    if not raw:
        return torch.empty(tuple(shape), dtype=dtype)
    # the clone owns its memory: a view of the bytearray would have a storage that cannot be resized
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).reshape(tuple(shape))
