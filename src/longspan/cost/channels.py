"""Seconds per layer of attention and its messages, by exchange, with the overlap of each exchange.

A channel has the parts of a step in one group by one exchange. Each kind of exchange has an `ExchangeCost`. The time of
a `chain`, whose layers run skewed, is in `forward.py`. Sparse forms take a share of the exact form, see `csa_price.py`.
Bytes are as in docs/exchanges.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from longspan.core.exchange import (
    ALLTOALL,
    CHAIN,
    GATHER_HIDDEN,
    GATHER_KV,
    RING_KV,
    RING_Q,
    Exchange,
)
from longspan.core.exchange_plugins import plugin_part
from longspan.core.runs import SpanShards
from longspan.cost.roofline import Layer
from longspan.cost.shape import ModelShape
from longspan.cost.topology import Topology
from longspan.errors import PluginError


class Share(NamedTuple):
    """One member's part of a channel.

    Attributes:
        queries: number of tokens that it computes.
        pairs: pairs of a query and a visible key, on any member.
        scores: score elements of full rectangles, including masked pairs, as plain products compute them.
        held: number of keys on the member, including new keys. In a chain, all keys up to its own.
    """

    queries: int
    pairs: float
    scores: float
    held: float

    def times(self, number: int) -> Share:
        return Share(number * self.queries, number * self.pairs, number * self.scores, number * self.held)


class Shares(NamedTuple):
    """A `Share` of each member, in ring order, as columns `[members]`."""

    queries: Sequence[int]
    pairs: Sequence[float]
    scores: Sequence[float]
    held: Sequence[float]

    @classmethod
    def of(cls, shares: Sequence[Share]) -> Shares:
        return cls(*zip(*shares, strict=True))

    def of_member(self, member: int) -> Share:
        return Share(self.queries[member], self.pairs[member], self.scores[member], self.held[member])

    @property
    def busiest(self) -> Share:
        """The share with the most pairs. The first wins ties."""
        return self.of_member(self.pairs.index(max(self.pairs)))


@dataclass(kw_only=True, slots=True)
class Channel:
    """The parts of a step with one group and exchange.

    Attributes:
        keys: number of keys that are visible to any query of the parts, as the mean over layers.
        decode: whether all its queries are single tokens, so that engines may record the step as a graph.
        evenness: of the keys of decoding requests, see `FlashCurve.seconds`.
    """

    exchange: Exchange
    group: tuple[int, ...]
    shares: Shares
    keys: float
    decode: bool
    evenness: float = 1.0


@dataclass(kw_only=True, slots=True)
class ChannelTime:
    """Seconds of a channel in one layer. All members take equally long, since they wait for each other.

    Attributes:
        attention_s: attention of the busiest member.
        exposed_s: communication that is not overlapped.
        overhead_s: hops, merges and copies.
    """

    attention_s: float
    exposed_s: float = 0.0
    overhead_s: float = 0.0


def shares_of(
    exchange: Exchange, runs: SpanShards, start: int, stop: int, shape: ModelShape | None = None
) -> list[Share]:
    """Return the shares of members that compute runs of the span from `start` to `stop`.

    Earlier keys count as spread evenly over the group. A member of a chain receives all keys before its own, and its
    rectangles end with its own keys.

    Args:
        shape: of a model whose windows limit the pairs.
    """
    members, shares = len(runs), []
    for own in runs:
        queries, pairs = 0, 0.0
        for run in own:
            number = len(run)
            queries += number
            if shape is None or shape.windows is None:
                pairs += number * (run.start + (number - 1) * run.step / 2 + 1)
            else:
                pairs += shape.pairs(run)
        width, held = stop, start / members + queries
        if exchange.traits.skewed and members > 1:
            width = held = max((run.stop for run in own), default=0)
        shares.append(Share(queries, pairs, queries * width, held))
    return shares


def cached_in_chain(channel: Channel) -> float:
    """Return the number of keys of earlier steps. Members gather them instead of passing them through the chain."""
    return max(0.0, channel.shares.held[0] - channel.shares.queries[0])


def attention_s(
    layer: Layer,
    share: Share,
    *,
    keys: float,
    pieces: int = 1,
    head_parts: int = 1,
    decode: bool = False,
    evenness: float = 1.0,
) -> float:
    """Return the seconds of a member's attention over `keys` in `pieces` parts, with 1/`head_parts` of the heads."""
    if not share.pairs:
        return 0.0
    heads, kv_heads = layer.heads, layer.kv_heads
    if head_parts > 1:
        heads, kv_heads = math.ceil(heads / head_parts), math.ceil(kv_heads / head_parts)
    if layer.attention.unfused:
        return layer.scores_s(scores=share.scores, keys=keys, heads=heads, kv_heads=kv_heads)
    sequences = share.queries if decode else 1
    call = share.queries, share.pairs / pieces, keys / pieces, heads, kv_heads, sequences
    own_s = layer.attended_s(*call, evenness=evenness) + layer.flash.store_s(share.queries, kv_heads)
    return own_s if pieces == 1 else own_s + (pieces - 1) * layer.attended_s(*call, evenness=evenness, received=True)


def copies_s(layer: Layer, keys: float) -> float:
    passes = layer.attention.memory_passes
    return layer.stream_s(2 * passes * keys * layer.kv_bytes) if passes else 0.0


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """The cost of one kind of exchange for the members of a group, in one layer.

    Attributes:
        num_bytes: returns the bytes that all ranks send.
        time: returns the seconds. None for a skewed exchange, which `forward.py` predicts over all layers.
        copies_kv: received keys and values are copied into one buffer.
        joins_all: the buffer is joined from the keys and values of all members.
    """

    num_bytes: Callable[[Layer, Channel], float]
    time: Callable[[Layer, Topology, Channel], ChannelTime] | None
    copies_kv: bool = False
    joins_all: bool = False


_COSTS: dict[str, ExchangeCost] = {}


def register_cost(exchange: Exchange, cost: ExchangeCost) -> None:
    _COSTS[exchange.kind] = cost


def cost_of(exchange: Exchange) -> ExchangeCost:
    """Return the registered cost of a kind, or the cost of a plug-in."""
    if exchange.kind not in _COSTS and (added := plugin_part(exchange.kind, "cost")) is not None:
        if not isinstance(added, ExchangeCost):
            raise PluginError(f"the cost of exchange {exchange.kind} is no longspan.cost.channels.ExchangeCost")
        register_cost(exchange, added)
    return _COSTS[exchange.kind]


def channel_time(layer: Layer, topology: Topology, channel: Channel, cost: ExchangeCost | None = None) -> ChannelTime:
    """Predict one layer of a channel that is not skewed or sparse, by the registered cost unless one is given."""
    if len(channel.group) == 1:
        alone = channel.shares.of_member(0)
        return ChannelTime(
            attention_s=attention_s(layer, alone, keys=channel.keys, decode=channel.decode, evenness=channel.evenness)
        )
    time = (cost or cost_of(channel.exchange)).time
    assert time is not None, f"a group of {len(channel.group)} with exchange {channel.exchange}"
    return time(layer, topology, channel)


def exchanged_bytes(layer: Layer, channel: Channel) -> float:
    """Return the bytes that all ranks send for a channel in one layer."""
    return cost_of(channel.exchange).num_bytes(layer, channel) if len(channel.group) > 1 else 0.0


def _ring_kv(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    """Keys and values are sent hop by hop, while the previous ones are used. The last are not sent on."""
    members = len(channel.group)
    busiest = channel.shares.busiest
    attended_s = attention_s(
        layer, busiest, keys=channel.keys, pieces=members, decode=channel.decode, evenness=channel.evenness
    )
    sent_s = topology.hop_s(max(channel.shares.held) * layer.kv_bytes, channel.group)
    return ChannelTime(
        attention_s=attended_s,
        exposed_s=(members - 1) * max(0.0, sent_s - attended_s / members),
        overhead_s=(members - 1) * (hop_s(layer, topology, channel.decode) + merge_s(layer, busiest.queries)),
    )


def _ring_q(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    """Queries are sent to all members at once, while each attends its own. Partial outputs return without overlap."""
    asking = sum(1 for number in channel.shares.queries if number)
    attended_s = asked_s(layer, channel, asking)
    sent_s, returned_s, overhead_s = _queries_s(
        layer, topology, channel.group, channel.decode, max(channel.shares.queries)
    )
    # A member without queries has no attention to overlap with the messages.
    hidden_s = attended_s / asking if asking == len(channel.group) else 0.0
    return ChannelTime(
        attention_s=attended_s, exposed_s=max(0.0, sent_s - hidden_s) + returned_s, overhead_s=overhead_s
    )


def asked_s(layer: Layer, channel: Channel, asking: int) -> float:
    """Return the seconds in which the member with most keys attends the queries of `asking` members, one after another.

    In a prompt, queries of each member read all its keys. A decoded token reads the keys of its own request.
    """
    shares = channel.shares
    largest = max(shares.held)
    part = largest / max(1.0, sum(shares.held))
    asked = Share(
        queries=max(1, sum(shares.queries) // asking),
        pairs=part * sum(shares.pairs),
        scores=part * sum(shares.scores),
        held=largest,
    )
    keys = part * channel.keys * (1 if channel.decode else asking)
    return attention_s(layer, asked, keys=keys, pieces=asking, decode=channel.decode, evenness=channel.evenness)


@lru_cache(maxsize=2**14)
def _queries_s(
    layer: Layer, topology: Topology, group: tuple[int, ...], decode: bool, queries: int
) -> tuple[float, float, float]:
    """Return the costs of `ring_q` that do not depend on keys, which change with every decoded token.

    Args:
        queries: queries of a member, which it sends to all peers.

    Returns:
        The seconds of sending queries and of returning partial outputs, and the overhead.
    """
    peers, shape, element = len(group) - 1, layer.model.attention, layer.bytes_per_element
    return (
        topology.alltoall_s(peers * queries * (layer.heads * shape.head_dims[0] * element), group),
        topology.alltoall_s(peers * queries * (layer.heads * shape.head_dims[1] * element + 4 * layer.heads), group),
        2 * hop_s(layer, topology, decode) + len(group) * merge_s(layer, queries),
    )


def _gather_kv(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    """Every member waits for all keys and values."""
    return ChannelTime(
        attention_s=attention_s(
            layer, channel.shares.busiest, keys=channel.keys, decode=channel.decode, evenness=channel.evenness
        ),
        exposed_s=topology.gather_s(max(channel.shares.held) * layer.kv_bytes, channel.group),
        overhead_s=copies_s(layer, channel.keys),
    )


def _alltoall(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    members, shape, shares = len(channel.group), layer.model.attention, channel.shares
    elements = max(shares.queries) * math.ceil(layer.heads / members)
    queries, outputs = (elements * dims * layer.bytes_per_element * (members - 1) for dims in shape.head_dims)
    kv_heads = math.ceil(layer.kv_heads / members)
    keys = max(shares.held) * layer.kv_bytes * kv_heads / layer.kv_heads * (members - 1)
    exposed_s = topology.alltoall_s(queries + keys, channel.group) + topology.alltoall_s(outputs, channel.group)
    return ChannelTime(attention_s=by_heads_s(layer, channel), exposed_s=exposed_s)


def _gather_hidden(layer: Layer, topology: Topology, channel: Channel) -> ChannelTime:
    members, queries = len(channel.group), max(channel.shares.queries)
    hidden = queries * layer.model.attention.hidden_size * layer.bytes_per_element
    exposed_s = 2 * topology.gather_s(hidden, channel.group)
    exposed_s += topology.alltoall_s(queries * layer.kv_bytes * (members - 1) / members, channel.group)
    return ChannelTime(attention_s=by_heads_s(layer, channel), exposed_s=exposed_s)


def by_heads_s(layer: Layer, channel: Channel) -> float:
    """Return the seconds of attention when each member attends all tokens with its part of the heads."""
    shares = channel.shares
    every = Share(queries=sum(shares.queries), pairs=sum(shares.pairs), scores=sum(shares.scores), held=channel.keys)
    return attention_s(
        layer, every, keys=channel.keys, head_parts=len(channel.group), decode=channel.decode, evenness=channel.evenness
    )


def _ring_kv_bytes(layer: Layer, channel: Channel) -> float:
    return (len(channel.group) - 1) * _kv_bytes(layer) * sum(channel.shares.held)


def _kv_bytes(layer: Layer) -> float:
    """Return the bytes of a token's keys and values that all ranks of an instance send, with copies of KV heads."""
    return layer.kv_bytes * layer.tp


def _ring_q_bytes(layer: Layer, channel: Channel) -> float:
    """Return the bytes of queries and partial outputs, with a log-sum-exp of four bytes per head."""
    shape, queries = layer.model.attention, sum(channel.shares.queries)
    per_query = shape.num_heads * (sum(shape.head_dims) * layer.bytes_per_element + 4)
    return (len(channel.group) - 1) * queries * per_query


def _alltoall_bytes(layer: Layer, channel: Channel) -> float:
    members, shape = len(channel.group), layer.model.attention
    kv_heads = max(shape.num_kv_heads, min(members, shape.num_heads))
    per_query = shape.num_heads * sum(shape.head_dims) * layer.bytes_per_element
    per_key = kv_heads / shape.num_kv_heads * _kv_bytes(layer)
    rows = per_query * sum(channel.shares.queries) + per_key * sum(channel.shares.held)
    return rows * ((members - 1) / members)


def _gather_hidden_bytes(layer: Layer, channel: Channel) -> float:
    members, queries = len(channel.group), sum(channel.shares.queries)
    hidden = layer.model.attention.hidden_size * layer.bytes_per_element
    return 2 * (members - 1) * queries * hidden + _kv_bytes(layer) * queries * ((members - 1) / members)


def _chain_bytes(layer: Layer, channel: Channel) -> float:
    cached = cached_in_chain(channel)
    return _kv_bytes(layer) * sum(max(held, cached) for held in channel.shares.held[:-1])


def hop_s(layer: Layer, topology: Topology, decode: bool) -> float:
    return 0.0 if decode and topology.recorded else layer.attention.hop_us * 1e-6


def merge_s(layer: Layer, queries: float) -> float:
    elements = queries * layer.heads * layer.model.attention.head_dims[1]
    return layer.stream_s(elements * layer.attention.merge_bytes)


register_cost(RING_KV, ExchangeCost(num_bytes=_ring_kv_bytes, time=_ring_kv))
register_cost(RING_Q, ExchangeCost(num_bytes=_ring_q_bytes, time=_ring_q))
register_cost(ALLTOALL, ExchangeCost(num_bytes=_alltoall_bytes, time=_alltoall))
register_cost(GATHER_KV, ExchangeCost(num_bytes=_ring_kv_bytes, time=_gather_kv, copies_kv=True, joins_all=True))
register_cost(GATHER_HIDDEN, ExchangeCost(num_bytes=_gather_hidden_bytes, time=_gather_hidden))
register_cost(CHAIN, ExchangeCost(num_bytes=_chain_bytes, time=None, copies_kv=True))
