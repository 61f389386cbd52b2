"""Tensor parallelism inside an instance: each rank's slice of each weight, and the sums over ranks.

The rules are our own (heads by `core.splits.split_heads`, feed-forward layers by their inner dimension). The plans of
transformers' models need sizes that divide. Roles that `model.trace` found decide, and for all other parameters their
names. Slices are views of the mapped weights, except for fused projections, whose pieces are not contiguous.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from longspan.attn.spec import AttnSpec
from longspan.core.splits import cut_evenly
from longspan.model.files import ModelError
from longspan.model.roles import LayerRoles, Role
from longspan.model.shard import Shard
from longspan.model.skeleton import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = re.compile(r"(^|\.)(self_)?att(n|ention)\.")
_WHOLE = re.compile(
    r"(^|\.)(gate|wg|router|router\.layer|router\.proj|shared_expert_gate|per_layer_input_gate|per_layer_projection"
    r"|linear_left|linear_right|modality_router|correction_coefs|prediction_coefs)\.weight$"
)
"""Matrices that every rank has completely: routers and other small matrices."""
_ALIGNED = (8, 4)
"""Elements in 16 bytes of bfloat16 and of float32."""
_SUMMED = re.compile(r"\.(o_proj|down_proj|experts)$")
_NORM = re.compile(r"norm\w*$")
_COUNT = re.compile(r"heads?$")
"""Names of numbers of heads in attention modules."""
_SIZE = re.compile(r"^(?!.*(window|vocab|chunk)|(attention_)?head_).*(dim|size)$")
"""Names of widths of all heads in attention modules."""


def pieces(shard: Shard, name: str, shape: torch.Size) -> tuple[int, tuple[range, ...]] | None:
    """Return the dimension in which a parameter is cut, and this rank's ranges. None: all of the parameter.

    A parameter that joins several projections has several ranges. One rank has the bias that is added to a sum over
    ranks, and the range of all other ranks is empty.
    """
    place = shard.layer_of(name)
    if shard.size == 1 or place is None:
        return None
    (layer, path), spec = place, shard.specs[place[0]]
    module, _, kind = path.rpartition(".")
    if (role := _role(shard, layer, module if kind in ("weight", "bias") else path)) is not None:
        return _of_role(shard, role, shape, spec)
    leaf = kind if kind.endswith("_proj") else module.rpartition(".")[2]  # an expert's own parameter, or a module
    attention, owner = shard.roles_in(layer).attention, name.rpartition(".")[0]
    if path.startswith(f"{attention}.") if attention else _ATTENTION.search(path) is not None:
        cut = (0, (shard.share(spec).heads,)) if kind == "sinks" else _of_attention(shard, leaf, shape, spec)
    elif owner in shard.transposed:
        cut = _of_transposed(shard, kind, shape, is_interleaved=owner in shard.interleaved)
    else:
        cut = _of_feed_forward(shard, leaf, shape)
    if cut is None and shape.numel() > max(shape, default=1) and not _WHOLE.search(path):
        raise ModelError(f"it is not known how to cut {name}")
    return cut


def _role(shard: Shard, layer: int, module: str) -> Role | None:
    """Return the role of a matrix by its path in the layer. None if it is unknown, or all ranks have all of it."""
    return None if _WHOLE.search(f"{module}.weight") else shard.roles_in(layer).matrices.get(module)


def _of_role(shard: Shard, role: Role, shape: torch.Size, spec: AttnSpec) -> tuple[int, tuple[range, ...]]:
    """Cut the weight or the bias of a matrix with a role, or a stack of such weights."""
    share, dim, last, is_bias = shard.share(spec), spec.head_dim, len(shape) - 1, len(shape) == 1
    if role.sums:
        columns = last - role.is_transposed
        if is_bias:
            return _added_once(shard, shape)
        return columns, (_rows(share.heads, dim) if role.sums == "heads" else _even(shard, shape[columns]),)
    rows = last if role.is_transposed or is_bias else last - 1
    if role.heads:
        return rows, tuple(_rows(blocks, dim) for blocks in role.blocks(spec, share))
    inner = shape[rows] // role.parts
    own = _even(shard, inner)
    return rows, tuple(range(own.start + part * inner, own.stop + part * inner) for part in range(role.parts))


def _of_attention(shard: Shard, leaf: str, shape: torch.Size, spec: AttnSpec) -> tuple[int, tuple[range, ...]] | None:
    """Cut a parameter of attention by heads."""
    share, dim = shard.share(spec), spec.head_dim
    if leaf == "o_proj":
        # values, and so outputs, may be narrower than keys
        return _added_once(shard, shape) if len(shape) == 1 else (1, (_rows(share.heads, shape[1] // spec.num_heads),))
    if leaf == "qkv_proj":
        q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
        keys = _rows(share.kv_heads, dim)
        return 0, (_rows(share.heads, dim), *(range(keys.start + at, keys.stop + at) for at in (q, q + kv)))
    if not shape or ("norm" in leaf and shape.numel() == dim):
        return None
    if leaf in ("k_proj", "v_proj"):
        return 0, (_rows(share.kv_heads, shape[0] // spec.num_kv_heads),)
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


def _of_transposed(
    shard: Shard, kind: str, shape: torch.Size, *, is_interleaved: bool
) -> tuple[int, tuple[range, ...]] | None:
    """Cut a parameter of stacked experts `[experts, inputs, outputs]` by the inner dimension."""
    match kind:
        case "gate_up_proj" | "gate_up_proj_bias":  # [experts, hidden, 2 * inner], or [experts, 2 * inner]
            inner = shape[-1] // 2
            gate = _even(shard, inner)
            if is_interleaved:
                return len(shape) - 1, (range(2 * gate.start, 2 * gate.stop),)
            return len(shape) - 1, (gate, range(gate.start + inner, gate.stop + inner))
        case "down_proj":  # [experts, inner, hidden]
            return 1, (_even(shard, shape[1]),)
        case "down_proj_bias":
            return _added_once(shard, shape)
    return None


def expert_forms(module: nn.Module) -> dict[str, frozenset[str]]:
    """Return `Shard.transposed` and `Shard.interleaved` of a model. transformers states whether outputs alternate."""
    parts = [*module.named_modules()]
    return {
        "transposed": frozenset(name for name, part in parts if _is_transposed(part)),
        "interleaved": frozenset(name for name, part in parts if not vars(part).get("is_concatenated", True)),
    }


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
        if (place := shard.layer_of(name)) is None:
            continue
        role = _role(shard, *place)
        if role.sums if role is not None else _SUMMED.search(name):
            layer.register_forward_hook(lambda _layer, _args, output: reduce(output))
        elif _NORM.search(name) and getattr(layer, "weight", None) is not None:
            total = shape(f"{name}.weight").numel()
            if layer.weight.ndim == 1 and (columns := counted(shard, f"{name}.weight", total)) is not None:
                shared = SharedNorm(norm=layer, counted=columns, size=columns.stop, total=total)
                layer.register_forward_hook(_summed_norm(shared, reduce))
    read_sizes_from_weights(module)
    for number, attention in attention_modules(module, shard.roles).items():
        _set_head_counts(attention, shard.specs[number], shard.local_specs[number])


@dataclass(frozen=True, kw_only=True)
class SharedNorm:
    """An RMSNorm of which several ranks have a share each.

    Attributes:
        counted: the columns of this share that this rank adds to the sum over all columns.
        size: the number of columns of this share.
        total: the number of columns of all shares.
    """

    norm: Any
    counted: slice
    size: int
    total: int


def shared_norms(
    attention: Any,  # noqa: ANN401 - of any class
    path: str,
    shard: Shard,
    part: Shard,
    shapes: Mapping[str, torch.Size],
) -> list[SharedNorm]:
    """Return the norms over all heads in an attention module, for a `part` of the rank's share.

    `shapes` are the shapes of the unsharded parameters by their names in the module.
    """
    found = []
    for name, norm in attention.named_modules():
        weight, full = getattr(norm, "weight", None), f"{path}.{name}.weight"
        if not _NORM.search(name) or weight is None or weight.ndim > 1:
            continue
        columns, total = counted(part, full, weight.numel()), shapes[f"{name}.weight"].numel()
        if columns is not None:
            cut = pieces(part, full, weight.shape)
            assert cut is not None, "it has counted columns"
            of_rank = counted(shard, full, total)
            first = 0 if of_rank is None else of_rank.start - cut[1][0].start  # lower ranks count columns before it
            columns = slice(min(max(columns.start, first), columns.stop), columns.stop)
            found.append(SharedNorm(norm=norm, counted=columns, size=columns.stop, total=total))
    return found


@contextmanager
def summed_norms(norms: Sequence[SharedNorm], reduce: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Sum the squares of norms over all shares by `reduce` inside the block."""
    hooks = [shared.norm.register_forward_hook(_summed_norm(shared, reduce)) for shared in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _summed_norm(
    shared: SharedNorm, reduce: Callable[[Tensor], Tensor]
) -> Callable[[object, tuple[Tensor, ...], Tensor], Tensor]:
    """Return a hook that rescales the RMSNorm of a share to the RMSNorm of all shares, by a factor per token."""
    epsilon: float = getattr(shared.norm, "variance_epsilon", None) or shared.norm.eps

    def scaled(_norm: object, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        columns = inputs[0].shape[-1]
        if columns == shared.total or columns != shared.size:  # unsharded weights, or a part of this share
            return output
        squares = inputs[0].float().square()
        summed = reduce(squares[..., shared.counted].sum(-1, keepdim=True))
        factor = ((squares.mean(-1, keepdim=True) + epsilon) / (summed / shared.total + epsilon)).sqrt()
        return (output * factor).to(output.dtype)

    return scaled


def all_weights(module: Any) -> dict[str, Tensor]:  # noqa: ANN401 - a module, whatever its class
    """Return the parameters of a module by name. Quantised weights are dequantised, to tensors of their own."""
    parts = ((name, getattr(part, "levels", None)) for name, part in module.named_modules())
    levels = {f"{name}.weight": own.weights() for name, own in parts if own is not None}
    return dict(module.named_parameters()) | levels


def attention_modules(module: PreTrainedModel, roles: Sequence[LayerRoles] = ()) -> dict[int, Any]:
    """Return the attention module of each layer of the rank. Without a role, its output projection is `o_proj`."""
    found: dict[int, Any] = {}
    for number, layer in enumerate(decoder_layers(module)):
        path = roles[number].attention if roles else ""
        if path and next(layer.parameters(), None) is not None:
            found[number] = layer.get_submodule(path)
        else:
            for part in layer.modules():
                if hasattr(part, "o_proj") and hasattr(part, "layer_idx"):
                    found[number] = part
    return found


@contextmanager
def head_counts(attention: Any, whole: AttnSpec, spec: AttnSpec) -> Iterator[None]:  # noqa: ANN401 - of any class
    """Set an attention module's numbers of heads from the numbers of `whole` to those of `spec` inside the block."""
    before = dict(vars(attention))
    _set_head_counts(attention, whole, spec)
    try:
        yield
    finally:
        vars(attention).update(before)


def _set_head_counts(attention: Any, whole: AttnSpec, spec: AttnSpec) -> None:  # noqa: ANN401 - of any class
    """Set the numbers by which some models cut and join projections. Other models use shapes."""
    config = copy.copy(attention.config)
    config.num_attention_heads, config.num_key_value_heads = spec.num_heads, spec.num_kv_heads
    counts = {whole.num_kv_heads: spec.num_kv_heads, whole.num_heads: spec.num_heads}
    sizes = {before * whole.head_dim: after * whole.head_dim for before, after in counts.items()}
    numbers = {name: value for name, value in vars(attention).items() if type(value) is int}
    changed = {name: counts.get(value, value) for name, value in numbers.items() if _COUNT.search(name)}
    changed |= {name: sizes.get(value, value) for name, value in numbers.items() if _SIZE.search(name)}
    vars(attention).update(changed, config=config, num_key_value_heads=spec.num_kv_heads)


class _AnyConv1D(Conv1D):  # type: ignore[misc]  # it has no types
    """Reads the number of outputs from its weight, which may be a share of the whole."""

    @property
    def nf(self) -> int:
        return int(self.weight.shape[1])


def read_sizes_from_weights(module: nn.Module) -> None:
    """Let modules that keep the size of their weight read it from the weight."""
    for part in module.modules():
        if type(part) is Conv1D:
            del part.nf
            part.__class__ = _AnyConv1D
