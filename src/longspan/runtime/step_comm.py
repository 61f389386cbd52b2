"""Groups of ranks that communicate in one step, their lanes (transports), and their message tags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from longspan.attn.comm import ALONE, Group, Transport, gather_hops, hidden_hops
from longspan.core.cluster import Cluster
from longspan.core.sparse import SPARSE_HOPS
from longspan.core.steps import Link
from longspan.model.step import RecordedSums
from longspan.runtime.batch import Channel

WEIGHTS = "weights"
_RATING_HOPS = 2
"""The last hops of a group, for the attention of prompts (`prompt_attention.py`)."""
FIRST_MOVE_TAG = 2**31 - 2**27
"""Lower bound of the tags of KV moves, which end at 2**31. Exchanges use the tags below it."""
_CHANNELS = 1024
"""Maximum number of channels of one Forward, over all ranks. Each has its own tags."""


@dataclass(frozen=True, kw_only=True)
class StepLanes:
    """A rank's transports for messages that peers receive in the same step.

    One tagged transport may serve all lanes. An untagged transport executes a rank's calls in order, so each kind of
    work has its own. All ranks make the calls of a lane in the same order, and no call waits for another lane.

    Attributes:
        exchange: between instances, for exchanges.
        inside: between the ranks of a stage, for tensor parallelism.
        weights: between the ranks of a stage, for weights, which are fetched one layer ahead.
    """

    exchange: Transport
    inside: Transport
    weights: Transport

    @classmethod
    def one(cls, transport: Transport) -> Self:
        """Use one tagged transport for all lanes."""
        return cls(exchange=transport, inside=transport, weights=transport)

    def each(self, change: Callable[[Transport], Transport]) -> StepLanes:
        return StepLanes(**{name: change(lane) for name, lane in vars(self).items()})

    def complete_sends(self) -> None:
        """Wait until every send has left its buffer."""
        for lane in vars(self).values():
            lane.complete_sends()


class StepComm:
    """The groups of ranks that communicate in one step.

    Exchanges connect ranks of the same stage and shard of instances that are split alike, so they have the same
    heads. Tags are unique per (step, layer, channel, hop) among the steps that can be in flight.

    Attributes:
        sent: payload bytes so far, by exchange and link.
    """

    def __init__(self, lanes: StepLanes, number: int, *, cluster: Cluster, rank: int, num_layers: int) -> None:
        self.sent: Counter[tuple[str, Link]] = Counter()
        self._lanes, self._cluster = lanes, cluster
        self._instance, self._stage, self._shard = cluster.at(rank)
        exchange_hops = max(hidden_hops(cluster.num_instances), SPARSE_HOPS)
        self._num_layers, self._hops = num_layers, max(exchange_hops, gather_hops(cluster.num_ranks)) + _RATING_HOPS
        self._num_stages = cluster.pp(self._instance)
        self._num_inside = 0
        per_step = 2 * (num_layers + 1) * _CHANNELS * self._hops  # 2: `inside` may need more groups than channels
        self._first_tag = number % (FIRST_MOVE_TAG // per_step) * per_step

    @property
    def tagged(self) -> bool:
        """Whether messages of exchanges are matched by tag, so that a receive delays no other message."""
        return self._lanes.exchange.tagged

    def channel(self, layer: int, channel: Channel) -> Group:
        if len(channel.members) == 1:
            return ALONE
        assert all(map(self._is_alike, channel.members)), "the members of an exchange are split alike"
        ranks = [self._cluster.rank(instance, self._stage, self._shard) for instance in channel.members]
        return self._group(ranks, channel.rank, channel.exchange.shown, self._tag(layer, channel.number))

    def instances(self) -> Group:
        """Return the group of instances for messages before the first layer, -1 for those split differently."""
        ranks = [
            self._cluster.rank(instance, self._stage, self._shard) if self._is_alike(instance) else -1
            for instance in self._cluster.instances
        ]
        return self._group(ranks, self._instance, "tokens", self._tag(self._num_layers, 0))

    def inside(self, name: str) -> Group:
        """Return a group of this stage's ranks, with new tags. All ranks call this in the same order.

        The name `WEIGHTS` selects the lane of weights, which are fetched one layer ahead.
        """
        tag = self._first_tag + self._num_inside * self._hops
        self._num_inside += 1
        lane = self._lanes.weights if name == WEIGHTS else self._lanes.inside
        return self._group(self._cluster.stage_ranks(self._instance, self._stage), self._shard, name, tag, lane)

    def stages(self, transport: Transport, name: str) -> Group:
        """Return the group of this shard's ranks in all stages, in order."""
        ranks = [self._cluster.rank(self._instance, stage, self._shard) for stage in range(self._num_stages)]
        return self._group(ranks, self._stage, name, self._tag(self._num_layers, 0), transport)

    def all_reduce(self, partial: Tensor) -> Tensor:
        from longspan.attn.collectives import all_reduce  # noqa: PLC0415 - only with tensor parallelism

        return all_reduce(self.inside("all_reduce"), partial)

    def recorded_sums(self) -> RecordedSums | None:
        """Return the sums over the ranks of a stage that a device makes and records. None if they are messages."""
        if self._lanes.inside.sums is None:
            return None
        return RecordedSums(reduce=self.all_reduce, sent=self.sent)

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
        )

    def _tag(self, layer: int, channel: int) -> int:
        assert channel < _CHANNELS, "the channels of a step have distinct tags"
        return self._first_tag + (layer * _CHANNELS + channel) * self._hops
