"""The cost of `broadcast`. Policies and simulations import this module, so it imports no torch."""

from __future__ import annotations

from longspan.cost.channels import Channel, ChannelTime, ExchangeCost, attention_s
from longspan.cost.roofline import Layer
from longspan.cost.topology import Topology


def seconds(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    """Return the seconds of one layer: the largest share of keys and values is sent before attention."""
    sent_s = topology.gather_s(max(channel.shares.held) * layer.kv_bytes, channel.group)
    return ChannelTime(attention_s=attention_s(layer, channel.shares.busiest, keys=channel.keys), exposed_s=sent_s)


def num_bytes(layer: Layer, channel: Channel) -> float:
    """Return the bytes that all members together send in one layer."""
    return (len(channel.group) - 1) * layer.kv_bytes * sum(channel.shares.held)


COST = ExchangeCost(num_bytes=num_bytes, time=seconds)
