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
from longspan.attn.exchanges import Call, register_attention
from longspan.attn.member import attend_held
from longspan.core.exchange import RING_Q
from longspan.core.runs import num_tokens


def ring_q(call: Call) -> None:
    group, parts, q, host = call.group, call.parts, call.q, call.host
    me, others = group.rank, group.peers
    to_ask = {holder: _visits(call, me, holder) for holder in range(group.size)}
    to_answer = {asker: _visits(call, asker, me) for asker in others}

    out_queries = {holder: _query_room(call, to_ask[holder], me) for holder in others}
    for holder, message in out_queries.items():
        if to_ask[holder]:
            torch.cat([q[:, parts[index].rows] for index in to_ask[holder]], dim=1, out=message.tensors[0])
    in_queries = {asker: _query_room(call, to_answer[asker], asker) for asker in others}
    pending = group.start(sends=out_queries, receives=in_queries, hop=0)

    found = []
    if to_ask[me]:
        found.append((to_ask[me], _attend(call, to_ask[me], q[:, parts.rows(to_ask[me], q.device)], me)))

    pending.wait()
    answers = {
        asker: _attend(call, indices, in_queries[asker].tensors[0], asker)
        for asker, indices in to_answer.items()
        if indices
    }
    if host is not None:
        visits = [host.visit(me, indices, q[:, parts.rows(indices, q.device)]) for indices, _ in found]
        visits += [host.visit(asker, to_answer[asker], in_queries[asker].tensors[0]) for asker in answers]
        partials = [*(partial for _, partial in found), *answers.values()]
        host.merge(parts.backend, visits, host.ask(visits, call.spec), partials, call.spec)
    out_results = {asker: _result_room(call, to_answer[asker], asker) for asker in others}
    for asker, (out, lse) in answers.items():
        for room, tensor in zip(out_results[asker].tensors, (lse, out), strict=True):
            room.copy_(tensor)
    in_results = {holder: _result_room(call, to_ask[holder], me) for holder in others}
    group.start(sends=out_results, receives=in_results, hop=1).wait()
    for holder, message in in_results.items():
        if to_ask[holder]:
            lse, out = message.tensors
            found.append((to_ask[holder], (out, lse)))
    _write(call, found)


def _visits(call: Call, asker: int, holder: int) -> tuple[int, ...]:
    """Lists the parts of which `asker` has queries and `holder` keys in sight, on its device or its host."""
    found, window = call.parts.visits(asker, holder, call.spec.window), call.spec.window
    if call.host is None:
        return found
    return tuple(sorted({*found, *call.host.parts.visits(asker, holder, window)}))


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


def _attend(call: Call, indices: tuple[int, ...], q: Tensor, asker: int) -> Partial:
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


def _query_room(call: Call, indices: Sequence[int], asker: int) -> Message:
    """Allocates a message for the queries of `asker` in these parts, one after the other."""
    return Message.empty([(*_rows_shape(call, indices, asker), call.spec.head_dim)], call.q)


def _result_room(call: Call, indices: Sequence[int], asker: int) -> Message:
    """Allocates a message for the log-sum-exps and the outputs of these queries."""
    shape = _rows_shape(call, indices, asker)
    return Message([(shape, torch.float32), ((*shape, call.spec.head_dim), call.q.dtype)], call.q.device)


def _rows_shape(call: Call, indices: Sequence[int], asker: int) -> tuple[int, int]:
    return call.spec.num_heads, sum(num_tokens(call.parts[index].q_runs[asker]) for index in indices)


register_attention(RING_Q, ring_q)
