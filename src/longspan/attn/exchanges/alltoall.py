"""Heads are scattered and the sequence is gathered, then back: SP-NTP (CSPS §3.2.1; DeepSpeed's Ulysses).

Each member computes attention for its share of the heads, over all tokens at once. Query heads are split evenly;
members that read the same KV head get a copy each, and one without heads just sends its queries, keys and values away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longspan.attn.backends import AttentionBackend
from longspan.attn.comm import Group, Message
from longspan.attn.exchanges import from_pool, register
from longspan.attn.member import MemberPart, MemberParts, attend_runs, by_position, gather_runs, num_tokens
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import ALLTOALL
from longspan.core.heads import HeadShare, spread_heads, uniform_pieces
from longspan.core.runs import coalesce, row_slices, stretch


def alltoall(group: Group, parts: MemberParts, q: Tensor, kv: PagedKv, spec: AttnSpec, out: Tensor) -> None:
    """Computes attention of several requests at once; `ring_kv` says what the arguments are."""
    me, members = group.rank, range(group.size)
    others = [member for member in members if member != me]
    shares = spread_heads(spec.num_heads, spec.num_kv_heads, group.size)
    leaving = {member: _tokens(parts, me, shares[member], q, kv, spec) for member in others}
    coming = {member: _room(parts, member, shares[me], q, spec) for member in others}
    pending = group.start(sends=leaving, receives=coming, hop=0)
    coming[me] = _tokens(parts, me, shares[me], q, kv, spec)
    pending.wait()
    results = {asker: _results(parts, asker, shares[me], q) for asker in members}
    if shares[me].heads:
        for piece in uniform_pieces(shares[me], spec.num_heads // spec.num_kv_heads):
            heads, kv_heads = _inside(piece.heads, shares[me].heads), _inside(piece.kv_heads, shares[me].kv_heads)
            mine = replace(spec, num_heads=len(piece.heads), num_kv_heads=len(piece.kv_heads))
            for index, part in enumerate(parts):
                tensors = [
                    [coming[member].tensors[3 * index + kind][chosen] for member in members]
                    for kind, chosen in enumerate((heads, kv_heads, kv_heads))
                ]
                _attend(parts.backend, part, tensors, mine, [results[asker].tensors[index][heads] for asker in members])
    answers = {member: _results(parts, me, shares[member], q) for member in others}
    group.start(sends={asker: results[asker] for asker in others}, receives=answers, hop=1).wait()
    answers[me] = results[me]
    for member, share in enumerate(shares):
        for part, answer in zip(parts, answers[member].tensors, strict=True):
            out[share.heads.start : share.heads.stop, part.rows] = answer


def _inside(some: range, of: range) -> slice:
    """Finds heads among those of a share."""
    return slice(some.start - of.start, some.stop - of.start)


def _attend(
    backend: AttentionBackend,
    part: MemberPart,
    tensors: Sequence[Sequence[Tensor]],
    spec: AttnSpec,
    results: Sequence[Tensor],
) -> None:
    """Computes some heads of a request, from the queries, keys and values of all members to the outputs of each."""
    q, k, v = tensors
    q_runs = coalesce(run for runs in part.q_runs for run in runs)
    if not q_runs:
        return
    needed = [part.needed(member, spec.window) for member in range(len(part.q_runs))]
    keys = stretch(run for runs in needed for run in runs)
    out, _ = attend_runs(
        backend, by_position(part.q_runs, q), q_runs, by_position(needed, k), by_position(needed, v), (keys,), spec
    )
    for result, own_places in zip(results, row_slices(part.q_runs), strict=True):
        if own_places:
            torch.cat([out[:, place] for place in own_places], dim=1, out=result)


def _tokens(parts: MemberParts, me: int, share: HeadShare, q: Tensor, kv: PagedKv, spec: AttnSpec) -> Message:
    """Fills a message with this member's queries, and its keys and values still in sight, for the heads of a share."""
    message = _room(parts, me, share, q, spec)
    kv_heads = slice(share.kv_heads.start, share.kv_heads.stop)
    view = PagedKv(keys=kv.keys[:, kv_heads], values=kv.values[:, kv_heads])
    for index, part in enumerate(parts):
        queries, k, v = message.tensors[3 * index : 3 * index + 3]
        queries.copy_(q[share.heads.start : share.heads.stop, part.rows])
        if share.heads:
            gather_runs(part, part.needed(me, spec.window), me, view, k, v)
    return message


def _room(parts: MemberParts, member: int, share: HeadShare, q: Tensor, spec: AttnSpec) -> Message:
    shapes = []
    for part in parts:
        kv_shape = (len(share.kv_heads), num_tokens(part.needed(member, spec.window)), spec.head_dim)
        shapes += [(len(share.heads), num_tokens(part.q_runs[member]), spec.head_dim), kv_shape, kv_shape]
    return Message([(shape, q.dtype) for shape in shapes], q.device)


def _results(parts: MemberParts, asker: int, share: HeadShare, q: Tensor) -> Message:
    """Makes room for the outputs of some heads, for the queries of `asker`."""
    shapes = [(len(share.heads), num_tokens(part.q_runs[asker]), q.shape[2]) for part in parts]
    return Message([(shape, q.dtype) for shape in shapes], q.device)


register(ALLTOALL, from_pool(alltoall))
