"""Tensor parallelism inside an instance: each rank's slice of each weight, and the sums over ranks.

The rules are our own (heads by `core.splits.split_heads`, feed-forward layers by their inner dimension). The plans of
transformers' models need sizes that divide. Slices are views of the mapped weights, except for fused projections, whose
pieces are not contiguous.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.attn.spec import AttnSpec
from longspan.core.splits import cut_evenly
from longspan.model.files import ModelError
from longspan.model.shard import Shard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_ATTENTION = re.compile(r"\.(self_)?att(n|ention)\.")
_WHOLE = re.compile(
    r"\.(gate|wg|router|router\.layer|router\.proj|shared_expert_gate|per_layer_input_gate|per_layer_projection"
    r"|linear_left|linear_right|modality_router|correction_coefs|prediction_coefs)\.weight$"
)
"""Matrices that every rank has completely: routers and other small matrices."""
_ALIGNED = (8, 4)
"""Elements in 16 bytes of bfloat16 and of float32."""
_SUMMED = re.compile(r"\.(o_proj|down_proj|experts)$")
_NORM = re.compile(r"norm\w*$")


def pieces(shard: Shard, name: str, shape: torch.Size) -> tuple[int, tuple[range, ...]] | None:
    """Return the dimension in which a parameter is cut, and this rank's ranges. None: all of the parameter.

    A parameter that joins several projections has several ranges. One rank has the bias that is added to a sum over
    ranks, and the range of all other ranks is empty.
    """
    layer = _LAYER.search(name)
    if shard.size == 1 or layer is None:
        return None
    spec = shard.specs[int(layer[1])]
    module, _, kind = name.rpartition(".")
    leaf = kind if kind.endswith("_proj") else module.rpartition(".")[2]  # an expert's own parameter, or a module
    if _ATTENTION.search(name) is not None:
        cut = _of_attention(shard, leaf, shape, spec)
    elif module in shard.transposed:
        cut = _of_transposed(shard, leaf, shape)
    else:
        cut = _of_feed_forward(shard, leaf, shape)
    if cut is None and len(shape) > 1 and shape.numel() != spec.head_dim and not _WHOLE.search(name):
        raise ModelError(f"it is not known how to cut {name}")
    return cut


def _of_attention(shard: Shard, leaf: str, shape: torch.Size, spec: AttnSpec) -> tuple[int, tuple[range, ...]] | None:
    """Cut a parameter of attention by heads."""
    share, dim = shard.share(spec), spec.head_dim
    if leaf == "o_proj":
        return _added_once(shard, shape) if len(shape) == 1 else (1, (_rows(share.heads, dim),))
    if leaf == "qkv_proj":
        q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
        keys = _rows(share.kv_heads, dim)
        return 0, (_rows(share.heads, dim), *(range(keys.start + at, keys.stop + at) for at in (q, q + kv)))
    if not shape or ("norm" in leaf and shape.numel() == dim):
        return None
    if leaf in ("k_proj", "v_proj"):
        return 0, (_rows(share.kv_heads, dim),)
    if leaf == "q_proj" and shape[0] == spec.num_heads * dim:
        return 0, (_rows(share.heads, dim),)
    sizes = (
        (spec.num_heads * dim, _rows(share.heads, dim)),  # gates, norms over all heads
        (spec.num_kv_heads * dim, _rows(share.kv_heads, dim)),
        (spec.num_heads, share.heads),  # one element or one row per head
    )
    fitting = {rows for size, rows in sizes if size == shape[0]}
    if len(fitting) > 1:
        raise ModelError(f"it is not known how to cut {leaf}: its {shape[0]} rows fit several projections")
    return (0, (fitting.pop(),)) if fitting else None


def _of_feed_forward(shard: Shard, leaf: str, shape: torch.Size) -> tuple[int, tuple[range, ...]] | None:
    """Cut a parameter by the inner dimension."""
    match leaf:
        case "gate_proj" | "up_proj" | "ffn_sub_norm":  # [inner, hidden], or [inner]
            return 0, (_even(shard, shape[0]),)
        case "gate_up_proj":  # gate above up: [2 * inner, hidden] or [experts, 2 * inner, hidden]
            dim = max(0, len(shape) - 2)
            gate, inner = _even(shard, shape[dim] // 2), shape[dim] // 2
            return dim, (gate, range(gate.start + inner, gate.stop + inner))
        case "down_proj" if len(shape) == 1:
            return _added_once(shard, shape)
        case "down_proj":  # [hidden, inner] or [experts, hidden, inner]
            return len(shape) - 1, (_even(shard, shape[-1]),)
    return None


def _of_transposed(shard: Shard, leaf: str, shape: torch.Size) -> tuple[int, tuple[range, ...]] | None:
    """Cut stacked experts `[experts, inputs, outputs]` by the inner dimension."""
    match leaf:
        case "gate_up_proj":  # [experts, hidden, 2 * inner], gate before up
            gate, inner = _even(shard, shape[2] // 2), shape[2] // 2
            return 2, (gate, range(gate.start + inner, gate.stop + inner))
        case "down_proj":  # [experts, inner, hidden]
            return 1, (_even(shard, shape[1]),)
    return None


def transposed_experts(module: nn.Module) -> frozenset[str]:
    """Return the names of the modules with stacked experts `[experts, inputs, outputs]`."""
    return frozenset(name for name, part in module.named_modules() if _is_transposed(part))


def _is_transposed(part: Any) -> bool:  # noqa: ANN401 - a module, whatever its class
    gate_up, down = (getattr(part, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.ndim != 3:
        return False
    return gate_up.shape[2] == 2 * down.shape[1]  # else both are the hidden size


def _added_once(shard: Shard, shape: torch.Size) -> tuple[int, tuple[range, ...]]:
    return 0, (range(shape[0] if shard.index == 0 else 0),)


def _even(shard: Shard, total: int) -> range:
    """Cut at multiples of `_ALIGNED` if no share is empty. Products of stacked experts need aligned rows."""
    unit = next((unit for unit in _ALIGNED if total % unit == 0 and total // unit >= shard.size), 1)
    start, stop = cut_evenly(total // unit, shard.size)[shard.index]
    return range(start * unit, stop * unit)


def counted(shard: Shard, name: str, size: int) -> slice | None:
    """Return the columns of the share that this rank adds to the sums of a norm over `size` columns.

    The first rank with a column counts it. Return None for a norm that every rank has completely.
    """
    shares = [pieces(replace(shard, index=index), name, torch.Size([size])) for index in range(shard.index + 1)]
    ranges = [share[1][0] for share in shares if share is not None]
    if not ranges:
        return None
    *before, own = ranges
    num_counted = max((columns.stop for columns in before), default=0)
    return slice(max(0, num_counted - own.start), len(own))


def _rows(heads: range, rows: int) -> range:
    return range(heads.start * rows, heads.stop * rows)


def sum_partial_results(
    module: PreTrainedModel, shard: Shard, reduce: Callable[[Tensor], Tensor], shape: Callable[[str], torch.Size]
) -> None:
    """Sum the partial results of sharded layers over ranks by `reduce`, in hooks.

    Partial results are outputs, and squares in norms over all heads or over the inner dimension. `shape` returns the
    shape of an unsharded parameter.
    """
    for name, layer in module.named_modules():
        if _LAYER.search(name) and _SUMMED.search(name):
            layer.register_forward_hook(lambda _layer, _args, output: reduce(output))
        elif _LAYER.search(f"{name}.") and _NORM.search(name) and getattr(layer, "weight", None) is not None:
            total = shape(f"{name}.weight").numel()
            if layer.weight.ndim == 1 and (columns := counted(shard, f"{name}.weight", total)) is not None:
                layer.register_forward_hook(_summed_norm(layer, columns, total, reduce))
    for layer, attention in attention_modules(module).items():
        _set_head_counts(attention, shard.local_specs[layer])


def _summed_norm(
    norm: Any,  # noqa: ANN401 - a module, whatever its class
    counted: slice,
    total: int,
    reduce: Callable[[Tensor], Tensor],
) -> Callable[[object, tuple[Tensor, ...], Tensor], Tensor]:
    """Return a hook that rescales the RMSNorm of a share to the RMSNorm of all ranks, by a factor per token."""
    epsilon: float = getattr(norm, "variance_epsilon", None) or norm.eps

    def scaled(_norm: object, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        own = inputs[0].shape[-1]
        if own == total:  # unsharded weights
            return output
        squares = inputs[0].float().square()
        summed = reduce(squares[..., counted].sum(-1, keepdim=True))
        factor = ((squares.mean(-1, keepdim=True) + epsilon) / (summed / total + epsilon)).sqrt()
        return (output * factor).to(output.dtype)

    return scaled


def all_weights(module: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a module, whatever its class
    """Return the parameters of a module by name. Quantised weights are dequantised, to tensors of their own."""
    parts = ((name, getattr(part, "levels", None)) for name, part in module.named_modules())
    levels = {f"{name}.weight": own.weights() for name, own in parts if own is not None}
    return dict(module.named_parameters()) | levels


def attention_modules(module: PreTrainedModel) -> dict[int, Any]:
    """Return the attention module of each layer of the rank."""
    parts: Iterator[Any] = module.modules()
    return {part.layer_idx: part for part in parts if hasattr(part, "o_proj") and hasattr(part, "layer_idx")}


@contextmanager
def head_counts(attention: Any, spec: AttnSpec) -> Iterator[None]:  # noqa: ANN401 - a module, whatever its class
    """Set an attention module's head counts to the counts of `spec` inside the block."""
    before = {name: vars(attention)[name] for name in ("config", "num_key_value_heads") if name in vars(attention)}
    _set_head_counts(attention, spec)
    try:
        yield
    finally:
        vars(attention).update(before)


def _set_head_counts(attention: Any, spec: AttnSpec) -> None:  # noqa: ANN401 - a module, whatever its class
    """Set the counts by which some models cut their fused projections. Other models use shapes."""
    config = copy.copy(attention.config)
    config.num_attention_heads, config.num_key_value_heads = spec.num_heads, spec.num_kv_heads
    vars(attention).update(config=config, num_key_value_heads=spec.num_kv_heads)
