"""Processes that fork or end with snapshots leased, idle, sent, prepared and under way: see `fork_cases`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_cases
import pytest

import mcore_snap


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Run all cases from a clean process: one that has threads must not fork."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mcore_snap.__file__).parents[1])}
    # From 3.12 on Python warns that threads are not forked, which is what some cases are about.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", fork_cases.__file__]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


SAID = {
    "it_ends_with_snapshots_under_way": "okfinished ",
    "it_ends_by_an_error": "",
}


@pytest.mark.parametrize("name", [case.__name__ for case in fork_cases.CASES])
def test_a_process_that_forks_or_ends(name: str, outcomes: dict[str, Any]) -> None:
    """All its checks hold, it ends well, it says nothing that it was not meant to, and leaves nothing in /dev/shm."""
    outcome = outcomes[name]
    if name == "it_ends_by_an_error":
        assert outcome["err"].endswith("RuntimeError: as planned\n")
        assert "Exception ignored" not in outcome["err"]
    else:
        assert outcome["err"] == ""
    assert outcome["status"] == (name == "it_ends_by_an_error")
    assert outcome["out"] == SAID.get(name, "ok")
    assert outcome["left"] == []
