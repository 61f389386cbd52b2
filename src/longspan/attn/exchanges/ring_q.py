"""Pass-Q: queries travel to the keys, partial outputs return and are merged (Context Parallelism §3.5.3, Algorithm 3).

For decode, where sending one query costs far less than sending the keys that it sees. Each query is sent at once to all
members that hold keys of its request, instead of hop by hop. This sends the same bytes as a ring, has the latency of
one hop, and needs no padding of the batch. While queries travel, every member computes on its own.
"""

from __future__ import annotations

from longspan.attn.exchanges import Call, exchange
from longspan.attn.member import QueryBatch, partials_of
from longspan.core.exchange import RING_Q


@exchange(RING_Q)
def ring_q(call: Call) -> None:
    """Send queries to the members that hold their keys, and merge the partial results that return."""
    group, rank, peers, host = call.group, call.group.rank, call.group.peers, call.host
    queries = {peer: call.queries_for(peer) for peer in peers}
    incoming = {peer: call.empty_queries(peer, rank) for peer in peers}
    pending = group.start(sends=queries, receives=incoming, hop=0)
    batches = [call.own_queries(call.visible(rank, rank))]
    partials = [call.attend_batch(batches[0])]
    pending.wait()
    batches += [QueryBatch(peer, call.visible(peer, rank), incoming[peer].tensors[0]) for peer in peers]
    partials += [call.attend_batch(batch) for batch in batches[1:]]
    if host is not None:
        host.merge(call.parts.backend, batches, host.ask(batches, call.spec), partials, call.spec)
    results = {peer: call.results_for(peer, partial) for peer, partial in zip(peers, partials[1:], strict=True)}
    returned = {peer: call.empty_results(rank, peer) for peer in peers}
    group.start(sends=results, receives=returned, hop=1).wait()
    call.merge(batches[0].indices, partials[0])
    for peer, message in returned.items():
        call.merge(call.visible(rank, peer), *partials_of(message))
