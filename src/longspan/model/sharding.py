"""Tensor parallelism inside an instance: which slice of each weight a rank computes with, and what must be summed.

The rules are our own (heads by `core.heads.split_heads`, feed-forward layers by their inner dimension), since the plans
that come with models want sizes that divide. Slices are views of the mapped weights where that is possible: all but
those of fused projections, which lie apart.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.attn.spec import AttnSpec
from longspan.core.heads import HeadShare, cut_evenly, split_heads
from longspan.model.files import ModelError, ModelFiles
from longspan.model.info import build_skeleton, load_config

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
        """Returns what each layer's attention computes on this rank."""
        return tuple(spec.of_heads(self.share(spec)) for spec in self.specs)

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """Returns this rank's slice of a parameter.

        Raises:
            ModelError: when it is not known how to cut it.
        """
        layer = _LAYER.search(name)
        if self.size == 1 or layer is None:
            return weight
        spec = self.specs[int(layer[1])]
        module, _, kind = name.rpartition(".")
        leaf = kind if kind in _RULES else module.rpartition(".")[2]
        if leaf in _RULES:
            return _RULES[leaf](self, weight, spec)
        is_head_norm = leaf in ("q_norm", "k_norm")
        if (weight.ndim == 1 and not is_head_norm) or _ROUTER.search(name) or weight.numel() == spec.head_dim:
            return weight
        raise ModelError(
            f"tensor parallelism is not supported for this architecture: it is not known how to cut {name}"
        )

    def share(self, spec: AttnSpec) -> HeadShare:
        """Returns this rank's heads of a layer."""
        return split_heads(spec.num_heads, spec.num_kv_heads, self.size)[self.index]


def _q(shard: Shard, weight: Tensor, spec: AttnSpec) -> Tensor:
    share = shard.share(spec)
    return weight[share.heads.start * spec.head_dim : share.heads.stop * spec.head_dim]


def _kv(shard: Shard, weight: Tensor, spec: AttnSpec) -> Tensor:
    share = shard.share(spec)
    return weight[share.kv_heads.start * spec.head_dim : share.kv_heads.stop * spec.head_dim]


def _qkv(shard: Shard, weight: Tensor, spec: AttnSpec) -> Tensor:
    sizes = [number * spec.head_dim for number in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    q, k, v = weight.split(sizes)
    return torch.cat([_q(shard, q, spec), _kv(shard, k, spec), _kv(shard, v, spec)])


def _o(shard: Shard, weight: Tensor, spec: AttnSpec) -> Tensor:
    if weight.ndim == 1:
        return _once(shard, weight)
    share = shard.share(spec)
    return weight[:, share.heads.start * spec.head_dim : share.heads.stop * spec.head_dim]


def _up(shard: Shard, weight: Tensor, _: AttnSpec) -> Tensor:
    """Cuts `[inner, hidden]`, or its bias."""
    start, stop = cut_evenly(weight.shape[0], shard.size)[shard.index]
    return weight[start:stop]


def _gate_up(shard: Shard, weight: Tensor, _: AttnSpec) -> Tensor:
    """Cuts two such weights below each other; of experts `[experts, 2 * inner, hidden]`."""
    dim = max(0, weight.ndim - 2)
    start, stop = cut_evenly(weight.shape[dim] // 2, shard.size)[shard.index]
    return torch.cat([half.narrow(dim, start, stop - start) for half in weight.chunk(2, dim)], dim)


def _down(shard: Shard, weight: Tensor, _: AttnSpec) -> Tensor:
    """Cuts `[hidden, inner]`, `[experts, hidden, inner]`, or a bias."""
    if weight.ndim == 1:
        return _once(shard, weight)
    start, stop = cut_evenly(weight.shape[-1], shard.size)[shard.index]
    return weight[..., start:stop]


def _once(shard: Shard, bias: Tensor) -> Tensor:
    """Gives what is added to a sum to one rank, and zeros to the others."""
    return bias if shard.index == 0 else torch.zeros_like(bias)


_RULES: dict[str, Callable[[Shard, Tensor, AttnSpec], Tensor]] = {
    "q_proj": _q,
    "k_proj": _kv,
    "v_proj": _kv,
    "qkv_proj": _qkv,
    "o_proj": _o,
    "gate_proj": _up,
    "up_proj": _up,
    "gate_up_proj": _gate_up,
    "down_proj": _down,
}
"""By the name of a layer's module, or of an expert's own parameter."""


def check_degree(specs: Sequence[AttnSpec], tp: int, num_sharing: int = 1) -> None:
    """Checks that heads can be split between `tp` ranks, and each rank's again between `num_sharing` instances.

    Raises:
        ModelError: when somebody would have no query head.
    """
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


def check_can_be_split(files: ModelFiles, specs: tuple[AttnSpec, ...]) -> None:
    """Raises ModelError unless it is known how to split every weight of a layer, and where its attention is."""
    skeleton = build_skeleton(load_config(files.config_dir, files.trust_remote_code), files.trust_remote_code)
    shard = Shard(index=0, size=2, specs=specs)
    for name, weight in skeleton.named_parameters():
        shard.cut(name, weight)
    layers = getattr(skeleton, skeleton.base_model_prefix)
    if len(attention_modules(skeleton)) != len(specs) or not hasattr(layers, "rotary_emb"):
        raise ModelError(f"{skeleton.config.model_type} cannot be split by heads: its attention is not of a known form")


def sum_partial_results(module: PreTrainedModel, shard: Shard, reduce: Callable[[Tensor], Tensor]) -> None:
    """Makes a model of sharded weights pass the outputs of its summed layers through `reduce`."""
    for name, layer in module.named_modules():
        if _LAYER.search(name) and _SUMMED.search(name):
            layer.register_forward_hook(lambda _module, _inputs, output: reduce(output))
    for attention in attention_modules(module):
        _tell_head_counts(attention, shard.local_specs[attention.layer_idx])


def attention_modules(module: PreTrainedModel) -> list[Any]:
    """Returns the attention modules, one per layer, in order."""
    found: list[Any] = [layer for layer in module.modules() if hasattr(layer, "o_proj") and hasattr(layer, "layer_idx")]
    return sorted(found, key=lambda attention: attention.layer_idx)


@contextmanager
def head_counts(attention: Any, spec: AttnSpec) -> Iterator[None]:  # noqa: ANN401 - a module, whatever its class
    """Gives an attention module so many heads for a while."""
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
