"""Hypothesis strategies, bitwise asserts and every way to write to a tensor: what the laws are tested with.

Everything is imported at first use, so that a test that needs no strategies needs no hypothesis either.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mcore_snap.testing.asserts import assert_bitwise_equal
    from mcore_snap.testing.model_state import model_bytes
    from mcore_snap.testing.model_strategies import model_trees, models
    from mcore_snap.testing.strategies import tensors, trees

__all__ = ["assert_bitwise_equal", "model_bytes", "model_trees", "models", "tensors", "trees"]

_HOME: Final = {
    "assert_bitwise_equal": "asserts",
    "model_bytes": "model_state",
    "model_trees": "model_strategies",
    "models": "model_strategies",
    "tensors": "strategies",
    "trees": "strategies",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines `name`, and say which extra is missing where it cannot be."""
    if name not in _HOME:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "hypothesis":
            raise
        msg = f"mcore_snap.testing.{name} needs hypothesis: install the extra with `pip install mcore_snap[testing]`"
        raise ImportError(msg, name=error.name) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
