"""Small but real Megatron-Core GPT models, and the steps of training them.

Everything here expects an initialised process group and Megatron parallel state, and on a machine
without CUDA also :func:`mcore_snap.testing.cpu.cpu_megatron`; :func:`mcore_snap.testing.ranks.run_ranks`
provides all three. Every function is deterministic.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_snap.testing.cpu import cuda_as_cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    expert_parallel: int = 1,
    expert_buffers: bool = False,
    overlap: bool = False,
    vocab: int = 64,
    seq: int = 8,
    layers: int = 2,
    hidden: int = 32,
    freeze: Callable[[str], bool] | None = None,
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
        chunks: Number of virtual pipeline stages, all on this rank.
        expert_parallel: Ranks that share the experts; as given to ``initialize_model_parallel``.
        expert_buffers: Mark the experts so that DDP keeps them in ``expert_parallel_buffers`` even
            where `expert_parallel` is 1.
        overlap: Overlap the gradient reduction and the parameter gather with computation.
        vocab: Number of tokens.
        seq: Longest sequence, in tokens.
        layers: Transformer layers over all chunks.
        hidden: Width, a multiple of four.
        freeze: Says by name (of the unwrapped module) which parameters need no gradient.
        seed: Seed of the initial weights. The caller's random state is left as it was.
        bias_update_rate: Step of the expert bias; large, so that a few steps change the routing.

    Raises:
        ValueError: The layers cannot be divided among the chunks, or embeddings are to be tied
            across chunks.
    """
    if layers % chunks:
        msg = f"expected layers to be a multiple of chunks, got layers={layers}, chunks={chunks}"
        raise ValueError(msg)
    if tied and chunks > 1:
        msg = "expected one chunk for tied embeddings: two chunks hold two parameters, not one"
        raise ValueError(msg)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=layers // chunks,
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
        expert_model_parallel_size=expert_parallel,
        **(_moe_settings(hidden, bias_update_rate) if moe else {}),
    )

    def build(index: int) -> nn.Module:
        module: nn.Module = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
            vocab_size=vocab,
            max_sequence_length=seq,
            pre_process=index == 0,
            post_process=index == chunks - 1,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
        ).to(_device())
        for name, parameter in module.named_parameters():
            if expert_buffers and ".experts." in name:
                vars(parameter)["allreduce"] = False  # how DDP tells experts from the rest
            if freeze is not None and freeze(name):
                parameter.requires_grad = False
        if bf16:
            module = Float16Module(config, module)
        if ddp:
            settings = DistributedDataParallelConfig(
                use_distributed_optimizer=distributed_optimizer,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap,
                bucket_size=_BUCKET if overlap else None,
                grad_reduce_in_fp32=True,
            )
            # As Megatron does it: only the first chunk is worth splitting into buckets.
            module = DistributedDataParallel(config, settings, module, disable_bucketing=index > 0)
        return module

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [build(index) for index in range(chunks)]


def optimizer(chunks: Sequence[nn.Module], lr: float = 0.05) -> Any:
    """Megatron-Core's own Adam for DDP-wrapped chunks; plain torch SGD for chunks without DDP.

    Args:
        chunks: What :func:`gpt` returned.
        lr: Learning rate.
    """
    if not isinstance(chunks[0], DistributedDataParallel):
        trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=lr)
    settings = chunks[0].ddp_config
    bf16 = bool(chunks[0].config.bf16)
    options = {
        "optimizer": "adam",
        "lr": lr,
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "use_distributed_optimizer": settings.use_distributed_optimizer,
        "overlap_param_gather": settings.overlap_param_gather,
    }
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    config = OptimizerConfig(**{name: value for name, value in options.items() if name in known})
    with cuda_as_cpu():
        return get_megatron_optimizer(config, list(chunks))


def train_step(
    chunks: Sequence[nn.Module],
    optimizer: Any,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    pause: Callable[[str], None] | None = None,
) -> float:
    """Do one whole training step and return its loss.

    Args:
        chunks: What :func:`gpt` returned; run one after the other on this rank.
        optimizer: What :func:`optimizer` returned for them.
        tokens: Token numbers, shaped (batch, sequence).
        labels: Tokens to predict; by default each position's next token.
        pause: Called inside the step with ``"forward"``, ``"backward"``, and ``"finalize"``, each
            time right after what it names. After ``"finalize"`` only the optimizer's step is left.

    Raises:
        RuntimeError: The optimizer skipped the step.
    """
    pause = pause or _go_on
    wrapped = isinstance(chunks[0], DistributedDataParallel)
    chunk: Any  # DDP's own methods are not nn.Module's
    for chunk in chunks:
        chunk.train()
        if wrapped:
            chunk.zero_grad_buffer()
    optimizer.zero_grad()
    labels = tokens.roll(-1, dims=1) if labels is None else labels
    loss = _forward(chunks, tokens, labels).float().mean()
    pause("forward")
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    pause("backward")
    if wrapped:
        # Reduces the gradients, updates expert biases, and resets the routers' counters.
        finalize_model_grads(list(chunks))
    pause("finalize")
    if wrapped:
        with cuda_as_cpu():
            done, _, _ = optimizer.step()
        if not done:
            msg = "the optimizer skipped the step: a gradient was not finite"
            raise RuntimeError(msg)
    else:
        optimizer.step()
    return float(loss.item())


def logits(chunks: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    """Run the model without gradients; a copy of its logits, shaped (batch, sequence, vocabulary).

    Runs through the wrappers, so DDP's parameter gather happens as in training. Leaves the mode
    (``train`` or ``eval``) as it is.
    """
    with torch.no_grad():
        return _forward(chunks, tokens, None).clone()


def log_probs(chunks: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    """Log-probability of each next token without gradients, shaped (batch, sequence - 1)."""
    scores = logits(chunks, tokens).float().log_softmax(dim=-1)
    following = tokens.to(scores.device)[:, 1:, None]
    return scores[:, :-1].gather(-1, following).squeeze(-1)


def batch(seed: int, rank: int = 0, *, vocab: int = 64, seq: int = 8, size: int = 2) -> Tensor:
    """Random token numbers, shaped (size, seq): the same for the same `seed` and `rank`."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, vocab, (size, seq), generator=generator).to(_device())


def _forward(chunks: Sequence[nn.Module], tokens: Tensor, labels: Tensor | None) -> Tensor:
    size, seq = tokens.shape
    positions = torch.arange(seq, device=tokens.device).expand(size, seq)
    # True hides. Given explicitly because Megatron would build its own on the CUDA device.
    mask = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    output: Tensor | None = None
    for chunk in chunks:
        if output is not None:
            model = _unwrapped(chunk)
            # Float16Module widens what every chunk returns, here also the hidden states.
            model.set_input_tensor(output.to(model.config.params_dtype))
        output = chunk(tokens, positions, mask, labels=labels)
    if output is None:
        msg = "expected at least one chunk, got none"
        raise ValueError(msg)
    return output


def _unwrapped(chunk: nn.Module) -> Any:
    while isinstance(chunk, (DistributedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk


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


def _go_on(moment: str) -> None:
    del moment
