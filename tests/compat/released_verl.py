"""The released verl package, read and not installed: the source of single functions and classes, executed.

verl itself needs a dozen packages and an accelerator; its functions for Megatron-Core models need none of them.
"""

from __future__ import annotations

import ast
import logging
from types import ModuleType
from typing import Final

import torch

from mcore_snap.bench.released_verl import FUNCTIONS, definition, execute, wheel

__all__ = [
    "FUNCTIONS",
    "TRAINERS",
    "WORKER",
    "actor_worker",
    "definition",
    "execute",
    "megatron_utils",
    "trainer",
    "wheel",
]

WORKER: Final = "verl/experimental/separation/engine_workers.py"
TRAINERS: Final = {
    "FullyAsyncTrainer": "verl/experimental/fully_async_policy/fully_async_trainer.py",
    "PPOTrainerSeparateAsync": "verl/trainer/ppo/v1/trainer_separate_async.py",
}


def megatron_utils() -> ModuleType:
    """Return verl's functions that copy, restore, offload and load back Megatron-Core models.

    They are as released. Around them, the device is this machine's, and there is no pinning where there is
    no accelerator; that `Tensor.pin_memory` works there is up to `mcore_snap.testing.cpu.cpu_megatron`.
    """
    from megatron.core.distributed import DistributedDataParallel

    wanted = [
        "copy_megatron_model_to_cpu",
        "restore_megatron_model_from_cpu",
        "offload_megatron_model_to_cpu",
        "load_megatron_model_to_gpu",
        "_can_safely_resize_storage",
        "_clear_te_fp8_weight_workspaces",
    ]
    around = {
        "torch": torch if torch.cuda.is_available() else _torch_without_pinning(),
        "DDP": DistributedDataParallel,
        "get_device_id": torch.cuda.current_device,
        "get_torch_device": lambda: torch.cuda,
        "logger": logging.getLogger("verl"),
    }
    return execute([definition(FUNCTIONS, name) for name in wanted], around, FUNCTIONS)


def _torch_without_pinning() -> ModuleType:
    def empty(*size, pin_memory=False, **options):
        return torch.empty(*size, **options)

    module = ModuleType("torch")
    vars(module).update(vars(torch), empty=empty)
    return module


def actor_worker(functions: str) -> type:
    """Return verl's worker class with its functions for Megatron-Core models imported from elsewhere.

    Args:
        functions: Name of the module to import them from: what a user of ours edits is this one line.
    """
    node = ast.parse(ast.unparse(definition(WORKER, "DetachActorWorker"))).body[0]
    lines = [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and n.module == "verl.utils.megatron_utils"]
    if len(lines) != 1:
        raise LookupError(f"{WORKER}: expected one import of the functions, found {len(lines)}")
    lines[0].module = functions
    around = {
        "ActorRolloutRefWorker": _Worker,
        "Dispatch": ModuleType("Dispatch"),
        "register": lambda dispatch_mode: lambda method: method,
        "DictConfig": object,
        "DistillationConfig": object,
    }
    around["Dispatch"].ONE_TO_ALL = None
    header = ast.parse("from typing import Callable, Optional").body
    found: type = execute([*header, node], around, WORKER).DetachActorWorker
    return found


class _Worker:
    """The base of verl's worker class, as far as keeping and restoring needs it."""

    def __init__(self, config, role, distillation_config=None, **options):
        self.config = config
        self.actor = options["actor"]


def trainer(name: str, base: type) -> type:
    """Return a class with the method `_compute_old_log_prob` of one of verl's trainers.

    Args:
        name: The trainer.
        base: Its base class; has the method that computes log-probabilities with the weights that are live.
    """
    node = definition(TRAINERS[name], name)
    node = ast.parse(ast.unparse(node)).body[0]
    node.bases = [ast.Name("Base", ast.Load())]
    node.keywords, node.decorator_list = [], []
    node.body = [one for one in node.body if getattr(one, "name", None) == "_compute_old_log_prob"]
    around = {"Base": base, "DataProto": object, "KVBatchMeta": object}
    found: type = getattr(execute([node], around, TRAINERS[name]), name)
    return found
