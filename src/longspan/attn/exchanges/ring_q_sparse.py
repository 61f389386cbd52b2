"""`ring_q` for single tokens, without the keys that were dropped in the prompt (CSPS §4.2).

A query is sent to a member for the KV heads of which that member has a key to read. Every member knows these heads by
arithmetic on positions. Layers that drop nothing read all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attn.backends import Partial, merge_each, nothing_seen
from longspan.attn.comm import Message
from longspan.attn.exchanges import Call, exchange
from longspan.attn.member import MemberPart
from longspan.attn.paged import PagedPlan, Reads
from longspan.attn.paged_splits import copied_once
from longspan.core.exchange import RING_Q_SPARSE
from longspan.core.runs import Relation, num_tokens
from longspan.core.splits import HeadShare


class _Read(NamedTuple):
    """The number of a part with a query of one member, and the KV heads for which another member reads keys."""

    number: int
    part: MemberPart
    heads: tuple[int, ...]


@exchange(RING_Q_SPARSE)
def ring_q_sparse(call: Call) -> None:
    """Send queries to the members that have kept keys, and merge the partial results that return."""
    group, rank, peers = call.group, call.group.rank, call.group.peers
    reads = {(source, rank): _reads(call, source, rank) for source in range(group.size)}
    reads |= {(rank, peer): _reads(call, rank, peer) for peer in peers}
    queries = {peer: _queries(call, reads[rank, peer]) for peer in peers}
    incoming = {peer: Message.empty([_shape(call, reads[peer, rank])], call.q) for peer in peers}
    pending = group.start(sends=queries, receives=incoming, hop=0)
    own = _queries(call, reads[rank, rank])
    partials = {rank: _attend(call, rank, reads[rank, rank], own.tensors[0])}
    pending.wait()
    for peer in peers:
        partials[peer] = _attend(call, peer, reads[peer, rank], incoming[peer].tensors[0])
    results = {peer: _results(call, reads[peer, rank], partials[peer]) for peer in peers}
    returned = {peer: _results(call, reads[rank, peer], None) for peer in peers}
    group.start(sends=results, receives=returned, hop=1).wait()
    _merge(call, reads[rank, rank], partials[rank])
    for peer, message in returned.items():
        lse, out = message.tensors
        _merge(call, reads[rank, peer], (out, lse))


def _reads(call: Call, q_rank: int, kv_rank: int) -> list[_Read]:
    reads = []
    for number, part in enumerate(call.parts):
        runs, kept = part.kv_runs[kv_rank], part.kept.get(call.layer)
        if part.q_runs[q_rank] and runs:
            assert num_tokens(part.q_runs[q_rank]) == 1, "sparse decodes are single tokens"
            heads = tuple(range(call.spec.num_kv_heads)) if kept is None else kept.read_heads(runs)
            if heads:
                reads.append(_Read(number, part, heads))
    return reads


def _at_heads(call: Call, read: _Read) -> Tensor:
    """Return the KV heads of a read as a tensor, without a wait for the device."""
    return copied_once(read.heads, torch.int64, call.q.device)


def _readers(call: Call) -> int:
    return call.spec.num_heads // call.spec.num_kv_heads


def _shape(call: Call, reads: Sequence[_Read]) -> tuple[int, int]:
    """Return the shape of the rows of queries, or of outputs: by part, then by head."""
    return _readers(call) * sum(len(read.heads) for read in reads), call.spec.head_dim


def _queries(call: Call, reads: Sequence[_Read]) -> Message:
    message, row = Message.empty([_shape(call, reads)], call.q), 0
    for read in reads:
        by_head = call.q[:, read.part.rows].reshape(call.spec.num_kv_heads, _readers(call), -1)
        rows = by_head.index_select(0, _at_heads(call, read)).flatten(0, 1)
        message.tensors[0][row : row + len(rows)] = rows
        row += len(rows)
    return message


def _attend(call: Call, q_rank: int, reads: Sequence[_Read], rows: Tensor) -> Partial:
    """Attend the rows of queries to this member's kept keys, and to all its keys of the last partition."""
    out, lse = rows.new_zeros(rows.shape), rows.new_full(rows.shape[:1], -torch.inf, dtype=torch.float32)
    sizes = [_readers(call) * len(read.heads) for read in reads]
    near = _attend_near(call, q_rank, reads, rows.split(sizes) if reads else ())
    for read, q, own_out, own_lse in zip(reads, rows.split(sizes), out.split(sizes), lse.split(sizes), strict=True):
        partials = [near[read.number]] if read.number in near else []
        far = _attend_far(call, read, q)
        partials += [] if far is None else [far]
        merged, total = merge_each(partials) if len(partials) > 1 else partials[0]
        own_out.copy_(merged)
        own_lse.copy_(total)
    return out, lse


def _attend_near(call: Call, q_rank: int, reads: Sequence[_Read], rows: Sequence[Tensor]) -> dict[int, Partial]:
    """Attend to the keys from the last partition on, or to all keys of a layer without drops, in one kernel call."""
    rank, parts = call.group.rank, call.parts
    starts = [(read, _first_near(call, read), num_tokens(read.part.kv_runs[rank])) for read in reads]
    chosen = [(read, start, stop, q) for (read, start, stop), q in zip(starts, rows, strict=True) if start < stop]
    if not chosen:
        return {}

    def plan() -> PagedPlan:
        near = [Reads(blocks=read.part.blocks, start=start, stop=stop) for read, start, stop, _ in chosen]
        return parts.backend.plan(near, call.kv)

    key = ("kept", q_rank, tuple((read.number, start) for read, start, *_ in chosen))
    q = torch.stack([q for *_, q in chosen], dim=1)
    out, lse = parts.backend.attend_paged(q, call.kv, parts.once(key, plan), call.spec)
    return {read.number: (out[:, number], lse[:, number]) for number, (read, *_) in enumerate(chosen)}


def _first_near(call: Call, read: _Read) -> int:
    kept = read.part.kept.get(call.layer)
    return 0 if kept is None else kept.num_far(read.part.kv_runs[call.group.rank])


def _attend_far(call: Call, read: _Read, rows: Tensor) -> Partial | None:
    """Attend to the kept keys of earlier partitions. None if the member has none."""
    kept, readers, kv = read.part.kept.get(call.layer), _readers(call), call.kv
    by_heads = [] if kept is None else [(heads, indices) for heads, indices in kept.by_heads if indices.shape[1]]
    if not by_heads:
        return None
    out, lse = rows.new_zeros(rows.shape), rows.new_full(rows.shape[:1], -torch.inf, dtype=torch.float32)
    blocks = copied_once(tuple(read.part.blocks), torch.int64, kv.keys.device)
    for heads, indices in by_heads:
        first = read.heads.index(heads.start)
        own = slice(first * readers, (first + len(heads)) * readers)
        head = torch.arange(heads.start, heads.stop, device=kv.keys.device)[:, None]
        at = blocks[indices // kv.block_size], head, indices % kv.block_size
        k, v = kv.keys[at], kv.values[at]
        spec = call.spec.of_heads(HeadShare(range(own.start, own.stop), heads))
        relation = Relation("full", -1, k.shape[1])
        part_out, part_lse = call.parts.backend.attend(rows[own, None], k, v, relation, spec)
        out[own], lse[own] = part_out[:, 0], part_lse[:, 0]
    return out, lse


def _results(call: Call, reads: Sequence[_Read], partial: Partial | None) -> Message:
    """Make a message of log-sum-exps and outputs. It is filled if there is a partial result."""
    shape = _shape(call, reads)
    message = Message([((shape[0],), torch.float32), (shape, call.q.dtype)], call.q.device)
    if partial is not None:
        for target, tensor in zip(message.tensors, reversed(partial), strict=True):
            target.copy_(tensor)
    return message


def _merge(call: Call, reads: Sequence[_Read], partial: Partial) -> None:
    """Merge the rows of each part with its other results. Other heads have seen nothing."""
    sizes = [_readers(call) * len(read.heads) for read in reads]
    for read, rows, row_lse in zip(reads, partial[0].split(sizes), partial[1].split(sizes), strict=True):
        out, lse = nothing_seen(call.q[:, read.part.rows].contiguous())
        by_head = out.view(call.spec.num_kv_heads, _readers(call), -1), lse.view(call.spec.num_kv_heads, -1)
        at = _at_heads(call, read)
        by_head[0].index_copy_(0, at, rows.view(len(read.heads), _readers(call), -1))
        by_head[1].index_copy_(0, at, row_lse.view(len(read.heads), -1))
        call.merge((read.number,), (out, lse))
