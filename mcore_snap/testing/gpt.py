"""Small but real Megatron-Core GPT models, and the steps of training them.

Everything here expects an initialised process group and Megatron parallel state, and on a machine
without CUDA also :func:`mcore_snap.testing.cpu.cpu_megatron`; :func:`mcore_snap.testing.ranks.run_ranks`
provides all three. Every function is deterministic.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_snap.testing.cpu import cuda_as_cpu
from mcore_snap.testing.forward import forward
from mcore_snap.testing.training import optimizer, train_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

__all__ = ["batch", "gpt", "log_probs", "logits", "optimizer", "train_step"]

_HEADS: Final = 4
_EXPERTS: Final = 4
_BUCKET: Final = 6000  # parameters: small enough that even these models have several buckets


def gpt(
    *,
    moe: bool = False,
    ddp: bool = True,
    distributed_optimizer: bool = True,
    bf16: bool = True,
    tied: bool = False,
    chunks: int = 1,
    pipeline: int = 1,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    expert_buffers: bool = False,
    overlap: bool = False,
    ddp_settings: Mapping[str, object] | None = None,
    vocab: int = 64,
    seq: int = 8,
    layers: int = 2,
    hidden: int = 32,
    freeze: Callable[[str], bool] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    seed: int = 1234,
    bias_update_rate: float = 0.5,
) -> list[nn.Module]:
    """Build a GPT model the way Megatron-Core's training does, as a list of chunks.

    Args:
        moe: Mixture of four experts with a sigmoid router and an expert bias.
        ddp: Wrap each chunk in DistributedDataParallel.
        distributed_optimizer: Keep the weights in DDP's flat parameter buffers.
        bf16: Wrap each chunk in Float16Module.
        tied: Share the embedding and the output weights.
        chunks: Number of virtual pipeline stages on this rank.
        pipeline: Ranks that share the layers; as given to ``initialize_model_parallel``, and more than
            one needs :mod:`mcore_snap.testing.pipelines` to run.
        tensor_parallel: Ranks that share each weight; as given to ``initialize_model_parallel``.
        expert_parallel: Ranks that share the experts; as given to ``initialize_model_parallel``.
        expert_buffers: Mark the experts so that DDP keeps them in ``expert_parallel_buffers`` even
            where `expert_parallel` is 1.
        overlap: Overlap the gradient reduction and the parameter gather with computation.
        ddp_settings: Further settings of DistributedDataParallelConfig, which win over these here.
        vocab: Number of tokens.
        seq: Longest sequence, in tokens.
        layers: Transformer layers over all chunks.
        hidden: Width, a multiple of four.
        freeze: Says by name (of the unwrapped module) which parameters need no gradient.
        prepare: Called with each chunk's bare module before it is wrapped.
        seed: Seed of the initial weights. The caller's random state is left as it was.
        bias_update_rate: Step of the expert bias; large, so that a few steps change the routing.

    Raises:
        ValueError: The layers cannot be divided among the chunks, or embeddings are to be tied
            across chunks of one rank.
    """
    if layers % (pipeline * chunks):
        msg = f"expected layers to be a multiple of chunks, got {layers=}, {chunks=}, {pipeline=}"
        raise ValueError(msg)
    if tied and chunks > 1 and pipeline == 1:
        msg = "expected one chunk for tied embeddings: two chunks hold two parameters, not one"
        raise ValueError(msg)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        # Megatron divides the layers itself among real pipeline stages.
        num_layers=layers if pipeline > 1 else layers // chunks,
        hidden_size=hidden,
        num_attention_heads=_HEADS,
        ffn_hidden_size=2 * hidden,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        add_bias_linear=False,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tensor_parallel,
        expert_model_parallel_size=expert_parallel,
        **(_pipeline_settings(pipeline, chunks) if pipeline > 1 else {}),
        **(_moe_settings(hidden, bias_update_rate) if moe else {}),
    )

    stage = parallel_state.get_pipeline_model_parallel_rank()

    def build(index: int) -> nn.Module:
        if pipeline > 1 and chunks > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        # Tied embeddings of two ranks are made equal by a collective on CUDA memory.
        with cuda_as_cpu() if pipeline > 1 else nullcontext():
            module: nn.Module = GPTModel(
                config,
                get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
                vocab_size=vocab,
                max_sequence_length=seq,
                pre_process=stage == 0 and index == 0,
                post_process=stage == pipeline - 1 and index == chunks - 1,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
                **(_virtual_stage(index) if pipeline > 1 and chunks > 1 else {}),
            ).to(_device())
        for name, parameter in module.named_parameters():
            if expert_buffers and ".experts." in name:
                vars(parameter)["allreduce"] = False  # how DDP tells experts from the rest
            if freeze is not None and freeze(name):
                parameter.requires_grad = False
        if prepare is not None:
            prepare(module)
        if bf16:
            module = Float16Module(config, module)
        if ddp:
            settings: dict[str, Any] = {
                "use_distributed_optimizer": distributed_optimizer,
                "overlap_grad_reduce": overlap,
                "overlap_param_gather": overlap,
                "bucket_size": _BUCKET if overlap else None,
                "grad_reduce_in_fp32": True,
            } | dict(ddp_settings or {})
            # As Megatron does it: only the first chunk is worth splitting into buckets.
            module = DistributedDataParallel(
                config, DistributedDataParallelConfig(**settings), module, disable_bucketing=index > 0
            )
        return module

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [build(index) for index in range(chunks)]


def logits(chunks: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    """Run the model without gradients; a copy of its logits, shaped (batch, sequence, vocabulary).

    Runs through the wrappers, so DDP's parameter gather happens as in training. Leaves the mode
    (``train`` or ``eval``) as it is.
    """
    with torch.no_grad():
        return forward(chunks, tokens, None).clone()


def log_probs(chunks: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    """Log-probability of each next token without gradients, shaped (batch, sequence - 1)."""
    scores = logits(chunks, tokens).float().log_softmax(dim=-1)
    following = tokens.to(scores.device)[:, 1:, None]
    return scores[:, :-1].gather(-1, following).squeeze(-1)


def batch(seed: int, rank: int = 0, *, vocab: int = 64, seq: int = 8, size: int = 2) -> Tensor:
    """Random token numbers, shaped (size, seq): the same for the same `seed` and `rank`."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, vocab, (size, seq), generator=generator).to(_device())


def _pipeline_settings(pipeline: int, chunks: int) -> dict[str, object]:
    return {
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        # gloo pairs messages of two ranks by their order, which batches do not keep.
        "batch_p2p_comm": False,
    }


def _virtual_stage(index: int) -> dict[str, int]:
    # From 0.13 on the model is told its stage; before, it asks the parallel state.
    return {"vp_stage": index} if "vp_stage" in inspect.signature(GPTModel).parameters else {}


def _moe_settings(hidden: int, bias_update_rate: float) -> dict[str, object]:
    return {
        "num_moe_experts": _EXPERTS,
        "moe_ffn_hidden_size": 2 * hidden,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": bias_update_rate,
        "moe_router_load_balancing_type": "none",
        # The other dispatchers create CUDA streams.
        "moe_token_dispatcher_type": "allgather",
    }


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
