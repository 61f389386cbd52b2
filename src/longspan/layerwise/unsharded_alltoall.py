"""`alltoall` with unsharded weights on one rank of an instance that is split by tensor parallelism, layer by layer.

Each rank of an instance makes the queries, keys and values of all heads for a slice of its tokens. They are swapped
inside the instance, so that each rank has its heads for all of them, as ever; `alltoall` between the instances follows.
Then outputs are swapped back, each rank finishes its slice, and all ranks get all tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from longspan.attn.collectives import gather_rows
from longspan.attn.comm import Group, Message
from longspan.attn.exchanges.alltoall import alltoall
from longspan.attn.member import MemberParts
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import ALLTOALL, WeightSource
from longspan.core.heads import HeadShare, cut_evenly, split_heads
from longspan.layerwise.layers import Channel, StepContext
from longspan.layerwise.unsharded_weights import PeerWeights, UnshardedWeights, Weights
from longspan.model.adapter import Model
from longspan.model.sharding import attention_modules


class Inside:
    """One layer of one rank. All ranks of the instance call `to_heads`, `to_tokens` and `gather`, in this order.

    Args:
        group: the ranks of the instance.
        spec: of the whole layer.
        num_tokens: of the instance.
    """

    def __init__(self, group: Group, spec: AttnSpec, num_tokens: int) -> None:
        self._group, self._spec = group, spec
        self._shares = split_heads(spec.num_heads, spec.num_kv_heads, group.size)
        self._slices = [slice(first, last) for first, last in cut_evenly(num_tokens, group.size)]

    @cached_property
    def counts(self) -> list[int]:
        """Counts the tokens of each rank."""
        return [tokens.stop - tokens.start for tokens in self._slices]

    @property
    def mine(self) -> slice:
        """Finds this rank's tokens."""
        return self._slices[self._group.rank]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Swaps queries, keys and values of all heads for this rank's tokens against those of its heads for all tokens.

        All are `[heads, tokens, head_dim]`.
        """
        me, ranks = self._group.rank, range(self._group.size)
        others = [rank for rank in ranks if rank != me]
        leaving = {rank: self._message(rank, q, k, v) for rank in others}
        coming = {rank: self._room(rank, me, q) for rank in others}
        pending = self._group.start(sends=leaving, receives=coming, hop=0)
        coming[me] = self._message(me, q, k, v)
        pending.wait()
        queries, keys, values = (torch.cat([coming[rank].tensors[kind] for rank in ranks], dim=1) for kind in range(3))
        return queries, keys, values

    def to_tokens(self, out: Tensor) -> Tensor:
        """Swaps outputs of this rank's heads for all tokens against `[all heads, this rank's tokens, head_dim]`."""
        me, ranks = self._group.rank, range(self._group.size)
        others = [rank for rank in ranks if rank != me]
        leaving = {rank: self._results(me, rank, out) for rank in others}
        for rank, message in leaving.items():
            message.tensors[0].copy_(out[:, self._slices[rank]])
        coming = {rank: self._results(rank, me, out) for rank in others}
        self._group.start(sends=leaving, receives=coming, hop=1).wait()
        return torch.cat([out[:, self.mine] if rank == me else coming[rank].tensors[0] for rank in ranks])

    def gather(self, rows: Tensor) -> Tensor:
        """Gathers what every rank made of its tokens, `[tokens, width]`."""
        return gather_rows(self._group, rows, self.counts, hop=2)

    def _message(self, receiver: int, q: Tensor, k: Tensor, v: Tensor) -> Message:
        message = self._room(self._group.rank, receiver, q)
        for room, made, heads in zip(message.tensors, (q, k, v), _kinds(self._shares[receiver]), strict=True):
            room.copy_(made[heads.start : heads.stop])
        return message

    def _room(self, sender: int, receiver: int, like: Tensor) -> Message:
        kinds = _kinds(self._shares[receiver])
        shapes = [(len(heads), self.counts[sender], self._spec.head_dim) for heads in kinds]
        return Message([(shape, like.dtype) for shape in shapes], like.device)

    def _results(self, sender: int, receiver: int, like: Tensor) -> Message:
        shape = (len(self._shares[sender].heads), self.counts[receiver], self._spec.head_dim)
        return Message([(shape, like.dtype)], like.device)


def _kinds(share: HeadShare) -> tuple[range, range, range]:
    """Returns the heads of its queries, keys and values."""
    return share.heads, share.kv_heads, share.kv_heads


class UnshardedLayers:
    """The channels of one step that need unsharded weights. All ranks of an instance call it alike."""

    def __init__(self, context: StepContext, channels: Sequence[Channel]) -> None:
        self._context = context
        self._parts = {c.number: _from_zero(c.parts) for c in channels}
        self._rotary = {c.number: context.rotary(c, [c.rank]) for c in channels if c.num_tokens}
        used = dict.fromkeys(c.exchange.weights for c in channels if c.num_tokens)
        self._sources = {source: self._fetch(source) for source in used}
        self._weights: dict[WeightSource | None, Weights] = {}
        self._start(0)

    def begin(self, layer: int) -> None:
        """Implements `LayerwiseExchange`: waits for the weights of a layer, and sends for those of the next."""
        self._weights = {source: fetched.take(layer) for source, fetched in self._sources.items()}
        self._start(layer + 1)

    def output(self, layer: int, channel: Channel, hidden: Tensor) -> Tensor:
        """Implements `LayerwiseExchange` on the slice of the tokens that this rank computes."""
        context = self._context
        model, pool, comm = context.model, context.pool, context.comm
        spec = model.info.specs[layer]
        inside = Inside(comm.inside(ALLTOALL.kind), spec, len(hidden))
        mine = hidden[inside.mine]

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context.watch.during("attention"):
                q, k, v = inside.to_heads(q, k, v)
                channel.store(pool, layer, k, v)
                out = torch.empty_like(q)
                group, parts = comm.channel(layer, channel), self._parts[channel.number]
                alltoall(group, parts, q, pool.layer(layer), model.specs[layer], out)
                return inside.to_tokens(out)

        if not len(mine):  # the module cannot run on none
            attend(layer, *_nothing(spec, hidden))
            return inside.gather(mine)
        rotary = self._rotary[channel.number]
        own = rotary[0][:, inside.mine], rotary[1][:, inside.mine]
        weights = self._weights[channel.exchange.weights]
        with _without_sums(model):
            made = context.layers[layer].compute_with(weights, spec, mine, own, attend)
        return inside.gather(made)

    def _fetch(self, source: WeightSource | None) -> UnshardedWeights:
        context = self._context
        if source == "host":
            return context.host_weights
        shares = [dict(module.named_parameters()) for module in attention_modules(context.model.module)]
        return PeerWeights(shares, context.model.shard, partial(context.comm.inside, "weights"))

    def _start(self, layer: int) -> None:
        if layer < self._context.model.info.num_layers:
            for source in self._sources.values():
                source.start(layer)


@contextmanager
def _without_sums(model: Model) -> Iterator[None]:
    """Outputs of unsharded weights are complete: for a while, nothing is summed over the ranks of the instance."""
    before, model.reduce = model.reduce, lambda complete: complete
    try:
        yield
    finally:
        model.reduce = before


def _from_zero(parts: MemberParts) -> MemberParts:
    """Returns the parts with rows that count from the first of them, which follow each other."""
    first = parts[0].rows.start
    moved = [replace(part, rows=slice(part.rows.start - first, part.rows.stop - first)) for part in parts]
    return MemberParts(moved, parts.backend)


def _nothing(spec: AttnSpec, like: Tensor) -> Sequence[Tensor]:
    """Makes queries, keys and values of no token."""
    return [like.new_empty(heads, 0, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
