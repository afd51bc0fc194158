"""Every configuration of the matrix, under its name there; and the sizes of parallelism."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import matrix_cases as cases
import matrix_in_flight as in_flight
import pytest

from mcore_snap.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Case(NamedTuple):
    """A configuration: what to do on each rank, and how Megatron-Core is to be initialised."""

    world: int
    run: Callable[..., Any]
    options: Mapping[str, Any] = {}
    parallel: Mapping[str, int] = {}


_EP2: Final = {"expert_model_parallel_size": 2}
_TP2: Final = {"tensor_model_parallel_size": 2}
_PP2: Final = {"pipeline_model_parallel_size": 2}
_VPP2: Final = _PP2 | {"virtual_pipeline_model_parallel_size": 2}
_STEP, _FORWARD = "after step", "after forward"

CASES: Final[dict[str, Case]] = {
    "dense bf16 DDP dist_opt": Case(1, cases.trained),
    "dense bf16 DDP dist_opt DP=2": Case(2, cases.trained),
    "dense fp32 DDP dist_opt": Case(1, cases.trained, {"bf16": False}),
    "dense bf16 DDP no dist_opt": Case(1, cases.trained, {"distributed_optimizer": False}),
    "tied embeddings": Case(1, cases.trained, {"tied": True}),
    "MoE EP=1 (experts in buffers)": Case(1, cases.trained, {"moe": True}),
    "MoE EP=1 forced expert_parallel_buffers": Case(1, cases.trained, {"moe": True, "expert_buffers": True}),
    "MoE EP=2": Case(2, cases.trained, {"moe": True, "expert_parallel": 2}, _EP2),
    "frozen base unchanged (LoRA-like)": Case(1, cases.frozen, {"change": False}),
    "frozen base changed (LoRA merge/swap)": Case(1, cases.frozen, {"change": True}),
    "all params frozen, DDP": Case(1, cases.all_frozen),
    "VPP list of 2 chunks": Case(1, cases.trained, {"chunks": 2}),
    "VPP, snapshot lacks chunk 1": Case(1, cases.lacks_a_chunk),
    "DDP snapshot into unwrapped module": Case(1, cases.unwrapped_since),
    "Float16Module, no DDP": Case(1, cases.trained, {"ddp": False}),
    "Float16Module, no DDP, tied": Case(1, cases.trained, {"ddp": False, "tied": True}),
    "Float16Module MoE, no DDP": Case(1, cases.trained, {"ddp": False, "moe": True}),
    "overlap_pg: snap after step, restore after fwd": Case(2, in_flight.overlapped, {"snap": _STEP, "back": _FORWARD}),
    "overlap_pg: snap after step, restore before fwd": Case(2, in_flight.overlapped, {"snap": _STEP, "back": _STEP}),
    "overlap_pg: snap after fwd, restore after fwd": Case(
        2, in_flight.overlapped, {"snap": _FORWARD, "back": _FORWARD}
    ),
    "overlap_pg: snap after fwd, restore before fwd": Case(2, in_flight.overlapped, {"snap": _FORWARD, "back": _STEP}),
    "overlap_pg: only rank 0 restores": Case(2, in_flight.one_rank_loads),
    "overlap_pg: restore with gather in flight": Case(2, in_flight.gather_in_flight),
    "offloaded (verl) at snapshot": Case(1, in_flight.offloaded, {"convention": "verl", "at": "snapshot"}),
    "offloaded (megatron) at snapshot": Case(1, in_flight.offloaded, {"convention": "megatron", "at": "snapshot"}),
    "offloaded (verl) at restore": Case(1, in_flight.offloaded, {"convention": "verl", "at": "load"}),
    "offloaded (megatron) at restore": Case(1, in_flight.offloaded, {"convention": "megatron", "at": "load"}),
    "MXFP8 reuse_grad_buf (simulated)": Case(1, in_flight.mxfp8, {"overlap": False}),
    "MXFP8 reuse_grad_buf overlap (simulated)": Case(1, in_flight.mxfp8, {"overlap": True}),
}
ELSEWHERE: Final = {
    "TorchFSDP2 dense": "test_fully_sharded.py",
    "TorchFSDP2 MoE": "test_fully_sharded.py",
    "restore then step: bf16 dist_opt": "test_optimizer.py",
    "restore then step: bf16 dist_opt + reload_model_params": "test_optimizer.py",
    "restore then step: fp32 dist_opt": "test_optimizer.py",
}
SIZES: Final[dict[str, Case]] = {
    "DP=4": Case(4, cases.trained),
    "DP=4, overlap": Case(4, cases.trained, {"overlap": True}),
    "DP=4, no dist_opt": Case(4, cases.trained, {"distributed_optimizer": False}),
    "DP=1, overlap": Case(1, cases.trained, {"overlap": True}),
    "DP=4 EP=2": Case(4, cases.trained, {"moe": True, "expert_parallel": 2}, _EP2),
    "EP=2, overlap": Case(2, cases.trained, {"moe": True, "expert_parallel": 2, "overlap": True}, _EP2),
    "TP=2": Case(2, cases.trained, {"tensor_parallel": 2}, _TP2),
    "TP=2, fp32, no dist_opt": Case(
        2, cases.trained, {"tensor_parallel": 2, "bf16": False, "distributed_optimizer": False}, _TP2
    ),
    "TP=2 DP=2, overlap": Case(4, cases.trained, {"tensor_parallel": 2, "overlap": True}, _TP2),
    "PP=2": Case(2, cases.pipelined, parallel=_PP2),
    "PP=2 VPP=2": Case(2, cases.pipelined, {"chunks": 2}, _VPP2),
    "PP=2 VPP=2, tied": Case(2, cases.pipelined, {"chunks": 2, "tied": True}, _VPP2),
    "PP=2 VPP=2, MoE, no dist_opt": Case(
        2, cases.pipelined, {"chunks": 2, "moe": True, "distributed_optimizer": False}, _VPP2
    ),
    "PP=2 VPP=2 DP=2, tied, overlap": Case(4, cases.pipelined, {"chunks": 2, "tied": True, "overlap": True}, _VPP2),
    "tied across chunks": Case(1, cases.tied_across_chunks),
    "tied across chunks, no dist_opt": Case(1, cases.tied_across_chunks, {"distributed_optimizer": False}),
    "tied across chunks, no DDP": Case(1, cases.tied_across_chunks, {"ddp": False}),
}


def run_case(rank: int, name: str) -> Any:
    """Run a case on one rank."""
    case = (CASES | SIZES)[name]
    return case.run(rank, **case.options)


@pytest.mark.parametrize("name", CASES | SIZES)
def test_configuration(name: str) -> None:
    """Outputs come back bit for bit on every rank, mismatches are refused, and nothing else is touched."""
    case = (CASES | SIZES)[name]
    found = run_ranks(run_case, case.world, name, parallel=case.parallel)
    if name.startswith("MXFP8"):
        release = tuple(map(int, version("megatron-core").split(".")[:2]))
        assert found == ["no such mode" if release < (0, 13) else "kept"]


def test_the_matrix_is_whole() -> None:
    """The cases that other files run are there."""
    assert len(CASES | ELSEWHERE) == 34
    here = Path(__file__).parent
    for file in ELSEWHERE.values():
        tree = ast.parse((here / file).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body), file
