"""SP-TP: hidden states are gathered, each member computes its heads for all tokens, outputs are summed and scattered
(CSPS §3.2.1, also Megatron's sequence parallelism).

Keys and values are computed by the member that has their head, but stored by the member that has their token. New ones
are sent there, and cached ones are sent back to be read, so pools have the same contents as after any other exchange.

The tokens are cut into micro-partitions, which are ranges of positions (CSPS §3.2.5, Fig. 9b). All are sent at once. A
member computes the projections and the attention of one while the next ones arrive, and while outputs of earlier ones
are summed. In order of position, every query finds all its keys, so each range is one call of attention. Members
without tokens call `compute`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longspan.attn.collectives import Gathering, ReduceScatter
from longspan.attn.comm import Group, Message, Pending, gather_hops
from longspan.attn.gathered import GatheredPart, attend_gathered
from longspan.attn.member import MemberParts, gather_runs, split_runs
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import Exchange
from longspan.core.runs import Run, SpanShards, clip, num_tokens, stretch
from longspan.core.sparse import MAX_PIECES
from longspan.core.splits import cut_evenly, split_heads

_NORM_HOPS = 4
"""The largest number of norms over all heads in a layer. Each has a hop in each micro-partition."""
MicroPartition = tuple[SpanShards, ...]
"""The runs of every member in one range of positions, for each part."""
AttendPiece = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of this member's heads for the tokens of one micro-partition: `(q, k, v) -> out`, as `Attend`."""
Project = Callable[[int, Tensor, AttendPiece], Tensor]
"""Computes the projections of a micro-partition: `(number, hidden [tokens, hidden], attend) -> partial output`."""


def pieces_of(exchange: Exchange) -> int:
    """Return the number of micro-partitions. With several levels, the largest number counts."""
    sparse = exchange.sparse
    return exchange.micro_partitions if sparse is None else max(sparse.micro_partitions, default=1)


def micro_partitions(parts: MemberParts, number: int) -> list[MicroPartition]:
    """Cut the new tokens of each part into `number` even ranges of positions, the same on all members.

    The tokens of a micro-partition are ordered by member, and the tokens of a member by part. Empty ones are left out.
    """
    return parts.once(("micro-partitions", number), lambda: _cut(parts, number))


def _cut(parts: MemberParts, number: int) -> list[MicroPartition]:
    by_part = []
    for part in parts:
        runs = [run for member_runs in part.q_runs for run in member_runs]
        start, stop = part.span_start or 0, max((run.positions[-1] + 1 for run in runs), default=0)
        ends = [(start + first, start + last) for first, last in cut_evenly(max(0, stop - start), number)]
        by_part.append([tuple(clip(member_runs, *each) for member_runs in part.q_runs) for each in ends])
    return [piece for piece in zip(*by_part, strict=True) if any(any(q_runs) for q_runs in piece)]


class GatherHidden:
    """The exchange of one layer on one member. It has the arguments of a `Call`. The span's KV is not yet stored.

    Attributes:
        share: the heads that this member computes.
        observe: called with the gathered parts of each micro-partition of this member's heads, and their spec.
    """

    observe: Callable[[Sequence[GatheredPart], AttnSpec], object] | None = None

    def __init__(
        self,
        group: Group,
        parts: MemberParts,
        kv: PagedKv,
        spec: AttnSpec,
        *,
        sinks: Tensor | None = None,
        num_pieces: int = 1,
    ) -> None:
        assert spec.has_sinks == (sinks is not None), "exactly the layers with sinks have sinks"
        self._group, self._parts, self._kv, self._spec = group, parts, kv, spec
        self._shares = split_heads(spec.num_heads, spec.num_kv_heads, group.size)
        self.share = self._shares[group.rank]
        self._sinks = None if sinks is None else sinks[self.share.heads.start : self.share.heads.stop]
        self._pieces = micro_partitions(parts, num_pieces)
        self._lengths = [
            [[num_tokens(q_runs[member]) for q_runs in piece] for member in range(group.size)] for piece in self._pieces
        ]
        self._stored: list[tuple[dict[int, Message], Pending]] = []
        self._keys: list[_Keys] = []

    def compute(self, hidden: Tensor, project: Project) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the layer.

        Args:
            hidden: `[tokens, hidden]` of this member.

        Returns:
            This member's rows `[tokens, hidden]` of the sum of all partial outputs. Then the keys and the values
            `[all KV heads, tokens, head_dim]` of its own tokens, for its pool.
        """
        cached, cached_pending = self._start_cached()
        gatherings = [self._gather(number, hidden) for number in range(len(self._pieces))]
        scattered: list[ReduceScatter] = []
        for number, (gathering, blocks) in enumerate(gatherings):
            gathering.wait()
            if not number:
                cached_pending.wait()
                self._keys = self._with_cached(cached)
            gathered = torch.cat([block.tensors[0] for block in blocks])
            output = project(number, gathered, partial(self._attend, number))
            if number + 1 < len(gatherings):  # behind the computation, which hides blocks of other hosts
                gatherings[number + 1][0].pass_on()
            counts = [sum(lengths) for lengths in self._lengths[number]]
            hop = self._hop(number) + gather_hops(self._group.size) + 1
            scattered.append(ReduceScatter(self._group, output.split(counts), hop=hop))
            if number:
                scattered[-2].pass_on()
        for scatter in scattered[-1:]:
            scatter.pass_on()
        self._finish()
        return (self._joined([scatter.wait() for scatter in scattered], hidden, dim=0), *self._own_kv())

    def sum(self, number: int, norm: int, term: Tensor) -> Tensor:
        """Return the sum of all members' terms `[1, tokens, 1]`, for one norm of a micro-partition."""
        group = self._group
        if norm >= _NORM_HOPS:
            raise ValueError(f"a layer has more than {_NORM_HOPS} norms over all heads")
        messages = {peer: Message.empty([term.shape], term) for peer in group.peers}
        hop = self._hop(MAX_PIECES) + number * _NORM_HOPS + norm
        group.start(sends=dict.fromkeys(group.peers, Message.of([term])), receives=messages, hop=hop).wait()
        terms = [messages[member].tensors[0] if member in messages else term for member in range(group.size)]
        return torch.stack(terms).sum(0)

    def _hop(self, number: int) -> int:
        """Return the first hop of a micro-partition: the hops of its all-gather, one of KV, and two of sums."""
        return 1 + number * (gather_hops(self._group.size) + 3)

    def _gather(self, number: int, hidden: Tensor) -> tuple[Gathering, list[Message]]:
        blocks = [Message.empty([(sum(lengths), hidden.shape[1])], hidden) for lengths in self._lengths[number]]
        torch.cat([hidden[rows] for rows in self._own_rows(number)], out=blocks[self._group.rank].tensors[0])
        return Gathering(self._group, blocks, hop=self._hop(number)), blocks

    def _own_rows(self, number: int) -> list[slice]:
        """Return the rows of this member's tokens of a micro-partition, a slice per part."""
        rank, rows, first = self._group.rank, [], 0
        for index in range(len(self._parts)):
            lengths = [lengths[rank][index] for lengths in self._lengths]
            start = first + sum(lengths[:number])
            rows.append(slice(start, start + lengths[number]))
            first += sum(lengths)
        return rows

    def _joined(self, pieces: Sequence[Tensor], like: Tensor, *, dim: int) -> Tensor:
        """Join this member's rows of all micro-partitions, along dimension `dim`, in the order of its tokens."""
        if len(pieces) == 1:
            return pieces[0]
        sizes = list(pieces[0].shape) if pieces else list(like.shape)
        sizes[dim] = sum(piece.shape[dim] for piece in pieces)
        joined = like.new_empty(sizes)
        for number, piece in enumerate(pieces):
            rows, start = self._own_rows(number), 0
            for own in rows:
                length = own.stop - own.start
                joined.narrow(dim, own.start, length).copy_(piece.narrow(dim, start, length))
                start += length
        return joined

    # ---------------------------------------------------------------- attention

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention of this member's heads for a micro-partition, and send its keys and values to the owners.

        Args:
            q: `[heads of the share, tokens, head_dim]`.
            k, v: `[KV heads of the share, tokens, head_dim]`.
        """
        self._store(number, k, v)
        out = torch.empty_like(q)
        lengths = [length for own in self._lengths[number] for length in own]
        split = [tensor.split(lengths, dim=1) for tensor in (q, k, v, out)]
        gathered = []
        for index, q_runs in enumerate(self._pieces[number]) if self.share.heads else ():
            part_q, new_k, new_v, part_out = (pieces[index :: len(self._parts)] for pieces in split)
            keys = self._keys[index]
            keys.add(q_runs, new_k, new_v)
            run, length = (keys.run,), len(keys.run)
            part_k, part_v = [keys.k[:, :length]], [keys.v[:, :length]]
            gathered.append(GatheredPart(q_runs, part_q, [run], part_k, part_v, part_out, self._sinks))
        if gathered:
            spec = self._spec.of_heads(self.share)
            self._attend_gathered(gathered, spec)
            if self.observe is not None:
                self.observe(gathered, spec)
        return out

    def _attend_gathered(self, gathered: Sequence[GatheredPart], spec: AttnSpec) -> None:
        for part in gathered:
            attend_gathered(self._parts.backend, part, spec)

    def _finish(self) -> None:
        """End the layer, after the attention of all micro-partitions."""

    # ---------------------------------------------------------------- cached keys and values

    def _start_cached(self) -> tuple[dict[int, Message], Pending]:
        """Start to send cached keys and values to the members that compute their heads."""
        rank, peers = self._group.rank, self._group.peers
        sends = {peer: self._cached_message(rank, peer) for peer in peers}
        messages = {peer: self._cached_message(peer, rank) for peer in peers}
        pending = self._group.start(sends=sends, receives=messages, hop=0)
        return messages | {rank: self._cached_message(rank, rank)}, pending

    def _cached_message(self, sender: int, receiver: int) -> Message:
        """Allocate a message for cached keys and values. It is filled if this member sends it."""
        cached, kv_heads = self._parts.cached(sender, self._spec.visibility), self._shares[receiver].kv_heads
        shapes = [(len(kv_heads), num_tokens(runs), self._spec.head_dim) for runs in cached for _ in "kv"]
        message = Message.empty(shapes, self._kv.keys)
        if sender == self._group.rank and kv_heads:
            view = self._kv.heads(kv_heads)
            for part, runs, k, v in zip(self._parts, cached, message.tensors[::2], message.tensors[1::2], strict=True):
                gather_runs(self._parts.backend, part, runs, sender, view, (k, v))
        return message

    def _with_cached(self, messages: dict[int, Message]) -> list[_Keys]:
        """Allocate the keys of each part, with the cached ones."""
        all_keys = []
        for index, part in enumerate(self._parts):
            cached = [self._parts.cached(member, self._spec.visibility)[index] for member in range(self._group.size)]
            runs = [run for shards in (cached, part.q_runs) for member_runs in shards for run in member_runs]
            whole = stretch(runs) if runs else Run(0, 0)
            shape = (len(self.share.kv_heads), len(whole), self._spec.head_dim)
            keys = _Keys(whole.start, part.span_start or whole.start, *self._kv.keys.new_empty(2, *shape))
            for kind, target in enumerate((keys.k, keys.v)):
                _place(target, whole.start, cached, [messages[m].tensors[2 * index + kind] for m in sorted(messages)])
            all_keys.append(keys)
        return all_keys

    # ---------------------------------------------------------------- new keys and values

    def _store(self, number: int, k: Tensor, v: Tensor) -> None:
        """Send the keys and values of a micro-partition to the members that have their tokens."""
        rank, peers = self._group.rank, self._group.peers
        messages = {peer: self._new_message(number, peer, rank) for peer in peers}
        messages[rank] = self._filled(number, rank, k, v)
        sends = {peer: self._filled(number, peer, k, v) for peer in peers}
        receives = {peer: messages[peer] for peer in peers}
        hop = self._hop(number) + gather_hops(self._group.size)
        self._stored.append((messages, self._group.start(sends=sends, receives=receives, hop=hop)))

    def _filled(self, number: int, receiver: int, k: Tensor, v: Tensor) -> Message:
        message = self._new_message(number, self._group.rank, receiver)
        start = sum(map(sum, self._lengths[number][:receiver]))
        first = self._owned(self._group.rank).start - self.share.kv_heads.start
        for target, made in zip(message.tensors, (k, v), strict=True):
            target.copy_(made[first : first + target.shape[0], start : start + target.shape[1]])
        return message

    def _new_message(self, number: int, sender: int, receiver: int) -> Message:
        shape = len(self._owned(sender)), sum(self._lengths[number][receiver]), self._spec.head_dim
        return Message.empty([shape] * 2, self._kv.keys)

    def _own_kv(self) -> tuple[Tensor, Tensor]:
        """Wait for the keys and values of this member's own tokens."""
        for _, pending in self._stored:
            pending.wait()
        empty = self._kv.keys.new_empty(self._spec.num_kv_heads, 0, self._spec.head_dim)
        members = range(self._group.size)
        keys, values = (
            self._joined(
                [torch.cat([made[m].tensors[kind] for m in members]) for made, _ in self._stored], empty, dim=1
            )
            for kind in (0, 1)
        )
        return keys, values

    def _owned(self, member: int) -> range:
        """Return the KV heads whose keys `member` computes for all: if several members have a head, the first one."""
        heads = self._shares[member].kv_heads
        taken = max((share.kv_heads.stop for share in self._shares[:member] if share.heads), default=0)
        return range(max(heads.start, taken), max(heads.start, taken, heads.stop))


@dataclass
class _Keys:
    """Keys and values `[kv_heads, tokens, head_dim]` of a part in order of position.

    Attributes:
        start, stop: the positions that are filled.
    """

    start: int
    stop: int
    k: Tensor
    v: Tensor

    @property
    def run(self) -> Run:
        return Run(self.start, self.stop)

    def add(self, q_runs: SpanShards, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """Add the keys of the next tokens, one tensor per member."""
        _place(self.k, self.start, q_runs, k)
        _place(self.v, self.start, q_runs, v)
        self.stop += sum(map(num_tokens, q_runs))


def _place(
    target: Tensor, first: int, all_runs: SpanShards | Sequence[Sequence[Run]], tensors: Sequence[Tensor]
) -> None:
    """Copy tensors of runs to their positions in `target`, which begins at position `first`."""
    for runs, tensor in zip(all_runs, tensors, strict=True):
        for run, piece in split_runs(tensor, runs):
            target[:, run.start - first : run.stop - first : run.step] = piece
