"""The released verl package, read and not installed: its own two functions, as they are.

verl needs a dozen packages and an accelerator; its functions that keep Megatron-Core models need neither.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

__all__ = [
    "FUNCTIONS",
    "SHA256",
    "VERSION",
    "UnavailableError",
    "definition",
    "execute",
    "functions",
    "unpinned",
    "wheel",
]

VERSION: Final = "0.9.1"
SHA256: Final = "db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14"
FUNCTIONS: Final = "verl/utils/megatron_utils.py"
"""The file of the wheel that has the functions."""


class UnavailableError(RuntimeError):
    """The released package cannot be had, or is not what was released."""


def wheel() -> Path:
    """Return the released wheel, downloaded by pip where the cache does not have it yet.

    The cache is ``mcore_snap`` in ``XDG_CACHE_HOME``, which is ``~/.cache`` by default.

    Raises:
        UnavailableError: It cannot be had, or it is not the file that was released.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore_snap"
    path = folder / f"verl-{VERSION}-py3-none-any.whl"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                _download(Path(fresh))
                # At once, since several processes may come here.
                (Path(fresh) / path.name).replace(path)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UnavailableError(f"verl {VERSION} cannot be kept in {folder}: {error}; set XDG_CACHE_HOME") from error
    if found != SHA256:
        raise UnavailableError(f"{path}: expected sha256 {SHA256}, found {found}; delete it to download it again")
    return path


def _download(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run(  # noqa: S603 - pip, with arguments of our own
        [*pip, f"verl=={VERSION}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UnavailableError(f"verl {VERSION} could not be downloaded by pip:\n{done.stdout}{done.stderr}".rstrip())


@functools.cache
def parsed(file: str) -> ast.Module:
    """Return the syntax tree of one file of the wheel."""
    with zipfile.ZipFile(wheel()) as archive:
        return ast.parse(archive.read(file), f"verl-{VERSION}/{file}")


def definition(file: str, name: str) -> Any:
    """Return the syntax tree of one function or class of a file.

    Raises:
        LookupError: The file defines no such thing, or several.
    """
    found = [node for node in parsed(file).body if getattr(node, "name", None) == name]
    if len(found) != 1:
        raise LookupError(f"{file}: expected one definition of {name}, found {len(found)}")
    return found[0]


def execute(nodes: Sequence[Any], names: Mapping[str, Any], file: str) -> ModuleType:
    """Run definitions in a module of their own that has these other names."""
    module = ModuleType(Path(file).stem)
    vars(module).update(names)
    tree = ast.fix_missing_locations(ast.Module([*nodes], []))
    exec(compile(tree, f"verl-{VERSION}/{file}", "exec"), vars(module))  # noqa: S102 - its digest was checked
    return module


def functions(ddp: type) -> ModuleType:
    """Return a module with `copy_megatron_model_to_cpu` and `restore_megatron_model_from_cpu`, as released.

    Args:
        ddp: What they take for Megatron-Core's DDP.
    """
    names = ["copy_megatron_model_to_cpu", "restore_megatron_model_from_cpu"]
    return execute([definition(FUNCTIONS, name) for name in names], {"torch": torch, "DDP": ddp}, FUNCTIONS)


@contextmanager
def unpinned() -> Iterator[None]:
    """Let ``Tensor.pin_memory`` return its tensor inside the ``with`` block, where nothing can pin.

    So on the CPU verl's functions are spared a copy that they make elsewhere.
    """
    if torch.accelerator.is_available():
        yield
        return
    Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Tensor.pin_memory  # torch defines it on the base class
