"""The routes of KV blocks from rank to rank, by layers and heads, and the messages that carry them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message, Transport
from longspan.core.cluster import Cluster
from longspan.core.splits import split_heads
from longspan.core.steps import Link, MoveKV
from longspan.runtime.pool import KvPool

FIRST_TAG = 2**31 - 2**27
"""Messages of moves have the tags from here to 2**31; those of exchanges have the others."""
_NUM_TAGS = 2**27
_CHUNKS = 64
"""Messages of a layer of a move, from one rank to another, that have tags of their own; fewer are under way."""
_CHUNK_BYTES = 8 * 2**20
"""The largest message, unless a single block is larger."""


class Route(NamedTuple):
    """Heads that one shard of the source sends to one of the target.

    Attributes:
        given, taken: the same heads, as the source and as the target counts its own.
    """

    source: int
    target: int
    given: range
    taken: range


@lru_cache
def head_routes(num_heads: int, num_kv_heads: int, source_tp: int, target_tp: int) -> tuple[Route, ...]:
    """Lists the routes of a layer. A target gets each head once; sources with the same head share its targets
    evenly.
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
    assert heads == list(range(heads[0], heads[-1] + 1)), "a rank has neighbouring heads, or a single one"
    return range(heads[0] - share.start, heads[-1] + 1 - share.start)


@dataclass(frozen=True, kw_only=True)
class BlockSlice:
    """One message: some heads of some blocks of a layer, which go to the rank `peer` or come from there.

    Attributes:
        number: of the move.
        blocks, heads: `[blocks]` int64 and the heads in this rank's own pool, where they are from or go to.
        block_bytes: of these heads of each block.
        chunk: the index of the message among those between these ranks in this layer.
        is_last: whether it is the last of them.
        is_final: whether no later layer of the move goes between these ranks.
        ready: on a CUDA device, when the pool has the blocks.
    """

    number: int
    peer: int
    layer: int
    blocks: Tensor
    heads: range
    block_bytes: int
    chunk: int = 0
    is_last: bool = True
    is_final: bool = False
    ready: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.blocks) * self.block_bytes

    def cut(self, ready: torch.cuda.Event | None = None) -> Iterator[BlockSlice]:
        """Cuts it in order into messages that are not too large."""
        chunks = self.blocks.split(max(1, _CHUNK_BYTES // self.block_bytes))
        for chunk, blocks in enumerate(chunks):
            yield replace(self, blocks=blocks, chunk=chunk, is_last=chunk + 1 == len(chunks), ready=ready)


class RankMove(NamedTuple):
    """A MoveKV on one rank: by the instance at the other end, which of its own blocks go `to` it, or are `of` it."""

    number: int
    to: Mapping[int, Tensor]
    of: Mapping[int, Tensor]


class BlockMessages:
    """Makes the messages of one rank."""

    def __init__(self, pool: KvPool, cluster: Cluster, rank: int) -> None:
        self._pool, self._cluster, self.rank = pool, cluster, rank
        self._instance, self._stage, self._shard = cluster.at(rank)
        self.layers = pool.layers
        self.device = pool.device

    def mark(self) -> torch.cuda.Event | None:
        """Marks the moment at which a CUDA device is done with what it has been given up to now."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def of_rank(self, move: MoveKV) -> RankMove:
        """Picks the blocks of a move that this rank sends or receives."""
        to: dict[int, list[int]] = {}
        of: dict[int, list[int]] = {}
        for source, target in move.copies:
            if source.instance == target.instance:
                continue  # see `copy_own`
            if source.instance == self._instance:
                to.setdefault(target.instance, []).append(source.block)
            elif target.instance == self._instance:
                of.setdefault(source.instance, []).append(target.block)
        return RankMove(move.number, to=self._tensors(to), of=self._tensors(of))

    def copy_own(self, move: MoveKV, start: int) -> None:
        """Copies the block that an admitted request begins in, up to its first new token, at position `start`."""
        for source, target in move.copies:
            if source.instance == self._instance:
                self._pool.copy_block(source.block, target.block, start % self._pool.block_size)

    def leaving(self, move: RankMove, layer: int) -> Iterator[BlockSlice]:
        """Yields what this rank sends of a layer, at most one slice per peer."""
        for target, blocks in move.to.items():
            for route in self._routes(layer, self._instance, target):
                if route.source == self._shard:
                    yield self._slice(move, layer, (target, route.target), blocks, route.given)

    def coming(self, move: RankMove, layer: int) -> Iterator[BlockSlice]:
        """Yields what this rank receives of a layer, at most one slice per peer."""
        for source, blocks in move.of.items():
            for route in self._routes(layer, source, self._instance):
                if route.target == self._shard:
                    yield self._slice(move, layer, (source, route.source), blocks, route.taken)

    def filled(self, leaving: BlockSlice) -> Message:
        made = self.room(leaving)
        self._pool.read_blocks(leaving.layer, leaving.blocks, leaving.heads, made.tensors)
        return made

    def room(self, blocks: BlockSlice) -> Message:
        """Allocate a message with a tensor `[blocks, heads, words]` for each field of the layer."""
        records, shape = self._pool.records, (len(blocks.blocks), len(blocks.heads))
        fields = records.layers[blocks.layer].values()
        return Message([((*shape, field.shape[2]), records.word) for field in fields], self.device)

    def store(self, blocks: BlockSlice, arrived: Message) -> None:
        if arrived.buffer.is_cuda:
            arrived.buffer.record_stream(torch.cuda.current_stream())
        self._pool.write_blocks(blocks.layer, blocks.blocks, blocks.heads, arrived.tensors)

    def group(
        self, transport: Transport, name: str, number: int, layer: int, chunk: int, sent: Counter[tuple[str, Link]]
    ) -> Group:
        """Connects all ranks for one message of a layer of a move, whose only hop is 0. Counts as `name` in `sent`."""
        per_move = len(self._pool.record.layers) * _CHUNKS
        within = layer * _CHUNKS + chunk % _CHUNKS
        tag = FIRST_TAG + number % (_NUM_TAGS // per_move) * per_move + within
        hosts = self._cluster.hosts
        return Group(
            transport, range(len(hosts)), self.rank, hosts=hosts, name=name, tags=range(tag, tag + 1), sent=sent
        )

    def _tensors(self, blocks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        return {inst: torch.tensor(own, dtype=torch.int64, device=self.device) for inst, own in blocks.items()}

    def _routes(self, layer: int, source: int, target: int) -> tuple[Route, ...]:
        record, tp = self._pool.record.layers[layer], self._cluster.tp
        return head_routes(record.num_heads, record.num_kv_heads, tp(source), tp(target))

    def _slice(self, move: RankMove, layer: int, end: tuple[int, int], blocks: Tensor, heads: range) -> BlockSlice:
        """Makes the slice whose other `end` is a shard of an instance, at the stage that has the layer."""
        instance, shard = end
        stage = self._cluster.stage_of(instance, layer)
        return BlockSlice(
            number=move.number,
            peer=self._cluster.rank(instance, stage, shard),
            layer=layer,
            blocks=blocks,
            heads=heads,
            block_bytes=len(heads) * self._pool.record.layers[layer].head_bytes,
            is_final=layer + 1 == min(self.layers[-1] + 1, self._cluster.layers(instance, stage).stop),
        )
