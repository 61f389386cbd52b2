"""Tensor parallelism inside an instance: which slice of each weight a rank computes with, and what must be summed.

The rules are our own (heads by `core.cluster.split_heads`, feed-forward layers by their inner dimension), since plans
that come with models want sizes that divide. Slices are views of the mapped weights where that is possible: all but
those of fused projections, which lie apart.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.spec import AttnSpec
from longspan.core.cluster import HeadShare, cut_evenly, split_heads
from longspan.model.files import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_ROUTER = re.compile(r"\.gate\.weight$")
_SUMMED = re.compile(r"\.(o_proj|down_proj|experts)$")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a model that one of `size` ranks computes; `specs` are those of the whole model."""

    index: int
    size: int
    specs: tuple[AttnSpec, ...]

    @property
    def local_specs(self) -> tuple[AttnSpec, ...]:
        """The attention of each layer on this rank."""
        return tuple(spec.of_heads(self.share(spec)) for spec in self.specs)

    def share(self, spec: AttnSpec) -> HeadShare:
        return split_heads(spec.num_heads, spec.num_kv_heads, self.size)[self.index]

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """Returns this rank's slice of a parameter."""
        layer = _LAYER.search(name)
        if self.size == 1 or layer is None:
            return weight
        spec = self.specs[int(layer[1])]
        module, _, kind = name.rpartition(".")
        leaf = kind if kind.endswith("_proj") else module.rpartition(".")[2]  # an expert's own parameter, or a module
        if (cut := self._projection(leaf, weight, spec)) is not None:
            return cut
        is_head_norm = leaf in ("q_norm", "k_norm")
        if (weight.ndim == 1 and not is_head_norm) or _ROUTER.search(name) or weight.numel() == spec.head_dim:
            return weight
        raise ModelError(f"it is not known how to cut {name}")

    def _projection(self, leaf: str, weight: Tensor, spec: AttnSpec) -> Tensor | None:
        """Cuts the weight or the bias of a projection by its name; None for any other parameter."""
        share = self.share(spec)
        match leaf:
            case "q_proj":
                cut = _of_heads(weight, share.heads, spec)
            case "k_proj" | "v_proj":
                cut = _of_heads(weight, share.kv_heads, spec)
            case "qkv_proj":
                heads = (share.heads, share.kv_heads, share.kv_heads)
                numbers = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
                parts = weight.split([number * spec.head_dim for number in numbers])
                cut = torch.cat([_of_heads(part, own, spec) for part, own in zip(parts, heads, strict=True)])
            case "gate_proj" | "up_proj":  # [inner, hidden]
                cut = self._even(weight, 0)
            case "gate_up_proj":  # two of these below each other, or [experts, 2 * inner, hidden]
                dim = max(0, weight.ndim - 2)
                cut = torch.cat([self._even(half, dim) for half in weight.chunk(2, dim)], dim)
            case "o_proj" | "down_proj" if weight.ndim == 1:  # what is added to a sum is added once
                cut = weight if self.index == 0 else torch.zeros_like(weight)
            case "o_proj":
                cut = _of_heads(weight, share.heads, spec, dim=1)
            case "down_proj":  # [hidden, inner] or [experts, hidden, inner]
                cut = self._even(weight, weight.ndim - 1)
            case _:
                return None
        return cut

    def _even(self, weight: Tensor, dim: int) -> Tensor:
        start, stop = cut_evenly(weight.shape[dim], self.size)[self.index]
        return weight.narrow(dim, start, stop - start)


def _of_heads(weight: Tensor, heads: range, spec: AttnSpec, dim: int = 0) -> Tensor:
    return weight.narrow(dim, heads.start * spec.head_dim, len(heads) * spec.head_dim)


def check_degree(specs: Sequence[AttnSpec], tp: int, num_sharing: int = 1) -> None:
    """Raises ModelError when `tp` ranks, each shared by `num_sharing` instances, would leave somebody without heads."""
    for spec in specs:
        for share in split_heads(spec.num_heads, spec.num_kv_heads, tp):
            if not share.heads:
                raise ModelError(
                    f"tp {tp} is too much for layers with {spec.num_heads} query heads and {spec.num_kv_heads} KV "
                    "heads: some rank would have no head; use a smaller tp and more instances"
                )
            if not all(one.heads for one in split_heads(len(share.heads), len(share.kv_heads), num_sharing)):
                raise ModelError(
                    f"exchange gather_hidden splits {len(share.heads)} query heads and {len(share.kv_heads)} KV heads "
                    f"between {num_sharing} instances, and one would have none: use fewer, or another exchange"
                )


def sum_partial_results(module: PreTrainedModel, shard: Shard, reduce: Callable[[Tensor], Tensor]) -> None:
    """Makes a model pass the partial outputs of its sharded layers through `reduce`."""
    for name, layer in module.named_modules():
        if _LAYER.search(name) and _SUMMED.search(name):
            layer.register_forward_hook(lambda _module, _inputs, output: reduce(output))
    for layer, attention in attention_modules(module).items():
        _tell_head_counts(attention, shard.local_specs[layer])


def attention_modules(module: PreTrainedModel) -> dict[int, Any]:
    """Returns the attention of each layer that the model has."""
    found: list[Any] = [layer for layer in module.modules() if hasattr(layer, "o_proj") and hasattr(layer, "layer_idx")]
    return {attention.layer_idx: attention for attention in found}


@contextmanager
def head_counts(attention: Any, spec: AttnSpec) -> Iterator[None]:  # noqa: ANN401 - a module, whatever its class
    """Sets an attention module's head counts to those of `spec` for a while."""
    before = {name: vars(attention)[name] for name in ("config", "num_key_value_heads") if name in vars(attention)}
    _tell_head_counts(attention, spec)
    try:
        yield
    finally:
        vars(attention).update(before)


def _tell_head_counts(attention: Any, spec: AttnSpec) -> None:  # noqa: ANN401 - a module, whatever its class
    """Sets the numbers by which some models cut their fused projections; the others go by shapes."""
    config = copy.copy(attention.config)
    config.num_attention_heads, config.num_key_value_heads = spec.num_heads, spec.num_kv_heads
    vars(attention).update(config=config, num_key_value_heads=spec.num_kv_heads)
