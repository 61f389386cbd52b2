"""KV-Runahead: keys and values of a prompt run along the members, each adds its own and passes all on (§4.1, §4.3).

Members have neighbouring runs of the new tokens, in order, so that nobody waits for more than it sees. The first
member is in a later layer while the last still works on an earlier one: nothing brings them together. The last member
ends up with all new keys and values. What older steps have cached stays where it is and is sent to those who see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longspan.attn.comm import Group, Message, Pending
from longspan.attn.exchanges import Call, KeysAndValues, register_attention
from longspan.attn.member import MemberPart, MemberParts, attend_all, empty_kv_message, pack_kv
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import CHAIN
from longspan.core.runs import Run, coalesce


@dataclass(frozen=True, kw_only=True)
class ChainStart:
    """Transfers of a layer under way: new keys and values from the `predecessor`, and `cached` ones from all owners."""

    predecessor: Message
    cached: list[Message]
    arrival: Pending
    cached_arrival: Pending


def chain_start(group: Group, parts: MemberParts, kv: PagedKv, spec: AttnSpec) -> ChainStart:
    """Sends this member's cached keys and values of a layer, and begins to receive.

    Nothing of the layer needs to be computed yet: call it before the layer's projections, which then overlap with the
    transfers. `group`, `kv` and `spec` are those of the layer, as for `chain`.
    """
    me, members, others = group.rank, range(group.size), group.peers
    seen = {asker: tuple(_cached(parts, me, asker, spec)) for asker in members}
    read = {runs: pack_kv(parts, runs, me, kv) for runs in dict.fromkeys(seen.values())}  # most see the same
    cached = [
        read[seen[me]]
        if holder == me
        else empty_kv_message(_cached(parts, holder, me, spec), spec.num_kv_heads, kv.keys)
        for holder in members
    ]
    leaving = {asker: read[seen[asker]] for asker in others}
    cached_arrival = group.start(sends=leaving, receives={holder: cached[holder] for holder in others}, hop=0)
    predecessor = empty_kv_message([_new(part, me) for part in parts], spec.num_kv_heads, kv.keys)
    arrival = group.start(sends={}, receives={me - 1: predecessor} if me else {}, hop=1, early=True)
    return ChainStart(predecessor=predecessor, cached=cached, arrival=arrival, cached_arrival=cached_arrival)


def chain(call: Call) -> list[KeysAndValues]:
    """Computes attention of several requests at once. `call.started` is what `chain_start` returned for this layer, if
    that was called.

    Of what lies in the pool only tokens before the span of a part are read, and who holds the span's own according to
    `kv_runs` does not matter.

    Returns:
        For each part the new keys and values of this member and all before it, in order of position: on the last
        member those of the whole span, for its pool. They may still be on their way to the next member: read only.
    """
    group, parts, spec, me = call.group, call.parts, call.spec, call.group.rank
    assert all(part.is_in_order for part in parts), "members have neighbouring runs in the order of the chain"
    started = call.started or chain_start(group, parts, call.kv, spec)
    assert isinstance(started, ChainStart), "what `chain_start` returned"
    started.arrival.wait()
    grown = empty_kv_message([_new(part, me + 1) for part in parts], spec.num_kv_heads, call.q)
    for index, part in enumerate(parts):
        for kind, own in enumerate((call.k, call.v)):
            before, room = started.predecessor.tensors[2 * index + kind], grown.tensors[2 * index + kind]
            torch.cat([before, own[:, part.rows]], dim=1, out=room)
    if me + 1 < group.size:
        group.start(sends={me + 1: grown}, receives={}, hop=1, early=True)
    started.cached_arrival.wait()
    cached = [_cached(parts, holder, me, spec) for holder in range(group.size)]
    for index, part in enumerate(parts):
        held, messages = [*(runs[index] for runs in cached), _new(part, me + 1)], [*started.cached, grown]
        k, v = ([one.tensors[2 * index + kind] for one in messages] for kind in (0, 1))
        q, out = call.q[:, part.rows], call.out[:, part.rows]
        attend_all(parts.backend, (part.q_runs[me],), [q], held, k, v, spec, [out])
    return list(zip(grown.tensors[::2], grown.tensors[1::2], strict=True))


def _new(part: MemberPart, num_members: int) -> tuple[Run, ...]:
    return coalesce(run for runs in part.q_runs[:num_members] for run in runs)


def _cached(parts: MemberParts, holder: int, asker: int, spec: AttnSpec) -> list[tuple[Run, ...]]:
    """Returns the cached tokens of `holder` that some query of `asker` may see, for each part."""
    return [part.cached(holder, spec.window, asker) for part in parts]


register_attention(CHAIN, chain, start=chain_start)
