"""Peak host memory by the kernel's own account, each time in a fresh process.

As a program, ``python -m mcore_snap.bench.memory BYTES NAME...`` prints what each contender took.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["peak_bytes"]

_STATUS: Final = Path("/proc/self/status")
_FORGET: Final = Path("/proc/self/clear_refs")
_PEAK: Final = "5"  # what makes the kernel forget the peak; proc(5)


def peak_bytes(names: Iterable[str], nbytes: int) -> dict[str, int]:
    """Return how many bytes of resident memory one run of each takes at its peak, beyond what was there.

    Args:
        names: Contenders, by their keys.
        nbytes: Size of the model.

    Raises:
        RuntimeError: A process failed; the message has what it said.
    """
    done = subprocess.run(  # noqa: S603 - this interpreter, with arguments of our own
        [sys.executable, "-W", "ignore", "-m", __name__, str(nbytes), *names],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the peak memory could not be measured:\n{done.stderr}".rstrip())
    return {name: int(peak) for name, peak in (line.split() for line in done.stdout.splitlines())}


def _print_peaks(nbytes: int, names: Iterable[str]) -> int:
    from mcore_snap.bench import contenders  # noqa: F401, PLC0415 - once, before the forks

    # Of a process that did nothing yet but import: no allocator has memory left over, no thread runs.
    fork = multiprocessing.get_context("fork")
    for name in names:
        process = fork.Process(target=_print_peak, args=(name, nbytes))
        process.start()
        process.join()
        if process.exitcode:
            return 1
    return 0


def _print_peak(name: str, nbytes: int) -> None:
    from mcore_snap.bench import contenders, stand_in  # noqa: PLC0415 - see above

    known = {**contenders.OURS, **contenders.VERL, **contenders.OTHERS}
    before = peak = 0
    for size in (stand_in.SMALLEST, nbytes):  # the small one brings in what is imported or started at first use
        subject = stand_in.one_buffer(size, stand_in.device_here())
        contender = known[name](subject)
        before = _forget_peak()
        contender.run(lambda: None)
        peak = _kilobytes("VmHWM")
    print(name, (peak - before) * 1024, flush=True)  # noqa: T201 - for the parent


def _forget_peak() -> int:
    _FORGET.write_text(_PEAK)
    return _kilobytes("VmRSS")


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no {field}")
    return int(found[1])


if __name__ == "__main__":
    sys.exit(_print_peaks(int(sys.argv[1]), sys.argv[2:]))
