"""The cost of Context Parallelism's pass-Q (Algorithms 3 and 4), in which queries travel around the ring hop by hop.

longspan's `ring_q` sends queries to all members at once.
"""

from __future__ import annotations

from dataclasses import replace

from longspan.core.exchange import RING_Q
from longspan.cost.channels import Channel, ChannelTime, ExchangeCost, Shares, asked_s, cost_of, hop_s, merge_s
from longspan.cost.roofline import Layer
from longspan.cost.topology import Topology


def _pass_q(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    """Return the time of pass-Q. Hops of queries overlap with attention. The all-to-all that returns partial outputs
    does not.
    """
    members, padded = len(channel.group), _padded(channel)
    num_queries = padded.shares.queries[0]
    attended_s = asked_s(layer, padded, members)
    width = layer.heads * layer.model.attention.head_dim * layer.bytes_per_element
    sent_s = topology.hop_s(num_queries * width, channel.group)
    returned_s = topology.alltoall_s((members - 1) * num_queries * (width + 4 * layer.heads), channel.group)
    return ChannelTime(
        attention_s=attended_s,
        exposed_s=(members - 1) * max(0.0, sent_s - attended_s / members) + returned_s,
        overhead_s=(members - 1) * hop_s(layer, topology, channel.decode) + members * merge_s(layer, num_queries),
    )


def _padded(channel: Channel) -> Channel:
    """Pad the queries of every member to the largest number. Padding is attended, too (section 4.3)."""
    shares, members = channel.shares, len(channel.group)
    num_queries = max(shares.queries)
    growth = members * num_queries / sum(shares.queries)
    padded = Shares(
        queries=[num_queries] * members,
        pairs=[growth * pairs for pairs in shares.pairs],
        scores=[growth * scores for scores in shares.scores],
        held=shares.held,
    )
    return replace(channel, shares=padded, keys=growth * channel.keys)


PASS_Q = ExchangeCost(num_bytes=cost_of(RING_Q).num_bytes, time=_pass_q)
