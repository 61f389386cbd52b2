"""The pass-Q of Context Parallelism (Algorithms 3 and 4), as its authors run it: queries travel hop by hop.

longspan's `ring_q` asks all members at once.
"""

from __future__ import annotations

from dataclasses import replace

from longspan.core.exchange import RING_Q
from longspan.cost.channels import Channel, ChannelTime, ExchangeCost, Shares, asked_s, cost_of, hop_s, merge_s
from longspan.cost.roofline import Layer
from longspan.cost.topology import Topology


def _pass_q(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    """Prices queries that travel around the ring while those before them are attended; an all-to-all, which nothing
    hides, brings partial outputs back.
    """
    members, padded = len(channel.group), _padded(channel)
    most = padded.shares.queries[0]
    attended_s = asked_s(layer, padded, members)
    width = layer.heads * layer.model.attention.head_dim * layer.bytes_per_element
    sent_s = topology.hop_s(most * width, channel.group)
    returned_s = topology.alltoall_s((members - 1) * most * (width + 4 * layer.heads), channel.group)
    return ChannelTime(
        attention_s=attended_s,
        exposed_s=(members - 1) * max(0.0, sent_s - attended_s / members) + returned_s,
        overhead_s=(members - 1) * hop_s(layer, channel.decode) + members * merge_s(layer, most),
    )


def _padded(channel: Channel) -> Channel:
    """Gives every member as many queries as the one with most; those that pad are attended, too (section 4.3)."""
    shares, members = channel.shares, len(channel.group)
    most = max(shares.queries)
    more = members * most / sum(shares.queries)
    padded = Shares(
        queries=[most] * members,
        pairs=[more * pairs for pairs in shares.pairs],
        scores=[more * scores for scores in shares.scores],
        held=shares.held,
    )
    return replace(channel, shares=padded, keys=more * channel.keys)


PASS_Q = ExchangeCost(num_bytes=cost_of(RING_Q).num_bytes, time=_pass_q)
