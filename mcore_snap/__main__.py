"""The command line: `python -m mcore_snap`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from mcore_snap.bench import command as bench
from mcore_snap.demo import command as demo

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status.

    Args:
        arguments: The words after the command's name; those of this process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m mcore_snap", description="Weights of Megatron-Core models, kept.")
    subcommands = parser.add_subparsers(title="subcommands", required=True, metavar="SUBCOMMAND")
    demo.add_parser(subcommands)
    bench.add_parser(subcommands)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
