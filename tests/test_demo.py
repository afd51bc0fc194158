"""The demo keeps its promises, notices when one is broken, and is usable as a command."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from mcore_snap import load
from mcore_snap.__main__ import main
from mcore_snap.demo import lookback
from mcore_snap.demo.records import Run, Step, as_json, broken_promises, exit_status, merge
from mcore_snap.demo.text import batches, text
from mcore_snap.testing.ranks import run_ranks

FIRST = Step(1, 5.5, 8, 1.0, None, None, None, None)
LATER = Step(2, 4.5, 8, 1.0, 2.0, old_log_probs_bitwise=True, weights_back_bitwise=True, distance=0.5)
VERSIONS = dict.fromkeys(("python", "torch", "megatron-core", "mcore-snap"), "1.0")
GOOD = Run(
    moe=False,
    ranks=1,
    device="cpu",
    versions=VERSIONS,
    leaves=1,
    dtypes=("bfloat16",),
    ranks_agree=None,
    steps=(FIRST, LATER),
)
BROKEN: dict[str, dict[str, Any]] = {
    "old log-probabilities": {"old_log_probs_bitwise": False},
    "did not come back": {"weights_back_bitwise": False},
    "has not moved": {"distance": 0.0},
}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m mcore_snap`` as a user would."""
    words = [sys.executable, "-m", "mcore_snap", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def with_later(**changes: Any) -> Run:
    """Return the good run with its look-back changed."""
    return replace(GOOD, steps=(FIRST, replace(LATER, **changes)))


@pytest.mark.parametrize("arguments", [[], ["--moe"], ["--ranks", "2"], ["--moe", "--ranks", "2"]], ids=" ".join)
def test_real_training_keeps_every_promise(arguments: list[str]) -> None:
    """A whole run exits 0, prints nothing but one document, and the model really learns."""
    done = command("demo", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    run = json.loads(done.stdout)
    assert run["ok"] is True
    assert run["broken"] == []
    assert run["moe"] is ("--moe" in arguments)
    assert run["ranks"] == (2 if "--ranks" in arguments else 1)
    assert run["ranks_agree"] is (True if "--ranks" in arguments else None)
    assert set(run["versions"]) == set(VERSIONS)
    assert run["leaves"] >= (10 if "--moe" in arguments else 1)
    assert "bfloat16" in run["dtypes"]
    assert [step["step"] for step in run["steps"]] == [1, 2, 3, 4]
    assert all(step["bytes"] > 1e6 and step["snapshot_ms"] > 0 for step in run["steps"])
    first, *later = run["steps"]
    assert first["load_ms"] is first["old_log_probs_bitwise"] is first["weights_back_bitwise"] is None
    for step in later:
        assert step["load_ms"] > 0
        assert step["old_log_probs_bitwise"] is step["weights_back_bitwise"] is True
    assert later[-1]["loss"] < first["loss"]
    assert 0 < later[0]["distance"] < later[-1]["distance"]


def test_table_has_a_row_per_step() -> None:
    """People get a table and a sentence, and no noise."""
    pytest.importorskip("rich")
    done = command("demo", "--steps", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "snapshot" in done.stdout
    assert done.stdout.count("yes") == 2
    assert done.stdout.splitlines()[-1].startswith("Version 1 was live again once, bit for bit")


@contextmanager
def _never_in(tree: Any, _snap: Any) -> Iterator[Any]:
    """Be a swap that leaves the current weights live."""
    yield tree


@contextmanager
def _never_out(tree: Any, snap: Any) -> Iterator[Any]:
    """Be a swap that forgets to bring the current weights back."""
    yield load(tree, snap)


def _sabotaged(rank: int, swap: Any) -> Run:
    with mock.patch.object(lookback, "swapped", swap):
        return lookback.look_back(rank, 1, 2, moe=False)


@pytest.mark.parametrize(
    ("swap", "promises"),
    [(_never_in, ["old log-probabilities", "has not moved"]), (_never_out, ["did not come back"])],
)
def test_wrong_swap_is_noticed(swap: Any, promises: list[str]) -> None:
    """The checks see a swap that does nothing, and one that does not return; other promises are kept."""
    problems = broken_promises(merge(run_ranks(_sabotaged, 1, swap)))
    assert len(problems) == len(promises)
    assert all(promise in problem for promise, problem in zip(promises, problems, strict=True))


def _with_another_model(rank: int) -> Run:
    from mcore_snap.testing import gpt

    other = functools.partial(gpt.gpt, seed=1234 + rank)
    with mock.patch.object(gpt, "gpt", other):
        return lookback.look_back(rank, 2, 2, moe=False)


def test_ranks_with_different_versions_are_noticed() -> None:
    """Each rank gets its own version back, bit for bit, so that nothing else would tell."""
    run = merge(run_ranks(_with_another_model, 2))
    assert broken_promises(run) == ["the ranks do not hold the same version 1"]
    assert as_json(run)["ranks_agree"] is False


def test_several_ranks_have_to_agree() -> None:
    """One rank that was told otherwise is enough, and an answer that is missing is none."""
    for answers in ([True, False], [False, True], [None, None]):
        run = merge([replace(GOOD, ranks=2, ranks_agree=answer) for answer in answers])
        assert broken_promises(run) == ["the ranks do not hold the same version 1"]
    good = merge([replace(GOOD, ranks=2, ranks_agree=True)] * 2)
    assert broken_promises(good) == []
    pytest.importorskip("rich")
    from mcore_snap.demo.report import sentence

    assert "all 2 ranks held the same version 1" in sentence(good)
    assert "held" not in sentence(GOOD)


@pytest.mark.parametrize("promise", BROKEN)
def test_broken_promise_gives_exit_status_1(promise: str) -> None:
    """Each promise is checked, on every rank, and named."""
    bad = with_later(**BROKEN[promise])
    assert (exit_status(GOOD), exit_status(bad)) == (0, 1)
    good, agreed = replace(GOOD, ranks_agree=True), replace(bad, ranks_agree=True)
    for run in (bad, merge([good, agreed]), merge([agreed, good])):
        (problem,) = as_json(run)["broken"]
        assert promise in problem
        assert "step 2" in problem
        assert as_json(run)["ok"] is False


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_command_returns_the_verdict(form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What the run broke becomes the command's exit status, and is said in both forms."""
    if not form:
        pytest.importorskip("rich")
    bad = with_later(weights_back_bitwise=False)
    with mock.patch("mcore_snap.demo.command._measure", return_value=bad):
        assert main(["demo", *form]) == 1
    assert "did not come back" in " ".join(capsys.readouterr().out.split())


def test_run_without_look_back_proves_nothing() -> None:
    """A run of one step is no success."""
    assert broken_promises(replace(GOOD, steps=(FIRST,))) == ["no step looked back, so nothing was shown"]


def test_ranks_add_up() -> None:
    """Bytes are summed, times are the slowest rank's, the loss is the mean."""
    other = with_later(loss=2.5, snapshot_ms=7.0, load_ms=1.0, distance=0.25)
    merged = merge([GOOD, other])
    assert merged.ranks == 2
    assert merged.steps[1] == replace(LATER, loss=3.5, bytes=16, snapshot_ms=7.0, distance=0.25)
    assert merged.steps[0] == replace(FIRST, bytes=16)


def test_not_a_number_is_still_json() -> None:
    """A diverged loss becomes null."""
    assert json.loads(json.dumps(as_json(with_later(loss=float("nan"))), allow_nan=False))["steps"][1]["loss"] is None


def test_batches_share_out_the_text() -> None:
    """Ranks and steps read different pieces in turn, and start again at the end."""
    pieces = [batches(2, size=2, seq=4, rank=rank, ranks=2) for rank in range(2)]
    dealt = [bytes(pieces[rank][step].flatten().tolist()) for step in range(2) for rank in range(2)]
    assert b"".join(dealt) == text()[:32]
    (everything,) = batches(1, size=1, seq=len(text()) + 3)
    assert bytes(everything[0, -3:].tolist()) == text()[:3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "expected at least 2 steps, got 1"),
        (["--steps", "x"], "expected a whole number, got 'x'"),
        (["--ranks", "0"], "expected 1 to 16 ranks, got 0"),
        (["--ranks", "17"], "expected 1 to 16 ranks, got 17"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong numbers are argparse's errors, status 2, before anything is imported or run."""
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_rich_is_explained() -> None:
    """Without rich the command says what to install, and does so before it trains."""
    code = "import sys; sys.modules['rich'] = None; from mcore_snap.__main__ import main; main(['demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "pip install 'mcore-snap[demo]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_megatron_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Without Megatron-Core the command says what to install."""
    with mock.patch("importlib.util.find_spec", side_effect=ModuleNotFoundError(name="megatron")):
        assert main(["demo", "--json"]) == 2
    assert "pip install megatron-core" in capsys.readouterr().err


def test_demo_needs_no_hypothesis() -> None:
    """Nothing that the demo imports imports hypothesis."""
    code = (
        "import sys, mcore_snap.__main__, mcore_snap.demo.lookback, mcore_snap.testing.gpt, mcore_snap.testing.ranks\n"
        "sys.exit('hypothesis' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
