"""What a check found, and how checks are made and reported."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

Numbers: TypeAlias = dict[str, float | str]


class WrongBitsError(Exception):
    """Bytes, or what decides over them, are not what they have to be."""


class NotHereError(Exception):
    """This machine cannot show it."""


class MissedError(Exception):
    """Right, but short of a goal: the numbers are the argument."""


@dataclass(frozen=True)
class Setting:
    """Where to check, with how many bytes, and how often to measure."""

    device: torch.device
    nbytes: int
    repeats: int

    def needs_device(self) -> None:
        """Raise NotHereError on the CPU."""
        if self.device.type == "cpu":
            raise NotHereError("it needs a device")

    def synchronize(self) -> None:
        """Wait for the whole device: the script may."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


Check: TypeAlias = Callable[[Setting], Numbers]


@dataclass(frozen=True)
class Finding:
    """What one check found: right, WRONG, FAILED, missed or not checked."""

    name: str
    verdict: str
    detail: str
    numbers: Numbers
    seconds: float


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes on the host, the slow and simple way."""
    return tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)


def same(what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise WrongBitsError if any leaf differs in a byte."""
    wrong = [str(i) for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    if wrong:
        raise WrongBitsError(f"{what}: leaves {', '.join(wrong)} of {len(expected)} differ")


def examine(at: Setting, checks: Sequence[Check]) -> list[Finding]:
    """Make every check; none keeps another from being made."""
    return [_examined(at, check) for check in checks]


def _examined(at: Setting, check: Check) -> Finding:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    numbers: Numbers = {}
    detail = ""
    began = time.perf_counter()
    try:
        verdict, numbers = "right", check(at)
    except WrongBitsError as error:
        verdict, detail = "WRONG", str(error)
    except NotHereError as error:
        verdict, detail = "not checked", str(error)
    except MissedError as error:
        verdict, numbers = "missed", error.args[0]
    except Exception:
        verdict, detail = "FAILED", traceback.format_exc(limit=-3)
    return Finding(name, verdict, detail, numbers, round(time.perf_counter() - began, 2))


def report(at: Setting, findings: Sequence[Finding], never: Sequence[str], path: Path | None) -> int:
    """Print a table and the JSON, and return the exit status."""
    for one in findings:
        told = one.detail or ", ".join(f"{name} {value}" for name, value in one.numbers.items())
        sys.stdout.write(f"{one.name:20s} {one.verdict:12s} {told} ({one.seconds} s)\n")
    sys.stdout.write(f"never checked here: {'; '.join(never)}\n")
    about = {"device": str(at.device), "name": _name(at.device), "torch": torch.__version__, "bytes": at.nbytes}
    text = json.dumps({**about, "never": never, "findings": [asdict(one) for one in findings]})
    sys.stdout.write(f"{text}\n")
    if path is not None:
        path.write_text(text)
    return int(any(one.verdict in {"WRONG", "FAILED"} for one in findings))


def _name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
