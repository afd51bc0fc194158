"""What only a device can show: bits, order, page-locked memory, and rates against the link of the machine.

Run ``python tests/device/check.py`` where the package is installed, or from a checkout
``PYTHONPATH=. python tests/device/check.py``; it takes under three minutes, and prints a table and then JSON.
Exit status 0: every bit that was looked at is right. 1: bits are wrong, or something failed. 2: there is
no accelerator. Goals that were missed, and what could not be checked, are said, and change no status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import bits
import footprint
import order
import rates
import torch
from findings import Check, Setting, examine, report

CHECKS: Final[tuple[Check, ...]] = (*bits.CHECKS, *order.CHECKS, *footprint.CHECKS, *rates.CHECKS)

NEVER: Final = (
    "several ranks or hosts",
    "graph capture",
    "Transformer Engine's tensors",
    "other kinds of accelerator than this one",
)
"""What this script does not look at, wherever it runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check everything and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model that is copied, in GiB (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="how often each rate is measured (default 5)")
    parser.add_argument("--json", type=Path, help="where to write the findings, besides printing them")
    chosen = parser.parse_args(arguments)
    if not chosen.gib > 0 or chosen.repeats < 1:
        parser.error("expected --gib above 0 and --repeats of at least 1")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        sys.stderr.write("no accelerator here: nothing was checked\n")
        return 2
    at = Setting(torch.device(kind.type, 0), int(chosen.gib * 2**30) // 64 * 64, chosen.repeats)
    return report(at, examine(at, CHECKS), NEVER, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
