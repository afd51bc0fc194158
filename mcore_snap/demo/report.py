"""The demo's table, for people. The only module that needs rich."""

from __future__ import annotations

import sys

from mcore_snap.demo.records import Run, Step, broken_promises

try:
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "rich":
        raise
    print(  # noqa: T201 - for the user of a command
        "the demo's table needs rich: install it with `pip install 'mcore-snap[demo]'`, or use --json", file=sys.stderr
    )
    raise SystemExit(2) from None

__all__ = ["sentence", "show"]


def show(run: Run, console: Console | None = None) -> None:
    """Print the table and one sentence.

    Args:
        run: The run to show.
        console: Where to print; standard output by default.
    """
    console = console or Console()
    kind = "mixture of experts" if run.moe else "dense"
    ranks = "1 rank" if run.ranks == 1 else f"{run.ranks} ranks"
    table = Table(title=f"Looking back to version 1: {kind} GPT on {run.device}, {ranks}")
    for heading in ("step", "loss", "bytes", "snapshot\nms", "load\nms", "moved\nnats"):
        # No ellipsis in numbers: where a terminal is narrow, the headings of the answers wrap instead.
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("old log-probs\nbitwise v1's", "weights back\nbitwise"):
        table.add_column(heading, justify="center")
    for step in run.steps:
        table.add_row(*_cells(step))
    console.print(table)
    # Soft: a sentence in a file or a pipe is one line.
    console.print(sentence(run), style="bold red" if broken_promises(run) else None, soft_wrap=True, markup=False)


def sentence(run: Run) -> str:
    """Return the verdict, in words."""
    problems = broken_promises(run)
    if problems:
        return "A promise is broken: " + "; ".join(problems) + "."
    looks = sum(step.old_log_probs_bitwise is not None for step in run.steps)
    times = "once" if looks == 1 else f"{looks} times"
    leaves = "1 leaf" if run.leaves == 1 else f"{run.leaves} leaves"
    held = f"; all {run.ranks} ranks held the same version 1" if run.ranks_agree else ""
    return (
        f"Version 1 was live again {times}, bit for bit, and the current weights came back each time{held} "
        f"({leaves} of {', '.join(run.dtypes)}; megatron-core {run.versions['megatron-core']}, "
        f"torch {run.versions['torch']})."
    )


def _cells(step: Step) -> list[str]:
    return [
        str(step.step),
        f"{step.loss:.3f}",
        f"{step.bytes:,}",
        f"{step.snapshot_ms:.2f}",
        _number(step.load_ms, ".2f"),
        _number(step.distance, ".4f"),
        _answer(step.old_log_probs_bitwise),
        _answer(step.weights_back_bitwise),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _answer(answer: bool | None) -> str:  # noqa: FBT001 - a value to show, not a switch
    if answer is None:
        return "-"
    return "[green]yes[/green]" if answer else "[bold red]NO[/bold red]"
