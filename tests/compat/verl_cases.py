"""What verl's two functions make of a model, configuration by configuration, and what ours do."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from megatron.core import distributed

from mcore_snap.testing.gpt import gpt
from mcore_snap.testing.mxfp8 import has_mxfp8_reuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    Chunks = Sequence[nn.Module]


class Case(NamedTuple):
    """One way to keep a model and restore it.

    Attributes:
        theirs: What the released functions do: "right" if the logits come back on every rank, "wrong" if
            others do and nothing is said, "crash" if an exception is raised; None if it depends on timing.
        options: How to build the model.
        ours: What ours do: "right", or the error that they refuse with.
        world: Number of ranks.
        forward_before_copy: Whether a forward pass comes before the copy is taken.
        forward_before_restore: Whether a forward pass comes between the last step and the restore.
        prepare: Done to the model once it and its optimizer are built.
        disturb: Done to the model between copy and restore, after training it.
        copied: What the copy is taken of.
        restored: What is restored.
        anew: Whether that is another model, not a part of this one.
        around: Entered around taking the copy, and around the restore.
        kind: Key of KINDS.
    """

    theirs: str | None
    options: Mapping[str, Any] = {}
    ours: str = "right"
    world: int = 1
    forward_before_copy: bool = True
    forward_before_restore: bool = True
    prepare: Callable[[Chunks], None] = lambda chunks: None
    disturb: Callable[[Chunks], None] = lambda chunks: None
    copied: Callable[[Chunks], Chunks] = lambda chunks: chunks
    restored: Callable[[Chunks], Chunks] = lambda chunks: chunks
    anew: bool = False
    around: tuple[Callable[[Chunks], Any], Callable[[Chunks], Any]] = (nullcontext, nullcontext)
    kind: str = "gpt"


def _is_attention(name: str) -> bool:
    return "self_attention" in name


def _always(name: str) -> bool:
    return True


def _unwrapped(chunks: Chunks) -> Chunks:
    return [chunk.module for chunk in chunks]


def _change_frozen(chunks: Chunks) -> None:
    """Do what merging an adapter into its base does."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(1.5)


def _change_attention(chunks: Chunks) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if _is_attention(name):
                parameter.data.mul_(1.5)


def _set_biases(chunks: Chunks) -> None:
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.tensor([0.3, -0.3, 0.1, -0.1]))


def _change_biases(chunks: Chunks) -> None:
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                buffer.mul_(-2)


def _train_all(chunks: Chunks) -> None:
    for chunk in chunks:
        chunk.requires_grad_(requires_grad=True)


def _train_no_attention(chunks: Chunks) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(not _is_attention(name))


def _move_attention(chunks: Chunks) -> None:
    """Point parameters out of the flat buffer that DDP put them into."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if _is_attention(name):
                parameter.data = parameter.data.clone()


def _another(**options: Any) -> Callable[[Chunks], Chunks]:
    return lambda chunks: gpt(**options)


@contextmanager
def _gathering(chunks: Chunks) -> Iterator[None]:
    """Be where parameter gathers have been started and nobody has waited for them."""
    for chunk in chunks:
        chunk.start_param_sync()
    assert any(group.param_gather_handle is not None for chunk in chunks for group in chunk.bucket_groups)
    yield


@contextmanager
def _offloaded_by_verl(chunks: Chunks) -> Iterator[None]:
    """Be where verl's worker is between two calls if `param_offload` is set."""
    import released_verl

    verl = released_verl.megatron_utils()
    verl.offload_megatron_model_to_cpu(chunks)
    try:
        yield
    finally:
        verl.load_megatron_model_to_gpu(chunks)


@contextmanager
def _offloaded_by_megatron(chunks: Chunks) -> Iterator[None]:
    """Do what the flat buffers of 0.16 and later do themselves, on every version."""
    flat: list[Any] = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for buffer in flat:
        if hasattr(buffer, "offload_to_cpu"):
            buffer.offload_to_cpu()
            continue
        buffer.param_data_cpu = buffer.param_data.cpu().pin_memory()
        buffer.param_data_size = buffer.param_data.untyped_storage().size()
        buffer.param_data.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for buffer in flat:
            if hasattr(buffer, "reload_from_cpu"):
                buffer.reload_from_cpu()
                continue
            buffer.param_data.untyped_storage().resize_(buffer.param_data_size)
            buffer.param_data.copy_(buffer.param_data_cpu)


_BARE: Final = {"ddp": False}
_OWN: Final = {"distributed_optimizer": False}
_MOE: Final = {"moe": True}
_TWO: Final = {"chunks": 2}
_LORA: Final = {"freeze": _is_attention}
_OVERLAP: Final = {"overlap": True}
_MISMATCH: Final = "StructureMismatch"
_BARE_MOE: Final = {"prepare": _set_biases, "disturb": _change_biases}

# Before that setting existed, the root module's parameters were left gathered by a forward pass, and are no DTensors.
_RESHARDS: Final = hasattr(distributed, "TorchFullyShardedDataParallelConfig")

CASES: Final[dict[str, Case]] = {
    # Flat buffers that hold all there is: verl's functions are right.
    "dense": Case("right"),
    "dense, fp32": Case("right", {"bf16": False}),
    "dense, 2 ranks": Case("right", world=2),
    "tied": Case("right", {"tied": True}),
    "two chunks": Case("right", _TWO),
    "into a model built anew": Case("right", restored=_another(seed=4321), anew=True),
    # The same without flat buffers.
    "Float16Module": Case("right", _BARE),
    "Float16Module, tied": Case("right", _BARE | {"tied": True}),
    "Float16Module, two chunks": Case("right", _BARE | _TWO),
    "no wrapper": Case("right", _BARE | {"bf16": False}),
    # Without the distributed optimizer there is no param_data.
    "own storage": Case("crash", _OWN),
    "own storage, fp32": Case("crash", _OWN | {"bf16": False}),
    "own storage, tied": Case("crash", _OWN | {"tied": True}),
    "own storage, two chunks, 2 ranks": Case("crash", _OWN | _TWO, world=2),
    "own storage, MoE": Case("crash", _OWN | _MOE),
    # The expert bias is a registered buffer.
    "MoE": Case("wrong", _MOE),
    "MoE, fp32": Case("wrong", _MOE | {"bf16": False}),
    "MoE, expert buffers": Case("wrong", _MOE | {"expert_buffers": True}),
    "MoE, two chunks": Case("wrong", _MOE | _TWO | {"expert_buffers": True}),
    "MoE, expert parallel 2": Case("wrong", _MOE | {"expert_parallel": 2}, world=2),
    "MoE, Float16Module": Case("wrong", _MOE | _BARE, **_BARE_MOE),
    "MoE, no wrapper": Case("wrong", _MOE | _BARE | {"bf16": False}, **_BARE_MOE),
    # Parameters that were frozen when the model was wrapped are in no flat buffer, whatever became of them.
    "frozen base": Case("right", _LORA),
    "frozen base changed": Case("wrong", _LORA, disturb=_change_frozen),
    "frozen base changed, Float16Module": Case("right", _LORA | _BARE, disturb=_change_frozen),
    "all frozen": Case("wrong", {"freeze": _always}, disturb=_change_frozen),
    "thawed since": Case("wrong", _LORA, prepare=_train_all, disturb=_change_attention),
    "frozen since": Case("right", prepare=_train_no_attention, disturb=_change_frozen),
    "moved out of the buffer": Case("wrong", prepare=_move_attention, disturb=_change_attention),
    # Models and copies that do not fit each other.
    "copy lacks a chunk": Case("wrong", _TWO, _MISMATCH, copied=lambda chunks: chunks[:1]),
    "copy has a chunk too many": Case("wrong", _TWO, _MISMATCH, restored=lambda chunks: chunks[:1]),
    "wrapped into unwrapped": Case("wrong", {}, _MISMATCH, restored=_unwrapped),
    "unwrapped into wrapped": Case("wrong", {}, _MISMATCH, copied=_unwrapped),
    "fp32 into bf16": Case("wrong", {}, _MISMATCH, copied=_another(bf16=False)),
    "fewer layers": Case("wrong", _BARE, _MISMATCH, copied=_another(ddp=False, layers=1)),
    "narrower": Case("crash", _BARE, _MISMATCH, copied=_another(ddp=False, hidden=16)),
    "own storage into flat": Case("crash", {}, _MISMATCH, copied=_another(distributed_optimizer=False)),
    # Overlapped parameter gathers: from step to forward only this rank's shards are new.
    "overlap": Case("right", _OVERLAP, world=2),
    "overlap, restored after the step": Case("right", _OVERLAP, world=2, forward_before_restore=False),
    "overlap, copied after the step": Case("wrong", _OVERLAP, world=2, forward_before_copy=False),
    "overlap, both after the step": Case(
        "right", _OVERLAP, world=2, forward_before_copy=False, forward_before_restore=False
    ),
    "overlap, two chunks, copied after the step": Case("wrong", _OVERLAP | _TWO, world=2, forward_before_copy=False),
    "overlap, gathers under way": Case(
        None, _OVERLAP, world=2, forward_before_restore=False, around=(_gathering, _gathering)
    ),
    # Offloaded between two calls.
    "offloaded by verl, copied": Case("right", around=(_offloaded_by_verl, nullcontext)),
    "offloaded by verl, restored": Case("right", around=(nullcontext, _offloaded_by_verl)),
    "offloaded by verl, both": Case("right", _TWO, around=(_offloaded_by_verl, _offloaded_by_verl)),
    "offloaded by Megatron-Core, copied": Case("crash", around=(_offloaded_by_megatron, nullcontext)),
    "offloaded by Megatron-Core, restored": Case("crash", around=(nullcontext, _offloaded_by_megatron)),
    "offloaded by Megatron-Core, both": Case("crash", _TWO, around=(_offloaded_by_megatron, _offloaded_by_megatron)),
    "offloaded by verl, MoE": Case("wrong", _MOE | {"expert_buffers": True}, around=(_offloaded_by_verl, nullcontext)),
    # Other wrappers.
    "FSDP2": Case("right" if _RESHARDS else "crash", world=2, kind="fsdp2"),
    "FSDP2, MoE": Case("wrong" if _RESHARDS else "crash", _MOE, world=2, kind="fsdp2", **_BARE_MOE),
}
_MXFP8: Final = {
    # The flat buffer is memory of the gradients.
    "MXFP8": Case("wrong", kind="mxfp8"),
    "MXFP8, 2 ranks": Case("wrong", world=2, kind="mxfp8"),
    "MXFP8, overlap": Case("wrong", _OVERLAP, world=2, kind="mxfp8 overlap"),
}
if has_mxfp8_reuse():
    CASES.update(_MXFP8)
