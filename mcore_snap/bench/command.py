"""The `bench` subcommand: its arguments, and running it from start to exit status."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Final

__all__ = ["add_parser", "parse_size"]

_SMALLEST: Final = 64 << 10  # the shapes of the model need that
_UNITS: Final = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to a command's subcommands; ``run`` in the parsed arguments is what it does."""
    parser = subcommands.add_parser(
        "bench",
        help="measure snapshot, load and look-back against one plain copy of the same bytes",
        description="Measure snapshot, load and look-back against one plain copy of the same bytes, and beside them "
        "verl's functions (from its released package, downloaded by pip without dependencies into a cache), torch's "
        "checkpoint staging and copy.deepcopy. Every contender runs once in every round, and its bits are checked "
        "first. The exit status is 1 if some are wrong. Host memory for about eight times the size is needed.",
    )
    parser.add_argument(
        "--size", type=parse_size, default="1GiB", metavar="SIZE", help="of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--small-leaves",
        type=_positive,
        default=10_000,
        metavar="N",
        help="leaves of the model that has many (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=_positive, default=7, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--no-verl", action="store_true", help="leave verl out, and download nothing")
    parser.add_argument(
        "--json",
        type=_document,
        metavar="FILE",
        help="also write the figures and all times there, and beside it a plot if matplotlib is there",
    )
    parser.set_defaults(run=_run)


def parse_size(word: str) -> int:
    """Return a size in bytes, of a number with one of the units KiB, MiB, GiB and TiB, or with none.

    Raises:
        argparse.ArgumentTypeError: It is no such size, or too small to be measured.

    >>> parse_size("1.5MiB"), parse_size("65536")
    (1572864, 65536)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB|)", word)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 512MiB or 1GiB, got {word!r}")
    nbytes = int(float(found[1]) * (1 << _UNITS[found[2]]))
    if nbytes < _SMALLEST:
        raise argparse.ArgumentTypeError(f"expected at least {_SMALLEST >> 10}KiB, got {word}")
    return nbytes // 2 * 2  # bfloat16


def _positive(word: str) -> int:
    if not re.fullmatch(r"[0-9]+", word) or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {word!r}")
    return int(word)


def _document(word: str) -> Path:
    # Said now, and not after minutes of measuring.
    path = Path(word)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {word}")
    if path.is_dir() or path.suffix == ".png":
        raise argparse.ArgumentTypeError(f"expected a file for JSON, got {word}; the plot's name is made from it")
    return path


def _run(arguments: argparse.Namespace) -> int:
    # Not needed for --help.
    from mcore_snap.bench import plot, report  # noqa: PLC0415
    from mcore_snap.bench.measuring import measure  # noqa: PLC0415
    from mcore_snap.bench.released_verl import UnavailableError  # noqa: PLC0415
    from mcore_snap.bench.results import as_json  # noqa: PLC0415

    try:
        results = measure(arguments.size, arguments.small_leaves, arguments.rounds, with_verl=not arguments.no_verl)
    except UnavailableError as error:
        return _complain(f"{error}\nTo measure without it: --no-verl", status=2)
    _say(report.table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(results), indent=2, allow_nan=False) + "\n")
        picture = arguments.json.with_suffix(".png")
        if plot.has_matplotlib():
            plot.draw(results, picture)
            _say(f"written: {arguments.json}, {picture}")
        else:
            _say(f"written: {arguments.json}; no plot, since matplotlib is not there: pip install 'mcore-snap[bench]'")
    return 1 if results.wrong else 0


def _say(text: str) -> None:
    print(text)  # noqa: T201 - the command's output


def _complain(message: str, *, status: int) -> int:
    print(message, file=sys.stderr)  # noqa: T201 - for the user of a command
    return status
