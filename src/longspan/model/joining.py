"""The inverse of `Shard.cut` for attention layers: what each rank has of a weight, joined to the whole of it.

Heads are dealt in order, so the shares of all ranks, one after the other, are the whole; but ranks that read one KV
head each have a copy of it, of which that of the first counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longspan.attn.comm import Message
from longspan.attn.spec import AttnSpec
from longspan.core.heads import deal_heads
from longspan.model.sharding import Shard

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
    before = deal_heads(spec.num_heads, spec.num_kv_heads, shard.size)[: shard.index]
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
