"""The groups of ranks that one step sends messages in, the lanes that carry them, and their tags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from longspan.attn.collectives import all_reduce, hidden_hops
from longspan.attn.comm import ALONE, Group, Transport
from longspan.core.cluster import Cluster
from longspan.core.sparse import SPARSE_HOPS
from longspan.core.steps import Link
from longspan.runtime.batch import Channel
from longspan.runtime.block_messages import FIRST_TAG as FIRST_MOVE_TAG

WEIGHTS = "weights"
_CHANNELS = 1024
"""Channels of one Forward, over all ranks, that get tags of their own."""


@dataclass(frozen=True, kw_only=True)
class StepLanes:
    """A rank's links to the others for what they send each other inside a step, where peers receive in the same step.

    Tagged transports may be one for all. Others run a rank's calls one after the other, so each kind of work has its
    own: calls of one lane come in the same order on all ranks, and none waits for another lane's.

    Attributes:
        exchange: between instances, for exchanges.
        early: likewise, for what is received before it is computed, see `Group.start`.
        inside: between the ranks of a stage, for what they compute together.
        weights: between them, for weights, which come a layer ahead.
    """

    exchange: Transport
    early: Transport
    inside: Transport
    weights: Transport

    @classmethod
    def one(cls, transport: Transport) -> Self:
        """Lets one tagged transport carry everything."""
        return cls(exchange=transport, early=transport, inside=transport, weights=transport)

    def each(self, change: Callable[[Transport], Transport]) -> StepLanes:
        return StepLanes(
            exchange=change(self.exchange),
            early=change(self.early),
            inside=change(self.inside),
            weights=change(self.weights),
        )

    def complete_sends(self) -> None:
        """Waits until every send has left its buffer."""
        for transport in (self.exchange, self.early, self.inside, self.weights):
            transport.complete_sends()


class StepComm:
    """The groups of ranks that one step sends messages in.

    Exchanges connect ranks of the same shard of different instances, which have the same heads, where both are
    split alike. Tags are unique per (step, layer, channel, hop) among the steps that can be in flight.

    Attributes:
        sent: payload bytes so far, by exchange and link.
    """

    def __init__(self, lanes: StepLanes, number: int, *, cluster: Cluster, rank: int, num_layers: int) -> None:
        self.sent: Counter[tuple[str, Link]] = Counter()
        self._lanes, self._cluster = lanes, cluster
        self._instance, self._stage, self._shard = cluster.at(rank)
        self._num_layers, self._hops = num_layers, max(hidden_hops(cluster.num_ranks), SPARSE_HOPS)
        self._num_stages = cluster.pp(self._instance)
        self._num_inside = 0
        per_step = 2 * (num_layers + 1) * _CHANNELS * self._hops  # inside instances a layer has more than channels
        self._first_tag = number % (FIRST_MOVE_TAG // per_step) * per_step

    def channel(self, layer: int, channel: Channel) -> Group:
        if len(channel.members) == 1:
            return ALONE
        assert all(map(self._is_alike, channel.members)), "instances that exchange are split alike"
        ranks = [self._cluster.rank(instance, self._stage, self._shard) for instance in channel.members]
        return self._group(ranks, channel.rank, channel.exchange.shown, self._tag(layer, channel.number))

    def everyone(self) -> Group:
        """Connects all instances, for what travels before the first layer between those that are split alike."""
        ranks = [
            self._cluster.rank(instance, self._stage, self._shard) if self._is_alike(instance) else -1
            for instance in self._cluster.instances
        ]
        return self._group(ranks, self._instance, "tokens", self._tag(self._num_layers, 0))

    def inside(self, name: str) -> Group:
        """Connects the ranks of this stage, which ask for it in the same order; no channel is between them.

        What is named `WEIGHTS` comes a layer ahead.
        """
        tag = self._first_tag + self._num_inside * self._hops
        self._num_inside += 1
        lane = self._lanes.weights if name == WEIGHTS else self._lanes.inside
        return self._group(self._cluster.stage_ranks(self._instance, self._stage), self._shard, name, tag, lane)

    def stages(self, transport: Transport, name: str) -> Group:
        """Connects the ranks of this shard in all stages, in order; nothing else is between them."""
        ranks = [self._cluster.rank(self._instance, stage, self._shard) for stage in range(self._num_stages)]
        return self._group(ranks, self._stage, name, self._tag(self._num_layers, 0), transport)

    def all_reduce(self, partial: Tensor) -> Tensor:
        return all_reduce(self.inside("all_reduce"), partial)

    def _is_alike(self, instance: int) -> bool:
        return self._cluster.are_alike(instance, self._instance)

    def _group(
        self, ranks: Sequence[int], index: int, name: str, first_tag: int, transport: Transport | None = None
    ) -> Group:
        hosts = [self._cluster.hosts[rank] for rank in ranks]
        tags = range(first_tag, first_tag + self._hops)
        return Group(
            transport or self._lanes.exchange,
            ranks,
            index,
            hosts=hosts,
            name=name,
            tags=tags,
            sent=self.sent,
            early=transport or self._lanes.early,
        )

    def _tag(self, layer: int, channel: int) -> int:
        assert channel < _CHANNELS, "a step has few kinds of groups and exchanges"
        return self._first_tag + (layer * _CHANNELS + channel) * self._hops
