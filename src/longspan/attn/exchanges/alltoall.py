"""Heads are scattered and the sequence is gathered, then back: SP-NTP (CSPS §3.2.1; DeepSpeed's Ulysses).

Each member computes attention for its share of the heads, over all tokens at once. Query heads are split evenly;
members that read the same KV head get a copy each, and one without heads just sends its queries, keys and values away.
"""

from __future__ import annotations

from longspan.attn.comm import Message
from longspan.attn.exchanges import Call, register_attention
from longspan.attn.member import attend_all, gather_runs
from longspan.core.cluster import HeadShare, spread_heads, uniform_pieces
from longspan.core.exchange import ALLTOALL
from longspan.core.runs import num_tokens


def alltoall(call: Call) -> None:
    group, parts, spec = call.group, call.parts, call.spec
    me, members, others = group.rank, range(group.size), group.peers
    shares = spread_heads(spec.num_heads, spec.num_kv_heads, group.size)
    leaving = {member: _tokens(call, shares[member]) for member in others}
    coming = {member: _room(call, member, shares[me]) for member in others}
    pending = group.start(sends=leaving, receives=coming, hop=0)
    coming[me] = _tokens(call, shares[me])
    pending.wait()
    results = {asker: _results(call, asker, shares[me]) for asker in members}
    for piece in uniform_pieces(shares[me], spec.num_heads // spec.num_kv_heads):
        heads, kv_heads = _inside(piece.heads, shares[me].heads), _inside(piece.kv_heads, shares[me].kv_heads)
        for index, part in enumerate(parts):
            q, k, v = (
                [coming[member].tensors[3 * index + kind][chosen] for member in members]
                for kind, chosen in enumerate((heads, kv_heads, kv_heads))
            )
            held = [part.needed(member, spec.window) for member in members]
            found = [results[asker].tensors[index][heads] for asker in members]
            attend_all(parts.backend, part.q_runs, q, held, k, v, spec.of_heads(piece), found)
    answers = {member: _results(call, me, shares[member]) for member in others}
    group.start(sends={asker: results[asker] for asker in others}, receives=answers, hop=1).wait()
    answers[me] = results[me]
    for member, share in enumerate(shares):
        for part, answer in zip(parts, answers[member].tensors, strict=True):
            call.out[share.heads.start : share.heads.stop, part.rows] = answer


def _inside(some: range, of: range) -> slice:
    """Returns the slice of `of` that `some` heads are."""
    return slice(some.start - of.start, some.stop - of.start)


def _tokens(call: Call, share: HeadShare) -> Message:
    """Fills a message with this member's queries, and its keys and values still in sight, for the heads of a share."""
    me = call.group.rank
    message, kv = _room(call, me, share), call.kv.heads(share.kv_heads)
    for index, part in enumerate(call.parts):
        queries, k, v = message.tensors[3 * index : 3 * index + 3]
        queries.copy_(call.q[share.heads.start : share.heads.stop, part.rows])
        if share.heads:
            gather_runs(call.parts.backend, part, part.needed(me, call.spec.window), me, kv, (k, v))
    return message


def _room(call: Call, member: int, share: HeadShare) -> Message:
    dim, shapes = call.spec.head_dim, []
    for part in call.parts:
        kv_shape = (len(share.kv_heads), num_tokens(part.needed(member, call.spec.window)), dim)
        shapes += [(len(share.heads), num_tokens(part.q_runs[member]), dim), kv_shape, kv_shape]
    return Message.empty(shapes, call.q)


def _results(call: Call, asker: int, share: HeadShare) -> Message:
    """Allocates a message for the outputs of some heads, for the queries of `asker`."""
    dim = call.spec.head_dim
    return Message.empty([(len(share.heads), num_tokens(part.q_runs[asker]), dim) for part in call.parts], call.q)


register_attention(ALLTOALL, alltoall)
