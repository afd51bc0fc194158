"""Hypothesis strategies for models: modules with every odd thing that a model chunk may hold, and DDP-like chunks.

`None` for a parameter means: draw it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final, TypeAlias, get_args

import torch
from hypothesis import strategies as st
from torch import nn

from mcore_snap.testing.bit_patterns import (
    DTYPES,
    FLOAT_DTYPES,
    MATH_DTYPES,
    elements,
    from_elements,
    special_words,
)
from mcore_snap.testing.chunks import AnyState, Backing, DDPLike, ExtraState, HostCopy, Layer
from mcore_snap.testing.strategies import permuted, shifted, tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import DrawFn, SearchStrategy

    import mcore_snap

Models: TypeAlias = nn.Module | list[nn.Module]

_TRAINABLE: Final = tuple(dtype for dtype in DTYPES if dtype.is_complex or dtype in FLOAT_DTYPES)
_TIES: Final[tuple[Callable[[nn.Parameter], nn.Parameter], ...]] = (
    lambda p: p,  # one parameter under two names, as tied embeddings are
    lambda p: nn.Parameter(p.detach(), requires_grad=p.requires_grad),  # two parameters, one memory
)
_PARTS: Final[tuple[Callable[[nn.Parameter], nn.Parameter], ...]] = (
    lambda p: nn.Parameter(p.detach().unsqueeze(0), requires_grad=False),
    lambda p: nn.Parameter(p.detach()[:1] if p.dim() else p.detach(), requires_grad=False),
)


def _parameters(trainable: bool | None) -> SearchStrategy[nn.Parameter]:  # noqa: FBT001 - None means: draw it
    flags = st.booleans() if trainable is None else st.just(trainable)

    def build(flag: bool) -> SearchStrategy[nn.Parameter]:  # noqa: FBT001 - called by flatmap
        dtypes = st.sampled_from(_TRAINABLE if flag else DTYPES)
        return dtypes.flatmap(tensors).map(lambda data: nn.Parameter(data, requires_grad=flag))

    return flags.flatmap(build)


def ties(param: nn.Parameter) -> SearchStrategy[nn.Parameter]:
    """Draw a parameter over memory of another: the same, or a part where the memory of the other has no gaps."""
    span = 1 + sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))
    return st.sampled_from(_TIES + _PARTS if span == param.numel() else _TIES).map(lambda tie: tie(param))


@st.composite
def modules(draw: DrawFn, *, trainable: bool | None = None, max_parameters: int = 4) -> nn.Module:
    """Draw a module: parameters frozen, tied, aliased or missing, buffers persistent or not, extra state."""
    root = nn.Module()
    children = {"": root, "inner": nn.Module(), "experts": nn.Module()}
    homes = st.sampled_from(sorted(children))
    made: list[nn.Parameter] = []
    for i in range(draw(st.integers(1, max_parameters))):
        if made and draw(st.integers(0, 3)) == 0:
            param = draw(st.sampled_from(made).flatmap(ties))
        else:
            param = draw(_parameters(trainable))
            made.append(param)
        home = draw(homes)
        if home == "experts":
            param.allreduce = False  # type: ignore[attr-defined]
        children[home].register_parameter(f"w{i}", param)
    for i in range(draw(st.integers(0, 3))):
        buffer = draw(st.none() | st.sampled_from(made).map(lambda p: p.detach()) | tensors())
        children[draw(homes)].register_buffer(f"b{i}", buffer, persistent=draw(st.booleans()))
    if draw(st.booleans()):
        root.register_parameter("absent", None)
    if draw(st.booleans()):
        history = draw(st.lists(st.integers(0, 1 << 40), max_size=3))
        children["inner"].add_module("fp8", ExtraState(history, draw(tensors(torch.float32))))
    for name in ("inner", "experts"):
        root.add_module(name, children[name])
    return root


@st.composite
def chunks(draw: DrawFn, *, ddp: bool | None = None, backing: Backing | None = None) -> nn.Module:
    """Draw one model chunk, bare or in a DDP-like wrapper with flat buffers of any backing."""
    module = draw(modules())
    if not (draw(st.booleans()) if ddp is None else ddp):
        return module
    drawn: Backing = draw(st.sampled_from(get_args(Backing))) if backing is None else backing
    wrapped = DDPLike(module, drawn, gap=draw(st.integers(0, 3)))
    if draw(st.booleans()):  # frozen after it was wrapped: it stays inside the flat buffer
        next(wrapped.module.parameters()).requires_grad = False
    return wrapped


@st.composite
def models(draw: DrawFn, *, ddp: bool | None = None, backing: Backing | None = None, max_chunks: int = 2) -> Models:
    """Draw a model: one chunk, or a list of chunks of which two may share a parameter."""
    listed = draw(st.lists(chunks(ddp=ddp, backing=backing), min_size=1, max_size=max_chunks))
    if len(listed) > 1 and not any(isinstance(chunk, DDPLike) for chunk in listed) and draw(st.booleans()):
        listed[1].register_parameter("shared", next(listed[0].parameters()))
    return listed[0] if len(listed) == 1 and draw(st.booleans()) else listed


def model_trees(strategy: SearchStrategy[Models] | None = None) -> SearchStrategy[tuple[Models, mcore_snap.ModelTree]]:
    """Draw a model and its tree, as a pair: the tree alone would not keep the model alive."""
    from mcore_snap import model_tree

    return (models() if strategy is None else strategy).map(lambda model: (model, model_tree(model)))


def _special(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Make a tensor of the patterns that equality and casts get wrong, or of some bytes where there are none."""
    words = [(128 + 5 * i) % 256 for i in range(dtype.itemsize)]
    pool = [bytes(words), bytes(dtype.itemsize)]
    if dtype in FLOAT_DTYPES or dtype is torch.bool:
        pool = [word.to_bytes(dtype.itemsize, "little") for word in special_words(dtype)]
    return from_elements(pool, dtype, shape)


def _made_in_inference_mode(dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return _special(dtype, 4).clone()


# One draw each: models have many tensors, and `tensors` draws every element.
_ODD_WEIGHTS: Final[dict[str, Callable[[torch.dtype], torch.Tensor]]] = {
    "channels_last": lambda dtype: permuted(_special(dtype, 2, 3, 2, 2), (0, 2, 3, 1)),
    "expanded": lambda dtype: _special(dtype, 2, 1).expand(2, 3),
    "no_elements": lambda dtype: _special(dtype, 2, 0, 3),
    "no_dimensions": _special,
    "behind_others": lambda dtype: shifted(_special(dtype, 3), 5),
}
_ODD_BUFFERS: Final = _ODD_WEIGHTS | {"inference": _made_in_inference_mode}
_EXTRA_STATES: Final[tuple[Callable[[], object], ...]] = (
    lambda: None,
    lambda: torch.empty(0, dtype=torch.uint8),
    lambda: io.BytesIO(b"\x00\xff recipe"),
    io.BytesIO,
    lambda: {"scale": _special(torch.float32, 3), "history": [1, (2, None)], "recipe": {"name": "delayed"}},
    lambda: [_special(torch.bfloat16, 2), io.BytesIO(b"amax")],
    lambda: _special(torch.uint8, 5),
    lambda: "text",
    lambda: 0,
)


def extra_states() -> SearchStrategy[object]:
    """Draw what a `get_extra_state` may return: nothing, no bytes, a file, objects inside each other."""
    return st.sampled_from(_EXTRA_STATES).map(lambda make: make())


def two_tensors() -> SearchStrategy[torch.Tensor]:
    """Draw a tensor that has no memory of its own but is made of two others."""
    from torch.testing._internal.two_tensor import TwoTensor

    shapes = st.sampled_from([(), (3,), (2, 3), (2, 0)])
    made = st.tuples(st.sampled_from(MATH_DTYPES), shapes).map(lambda drawn: _special(drawn[0], *drawn[1]))
    untyped: Callable[..., torch.Tensor] = TwoTensor
    return made.map(lambda tensor: untyped(tensor, tensor.neg()))


@st.composite
def odd_modules(draw: DrawFn) -> nn.Module:
    """Draw a module with odd layouts, buffers made in inference mode, and extra state of every kind."""
    module = draw(modules(max_parameters=2))
    homes = st.sampled_from(["", "inner", "experts"]).map(module.get_submodule)
    for name in sorted(draw(st.sets(st.sampled_from(sorted(_ODD_BUFFERS)), max_size=3))):
        buffer = _ODD_BUFFERS[name](draw(st.sampled_from(DTYPES)))
        draw(homes).register_buffer(name, buffer, persistent=draw(st.booleans()))
    for name in sorted(draw(st.sets(st.sampled_from(sorted(_ODD_WEIGHTS)), max_size=2))):
        weight = nn.Parameter(_ODD_WEIGHTS[name](draw(st.sampled_from(DTYPES))), requires_grad=False)
        draw(homes).register_parameter(f"{name}_weight", weight)
    for i in range(draw(st.integers(0, 2))):
        draw(homes).add_module(f"state{i}", AnyState(draw(extra_states())))
    return module


def _mishaps(inner: bool) -> dict[str, Callable[[DrawFn, nn.Module], None]]:  # noqa: FBT001 - one call
    """Return what may happen to a chunk after it was wrapped, by name, in the order in which it happens.

    Weights move before anything aliases them: an alias left behind would keep memory that no weight is in. A pair
    comes last, for the others cannot be done to it.
    """

    def some_parameter(draw: DrawFn, chunk: nn.Module) -> nn.Parameter:
        return draw(st.sampled_from(list(chunk.parameters())))

    def point_elsewhere(draw: DrawFn, chunk: nn.Module) -> None:
        param = some_parameter(draw, chunk)
        param.data = param.data.clone()

    def freeze_or_thaw(draw: DrawFn, chunk: nn.Module) -> None:
        param = some_parameter(draw, chunk)
        param.requires_grad = not param.requires_grad and param.dtype in _TRAINABLE

    def alias(draw: DrawFn, chunk: nn.Module) -> None:
        # An alias of the memory that the weight has now: inside a flat buffer, if that holds it.
        chunk.register_buffer("alias", some_parameter(draw, chunk).detach(), persistent=draw(st.booleans()))

    def second_name(draw: DrawFn, chunk: nn.Module) -> None:
        chunk.register_parameter("second_name", draw(st.sampled_from(_TIES))(some_parameter(draw, chunk)))

    def pair(draw: DrawFn, chunk: nn.Module) -> None:
        chunk.register_parameter("pair", nn.Parameter(draw(two_tensors()), requires_grad=draw(st.booleans())))

    found: list[Callable[[DrawFn, nn.Module], None]] = [point_elsewhere, freeze_or_thaw, alias, second_name]
    return {happen.__name__: happen for happen in (*found, *([pair] if inner else []))}


@st.composite
def odd_models(draw: DrawFn, *, inner: bool = True, offloaded: bool | None = None) -> list[nn.Module]:
    """Draw a model to which everything odd may have happened that real ones go through.

    Flat buffers that back some of their parameters only, that lend memory of the gradients, that are absent or
    offloaded with a host copy of either kind; parameters frozen or thawed after they were wrapped, wrapped twice,
    tied across chunks, aliased by buffers, or (with `inner`) made of two tensors.
    """
    found: list[nn.Module] = []
    for i in range(draw(st.integers(1, 2))):
        module = draw(odd_modules())
        if draw(st.booleans()) and found:  # wrapping it moves the parameter out of the first chunk's buffer
            module.register_parameter("shared", draw(st.sampled_from(list(found[0].parameters()))))
        backing: Backing | None = draw(st.sampled_from([None, "flat", "flat", "none", "shared"]))
        chunk = module if backing is None else DDPLike(module, backing, gap=draw(st.integers(0, 3)))
        if draw(st.booleans()) and found:
            chunk.register_parameter(f"tied{i}", draw(st.sampled_from(list(found[0].parameters()))))
        found.append(chunk)
    mishaps = _mishaps(inner)
    drawn = [draw(st.sets(st.sampled_from(sorted(mishaps)), max_size=3)) for _ in found]
    for name, happen in mishaps.items():
        for chunk, names in zip(found, drawn, strict=True):
            if name in names:
                happen(draw, chunk)
    if draw(st.booleans()) if offloaded is None else offloaded:
        offload_some(draw, found)
    return found


def offload_some(draw: DrawFn, models: list[nn.Module]) -> None:
    """Offload flat buffers, each to a host copy of one kind or another, or leave them where they are."""
    kinds: SearchStrategy[HostCopy | None] = st.sampled_from(["param_data_cpu", "cpu_data", None])
    for chunk in models:
        if isinstance(chunk, DDPLike):
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:  # type: ignore[misc]
                kind = draw(kinds)
                if kind is not None and not hasattr(buffer, "shared_buffer"):
                    buffer.offload(kind)


@st.composite
def trainable_models(draw: DrawFn, dtype: torch.dtype | None = None) -> Models:
    """Draw a model that a training step can be done with: every chunk maps 3 features to 3."""
    if dtype is None:
        dtype = draw(st.sampled_from(MATH_DTYPES))
    made: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 2))):
        layer = Layer(3, dtype)
        weights = [w for name, w in layer.named_parameters() if draw(st.booleans()) or name == "fc.weight"]
        for weight in weights:
            pool = draw(st.lists(elements(torch.int8), min_size=1, max_size=4))
            values = from_elements(pool, torch.int8, weight.shape).to(torch.float32) / 64
            weight.data.copy_(values)  # finite, so that training changes them
        backing: Backing | None = draw(st.sampled_from([None, *get_args(Backing)]))
        made.append(layer if backing is None else DDPLike(layer, backing))
    return made[0] if len(made) == 1 and draw(st.booleans()) else made
