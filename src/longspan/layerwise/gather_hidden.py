"""SP-TP: hidden states are gathered, each member computes its heads for all tokens, outputs are summed and scattered
(CSPS §3.2.1; Megatron's sequence parallelism).

Keys and values are made by the member that has their head, but kept by the member that has their token: new ones travel
there, cached ones travel back to be read. So the pools look as after any other exchange. Whoever computes the layer's
projections calls the methods of `GatherHidden` in the order `gather`, `attend`, `scatter`, members without tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from longspan.attn.collectives import gather_hops, gather_rows, reduce_scatter
from longspan.attn.comm import Group, Message
from longspan.attn.member import MemberParts, attend_runs, by_position, gather_runs, num_tokens
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.heads import split_heads
from longspan.core.runs import Run, coalesce, row_slices, stretch
from longspan.layerwise.layers import Channel, StepContext


def hidden_hops(size: int) -> int:
    """Counts the hops that one layer numbers in a group of `size` members."""
    return gather_hops(size) + 3


class GatherHidden:
    """The exchange of one layer on one member. The arguments are those of `ring_kv`; the span's KV is not yet stored.

    Gathered tokens are ordered by member, and a member's by part.

    Attributes:
        share: the heads that this member computes.
    """

    def __init__(self, group: Group, parts: MemberParts, kv: PagedKv, spec: AttnSpec) -> None:
        self._group, self._parts, self._kv, self._spec = group, parts, kv, spec
        self._shares = split_heads(spec.num_heads, spec.num_kv_heads, group.size)
        self.share = self._shares[group.rank]

    @cached_property
    def counts(self) -> list[int]:
        """Counts the tokens of each member."""
        return [sum(num_tokens(part.q_runs[member]) for part in self._parts) for member in range(self._group.size)]

    def gather(self, hidden: Tensor) -> Tensor:
        """Gathers all tokens' hidden states `[all tokens, hidden]` from this member's `[tokens, hidden]`."""
        return gather_rows(self._group, hidden, self.counts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes attention of this member's heads, for all tokens.

        Args:
            q: `[heads of the share, all tokens, head_dim]`.
            k, v: `[KV heads of the share, all tokens, head_dim]`.

        Returns:
            The output, of q's shape; and the keys and values `[all KV heads, tokens, head_dim]` of this member's own
            tokens, for its pool.
        """
        me, members = self._group.rank, range(self._group.size)
        leaving = {member: self._message(member, k, v) for member in members if member != me}
        coming = {member: self._room(member, me, q) for member in members if member != me}
        self._group.start(sends=leaving, receives=coming, hop=gather_hops(self._group.size)).wait()
        coming[me] = self._message(me, k, v)
        keys, values = (torch.cat([coming[member].tensors[kind] for member in members]) for kind in (0, 1))
        out = torch.empty_like(q)
        if self.share.heads:
            spec = replace(self._spec, num_heads=len(self.share.heads), num_kv_heads=len(self.share.kv_heads))
            for index in range(len(self._parts)):
                cached = [coming[member].tensors[2 + 2 * index : 4 + 2 * index] for member in members]
                self._attend_part(index, spec, (q, k, v), cached, out)
        return out, keys, values

    def scatter(self, partial: Tensor) -> Tensor:
        """Returns the sum over members `[tokens, hidden]` of their `[all tokens, hidden]`, for this member's tokens."""
        blocks = partial.split(self.counts)
        return reduce_scatter(self._group, blocks, hop=gather_hops(self._group.size) + 1)

    def _attend_part(
        self,
        index: int,
        spec: AttnSpec,
        qkv: tuple[Tensor, Tensor, Tensor],
        cached: Sequence[Sequence[Tensor]],
        out: Tensor,
    ) -> None:
        part, rows = self._parts[index], self._rows(index)
        q, k, v = ([tensor[:, place] for place in rows] for tensor in qkv)
        q_runs = coalesce(run for runs in part.q_runs for run in runs)
        if not q_runs:
            return
        held = [*(self._cached(holder)[index] for holder in range(self._group.size)), *part.q_runs]
        seen = stretch(run for runs in held for run in runs)
        keys = by_position(held, [*(tensors[0] for tensors in cached), *k])
        values = by_position(held, [*(tensors[1] for tensors in cached), *v])
        found, _ = attend_runs(self._parts.backend, by_position(part.q_runs, q), q_runs, keys, values, (seen,), spec)
        for own, own_places in zip(rows, row_slices(part.q_runs), strict=True):
            if own_places:
                out[:, own] = torch.cat([found[:, place] for place in own_places], dim=1)

    def _rows(self, index: int) -> list[slice]:
        """Finds the tokens of a part among all gathered ones, by member."""
        found, start = [], 0
        for member, count in enumerate(self.counts):
            first = start + sum(num_tokens(part.q_runs[member]) for part in [self._parts[i] for i in range(index)])
            found.append(slice(first, first + num_tokens(self._parts[index].q_runs[member])))
            start += count
        return found

    def _message(self, member: int, k: Tensor, v: Tensor) -> Message:
        """Fills a message for `member`: new keys and values of its tokens, then what is cached here of its heads."""
        message = self._room(self._group.rank, member, k)
        start = sum(self.counts[:member])
        first = self._owned(self._group.rank).start - self.share.kv_heads.start
        for room, made in zip(message.tensors, (k, v), strict=False):
            room.copy_(made[first : first + room.shape[0], start : start + self.counts[member]])
        heads = slice(self._shares[member].kv_heads.start, self._shares[member].kv_heads.stop)
        view = PagedKv(keys=self._kv.keys[:, heads], values=self._kv.values[:, heads])
        for index, (part, runs) in enumerate(zip(self._parts, self._cached(self._group.rank), strict=True)):
            if self._shares[member].heads:
                gather_runs(part, runs, self._group.rank, view, *message.tensors[2 + 2 * index : 4 + 2 * index])
        return message

    def _room(self, sender: int, receiver: int, like: Tensor) -> Message:
        dim = self._spec.head_dim
        shapes = [(len(self._owned(sender)), self.counts[receiver], dim)] * 2
        num_heads = len(self._shares[receiver].kv_heads)
        for runs in self._cached(sender):
            shapes += [(num_heads, num_tokens(runs), dim)] * 2
        return Message([(shape, like.dtype) for shape in shapes], like.device)

    def _owned(self, member: int) -> range:
        """Returns the KV heads that `member` makes for all: the first of several that have a head makes it."""
        heads = self._shares[member].kv_heads
        taken = max((share.kv_heads.stop for share in self._shares[:member] if share.heads), default=0)
        return range(max(heads.start, taken), max(heads.start, taken, heads.stop))

    def _cached(self, holder: int) -> list[tuple[Run, ...]]:
        """Returns the runs of `holder` before the span that some query may still see, for each part."""
        return [part.cached(holder, self._spec.window) for part in self._parts]


class HiddenLayers:
    """The `gather_hidden` channels of one step."""

    def __init__(self, context: StepContext, channels: Sequence[Channel]) -> None:
        self._context = context
        self._rotary = {c.number: context.rotary(c, range(len(c.parts[0].q_runs))) for c in channels}

    def begin(self, layer: int) -> None:
        """Implements `LayerwiseExchange`: a layer needs no preparation."""

    def output(self, layer: int, channel: Channel, hidden: Tensor) -> Tensor:
        """Implements `LayerwiseExchange`: gathers, computes this member's heads, and scatters the sums."""
        context = self._context
        group, kv = context.comm.channel(layer, channel), context.pool.layer(layer)
        gathered = GatherHidden(group, channel.parts, kv, context.model.specs[layer])

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context.watch.during("attention"):
                out, keys, values = gathered.attend(q, k, v)
                channel.store(context.pool, layer, keys, values)
                return out

        partial = context.layers[layer].compute(
            gathered.gather(hidden), self._rotary[channel.number], attend, index=channel.rank, size=group.size
        )
        return gathered.scatter(partial)
