"""Unsharded weights of attention layers on a rank that has a share of them: from its host's copy, or from its peers.

Layers are fetched one ahead: `start(layer + 1)`, then the layer is computed with what `take(layer)` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from longspan.attn.collectives import Gathering
from longspan.attn.comm import Group, Message
from longspan.attn.spec import AttnSpec
from longspan.core.heads import split_heads
from longspan.model.sharding import Shard

Weights = Mapping[str, Tensor]
"""The parameters of an attention module, by their names in it."""


class UnshardedWeights(Protocol):
    """Fetches the weights of one layer after the other."""

    def start(self, layer: int) -> None:
        """Begins to fetch a layer. The layer before it may not have been computed yet; all earlier ones have."""

    def take(self, layer: int) -> Weights:
        """Returns a layer's weights, valid for what is computed from now on until the next layer but one is started."""


class HostWeights:
    """Takes weights from the mapped weight file: views of it on CPUs; on CUDA devices copies, made on a stream.

    What is copied is first pinned, layer by layer, and stays so: each rank has the weights of all attention layers once
    in the memory of its host.
    """

    def __init__(self, layers: Sequence[Weights], device: torch.device) -> None:
        self._layers = list(layers)
        self._copies = None if device.type == "cpu" else _Copies(device)

    def start(self, layer: int) -> None:
        """Pins and copies a layer on CUDA devices; on CPUs there is nothing to fetch."""
        if self._copies is not None:
            self._layers[layer] = {name: weight.pin_memory() for name, weight in self._layers[layer].items()}
            self._copies.start(layer, self._layers[layer])

    def take(self, layer: int) -> Weights:
        """Returns the views, or the copies once they are complete."""
        return self._layers[layer] if self._copies is None else self._copies.take(layer)


class _Copies:
    """Keeps two buffers on a CUDA device, which even and odd layers fill."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._rooms: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._done = (torch.cuda.Event(), torch.cuda.Event())

    def start(self, layer: int, pinned: Weights) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # who used the buffer before is done with it
        room = self._rooms[layer % 2]
        with torch.cuda.stream(self._stream):
            for name, weight in pinned.items():
                if name not in room or room[name].shape != weight.shape:
                    room[name] = torch.empty_like(weight, device=self._device)
                room[name].copy_(weight, non_blocking=True)
            self._done[layer % 2].record(self._stream)

    def take(self, layer: int) -> Weights:
        torch.cuda.current_stream(self._device).wait_event(self._done[layer % 2])
        return self._rooms[layer % 2]


class PeerWeights:
    """Gathers weights from the ranks of the instance, which have a share each; `connect` makes a group for every layer.

    All ranks of the instance start and take the same layers in the same order.
    """

    def __init__(self, shares: Sequence[Weights], shard: Shard, connect: Callable[[], Group]) -> None:
        self._shares, self._shard, self._connect = shares, shard, connect
        self._pending: dict[int, tuple[Gathering, list[Message]]] = {}

    def start(self, layer: int) -> None:
        """Sends this rank's share of a layer to the others, and begins to receive theirs."""
        share, shard = self._shares[layer], self._shard
        blocks = [share_room(replace(shard, index=rank), layer, share) for rank in range(shard.size)]
        blocks[shard.index] = share_message(shard, layer, share)
        self._pending[layer] = Gathering(self._connect(), blocks), blocks

    def take(self, layer: int) -> Weights:
        """Joins the shares once they are here."""
        gathering, blocks = self._pending.pop(layer)
        gathering.wait()
        return join(self._shard, layer, self._shares[layer], blocks)


def share_room(shard: Shard, layer: int, like: Weights) -> Message:
    """Makes room for what a rank has of a layer that no rank before it has; `like` is the share of any rank."""
    shapes = []
    for name, weight in like.items():
        dim, stretches = _stretches(shard, shard.specs[layer], name, weight)
        for start, stop in stretches:
            shape = list(weight.shape)
            shape[dim] = stop - start
            shapes.append((tuple(shape), weight.dtype))
    return Message(shapes, next(iter(like.values())).device)


def share_message(shard: Shard, layer: int, share: Weights) -> Message:
    """Fills `share_room` from the rank's own share."""
    message = share_room(shard, layer, share)
    rooms = iter(message.tensors)
    for name, weight in share.items():
        dim, stretches = _stretches(shard, shard.specs[layer], name, weight)
        for start, stop in stretches:
            next(rooms).copy_(weight.narrow(dim, start, stop - start))
    return message


def join(shard: Shard, layer: int, share: Weights, messages: Sequence[Message]) -> dict[str, Tensor]:
    """Joins the weights of a layer from the messages of all ranks, and from `share` what every rank has completely."""
    rooms = [iter(message.tensors) for message in messages]
    whole = {}
    for name, weight in share.items():
        dim, stretches = _stretches(replace(shard, index=0), shard.specs[layer], name, weight)
        pieces = [[next(room) for _ in stretches] for room in rooms]
        in_order = [piece for kind in zip(*pieces, strict=True) for piece in kind]
        whole[name] = torch.cat(in_order, dim) if in_order else weight
    return whole


def _stretches(shard: Shard, spec: AttnSpec, name: str, weight: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Finds the dimension and the stretches of a rank's share of a parameter that no rank before it has.

    All ranks have equally many stretches: one of queries, keys and values each for fused projections, none for what
    every rank has completely. `weight` is the share of any rank.
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
