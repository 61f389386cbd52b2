"""SP-TP: hidden states are gathered, each member computes its heads for all tokens, outputs are summed and scattered
(CSPS §3.2.1, also Megatron's sequence parallelism).

Keys and values are computed by the member that has their head, but stored by the member that has their token. New ones
are sent there, and cached ones are sent back to be read, so pools have the same contents as after any other exchange.
Callers compute the layer's projections and call `gather`, `attend` and `scatter` in this order, also without tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longspan.attn.collectives import gather_rows, reduce_scatter
from longspan.attn.comm import Group, Message, gather_hops
from longspan.attn.gathered import GatheredPart, attend_gathered
from longspan.attn.member import MemberParts, gather_runs
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.runs import num_tokens
from longspan.core.splits import split_heads


class GatherHidden:
    """The exchange of one layer on one member. It has the arguments of a `Call`. The span's KV is not yet stored.

    Gathered tokens are ordered by member, and the tokens of a member by part.

    Attributes:
        share: the heads that this member computes.
        observe: called with the gathered parts of this member's heads, and their spec.
    """

    observe: Callable[[Sequence[GatheredPart], AttnSpec], object] | None = None

    def __init__(self, group: Group, parts: MemberParts, kv: PagedKv, spec: AttnSpec) -> None:
        self._group, self._parts, self._kv, self._spec = group, parts, kv, spec
        self._shares = split_heads(spec.num_heads, spec.num_kv_heads, group.size)
        self.share = self._shares[group.rank]
        lengths = [parts.num_queries(member, tuple(range(len(parts)))) for member in range(group.size)]
        self._counts, self._lengths = [sum(own) for own in lengths], [length for own in lengths for length in own]

    def gather(self, hidden: Tensor) -> Tensor:
        """Gather the hidden states `[all tokens, hidden]` of all members from this member's `[tokens, hidden]`."""
        return gather_rows(self._group, hidden, self._counts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute attention of this member's heads, for all tokens.

        Args:
            q: `[heads of the share, all tokens, head_dim]`.
            k, v: `[KV heads of the share, all tokens, head_dim]`.

        Returns:
            The output, with q's shape, and the keys and values `[all KV heads, tokens, head_dim]` of this member's own
            tokens, for its pool.
        """
        rank, members, peers = self._group.rank, range(self._group.size), self._group.peers
        sends = {peer: self._message(peer, k, v) for peer in peers}
        messages = {peer: self._empty_message(peer, rank, q) for peer in peers}
        self._group.start(sends=sends, receives=messages, hop=gather_hops(self._group.size)).wait()
        messages[rank] = self._message(rank, k, v)
        keys, values = (torch.cat([messages[member].tensors[kind] for member in members]) for kind in (0, 1))
        out = torch.empty_like(q)
        pieces = [tensor.split(self._lengths, dim=1) for tensor in (q, k, v, out)]
        gathered = []
        for index, part in enumerate(self._parts) if self.share.heads else ():
            kv_runs = [*(self._parts.cached(member, self._spec.window)[index] for member in members), *part.q_runs]
            old_k, old_v = ([messages[member].tensors[2 + 2 * index + kind] for member in members] for kind in (0, 1))
            part_q, new_k, new_v, part_out = (split[index :: len(self._parts)] for split in pieces)
            gathered.append(GatheredPart(part.q_runs, part_q, kv_runs, [*old_k, *new_k], [*old_v, *new_v], part_out))
        if gathered:
            self._attend_gathered(gathered, self._spec.of_heads(self.share))
            if self.observe is not None:
                self.observe(gathered, self._spec.of_heads(self.share))
        return out, keys, values

    def _attend_gathered(self, gathered: Sequence[GatheredPart], spec: AttnSpec) -> None:
        for part in gathered:
            attend_gathered(self._parts.backend, part, spec)

    def scatter(self, partial: Tensor) -> Tensor:
        """Return this member's rows `[tokens, hidden]` of the sum over members of their `[all tokens, hidden]`."""
        blocks = partial.split(self._counts)
        return reduce_scatter(self._group, blocks, hop=gather_hops(self._group.size) + 1)

    def _message(self, member: int, k: Tensor, v: Tensor) -> Message:
        """Fill a message for `member`: new keys and values of its tokens, then cached ones of its heads."""
        rank = self._group.rank
        message = self._empty_message(rank, member, k)
        start = sum(self._counts[:member])
        first = self._owned(rank).start - self.share.kv_heads.start
        for target, made in zip(message.tensors, (k, v), strict=False):
            target.copy_(made[first : first + target.shape[0], start : start + self._counts[member]])
        view = self._kv.heads(self._shares[member].kv_heads)
        for index, (part, runs) in enumerate(
            zip(self._parts, self._parts.cached(rank, self._spec.window), strict=True)
        ):
            if self._shares[member].heads:
                k_out, v_out = message.tensors[2 + 2 * index : 4 + 2 * index]
                gather_runs(self._parts.backend, part, runs, rank, view, (k_out, v_out))
        return message

    def _empty_message(self, sender: int, receiver: int, like: Tensor) -> Message:
        dim = self._spec.head_dim
        shapes = [(len(self._owned(sender)), self._counts[receiver], dim)] * 2
        num_heads = len(self._shares[receiver].kv_heads)
        for runs in self._parts.cached(sender, self._spec.window):
            shapes += [(num_heads, num_tokens(runs), dim)] * 2
        return Message.empty(shapes, like)

    def _owned(self, member: int) -> range:
        """Return the KV heads whose keys `member` computes for all: if several members have a head, the first one."""
        heads = self._shares[member].kv_heads
        taken = max((share.kv_heads.stop for share in self._shares[:member] if share.heads), default=0)
        return range(max(heads.start, taken), max(heads.start, taken, heads.stop))
