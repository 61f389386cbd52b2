"""Tensor parallelism inside an instance: each rank's slice of each weight, and the sums over ranks.

The rules are our own (heads by `core.splits.split_heads`, feed-forward layers by their inner dimension). The plans of
transformers' models need sizes that divide. Slices are views of the mapped weights, except for fused projections, whose
pieces are not contiguous.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.spec import AttnSpec
from longspan.core.splits import HeadShare, cut_evenly, split_heads
from longspan.model.files import ModelError

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


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a model that one of `size` ranks computes. `specs` describe the whole model."""

    index: int
    size: int
    specs: tuple[AttnSpec, ...]

    @property
    def local_specs(self) -> tuple[AttnSpec, ...]:
        """The attention of each layer with this rank's heads."""
        return tuple(spec.of_heads(self.share(spec)) for spec in self.specs)

    def share(self, spec: AttnSpec) -> HeadShare:
        return split_heads(spec.num_heads, spec.num_kv_heads, self.size)[self.index]

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """Return this rank's slice of a parameter, a view if it is one piece. Raise ModelError if no rule fits."""
        if (cut := self.pieces(name, weight.shape)) is None:
            return weight
        dim, ranges = cut
        if weight.ndim == 1 and not any(ranges):  # a bias that another rank adds to the sum
            return torch.zeros_like(weight)
        pieces = [weight.narrow(dim, own.start, len(own)) for own in ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def pieces(self, name: str, shape: torch.Size) -> tuple[int, tuple[range, ...]] | None:
        """Return the dimension in which a parameter is cut, and this rank's ranges. None: all of the parameter.

        A parameter that joins several projections has several ranges. One rank has the bias that is added to a sum over
        ranks, and the range of all other ranks is empty.
        """
        layer = _LAYER.search(name)
        if self.size == 1 or layer is None:
            return None
        spec = self.specs[int(layer[1])]
        module, _, kind = name.rpartition(".")
        leaf = kind if kind.endswith("_proj") else module.rpartition(".")[2]  # an expert's own parameter, or a module
        is_attention = _ATTENTION.search(name) is not None
        cut = self._of_attention(leaf, shape, spec) if is_attention else self._of_feed_forward(leaf, shape)
        if cut is None and len(shape) > 1 and shape.numel() != spec.head_dim and not _WHOLE.search(name):
            raise ModelError(f"it is not known how to cut {name}")
        return cut

    def _of_attention(self, leaf: str, shape: torch.Size, spec: AttnSpec) -> tuple[int, tuple[range, ...]] | None:
        """Cut a parameter of attention by heads."""
        share, dim = self.share(spec), spec.head_dim
        if leaf == "o_proj":
            return self._added_once(shape) if len(shape) == 1 else (1, (_rows(share.heads, dim),))
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

    def _of_feed_forward(self, leaf: str, shape: torch.Size) -> tuple[int, tuple[range, ...]] | None:
        """Cut a parameter by the inner dimension."""
        match leaf:
            case "gate_proj" | "up_proj" | "ffn_sub_norm":  # [inner, hidden], or [inner]
                return 0, (self._even(shape[0]),)
            case "gate_up_proj":  # gate above up: [2 * inner, hidden] or [experts, 2 * inner, hidden]
                dim = max(0, len(shape) - 2)
                gate, inner = self._even(shape[dim] // 2), shape[dim] // 2
                return dim, (gate, range(gate.start + inner, gate.stop + inner))
            case "down_proj" if len(shape) == 1:
                return self._added_once(shape)
            case "down_proj":  # [hidden, inner] or [experts, hidden, inner]
                return len(shape) - 1, (self._even(shape[-1]),)
        return None

    def _added_once(self, shape: torch.Size) -> tuple[int, tuple[range, ...]]:
        return 0, (range(shape[0] if self.index == 0 else 0),)

    def _even(self, total: int) -> range:
        """Cut at multiples of `_ALIGNED` if no share is empty. Products of stacked experts need aligned rows."""
        unit = next((unit for unit in _ALIGNED if total % unit == 0 and total // unit >= self.size), 1)
        start, stop = cut_evenly(total // unit, self.size)[self.index]
        return range(start * unit, stop * unit)

    def counted(self, name: str, size: int) -> slice | None:
        """Return the columns of the share that this rank adds to the sums of a norm over `size` columns.

        The first rank with a column counts it. Return None for a norm that every rank has completely.
        """
        shares = [replace(self, index=index).pieces(name, torch.Size([size])) for index in range(self.index + 1)]
        ranges = [share[1][0] for share in shares if share is not None]
        if not ranges:
            return None
        *before, own = ranges
        num_counted = max((columns.stop for columns in before), default=0)
        return slice(max(0, num_counted - own.start), len(own))


def _rows(heads: range, rows: int) -> range:
    return range(heads.start * rows, heads.stop * rows)


def check_degree(specs: Sequence[AttnSpec], tp: int, num_sharing: int = 1) -> None:
    """Raise ModelError if `tp` ranks, whose shares `num_sharing` instances split again, leave one without a head."""
    for spec in specs:
        for share in split_heads(spec.num_heads, spec.num_kv_heads, tp):
            if not share.heads:
                raise ModelError(
                    f"tp {tp} is too much for layers with {spec.num_heads} query heads and {spec.num_kv_heads} KV "
                    "heads: some rank would have no head; use a smaller tp and more instances"
                )
            if not all(part.heads for part in split_heads(len(share.heads), len(share.kv_heads), num_sharing)):
                raise ModelError(
                    f"exchange gather_hidden splits {len(share.heads)} query heads and {len(share.kv_heads)} KV heads "
                    f"between {num_sharing} instances, and one would have none: use fewer, or another exchange"
                )


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
            if layer.weight.ndim == 1 and (counted := shard.counted(f"{name}.weight", total)) is not None:
                layer.register_forward_hook(_summed_norm(layer, counted, total, reduce))
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
