"""Hypothesis strategies for models: modules with every odd thing that a model chunk may hold, and DDP-like chunks.

`None` for a parameter means: draw it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, get_args

import torch
from hypothesis import strategies as st
from torch import nn

from mcore_snap.testing.bit_patterns import DTYPES, FLOAT_DTYPES, MATH_DTYPES, elements, from_elements
from mcore_snap.testing.chunks import Backing, DDPLike, ExtraState, Layer
from mcore_snap.testing.strategies import tensors

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
