"""The whole weights of attention layers on a rank that has a share of them: from its host's copy, or from its peers.

Layers are fetched one ahead: `start(layer + 1)`, then the layer is computed with what `take(layer)` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from longspan.attn.collectives import Gathering
from longspan.attn.comm import Group, Message
from longspan.layerwise.shared_layers import Weights, join, share_message, share_room
from longspan.model.sharding import Shard


class UnshardedWeights(Protocol):
    """Fetches the weights of one layer after the other."""

    def start(self, layer: int) -> None:
        """Begins to fetch those of a layer; the layer before may not have been computed yet, that before it has."""

    def take(self, layer: int) -> Weights:
        """They are there for what is computed from now on; until the next layer but one is started."""


class HostWeights:
    """From the mapped weight file: views of it on CPUs; on CUDA devices copies, made on a stream of their own.

    What is copied is first pinned, layer by layer, and stays so: each rank has the weights of all attention layers once
    in the memory of its host.
    """

    def __init__(self, layers: Sequence[Weights], device: torch.device) -> None:
        self._layers = list(layers)
        self._copies = None if device.type == "cpu" else _Copies(device)

    def start(self, layer: int) -> None:
        """See `UnshardedWeights`."""
        if self._copies is not None:
            self._layers[layer] = {name: weight.pin_memory() for name, weight in self._layers[layer].items()}
            self._copies.start(layer, self._layers[layer])

    def take(self, layer: int) -> Weights:
        """See `UnshardedWeights`."""
        return self._layers[layer] if self._copies is None else self._copies.take(layer)


class _Copies:
    """Two buffers on a CUDA device, which even and odd layers fill."""

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
    """From the ranks of the instance, which have a share each; `connect` gives their group, anew for every layer.

    All ranks of the instance start and take the same layers in the same order.
    """

    def __init__(self, shares: Sequence[Weights], shard: Shard, connect: Callable[[], Group]) -> None:
        self._shares, self._shard, self._connect = shares, shard, connect
        self._pending: dict[int, tuple[Gathering, list[Message]]] = {}

    def start(self, layer: int) -> None:
        """See `UnshardedWeights`."""
        share, shard = self._shares[layer], self._shard
        blocks = [share_room(replace(shard, index=rank), layer, share) for rank in range(shard.size)]
        blocks[shard.index] = share_message(shard, layer, share)
        self._pending[layer] = Gathering(self._connect(), blocks), blocks

    def take(self, layer: int) -> Weights:
        """See `UnshardedWeights`."""
        gathering, blocks = self._pending.pop(layer)
        gathering.wait()
        return join(self._shard, layer, self._shares[layer], blocks)
