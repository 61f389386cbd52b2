"""Pass-Q: queries visit the keys, partial outputs come back and are merged (Context Parallelism §3.5.3, Algorithm 3).

Made for decode, where one query costs far less to move than the keys it meets. Each query goes to the members that hold
keys of its request at once instead of hop by hop: the same bytes as around the ring, but the latency of one hop, and no
padding of the batch. While queries travel, every member computes on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.backends import Partial
from longspan.attn.comm import Group, Message
from longspan.attn.exchanges import from_pool, register
from longspan.attn.member import MemberParts, attend_held, num_tokens
from longspan.attn.merge import merge_each
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import RING_Q


def ring_q(group: Group, parts: MemberParts, q: Tensor, kv: PagedKv, spec: AttnSpec, out: Tensor) -> None:
    """Computes attention of several requests at once; `ring_kv` says what the arguments are."""
    me, window = group.rank, spec.window
    others = [member for member in range(group.size) if member != me]
    mine = {holder: parts.visits(me, holder, window) for holder in range(group.size)}
    theirs = {asker: parts.visits(asker, me, window) for asker in others}
    questions = {holder: _questions(parts, mine[holder], me, q, spec, fill=True) for holder in others}
    asked = {asker: _questions(parts, theirs[asker], asker, q, spec, fill=False) for asker in others}
    pending = group.start(sends=questions, receives=asked, hop=0)
    found = _Found(parts, me, q)
    if mine[me]:
        found.add(mine[me], _meet(parts, mine[me], q[:, found.rows(mine[me])], kv, spec, asker=me, me=me))
    pending.wait()
    answers = {asker: _room(parts, theirs[asker], asker, q, spec) for asker in others}
    for asker in others:
        if theirs[asker]:
            meeting = _meet(parts, theirs[asker], asked[asker].tensors[0], kv, spec, asker=asker, me=me)
            for room, tensor in zip(answers[asker].tensors, reversed(meeting), strict=True):
                room.copy_(tensor)
    answered = {holder: _room(parts, mine[holder], me, q, spec) for holder in others}
    group.start(sends=answers, receives=answered, hop=1).wait()
    for holder in others:
        if mine[holder]:
            lse, partial = answered[holder].tensors
            found.add(mine[holder], (partial, lse))
    found.write(out)


class _Found:
    """Partial results of this member's queries, which may lack those that a holder did not meet."""

    def __init__(self, parts: MemberParts, rank: int, q: Tensor) -> None:
        self._parts, self._q = parts, q
        self._all = tuple(index for index, part in enumerate(parts) if part.q_runs[rank])
        self._sum: Partial | None = None

    def rows(self, indices: Sequence[int]) -> slice | Tensor:
        """Finds the queries of these parts."""
        return self._parts.rows(tuple(indices), self._q.device)

    def add(self, indices: tuple[int, ...], partial: Partial) -> None:
        """Takes in the results of all queries of these parts."""
        if indices != self._all:
            out, lse = torch.zeros_like(self._q), torch.full(self._q.shape[:2], -torch.inf, device=self._q.device)
            rows = self.rows(indices)
            out[:, rows], lse[:, rows] = partial
            partial = out[:, self.rows(self._all)], lse[:, self.rows(self._all)]
        self._sum = partial if self._sum is None else merge_each([self._sum, partial])

    def write(self, out: Tensor) -> None:
        """Merges all results into the queries' rows."""
        if self._sum is not None:
            out[:, self.rows(self._all)] = self._sum[0].to(out.dtype)


def _meet(
    parts: MemberParts, indices: tuple[int, ...], q: Tensor, kv: PagedKv, spec: AttnSpec, *, asker: int, me: int
) -> Partial:
    """Computes the queries of `asker` in these parts over this member's keys."""
    counts = [num_tokens(parts[index].q_runs[asker]) for index in indices]
    if max(counts) == 1:
        return parts.backend.attend_paged(q, kv, parts.plan(indices, asker, me, kv, spec.window), spec)
    queries = q.split(counts, dim=1)
    partials = [
        attend_held(parts.backend, parts[index], rows, asker, me, kv, spec)
        for index, rows in zip(indices, queries, strict=True)
    ]
    return torch.cat([out for out, _ in partials], dim=1), torch.cat([lse for _, lse in partials], dim=1)


def _questions(
    parts: MemberParts, indices: Sequence[int], asker: int, q: Tensor, spec: AttnSpec, *, fill: bool
) -> Message:
    """Packs the queries of `asker` in these parts, one after the other."""
    tokens = sum(num_tokens(parts[index].q_runs[asker]) for index in indices)
    message = Message([((spec.num_heads, tokens, spec.head_dim), q.dtype)], q.device)
    if fill and tokens:
        torch.cat([q[:, parts[index].rows] for index in indices], dim=1, out=message.tensors[0])
    return message


def _room(parts: MemberParts, indices: Sequence[int], asker: int, q: Tensor, spec: AttnSpec) -> Message:
    """Makes room for the log-sum-exps and the outputs of the queries of `asker` in these parts."""
    tokens = sum(num_tokens(parts[index].q_runs[asker]) for index in indices)
    shape = (spec.num_heads, tokens)
    return Message([(shape, torch.float32), ((*shape, spec.head_dim), q.dtype)], q.device)


register(RING_Q, from_pool(ring_q))
