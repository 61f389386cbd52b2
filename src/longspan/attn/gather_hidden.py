"""SP-TP: hidden states are gathered, each member computes its heads for all tokens, outputs are summed and scattered
(CSPS §3.2.1; Megatron's sequence parallelism).

Keys and values are made by the member that has their head, but kept by the member that has their token: new ones travel
there, cached ones travel back to be read. So the pools look as after any other exchange. Whoever computes the layer's
projections calls the methods of `GatherHidden` in the order `gather`, `attend`, `scatter`, members without tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attn.collectives import gather_hops, gather_rows, reduce_scatter
from longspan.attn.comm import Group, Message
from longspan.attn.member import MemberParts, attend_all, gather_runs
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.cluster import split_heads
from longspan.core.runs import Run, SpanShards, num_tokens


class GatheredPart(NamedTuple):
    """One request after the exchange: tensors of one member's heads, with the tokens of all members.

    Attributes:
        q_runs: the queries of each member.
        q: the queries, one tensor per member.
        held: the runs of the keys, cached ones of each member first, then new ones.
        k, v: keys and values, one tensor per entry of `held`.
        results: where the outputs go, one tensor per member.
    """

    q_runs: SpanShards
    q: Sequence[Tensor]
    held: Sequence[Sequence[Run]]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    results: Sequence[Tensor]


class GatherHidden:
    """The exchange of one layer on one member. The arguments are those of a `Call`; the span's KV is not yet stored.

    Gathered tokens are ordered by member, and a member's by part.

    Attributes:
        share: the heads that this member computes.

    """

    def __init__(self, group: Group, parts: MemberParts, kv: PagedKv, spec: AttnSpec) -> None:
        self._group, self._parts, self._kv, self._spec = group, parts, kv, spec
        self._shares = split_heads(spec.num_heads, spec.num_kv_heads, group.size)
        self.share = self._shares[group.rank]
        lengths = [[num_tokens(part.q_runs[member]) for part in parts] for member in range(group.size)]
        self._counts, self._lengths = [sum(own) for own in lengths], [length for own in lengths for length in own]

    def gather(self, hidden: Tensor) -> Tensor:
        """Gathers all tokens' hidden states `[all tokens, hidden]` from this member's `[tokens, hidden]`."""
        return gather_rows(self._group, hidden, self._counts)

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
        leaving = {member: self._message(member, k, v) for member in self._group.peers}
        coming = {member: self._room(member, me, q) for member in self._group.peers}
        self._group.start(sends=leaving, receives=coming, hop=gather_hops(self._group.size)).wait()
        coming[me] = self._message(me, k, v)
        keys, values = (torch.cat([coming[member].tensors[kind] for member in members]) for kind in (0, 1))
        out = torch.empty_like(q)
        pieces = [tensor.split(self._lengths, dim=1) for tensor in (q, k, v, out)]
        gathered = []
        for index, part in enumerate(self._parts) if self.share.heads else ():
            held = [*(self._cached(holder)[index] for holder in members), *part.q_runs]
            old_k, old_v = ([coming[member].tensors[2 + 2 * index + kind] for member in members] for kind in (0, 1))
            own_q, new_k, new_v, found = (split[index :: len(self._parts)] for split in pieces)
            gathered.append(GatheredPart(part.q_runs, own_q, held, [*old_k, *new_k], [*old_v, *new_v], found))
        if gathered:
            self._attend_gathered(gathered, self._spec.of_heads(self.share))
        return out, keys, values

    def _attend_gathered(self, gathered: Sequence[GatheredPart], spec: AttnSpec) -> None:
        """Computes attention of this member's heads; `spec` describes these heads."""
        for part in gathered:
            attend_all(self._parts.backend, part.q_runs, part.q, part.held, part.k, part.v, spec, part.results)

    def scatter(self, partial: Tensor) -> Tensor:
        """Returns this member's rows `[tokens, hidden]` of the sum over members of their `[all tokens, hidden]`."""
        blocks = partial.split(self._counts)
        return reduce_scatter(self._group, blocks, hop=gather_hops(self._group.size) + 1)

    def _message(self, member: int, k: Tensor, v: Tensor) -> Message:
        """Fills a message for `member`: new keys and values of its tokens, then what is cached here of its heads."""
        message = self._room(self._group.rank, member, k)
        start = sum(self._counts[:member])
        first = self._owned(self._group.rank).start - self.share.kv_heads.start
        for room, made in zip(message.tensors, (k, v), strict=False):
            room.copy_(made[first : first + room.shape[0], start : start + self._counts[member]])
        view = self._kv.heads(self._shares[member].kv_heads)
        for index, (part, runs) in enumerate(zip(self._parts, self._cached(self._group.rank), strict=True)):
            if self._shares[member].heads:
                k_room, v_room = message.tensors[2 + 2 * index : 4 + 2 * index]
                gather_runs(self._parts.backend, part, runs, self._group.rank, view, (k_room, v_room))
        return message

    def _room(self, sender: int, receiver: int, like: Tensor) -> Message:
        dim = self._spec.head_dim
        shapes = [(len(self._owned(sender)), self._counts[receiver], dim)] * 2
        num_heads = len(self._shares[receiver].kv_heads)
        for runs in self._cached(sender):
            shapes += [(num_heads, num_tokens(runs), dim)] * 2
        return Message.empty(shapes, like)

    def _owned(self, member: int) -> range:
        """Returns the KV heads that `member` makes for all: the first of several that have a head makes it."""
        heads = self._shares[member].kv_heads
        taken = max((share.kv_heads.stop for share in self._shares[:member] if share.heads), default=0)
        return range(max(heads.start, taken), max(heads.start, taken, heads.stop))

    def _cached(self, holder: int) -> list[tuple[Run, ...]]:
        """Returns the cached runs of `holder` that some query may see, for each part."""
        return [part.cached(holder, self._spec.window) for part in self._parts]
