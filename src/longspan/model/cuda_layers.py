"""Decoder layers on CUDA devices: products by PyTorch, and everything between them in few launches of Triton kernels.

A layer keeps its module, and its forward is replaced, as in `model.fused`. Queries, keys and values are one product,
and so are gate and up projection. The weights are joined once, and the modules get views of the joined weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longspan.attn.spec import AttnSpec
from longspan.model.fused import (
    FAMILIES,
    ReplacedForward,
    check_known,
    compare,
    few_positions,
    norm_of,
    replace_forwards,
    settings_of,
)
from longspan.model.step import Attend, Reduce
from longspan.model.triton_layers import MAX_WIDTH, Activation, Norm, Rotation, add_norm, gated, rotate
from longspan.model.triton_levels import LevelsLinear, join_levels

if TYPE_CHECKING:
    from longspan.model.stages import LayerArguments

_log = logging.getLogger("longspan")
_COST = "a decode step has up to four times the launches"
_CUDA_FAMILIES = FAMILIES | {"gemma", "gemma2", "gemma3", "glm4", "mixtral"}
"""The models of transformers whose code was compared. The norms of their layers are in one of `_NORMS`."""
_PAIRS_ADJACENT = {"glm4"}
"""The models whose rotary embedding turns adjacent elements."""
_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
"""The norms before and after attention, and before and after the feed-forward part."""
_ACTIVATIONS: dict[str, Activation] = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}


class CudaLayer(ReplacedForward):
    """The forward of one decoder layer on CUDA devices.

    Args:
        layer: the module. Its own forward still computes steps with layerwise exchanges. Raise ValueError for a form
            that is not known.
        reduce: sums outputs over the ranks of tensor parallelism. None for whole layers.
    """

    def __init__(self, layer: nn.Module, spec: AttnSpec, reduce: Reduce | None) -> None:
        parts = {name: part for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
        names = parts.keys() - {"self_attn", "mlp"}
        norms = next((own for own in _NORMS if names == {name for name in own if name is not None}), None)
        if norms is None or len(parts) != len(names) + 2:
            raise ValueError(f"{type(layer).__name__} has parts of another form")
        check_known(layer, *parts.values(), families=_CUDA_FAMILIES)
        attention: Any = layer.self_attn
        self._own, self._spec, self._reduce, self._index = layer.forward, spec, reduce, attention.layer_idx
        self._norms = [None if name is None else _norm(parts[name]) for name in norms]
        self._head_norms = tuple(_head_norm(attention, name, spec) for name in ("q_norm", "k_norm"))
        if (self._head_norms[0] is None) != (self._head_norms[1] is None):
            raise ValueError("only queries or only keys have a norm")
        self._is_rotated = getattr(attention, "use_rope", True)
        self._pairs_adjacent = type(layer).__module__.rpartition(".modeling_")[2] in _PAIRS_ADJACENT
        names_of_qkv = ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
        self._qkv = _joined([getattr(attention, name) for name in names_of_qkv])
        self._out = _joined([attention.o_proj])
        self._feed_forward = _feed_forward(layer.mlp, self._norms[3], reduce)

    def __call__(self, hidden_states: Tensor, *others: object, **arguments: Any) -> Tensor:  # noqa: ANN401
        """Compute hidden states `[1, tokens, hidden]`, as transformers' layers do."""
        attend: Attend = arguments["attend"]
        if getattr(attend, "num_alone", None) is not None:
            return self._own(hidden_states, *others, **arguments)  # type: ignore[no-any-return]
        before, after, before_mlp, _ = self._norms
        hidden = hidden_states[0]
        _, x = add_norm(hidden, after=before)
        rotation = None
        if self._is_rotated:
            cos, sin = arguments["position_embeddings"]
            rotation = Rotation(cos=cos, sin=sin, pairs_adjacent=self._pairs_adjacent)
        out = self._attend(self._qkv(x), rotation, attend)
        attended = _summed(self._out(out), self._reduce)
        hidden, x = add_norm(attended, residual=hidden, before=after, after=before_mlp)
        return self._feed_forward(x, hidden)[None]

    def _attend(self, qkv: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        """Return the attention `[tokens, heads * head_dim]` of the heads in `qkv`."""
        spec, index = self._spec, self._index
        slots = attend.slots(index) if hasattr(attend, "slots") else None
        q_norm, k_norm = self._head_norms
        heads = rotate(qkv, spec.num_heads, spec.num_kv_heads, rotation, norms=(q_norm, k_norm), slots=slots)
        out: Tensor = attend(index, *heads) if slots is None else attend.attend_stored(index, *heads)  # type: ignore[attr-defined]
        return out.transpose(0, 1).reshape(len(qkv), -1)


def fuse_cuda_layers(
    layers: Mapping[int, nn.Module],
    specs: Sequence[AttnSpec],
    reduce: Reduce | None,
    arguments_at: Callable[[Tensor], LayerArguments],
    positions: Sequence[int],
    *,
    log: Callable[[str], object] = _log.info,
) -> dict[int, CudaLayer]:
    """Replace the forward of each layer of a known form, and log the other layers.

    `arguments_at` computes each layer's arguments for positions `[tokens]`. The first layer of each kind is checked at
    all `positions`, later layers at a few of them.
    """
    checked: set[tuple[AttnSpec, tuple[object, ...]]] = set()
    all_arguments, few_arguments = (arguments_at(torch.tensor(own)) for own in (positions, few_positions(positions)))
    bound = {"self", "hidden_states"}

    def make(index: int, layer: nn.Module) -> CudaLayer:
        fused, kind = CudaLayer(layer, specs[index], reduce), (specs[index], tuple(sorted(settings_of(layer))))
        is_known = kind in checked
        probe, arguments = (few_positions(positions), few_arguments) if is_known else (positions, all_arguments)
        own = {name: value for name, value in arguments[index].items() if name not in bound}
        compare(fused, layer, own, probe)
        checked.add(kind)
        return fused

    return replace_forwards(layers, make, cost=_COST, log=log)


class _FeedForward:
    """Adds the feed-forward part of a layer to the residual `hidden [tokens, hidden]`, which it may overwrite.

    Without sums over ranks, a norm and levels, the last product adds the residual itself, which saves a launch.
    """

    def __init__(self, mlp: Any, after: Norm | None, reduce: Reduce | None) -> None:  # noqa: ANN401 - of any class
        names = ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]
        name = type(getattr(mlp, "act_fn", None) or mlp.activation_fn).__name__
        if name not in _ACTIVATIONS:
            raise ValueError(f"the activation {name} is not known to the kernels")
        self._activation, self._after, self._reduce = _ACTIVATIONS[name], after, reduce
        self._gate_up, self._down = _joined([getattr(mlp, name) for name in names]), _joined([mlp.down_proj])
        down, is_alone = mlp.down_proj, after is None and reduce is None
        self._added = down.weight.t() if is_alone and down.bias is None and type(down) is nn.Linear else None

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        inner = gated(self._gate_up(x), self._activation)
        if self._added is not None:
            return hidden.addmm_(inner, self._added)
        return add_norm(_summed(self._down(inner), self._reduce), residual=hidden, before=self._after)[0]


def _feed_forward(mlp: Any, after: Norm | None, reduce: Reduce | None) -> Callable[[Tensor, Tensor], Tensor]:  # noqa: ANN401 - a module, whatever its class
    """Return the feed-forward part of a layer. Experts are computed by their own module, which sums over ranks."""
    if isinstance(getattr(mlp, "down_proj", None), nn.Linear):
        return _FeedForward(mlp, after, reduce)
    return lambda x, hidden: add_norm(mlp(x[None])[0], residual=hidden, before=after)[0]


def _summed(partial_sum: Tensor, reduce: Reduce | None) -> Tensor:
    return partial_sum if reduce is None else reduce(partial_sum[None])[0]


def _joined(linears: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """Return the product of joined linear layers. Their weights, levels and biases become views of the joined ones."""
    if len(kinds := {type(own) for own in linears}) > 1 or not kinds <= {nn.Linear, LevelsLinear}:
        raise ValueError(f"it has a {type(linears[-1]).__name__} where a plain Linear is needed")
    first, *others = linears
    bias = first.bias if not others or first.bias is None else _join(linears, "bias")
    if isinstance(first, LevelsLinear):
        return join_levels(linears, bias).forward if others else first.forward  # type: ignore[arg-type]
    return partial(linear, weight=_join(linears, "weight") if others else first.weight, bias=bias)


def _join(linears: Sequence[nn.Linear], name: str) -> Tensor:
    parameters: list[Tensor | None] = [getattr(own, name) for own in linears]
    if any(parameter is None for parameter in parameters):
        raise ValueError("only some of the projections have a bias")
    sizes = [len(parameter) for parameter in parameters if parameter is not None]
    joined = torch.cat([parameter for parameter in parameters if parameter is not None])
    for own, view in zip(linears, joined.split(sizes), strict=True):
        setattr(own, name, nn.Parameter(view, requires_grad=False))
    return joined


def _norm(module: nn.Module) -> Norm:
    weight, epsilon = norm_of(module)
    if len(weight) > MAX_WIDTH:
        raise ValueError(f"a norm has {len(weight)} elements, and the kernels support up to {MAX_WIDTH}")
    return Norm(weight=weight, epsilon=epsilon, adds_one=type(module).__name__.startswith("Gemma"))


def _head_norm(attention: nn.Module, name: str, spec: AttnSpec) -> Norm | None:
    module = getattr(attention, name, None)
    if module is None:
        return None
    if module.weight.shape != (spec.head_dim,):
        raise ValueError(f"{name} is not a norm of each head")
    return _norm(module)
