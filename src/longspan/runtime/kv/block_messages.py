"""Messages of whole KV blocks: a layer of one `MoveKV`, from one rank to another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from longspan.attn.comm import Message
from longspan.attn.spec import AttnSpec
from longspan.core.cluster import Cluster
from longspan.core.heads import split_heads
from longspan.core.steps import MoveKV
from longspan.runtime.kv.pool import KvPool


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Heads that one rank of the source sends to one of the target, both named by their shards.

    Attributes:
        given, taken: the same heads, as the source and as the target counts its own.
    """

    source: int
    target: int
    given: range
    taken: range


@lru_cache
def head_routes(num_heads: int, num_kv_heads: int, source_tp: int, target_tp: int) -> tuple[Route, ...]:
    """Lists the routes of a layer. A target gets each head once; sources with the same head share its targets evenly.

    Raises:
        ValueError: see `split_heads`.
    """
    has = [share.kv_heads for share in split_heads(num_heads, num_kv_heads, source_tp)]
    needs = [share.kv_heads for share in split_heads(num_heads, num_kv_heads, target_tp)]
    sent: dict[tuple[int, int], list[int]] = {}
    for head in range(num_kv_heads):
        givers = [shard for shard, heads in enumerate(has) if head in heads]
        takers = [shard for shard, heads in enumerate(needs) if head in heads]
        for index, taker in enumerate(takers):
            sent.setdefault((givers[index * len(givers) // len(takers)], taker), []).append(head)
    return tuple(
        Route(source=source, target=target, given=_within(has[source], heads), taken=_within(needs[target], heads))
        for (source, target), heads in sent.items()
    )


def _within(share: range, heads: list[int]) -> range:
    """Counts neighbouring heads from the first of a share."""
    assert heads == list(range(heads[0], heads[-1] + 1)), "a rank has neighbouring heads, or a single one"
    return range(heads[0] - share.start, heads[-1] + 1 - share.start)


@dataclass(frozen=True, kw_only=True)
class BlockSlice:
    """Some heads of some blocks of a layer, which go to the rank `peer` or come from there.

    Attributes:
        blocks, heads: `[blocks]` int64 and the heads in this rank's own pool, where they are from or go to.
        block_bytes: of each block, keys and values.
    """

    peer: int
    layer: int
    blocks: Tensor
    heads: range
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """Sums keys and values of all blocks."""
        return len(self.blocks) * self.block_bytes

    def cut(self, most_bytes: int) -> list[BlockSlice]:
        """Cuts it in order into chunks of so many bytes, or of one block."""
        num_blocks = max(1, most_bytes // self.block_bytes)
        return [replace(self, blocks=blocks) for blocks in self.blocks.split(num_blocks)]


class BlockMessages:
    """Makes the messages of one rank. `specs` are those of the whole model."""

    def __init__(self, pool: KvPool, specs: Sequence[AttnSpec], cluster: Cluster, rank: int) -> None:
        self._pool, self._specs, self._cluster = pool, specs, cluster
        self._instance, _, self._shard = cluster.at(rank)

    @property
    def num_layers(self) -> int:
        """Counts the layers of the whole model."""
        return len(self._specs)

    @property
    def device(self) -> torch.device:
        """Returns the device of the pool."""
        return self._pool.layer(0).keys.device

    def part(self, move: MoveKV) -> RankMove:
        """Picks the blocks of a move that this rank sends or receives."""
        to: dict[int, list[int]] = {}
        of: dict[int, list[int]] = {}
        for source, target in move.copies:
            assert source.instance != target.instance, "KV moves from one instance to another"
            if source.instance == self._instance:
                to.setdefault(target.instance, []).append(source.block)
            elif target.instance == self._instance:
                of.setdefault(source.instance, []).append(target.block)
        return RankMove(messages=self, number=move.number, to=self._tensors(to), of=self._tensors(of))

    def leaving(self, layer: int, target: int, blocks: Tensor) -> Iterator[BlockSlice]:
        """Yields the messages of a layer from this rank to an instance."""
        for route in self._routes(layer, self._instance, target):
            if route.source == self._shard:
                yield self._slice(layer, self._cluster.rank(target, shard=route.target), blocks, route.given)

    def coming(self, layer: int, source: int, blocks: Tensor) -> Iterator[BlockSlice]:
        """Yields the messages of a layer to this rank from an instance."""
        for route in self._routes(layer, source, self._instance):
            if route.target == self._shard:
                yield self._slice(layer, self._cluster.rank(source, shard=route.source), blocks, route.taken)

    def filled(self, leaving: BlockSlice) -> Message:
        """Makes a message and copies the blocks from the pool to it."""
        made = self.room(leaving)
        self._pool.read_blocks(leaving.layer, leaving.blocks, leaving.heads, *made.tensors)
        return made

    def room(self, blocks: BlockSlice) -> Message:
        """Makes an empty message for keys and values `[blocks, heads, block_size, head_dim]`."""
        keys = self._pool.layer(blocks.layer).keys
        shape = (len(blocks.blocks), len(blocks.heads), *keys.shape[2:])
        return Message([(shape, keys.dtype)] * 2, keys.device)

    def store(self, blocks: BlockSlice, arrived: Message) -> None:
        """Writes the blocks of a message that has come to the pool."""
        if arrived.buffer.is_cuda:
            arrived.buffer.record_stream(torch.cuda.current_stream())
        self._pool.write_blocks(blocks.layer, blocks.blocks, blocks.heads, *arrived.tensors)

    def _tensors(self, blocks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        return {inst: torch.tensor(own, dtype=torch.int64, device=self.device) for inst, own in blocks.items()}

    def _routes(self, layer: int, source: int, target: int) -> tuple[Route, ...]:
        spec, tp = self._specs[layer], self._cluster.tp
        return head_routes(spec.num_heads, spec.num_kv_heads, tp(source), tp(target))

    def _slice(self, layer: int, peer: int, blocks: Tensor, heads: range) -> BlockSlice:
        keys = self._pool.layer(layer).keys
        block_bytes = 2 * len(heads) * math.prod(keys.shape[2:]) * keys.itemsize
        return BlockSlice(peer=peer, layer=layer, blocks=blocks, heads=heads, block_bytes=block_bytes)


@dataclass(frozen=True, kw_only=True)
class RankMove:
    """A MoveKV on one rank: by the instance at the other end, which of its own blocks go `to` it, or are `of` it."""

    messages: BlockMessages
    number: int
    to: Mapping[int, Tensor]
    of: Mapping[int, Tensor]

    @property
    def is_source(self) -> bool:
        """Tells whether its instance sends any of it."""
        return bool(self.to)

    def leaving(self, layer: int) -> Iterator[BlockSlice]:
        """Yields this rank's messages of a layer, at most one per peer."""
        for target, blocks in self.to.items():
            yield from self.messages.leaving(layer, target, blocks)

    def coming(self, layer: int) -> Iterator[BlockSlice]:
        """Yields the messages of a layer to this rank, at most one per peer."""
        for source, blocks in self.of.items():
            yield from self.messages.coming(layer, source, blocks)
