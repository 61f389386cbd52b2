"""Heads are scattered and the sequence is gathered, then back: SP-NTP (CSPS §3.2.1), also DeepSpeed's Ulysses.

Each member computes attention for its share of the heads, over all tokens at once. Query heads are split evenly.
Members that read the same KV head get a copy each. A member without heads only sends its queries, keys and values.
"""

from __future__ import annotations

from longspan.attn.comm import Message
from longspan.attn.exchanges import Call, exchange
from longspan.attn.gathered import GatheredPart, attend_gathered
from longspan.attn.member import gather_runs
from longspan.core.exchange import ALLTOALL
from longspan.core.runs import num_tokens
from longspan.core.splits import HeadShare, spread_heads, uniform_pieces


@exchange(ALLTOALL)
def alltoall(call: Call) -> None:
    """Exchange tokens for heads, attend to all tokens, and exchange the results back."""
    group, parts, spec = call.group, call.parts, call.spec
    rank, members, peers = group.rank, range(group.size), group.peers
    shares = spread_heads(spec.num_heads, spec.num_kv_heads, group.size)
    sends = {peer: _tokens(call, shares[peer]) for peer in peers}
    tokens = {peer: _empty_tokens(call, peer, shares[rank]) for peer in peers}
    pending = group.start(sends=sends, receives=tokens, hop=0)
    tokens[rank] = _tokens(call, shares[rank])
    pending.wait()
    results = {member: _empty_results(call, member, shares[rank]) for member in members}
    kv_runs = [call.needed(member) for member in members]
    for piece in uniform_pieces(shares[rank], spec.num_heads // spec.num_kv_heads):
        heads, kv_heads = _inside(piece.heads, shares[rank].heads), _inside(piece.kv_heads, shares[rank].kv_heads)
        for index, part in enumerate(parts):
            q, k, v = (
                [tokens[member].tensors[3 * index + kind][chosen] for member in members]
                for kind, chosen in enumerate((heads, kv_heads, kv_heads))
            )
            out = [results[member].tensors[index][heads] for member in members]
            sinks = None if call.sinks is None else call.sinks[piece.heads.start : piece.heads.stop]
            gathered = GatheredPart(part.q_runs, q, [runs[index] for runs in kv_runs], k, v, out, sinks)
            attend_gathered(parts.backend, gathered, spec.of_heads(piece))
    returned = {peer: _empty_results(call, rank, shares[peer]) for peer in peers}
    group.start(sends={peer: results[peer] for peer in peers}, receives=returned, hop=1).wait()
    returned[rank] = results[rank]
    for member, share in enumerate(shares):
        for part, result in zip(parts, returned[member].tensors, strict=True):
            call.out[share.heads.start : share.heads.stop, part.rows] = result


def _inside(heads: range, share: range) -> slice:
    """Return the slice of a share that `heads` are."""
    return slice(heads.start - share.start, heads.stop - share.start)


def _tokens(call: Call, share: HeadShare) -> Message:
    """Copy this member's queries, and its needed keys and values, of the heads of a share into a message."""
    rank = call.group.rank
    message, kv = _empty_tokens(call, rank, share), call.kv.heads(share.kv_heads)
    for index, (part, runs) in enumerate(zip(call.parts, call.needed(rank), strict=True)):
        queries, k, v = message.tensors[3 * index : 3 * index + 3]
        queries.copy_(call.q[share.heads.start : share.heads.stop, part.rows])
        if share.heads:
            gather_runs(call.parts.backend, part, runs, rank, kv, (k, v))
    return message


def _empty_tokens(call: Call, source: int, share: HeadShare) -> Message:
    dim, shapes = call.spec.head_dim, []
    for part, runs in zip(call.parts, call.needed(source), strict=True):
        kv_shape = (len(share.kv_heads), num_tokens(runs), dim)
        shapes += [(len(share.heads), num_tokens(part.q_runs[source]), dim), kv_shape, kv_shape]
    return Message.empty(shapes, call.q)


def _empty_results(call: Call, q_rank: int, share: HeadShare) -> Message:
    """Allocate a message for the outputs of the heads of a share, for the queries of `q_rank`."""
    dim = call.spec.head_dim
    return Message.empty([(len(share.heads), num_tokens(part.q_runs[q_rank]), dim) for part in call.parts], call.q)
