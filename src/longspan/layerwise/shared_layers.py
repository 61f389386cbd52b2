"""Attention layers, unmodified, computed with other weights than their own: for a share of their heads over tokens that
several instances gathered, or for all heads where the layer has a share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from longspan.attn.comm import Message
from longspan.attn.spec import AttnSpec
from longspan.core.heads import split_heads
from longspan.model.sharding import Shard, head_counts

Weights = Mapping[str, Tensor]
"""The parameters of an attention module, by their names in it."""


def share_room(shard: Shard, layer: int, like: Weights) -> Message:
    """Room for what a rank has of a layer that no rank before it has; `like` is the share of any rank."""
    shapes = []
    for name, weight in like.items():
        dim, stretches = _stretches(shard, shard.specs[layer], name, weight)
        for start, stop in stretches:
            shape = list(weight.shape)
            shape[dim] = stop - start
            shapes.append((tuple(shape), weight.dtype))
    return Message(shapes, next(iter(like.values())).device)


def share_message(shard: Shard, layer: int, share: Weights) -> Message:
    """`share_room`, filled from the rank's own share."""
    message = share_room(shard, layer, share)
    rooms = iter(message.tensors)
    for name, weight in share.items():
        dim, stretches = _stretches(shard, shard.specs[layer], name, weight)
        for start, stop in stretches:
            next(rooms).copy_(weight.narrow(dim, start, stop - start))
    return message


def join(shard: Shard, layer: int, share: Weights, messages: Sequence[Message]) -> dict[str, Tensor]:
    """The whole weights of a layer, from the messages of all ranks, and from `share` what all ranks have whole."""
    rooms = [iter(message.tensors) for message in messages]
    whole = {}
    for name, weight in share.items():
        dim, stretches = _stretches(replace(shard, index=0), shard.specs[layer], name, weight)
        pieces = [[next(room) for _ in stretches] for room in rooms]
        in_order = [piece for kind in zip(*pieces, strict=True) for piece in kind]
        whole[name] = torch.cat(in_order, dim) if in_order else weight
    return whole


def _stretches(shard: Shard, spec: AttnSpec, name: str, weight: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Along which dimension, and from where to where, a rank's share of a parameter has what no rank before it has.

    Equally many stretches for all ranks: one of queries, keys and values each for fused projections, none for what all
    ranks have whole. `weight` is the share of any rank.
    """
    share = shard.share(spec)
    before = split_heads(spec.num_heads, spec.num_kv_heads, shard.size)[: shard.index]
    num_known = max((one.kv_heads.stop for one in before), default=0) - share.kv_heads.start
    dim = spec.head_dim
    q, kv = len(share.heads) * dim, len(share.kv_heads) * dim
    known = max(0, num_known) * dim
    match name.rpartition(".")[0]:
        case "q_proj":
            return 0, [(0, q)]
        case "k_proj" | "v_proj":
            return 0, [(known, kv)]
        case "qkv_proj":
            return 0, [(0, q), (q + known, q + kv), (q + kv + known, q + 2 * kv)]
        case "o_proj" if weight.ndim == 2:
            return 1, [(0, q)]
        case "o_proj":
            return 0, [(0, len(weight) if shard.index == 0 else 0)]
        case _:
            return 0, []


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines `[1, tokens, rotary_dim]`."""


class SharingAttend(Protocol):
    """An `Attend` whose last packed tokens may be computed by several instances together.

    Attributes:
        num_alone: how many tokens come before those; None when nothing is computed together.
    """

    num_alone: int | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of the tokens before those."""

    def share(self, layer: int, hidden: Tensor) -> Tensor:
        """The layer's output `[tokens, hidden]` for those tokens; it calls `SharedLayer.compute`."""


class SharedLayer:
    """One attention module of a model, whose calls it takes over. `specs` are what its layers compute on this rank."""

    def __init__(self, module: nn.Module, specs: tuple[AttnSpec, ...]) -> None:
        self._module, self._specs = module, specs
        self._layer: int = module.layer_idx  # type: ignore[assignment]  # the probe has checked that it is an int
        self._forward: Callable[..., Any] = module.forward
        self._shares: dict[tuple[int, int], dict[str, Tensor]] = {}
        module.forward = self._call

    def compute(self, hidden: Tensor, rotary: Rotary, attend: Attend, *, index: int, size: int) -> Tensor:
        """What one of `size` shares of the heads adds to the output `[tokens, hidden]` of `hidden [tokens, hidden]`."""
        shard = Shard(index=index, size=size, specs=self._specs)
        if (index, size) not in self._shares:
            cut = {name: shard.cut(f"layers.{self._layer}.{_NAME}.{name}", weight) for name, weight in self._weights()}
            self._shares[index, size] = cut
        return self.compute_with(self._shares[index, size], shard.local_specs[self._layer], hidden, rotary, attend)

    def compute_with(self, weights: Weights, spec: AttnSpec, hidden: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """The output `[tokens, hidden]` of other weights, with the heads of `spec`."""
        arguments = {"hidden_states": hidden[None], "position_embeddings": rotary, "attention_mask": None}
        with head_counts(self._module, spec):
            output = functional_call(self._module, dict(weights), (), {**arguments, "attend": attend})
        return output[0][0]  # type: ignore[no-any-return]

    def _weights(self) -> list[tuple[str, Tensor]]:
        return list(self._module.named_parameters())

    def _call(self, hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, None]:  # noqa: ANN401
        attend: Any = arguments.get("attend")
        num_alone = getattr(attend, "num_alone", None)
        if num_alone is None:
            return self._forward(hidden_states=hidden_states, **arguments)  # type: ignore[no-any-return]
        outputs = []
        if num_alone:
            rotary = tuple(part[:, :num_alone] for part in arguments.pop("position_embeddings"))
            alone, _ = self._forward(
                hidden_states=hidden_states[:, :num_alone], position_embeddings=rotary, **arguments
            )
            outputs.append(alone[0])
        outputs.append(attend.share(self._layer, hidden_states[0, num_alone:]))
        return torch.cat(outputs)[None], None


_NAME = "self_attn"
