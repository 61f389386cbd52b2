"""Pass-Q: queries visit the keys, partial outputs come back and are merged (Context Parallelism §3.5.3, Algorithm 3).

Made for decode, where one query costs far less to move than the keys it meets. Each query goes to the members that hold
keys of its request at once instead of hop by hop: the same bytes as around the ring, but the latency of one hop, and no
padding of the batch. While queries travel, every member computes on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.backends import Partial, merge_each, nothing_seen
from longspan.attn.comm import Message
from longspan.attn.exchanges import Call, register
from longspan.attn.member import attend_held, num_tokens
from longspan.core.exchange import RING_Q


def ring_q(call: Call) -> None:
    group, parts, q, window = call.group, call.parts, call.q, call.spec.window
    me, others = group.rank, group.others
    mine = {holder: parts.visits(me, holder, window) for holder in range(group.size)}
    theirs = {asker: parts.visits(asker, me, window) for asker in others}
    questions = {holder: _question_room(call, mine[holder], me) for holder in others}
    for holder, message in questions.items():
        if mine[holder]:
            torch.cat([q[:, parts[index].rows] for index in mine[holder]], dim=1, out=message.tensors[0])
    asked = {asker: _question_room(call, theirs[asker], asker) for asker in others}
    pending = group.start(sends=questions, receives=asked, hop=0)
    found = []
    if mine[me]:
        found.append((mine[me], _meet(call, mine[me], q[:, parts.rows(mine[me], q.device)], me)))
    pending.wait()
    answers = {asker: _answer_room(call, theirs[asker], asker) for asker in others}
    for asker in others:
        if theirs[asker]:
            meeting = _meet(call, theirs[asker], asked[asker].tensors[0], asker)
            for room, tensor in zip(answers[asker].tensors, reversed(meeting), strict=True):
                room.copy_(tensor)
    answered = {holder: _answer_room(call, mine[holder], me) for holder in others}
    group.start(sends=answers, receives=answered, hop=1).wait()
    for holder in others:
        if mine[holder]:
            lse, partial = answered[holder].tensors
            found.append((mine[holder], (partial, lse)))
    _write(call, found)


def _write(call: Call, found: Sequence[tuple[tuple[int, ...], Partial]]) -> None:
    """Merges partial results into the queries' rows. Each is of the parts that one holder attended."""
    if not found:
        return
    parts, q = call.parts, call.q
    asking = tuple(index for index, part in enumerate(parts) if part.q_runs[call.group.rank])
    rows = parts.rows(asking, q.device)
    partials = []
    for indices, partial in found:
        if indices != asking:
            out, lse = nothing_seen(q)
            met = parts.rows(indices, q.device)
            out[:, met], lse[:, met] = partial
            partials.append((out[:, rows], lse[:, rows]))
        else:
            partials.append(partial)
    call.out[:, rows] = merge_each(partials)[0].to(q.dtype)


def _meet(call: Call, indices: tuple[int, ...], q: Tensor, asker: int) -> Partial:
    """Attends the queries of `asker` in these parts to this member's keys."""
    parts, kv, spec, me = call.parts, call.kv, call.spec, call.group.rank
    counts = [num_tokens(parts[index].q_runs[asker]) for index in indices]
    if max(counts) == 1:
        return parts.backend.attend_paged(q, kv, parts.plan(indices, asker, me, kv, spec.window), spec)
    queries = q.split(counts, dim=1)
    partials = [
        attend_held(parts.backend, parts[index], rows, asker, me, kv, spec)
        for index, rows in zip(indices, queries, strict=True)
    ]
    return torch.cat([out for out, _ in partials], dim=1), torch.cat([lse for _, lse in partials], dim=1)


def _question_room(call: Call, indices: Sequence[int], asker: int) -> Message:
    """Allocates a message for the queries of `asker` in these parts, one after the other."""
    return Message.room([(*_rows_shape(call, indices, asker), call.spec.head_dim)], call.q)


def _answer_room(call: Call, indices: Sequence[int], asker: int) -> Message:
    """Allocates a message for the log-sum-exps and the outputs of these queries."""
    shape = _rows_shape(call, indices, asker)
    return Message([(shape, torch.float32), ((*shape, call.spec.head_dim), call.q.dtype)], call.q.device)


def _rows_shape(call: Call, indices: Sequence[int], asker: int) -> tuple[int, int]:
    return call.spec.num_heads, sum(num_tokens(call.parts[index].q_runs[asker]) for index in indices)


register(RING_Q, ring_q)
