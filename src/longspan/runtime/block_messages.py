"""Messages of whole KV blocks: a layer of one `MoveKV`, from one rank to another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attn.comm import Message
from longspan.attn.spec import AttnSpec
from longspan.core.fleet import Fleet
from longspan.core.steps import MoveKV
from longspan.kv.pool import KvPool
from longspan.runtime.head_routes import Route, head_routes


@dataclass(frozen=True, kw_only=True)
class BlockMessage:
    """Keys and values `[blocks, heads, block_size, head_dim]` to or from the rank `peer`.

    Attributes:
        blocks, heads: `[blocks]` int64 and the heads in this rank's own pool, where they are from or go to.
    """

    peer: int
    layer: int
    blocks: Tensor
    heads: range
    message: Message


class BlockMessages:
    """Makes the messages of one rank. `specs` are those of the whole model."""

    def __init__(self, pool: KvPool, specs: Sequence[AttnSpec], fleet: Fleet, rank: int) -> None:
        self._pool, self._specs, self._fleet = pool, specs, fleet
        self._instance, self._place = fleet.place(rank)

    @property
    def num_layers(self) -> int:
        """Of the model: a MoveKV is at most so many messages from one rank to another."""
        return len(self._specs)

    def part(self, move: MoveKV) -> RankMove:
        """What of a move concerns this rank."""
        leaving: dict[int, list[int]] = {}
        coming: dict[int, list[int]] = {}
        for source, target in move.copies:
            assert source.instance != target.instance, "KV moves from one instance to another"
            if source.instance == self._instance:
                leaving.setdefault(target.instance, []).append(source.block)
            elif target.instance == self._instance:
                coming.setdefault(source.instance, []).append(target.block)
        return RankMove(messages=self, number=move.number, leaving=self._tensors(leaving), coming=self._tensors(coming))

    def outgoing(self, layer: int, target: int, blocks: Tensor) -> Iterator[BlockMessage]:
        """What this rank sends of a layer to an instance, copied from the pool."""
        for route in self._routes(layer, self._instance, target):
            if route.source == self._place:
                made = self._message(layer, self._fleet.ranks(target)[route.target], blocks, route.given)
                self._pool.read_blocks(layer, blocks, made.heads, *made.message.tensors)
                yield made

    def incoming(self, layer: int, source: int, blocks: Tensor) -> Iterator[BlockMessage]:
        """Room for what this rank gets of a layer from an instance."""
        for route in self._routes(layer, source, self._instance):
            if route.target == self._place:
                yield self._message(layer, self._fleet.ranks(source)[route.source], blocks, route.taken)

    def store(self, arrived: BlockMessage) -> None:
        """Writes what has come to the pool."""
        self._pool.write_blocks(arrived.layer, arrived.blocks, arrived.heads, *arrived.message.tensors)

    def _tensors(self, blocks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        device = self._pool.layer(0).keys.device
        return {instance: torch.tensor(own, dtype=torch.int64, device=device) for instance, own in blocks.items()}

    def _routes(self, layer: int, source: int, target: int) -> tuple[Route, ...]:
        spec, tps = self._specs[layer], self._fleet.tps
        return head_routes(spec.num_heads, spec.num_kv_heads, tps[source], tps[target])

    def _message(self, layer: int, peer: int, blocks: Tensor, heads: range) -> BlockMessage:
        keys = self._pool.layer(layer).keys
        shape = (len(blocks), len(heads), *keys.shape[2:])
        message = Message([(shape, keys.dtype)] * 2, keys.device)
        return BlockMessage(peer=peer, layer=layer, blocks=blocks, heads=heads, message=message)


@dataclass(frozen=True, kw_only=True)
class RankMove:
    """A MoveKV on one rank: by the instance at the other end, which of its own blocks go there, or come from there."""

    messages: BlockMessages
    number: int
    leaving: Mapping[int, Tensor]
    coming: Mapping[int, Tensor]

    def outgoing(self, layer: int) -> dict[int, Message]:
        """What this rank sends of a layer, by rank."""
        made = (self.messages.outgoing(layer, target, blocks) for target, blocks in self.leaving.items())
        return {one.peer: one.message for one in itertools.chain.from_iterable(made)}

    def incoming(self, layer: int) -> list[BlockMessage]:
        """Room for what this rank gets of a layer."""
        made = (self.messages.incoming(layer, source, blocks) for source, blocks in self.coming.items())
        return list(itertools.chain.from_iterable(made))
