"""The training run itself, as one rank sees it."""

from __future__ import annotations

import math
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from mcore_snap import Corrupt, agree, fingerprint, load, model_tree, named_leaves, snapshot, swapped
from mcore_snap.demo.records import Run, Step
from mcore_snap.demo.text import VOCABULARY, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

__all__ = ["expert_parallel", "look_back"]

_T = TypeVar("_T")

_LAYERS: Final = 4
_HIDDEN: Final = 256
_EXPERTS: Final = 4  # as mcore_snap.testing.gpt builds them
_SEQUENCES: Final = 4  # per batch
_SEQ: Final = 64  # bytes of text per sequence
_LEARNING_RATE: Final = 2e-3


def expert_parallel(ranks: int, *, moe: bool) -> int:
    """Return among how many ranks the experts are shared.

    >>> expert_parallel(2, moe=True), expert_parallel(3, moe=True), expert_parallel(2, moe=False)
    (2, 1, 1)
    """
    return math.gcd(ranks, _EXPERTS) if moe else 1


def look_back(rank: int, ranks: int, steps: int, moe: bool) -> Run:  # noqa: FBT001 - passed on by position
    """Train for some steps, and before each but the first look back to version 1.

    Args:
        rank: This rank; the process groups are those of ``run_ranks``.
        ranks: Number of ranks.
        steps: Number of optimizer steps.
        moe: Whether the model is a mixture of experts.
    """
    # Not at the top: the process that asks for ranks imports this module, and Megatron-Core takes seconds.
    from mcore_snap.testing import gpt  # noqa: PLC0415

    _compute_reproducibly()
    chunks = gpt.gpt(
        moe=moe,
        expert_parallel=expert_parallel(ranks, moe=moe),
        expert_buffers=moe,
        vocab=VOCABULARY,
        seq=_SEQ,
        layers=_LAYERS,
        hidden=_HIDDEN,
        bias_update_rate=1e-3,
    )
    optimizer = gpt.optimizer(chunks, lr=_LEARNING_RATE)
    device = next(chunks[0].parameters()).device
    texts = [x.to(device) for x in batches(steps, size=_SEQUENCES, seq=_SEQ, rank=rank, ranks=ranks)]

    tree = model_tree(chunks)
    version_1, first_ms = _timed(lambda: snapshot(tree))
    ranks_agree = _agree(version_1) if ranks > 1 else None
    # What every look-back has to give, by the model itself and without this library.
    expected = [_bits(gpt.log_probs(chunks, tokens)) for tokens in texts]

    kept = list(named_leaves(version_1).values())
    size = sum(leaf.numel() * leaf.element_size() for leaf in kept)
    records: list[Step] = []
    for number, tokens in enumerate(texts, start=1):
        if number == 1:
            found: dict[str, Any] = {
                "snapshot_ms": first_ms,
                "load_ms": None,
                "old_log_probs_bitwise": None,
                "weights_back_bitwise": None,
                "distance": None,
            }
        else:
            found = _one_look_back(chunks, tree, version_1, tokens, expected[number - 1])
        loss = gpt.train_step(chunks, optimizer, tokens, _next_bytes(tokens))
        records.append(Step(step=number, loss=loss, bytes=size, **found))
    return Run(
        moe=moe,
        ranks=ranks,
        device=device.type,
        versions=_versions(),
        leaves=len(kept),
        dtypes=tuple(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in kept})),
        ranks_agree=ranks_agree,
        steps=tuple(records),
    )


def _agree(version_1: Any) -> bool:
    from megatron.core import parallel_state  # noqa: PLC0415 - see look_back

    try:
        agree(
            version_1,
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            expert_group=parallel_state.get_expert_data_parallel_group(),
        )
    except Corrupt:
        return False
    return True


def _one_look_back(
    chunks: Sequence[nn.Module], tree: Any, version_1: Any, tokens: Tensor, expected: bytes
) -> dict[str, Any]:
    from mcore_snap.testing.gpt import log_probs  # noqa: PLC0415 - see look_back

    current_log_prob = log_probs(chunks, tokens)
    before = fingerprint(tree)

    with swapped(tree, version_1):
        old_log_prob = log_probs(chunks, tokens)

    # The same two copies once more, each by itself for the clock. If the block above left wrong
    # weights behind, this keeps and restores the wrong ones, so it cannot hide that.
    current, snapshot_ms = _timed(lambda: snapshot(tree))
    _, load_ms = _timed(lambda: load(tree, current))
    return {
        "snapshot_ms": snapshot_ms,
        "load_ms": load_ms,
        "old_log_probs_bitwise": _bits(old_log_prob) == expected,
        "weights_back_bitwise": fingerprint(tree) == before,
        "distance": (current_log_prob - old_log_prob).abs().mean().item(),
    }


def _next_bytes(tokens: Tensor) -> Tensor:
    # The text runs on from one sequence to the next; only the batch's last byte has no successor here.
    return tokens.flatten().roll(-1).view_as(tokens)


def _bits(tensor: Tensor) -> bytes:
    # As bytes, because == holds 0.0 and -0.0 equal, and NaN unequal to itself.
    return tensor.cpu().contiguous().numpy().tobytes()


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """Return what `work` returned, and the milliseconds it took."""
    _wait_for_device()
    start = time.perf_counter()
    result = work()
    _wait_for_device()
    return result, 1e3 * (time.perf_counter() - start)


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _compute_reproducibly() -> None:
    # On a CPU the same inputs give the same bits anyway; on a GPU some kernels add up in any order.
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        # Comes with the mode above, and would write all fresh memory once before every copy.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no stub has it


def _versions() -> dict[str, str]:
    from megatron.core import __version__ as megatron_core  # noqa: PLC0415 - see look_back

    try:
        own = version("mcore-snap")
    except PackageNotFoundError:
        own = "not installed"  # run from a checkout
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "megatron-core": str(megatron_core),
        "mcore-snap": own,
    }
