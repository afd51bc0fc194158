"""The `demo` subcommand: its arguments, and running it from start to exit status."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from mcore_snap.demo.records import Run, as_json, exit_status, merge

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["add_parser"]

_MOST_RANKS: Final = 16  # each is a process with a model
_STARTING: Final = 120.0  # seconds until the first step at the latest, also on a slow machine
_PER_STEP: Final = 10.0  # seconds for one rank's step at most


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to a command's subcommands; ``run`` in the parsed arguments is what it does."""
    parser = subcommands.add_parser(
        "demo",
        help="train a small Megatron-Core GPT and look back to version 1 at every step",
        description="Train a small Megatron-Core GPT on Python's help pages, look back to version 1 before every "
        "step, and check bit by bit that version 1 was live and that the current weights came back. "
        "The exit status is 1 if they did not.",
    )
    parser.add_argument("--moe", action="store_true", help="a mixture of experts instead of a dense model")
    parser.add_argument(
        "--steps", type=_steps, default=4, metavar="N", help="optimizer steps, at least 2 (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=_ranks, default=1, metavar="N", help=f"ranks, 1 to {_MOST_RANKS} (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.set_defaults(run=_run)


def _steps(word: str) -> int:
    number = _whole(word)
    if number < 2:  # noqa: PLR2004 - the first step has nothing to look back to
        msg = f"expected at least 2 steps, got {number}: step 1 has nothing to look back to"
        raise argparse.ArgumentTypeError(msg)
    return number


def _ranks(word: str) -> int:
    number = _whole(word)
    if not 1 <= number <= _MOST_RANKS:
        msg = f"expected 1 to {_MOST_RANKS} ranks, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        msg = f"expected a whole number, got {word!r}"
        raise argparse.ArgumentTypeError(msg) from None


def _run(arguments: argparse.Namespace) -> int:
    if not _has_megatron():
        return _complain("the demo needs Megatron-Core: install it with `pip install megatron-core`", status=2)
    if not arguments.json:
        # Before training: whoever lacks rich should not wait for that message.
        from mcore_snap.demo import report  # noqa: PLC0415
    from mcore_snap.testing.ranks import RankFailure  # noqa: PLC0415 - not needed for --help

    try:
        run = _measure(arguments.ranks, arguments.steps, moe=arguments.moe)
    except RankFailure as failure:
        return _complain(f"the demo did not finish: {failure}", status=1)
    if arguments.json:
        print(json.dumps(as_json(run), indent=2, allow_nan=False))  # noqa: T201 - the command's output
    else:
        report.show(run)
    return exit_status(run)


def _measure(ranks: int, steps: int, *, moe: bool) -> Run:
    from mcore_snap.demo.lookback import expert_parallel, look_back  # noqa: PLC0415 - not needed for --help
    from mcore_snap.testing.ranks import RankFailure, run_ranks  # noqa: PLC0415

    # Without it cuBLAS may add up in another order each time. Only set before a GPU is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with _silence() as noise:
        try:
            runs = run_ranks(
                look_back,
                ranks,
                ranks,
                steps,
                moe,
                parallel={"expert_model_parallel_size": expert_parallel(ranks, moe=moe)},
                timeout=_STARTING + _PER_STEP * steps * ranks,
            )
        except RankFailure as failure:
            noise.seek(0)
            said = noise.read().decode(errors="replace").strip()
            raise RankFailure(failure.rank, "\n".join(filter(None, [failure.details, said]))) from None
    return merge(runs)


@contextmanager
def _silence() -> Iterator[Any]:
    """Send to a file what this process and its children print, libraries in C++ included; yield the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as noise:
        saved = {handle: os.dup(handle) for handle in (1, 2)}
        try:
            for handle in saved:
                os.dup2(noise.fileno(), handle)
            yield noise
        finally:
            for handle, copy in saved.items():
                os.dup2(copy, handle)
                os.close(copy)


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # there is no package `megatron` at all
        return False


def _complain(message: str, *, status: int) -> int:
    print(message, file=sys.stderr)  # noqa: T201 - for the user of a command
    return status
