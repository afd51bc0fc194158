"""The script for devices, as far as it can be tried without one: its arguments, its verdicts, its checks of bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bits
import check
import findings
import pytest
import torch

HERE = Path(__file__).parent
CPU = findings.Setting(torch.device("cpu"), 1 << 16, 1)


def _run_without_devices(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, HERE / "check.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_without_an_accelerator_it_says_so() -> None:
    """And leaves with a status of its own, having printed no finding."""
    done = _run_without_devices()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no accelerator here: nothing was checked" in done.stderr


@pytest.mark.parametrize("wrong", [["--gib", "0"], ["--gib", "nan"], ["--repeats", "0"], ["--gib", "x"], ["what"]])
def test_arguments_are_checked(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything else happens."""
    with pytest.raises(SystemExit):
        check.main(wrong)
    assert "usage:" in capsys.readouterr().err


def test_help_says_what_the_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    """For whoever runs it by hand."""
    with pytest.raises(SystemExit) as left:
        check.main(["--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "Exit status 0" in printed
    assert "PYTHONPATH=. python tests/device/check.py" in printed


def test_on_the_cpu_bits_are_right_and_the_rest_is_not_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Every check runs or says that it cannot; the JSON says the same as the table, printed and in the file."""
    found = findings.examine(CPU, check.CHECKS)
    assert {one.name: one.verdict for one in found} == {
        "round trip": "right",
        "read only sources": "right",
        "page locking": "not checked",
        "borders": "not checked",
        "megatron": "not checked",
        "several devices": "not checked",
        "order": "not checked",
        "conjugated": "not checked",
        "offload": "not checked",
        "reserved memory": "not checked",
        "other devices": "not checked",
        "rates": "not checked",
        "device memory": "not checked",
        "background": "not checked",
    }
    assert findings.report(CPU, found, check.NEVER, tmp_path / "found.json") == 0
    printed = capsys.readouterr().out
    told = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(printed.splitlines()[-1]) == told
    assert [one["verdict"] for one in told["findings"]] == [one.verdict for one in found]
    assert f"never checked here: {check.NEVER[0]}" in printed


@pytest.mark.parametrize("broken", ["load", "snapshot", "swapped"])
def test_wrong_bits_are_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an operation that does nothing, the verdict is not that all is right, and neither is the status."""
    nothing = {
        "load": lambda tree, snap: tree,
        "snapshot": lambda tree: tree,
        "swapped": lambda tree, snap: __import__("contextlib").nullcontext(),
    }
    monkeypatch.setattr(bits, broken, nothing[broken])
    found = findings.examine(CPU, [bits.check_round_trip])
    assert found[0].verdict == "WRONG"
    assert "differ" in found[0].detail
    assert findings.report(CPU, found, [], None) == 1


def test_other_verdicts() -> None:
    """An error of any other kind is a failure; a missed goal is none."""

    def check_failing(at: findings.Setting) -> findings.Numbers:
        raise ValueError("no such thing")

    def check_slow(at: findings.Setting) -> findings.Numbers:
        raise findings.MissedError({"rate": 1.5})

    found = findings.examine(CPU, [check_failing, check_slow])
    assert [one.verdict for one in found] == ["FAILED", "missed"]
    assert "no such thing" in found[0].detail
    assert found[1].numbers == {"rate": 1.5}
    assert findings.report(CPU, found[:1], [], None) == 1
    assert findings.report(CPU, found[1:], [], None) == 0
