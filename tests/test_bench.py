"""The benchmark checks bits, says what was wrong or missing, and derives its ratios from the times that it gives."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_snap.__main__ import main
from mcore_snap.bench import contenders, measuring, plot, released_verl
from mcore_snap.bench.contenders import Contender
from mcore_snap.bench.report import LABELS, table
from mcore_snap.bench.results import FIGURES, RATIOS, Machine, Results, as_json
from mcore_snap.bench.stand_in import Subject

ALL = {**contenders.LIMIT, **contenders.OURS, **contenders.ASYNC, **contenders.VERL, **contenders.OTHERS}
MACHINE = Machine("cpu", 2, 2, (3.0, 2.0, 1.0), (4.0, 2.0, 1.0), {"torch": "2"})
GIVEN = Results(
    nbytes=1000,
    small_leaves=4,
    rounds=3,
    seconds={
        "limit": (4.0, 2.0, 8.0),
        "load": (6.0, 5.0, 4.0),
        "async_stall": (0.5, 0.25, 1.0),
        "small_limit": (1e-6, 2e-6, 3e-6),
        "small_pytree": (7e-6, 5e-6, 9e-6),
        "import": (0.5, 0.4, 0.6),
    },
    peaks={"snapshot_cold": 1250, "deepcopy": 2000},
    wrong={},
    machine=MACHINE,
    missing={"verl_load": "left out on request"},
)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m mcore_snap bench`` as a user would."""
    words = [sys.executable, "-m", "mcore_snap", "bench", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A whole run on a small model, and where it wrote."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    return command("--size", "1MiB", "--small-leaves", "50", "--rounds", "2", "--json", str(path)), path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes a process of its own."""
    monkeypatch.setattr(measuring, "peak_bytes", dict.fromkeys)
    monkeypatch.setattr(measuring, "import_seconds", lambda: 0.1)


def test_a_whole_run_measures_everything(whole: Any) -> None:
    """Every key that was promised has a number, every contender was right, and people get a table."""
    done, path = whole
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(path.read_text())
    assert (found["ok"], found["wrong"], found["missing"]) == (True, {}, {})
    assert (found["size_bytes"], found["small_leaves"], found["rounds"]) == (1 << 20, 50, 2)
    assert all(isinstance(found[key], float) for key in (*RATIOS, *FIGURES))
    assert set(found["seconds"]) == {*ALL, *contenders.SMALL, "import"}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found["seconds"].values())
    assert found["machine"]["threads"] >= 1
    assert found["machine"]["cpus"] >= 1
    assert len(found["machine"]["load_before"]) == len(found["machine"]["load_after"]) == 3
    assert all(label in done.stdout for label in LABELS.values())
    assert "load average" in done.stdout


def test_ratios_are_those_of_the_recorded_times(whole: Any) -> None:
    """What stands in the document can be computed again from its own raw times."""
    found = json.loads(whole[1].read_text())
    for figures, pick in ((found, min), (found["median"], statistics.median)):
        times = {name: pick(seconds) for name, seconds in found["seconds"].items()}
        for name in RATIOS:
            assert figures[name] == times[name] / times["limit"]
        assert figures["small_leaf_us"] == (times["small_pytree"] - times["small_limit"]) / 50 * 1e6
        assert figures["small_leaf_model_us"] == (times["small_model"] - times["small_limit"]) / 50 * 1e6
        assert (figures["async_stall_s"], figures["import_s"]) == (times["async_stall"], times["import"])
    assert found["peak_bytes_over_s"] == found["peak_bytes"]["snapshot_cold"] / (1 << 20)


def test_figures_of_known_times() -> None:
    """Best is over best, median over median, and what was not measured is null."""
    found = as_json(GIVEN)
    assert (found["load"], found["median"]["load"]) == (2.0, 1.25)
    assert (found["async_stall_s"], found["median"]["async_stall_s"]) == (0.25, 0.5)
    assert found["small_leaf_us"] == pytest.approx(1.0)
    assert found["median"]["small_leaf_us"] == pytest.approx(1.25)
    assert (found["import_s"], found["peak_bytes_over_s"]) == (0.4, 1.25)
    assert found["verl_load"] is found["small_leaf_model_us"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_table_says_what_is_missing_and_how_busy_it_was() -> None:
    """A contender that was left out has a reason, and a busy machine a warning."""
    text = table(GIVEN)
    rows = {label: line for label in LABELS.values() for line in text.splitlines() if line.startswith(label)}
    assert rows[LABELS["load"]].split()[-4:] == ["4.0000", "5.0000", "2.00", "1.25"]
    assert rows[LABELS["verl_load"]].endswith("left out on request")
    assert "load average 3.0 before and 4.0 after; it was busy" in text
    assert "WRONG" not in text


@pytest.mark.usefixtures("quick")
def test_wrong_bits_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """The table marks the row, the document names it, and the exit status is 1."""

    def wrong(subject: Subject) -> Contender:
        return Contender("snapshot", lambda _: ~subject.live[0], lambda kept: [kept])

    monkeypatch.setattr(contenders, "OTHERS", {"deepcopy": wrong})
    path = tmp_path / "figures.json"
    status = main(
        ["bench", "--size", "64KiB", "--small-leaves", "3", "--rounds", "1", "--no-verl", "--json", str(path)]
    )
    said, found = capsys.readouterr().out, json.loads(path.read_text())
    assert status == 1
    assert (found["ok"], list(found["wrong"])) == (False, ["deepcopy"])
    assert next(line for line in said.splitlines() if "WRONG BITS" in line).startswith(LABELS["deepcopy"])
    assert "WRONG BITS: deepcopy: what was kept is not the model's bits" in said
    assert set(found["missing"]) == set(contenders.VERL)
    assert found["verl_snapshot"] is found["median"]["verl_snapshot"] is None


def test_verl_that_cannot_be_had_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """The command says what pip said and what to do, and has not measured anything by then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(measuring, "peak_bytes", None)
    assert main(["bench"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"verl {released_verl.VERSION} could not be downloaded by pip:\n")
    assert "No matching distribution" in said.err
    assert said.err.endswith("To measure without it: --no-verl\n")
    assert list((tmp_path / "mcore_snap").iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_the_plot_lies_beside_the_document(there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any):
    """With matplotlib there is a picture; without, one line says so, and the document is written all the same."""
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: GIVEN)
    if not there:
        monkeypatch.setattr(plot, "has_matplotlib", lambda: False)
    path = tmp_path / "figures.json"
    assert main(["bench", "--json", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(path.read_text()) == as_json(GIVEN)
    assert path.with_suffix(".png").exists() is there
    if there:
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "no plot, since matplotlib is not there: pip install 'mcore-snap[bench]'" in last


def test_matplotlib_that_is_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked for is the package itself."""
    assert plot.has_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot.has_matplotlib()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "1GB"], "expected a size such as"),
        (["--size", "-1MiB"], "expected"),
        (["--size", "1KiB"], "at least 64KiB"),
        (["--small-leaves", "0"], "at least 1"),
        (["--rounds", "1.5"], "at least 1"),
        (["--json", "no/such/folder/figures.json"], "a folder that exists"),
        (["--json", "figures.png"], "a file for JSON"),
        (["--json", "."], "a file for JSON"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: list[str], words: str, capsys: Any) -> None:
    """Before anything is measured, in words."""
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_the_command_line_stays_light() -> None:
    """Importing the library or its command line brings in neither the benchmark nor what it compares with."""
    program = (
        "import sys, mcore_snap.__main__\n"
        "heavy = ('mcore_snap.bench.', 'torch.distributed.checkpoint', 'matplotlib')\n"
        "print([m for m in sys.modules if m.startswith(heavy) and m != 'mcore_snap.bench.command'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
