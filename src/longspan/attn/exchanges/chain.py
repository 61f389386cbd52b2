"""KV-Runahead: keys and values of a prompt pass along the members, and each member adds its own (§4.1, §4.3).

Members have consecutive runs of the new tokens, in order, so a member receives only keys that it sees. The first member
may be in a later layer while the last still computes an earlier one, since nothing synchronises them. The last member
receives all new keys and values. Cached tokens of earlier steps stay with their owners, which send them to the members
that see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longspan.attn.comm import Group, Message, Pending
from longspan.attn.exchanges import Call, exchange
from longspan.attn.gathered import attend_joined
from longspan.attn.member import MemberParts, PartRuns, empty_kv_message, pack_kv
from longspan.attn.paged import KeysAndValues, PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import CHAIN
from longspan.core.runs import coalesce


@dataclass(frozen=True, kw_only=True)
class ChainStart:
    """Started transfers of a layer: new keys and values from the `predecessor`, and `cached` ones from all owners."""

    predecessor: Message
    cached: list[Message]
    arrival: Pending | None  # None without tags: a device would run it before calls that the predecessor waits for
    cached_arrival: Pending


def chain_start(group: Group, parts: MemberParts, kv: PagedKv, spec: AttnSpec) -> ChainStart:
    """Send this member's cached keys and values of a layer, and start to receive.

    The transfers do not depend on the layer's projections. Call this before the projections, so that both overlap.
    """
    rank, peers, visibility = group.rank, group.peers, spec.visibility
    seen = [tuple(parts.cached(rank, visibility, member)) for member in range(group.size)]
    packed = {runs: pack_kv(parts, runs, rank, kv) for runs in dict.fromkeys(seen)}  # most members see the same keys
    cached = [
        packed[seen[rank]]
        if member == rank
        else empty_kv_message(parts.cached(member, visibility, rank), spec.num_kv_heads, kv.keys)
        for member in range(group.size)
    ]
    sends, receives = {peer: packed[seen[peer]] for peer in peers}, {peer: cached[peer] for peer in peers}
    cached_arrival = group.start(sends=sends, receives=receives, hop=0)
    predecessor = empty_kv_message(_new(parts, rank), spec.num_kv_heads, kv.keys)
    arrival = _receive(group, predecessor) if group.tagged else None
    return ChainStart(predecessor=predecessor, cached=cached, arrival=arrival, cached_arrival=cached_arrival)


@exchange(CHAIN, start=chain_start)
def chain(call: Call) -> Sequence[KeysAndValues]:
    """Add this member's keys and values, send them on, and attend. `call.started` may have the result of `chain_start`.

    Only tokens before the span of a part are read from the pool. The owners of the span's own tokens in `kv_runs` do
    not matter.

    Returns:
        For each part the new keys and values of this member and all members before it, in order of position. On the
        last member these are the whole span, for its pool. They may still be read by a send, so do not write to them.
    """
    group, parts, spec, rank = call.group, call.parts, call.spec, call.group.rank
    assert all(part.is_in_order for part in parts), "members have consecutive runs in the order of the chain"
    started = call.started or chain_start(group, parts, call.kv, spec)
    assert isinstance(started, ChainStart), "the result of `chain_start`"
    (started.arrival or _receive(group, started.predecessor)).wait()
    new = _new(parts, rank + 1)
    grown = empty_kv_message(new, spec.num_kv_heads, call.q)
    own = [tensor[:, part.rows] for part in parts for tensor in (call.k, call.v)]
    for target, before, added in zip(grown.tensors, started.predecessor.tensors, own, strict=True):
        torch.cat([before, added], dim=1, out=target)
    if rank + 1 < group.size:
        group.start(sends={rank + 1: grown}, receives={}, hop=1)
    started.cached_arrival.wait()
    cached = [parts.cached(member, spec.visibility, rank) for member in range(group.size)]
    attend_joined(call, [*cached, new], [*started.cached, grown])
    return list(zip(grown.tensors[::2], grown.tensors[1::2], strict=True))


def _receive(group: Group, predecessor: Message) -> Pending:
    return group.start(sends={}, receives={group.rank - 1: predecessor} if group.rank else {}, hop=1)


def _new(parts: MemberParts, num_members: int) -> PartRuns:
    """Return the new tokens of the first members, for each part."""
    key = ("new", num_members)
    return parts.once(
        key, lambda: [coalesce(run for runs in part.q_runs[:num_members] for run in runs) for part in parts]
    )
