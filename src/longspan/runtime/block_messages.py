"""Routes of KV blocks between ranks, by layers and heads, and the messages that carry the blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message, Transport
from longspan.attn.paged_splits import copied
from longspan.core.cluster import Cluster
from longspan.core.splits import split_heads
from longspan.core.steps import Link, MoveKV
from longspan.runtime.pool import KvPool
from longspan.runtime.step_comm import FIRST_MOVE_TAG

_NUM_TAGS = 2**31 - FIRST_MOVE_TAG
_CHUNKS = 64
"""Distinct tags per layer, move and pair of ranks. Fewer messages are in flight, so a tag is free when reused."""
_CHUNK_BYTES = 8 * 2**20
"""Maximum size of a message, unless a single block is larger."""


class Route(NamedTuple):
    """Heads that one shard of the source sends to one shard of the target.

    Attributes:
        source_heads, target_heads: the same heads, numbered within the source's and the target's own heads.
    """

    source: int
    target: int
    source_heads: range
    target_heads: range


@lru_cache
def head_routes(num_heads: int, num_kv_heads: int, source_tp: int, target_tp: int) -> tuple[Route, ...]:
    """Return the routes of a layer. Each target gets each head once. Sources with equal heads share the targets."""
    source_shares = [share.kv_heads for share in split_heads(num_heads, num_kv_heads, source_tp)]
    target_shares = [share.kv_heads for share in split_heads(num_heads, num_kv_heads, target_tp)]
    sent: dict[tuple[int, int], list[int]] = {}
    for head in range(num_kv_heads):
        sources = [shard for shard, heads in enumerate(source_shares) if head in heads]
        targets = [shard for shard, heads in enumerate(target_shares) if head in heads]
        for index, target in enumerate(targets):
            sent.setdefault((sources[index * len(sources) // len(targets)], target), []).append(head)
    return tuple(
        Route(source, target, _within(source_shares[source], heads), _within(target_shares[target], heads))
        for (source, target), heads in sent.items()
    )


def _within(share: range, heads: list[int]) -> range:
    assert heads == list(range(heads[0], heads[-1] + 1)), "the heads of a rank are contiguous"
    return range(heads[0] - share.start, heads[-1] + 1 - share.start)


@dataclass(frozen=True, kw_only=True)
class BlockSlice:
    """One message: some heads of some blocks of a layer, sent to or received from the rank `peer`.

    Attributes:
        number: of the move.
        blocks, heads: `[blocks]` int64 and the heads, both numbered within this rank's own pool.
        block_bytes: of these heads of each block.
        chunk: the index of the message among all messages between these ranks in this layer.
        is_last: whether it is the last chunk of its layer.
        is_final: whether no later layer of the move is sent between these ranks.
        ready: event that marks the blocks as complete in the pool. Only on CUDA devices.
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
        """Split into messages of at most `_CHUNK_BYTES`, in order."""
        chunks = self.blocks.split(max(1, _CHUNK_BYTES // self.block_bytes))
        for chunk, blocks in enumerate(chunks):
            yield replace(self, blocks=blocks, chunk=chunk, is_last=chunk + 1 == len(chunks), ready=ready)


class RankMove(NamedTuple):
    """A MoveKV on one rank: this rank's own blocks, by the instance that they are sent to or received from."""

    number: int
    sent_to: Mapping[int, Tensor]
    received_from: Mapping[int, Tensor]


class BlockMessages:
    """Create, fill and store the KV messages of one rank."""

    def __init__(self, pool: KvPool, cluster: Cluster, rank: int) -> None:
        self._pool, self._cluster, self.rank = pool, cluster, rank
        self.instance, self._stage, self._shard = cluster.at(rank)
        self.layers = pool.layers
        self.device = pool.device

    def mark(self) -> torch.cuda.Event | None:
        """Record an event after all work submitted to the CUDA device so far. None on CPUs."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def of_rank(self, move: MoveKV) -> RankMove:
        """Select the blocks of a move that this rank sends or receives."""
        sent_to: dict[int, list[int]] = {}
        received_from: dict[int, list[int]] = {}
        for source, target in move.copies:
            if source.instance == target.instance:
                continue  # the worker copies it
            if source.instance == self.instance:
                sent_to.setdefault(target.instance, []).append(source.block)
            elif target.instance == self.instance:
                received_from.setdefault(source.instance, []).append(target.block)
        return RankMove(move.number, self._tensors(sent_to), self._tensors(received_from))

    def slices_to_send(self, move: RankMove, layer: int) -> Iterator[BlockSlice]:
        """Yield the slices of a layer that this rank sends, at most one per peer."""
        for target, blocks in move.sent_to.items():
            for route in self._routes(layer, self.instance, target):
                if route.source == self._shard:
                    yield self._slice(move, layer, (target, route.target), blocks, route.source_heads)

    def slices_to_receive(self, move: RankMove, layer: int) -> Iterator[BlockSlice]:
        """Yield the slices of a layer that this rank receives, at most one per peer."""
        for source, blocks in move.received_from.items():
            for route in self._routes(layer, source, self.instance):
                if route.target == self._shard:
                    yield self._slice(move, layer, (source, route.source), blocks, route.target_heads)

    def filled(self, blocks: BlockSlice) -> Message:
        message = self.allocate(blocks)
        self._pool.read_blocks(blocks.layer, blocks.blocks, blocks.heads, message.tensors)
        return message

    def allocate(self, blocks: BlockSlice) -> Message:
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
        """Return the group of all ranks for one message, whose only hop is 0. Counts its bytes as `name` in `sent`."""
        per_move = len(self._pool.record.layers) * _CHUNKS
        within = layer * _CHUNKS + chunk % _CHUNKS
        tag = FIRST_MOVE_TAG + number % (_NUM_TAGS // per_move) * per_move + within
        hosts = self._cluster.hosts
        return Group(
            transport, range(len(hosts)), self.rank, hosts=hosts, name=name, tags=range(tag, tag + 1), sent=sent
        )

    def _tensors(self, blocks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        return {i: copied(numbers, torch.int64, self.device) for i, numbers in blocks.items()}

    def _routes(self, layer: int, source: int, target: int) -> tuple[Route, ...]:
        record, tp = self._pool.record.layers[layer], self._cluster.tp
        return head_routes(record.num_heads, record.num_kv_heads, tp(source), tp(target))

    def _slice(self, move: RankMove, layer: int, end: tuple[int, int], blocks: Tensor, heads: range) -> BlockSlice:
        """Build the slice whose other `end` is an (instance, shard), at the stage with the layer."""
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
