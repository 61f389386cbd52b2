"""The groups of ranks that one step sends messages in, and the tags of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from longspan.attn.collectives import all_reduce
from longspan.attn.comm import ALONE, Group, Transport
from longspan.core.cluster import Cluster
from longspan.core.steps import Link
from longspan.layerwise.gather_hidden import hidden_hops
from longspan.runtime.worker.batch import Channel

_CHANNELS = 1024
"""Channels of one Forward, over all ranks, that get tags of their own."""
_NUM_TAGS = 2**31
_NUM_MOVE_TAGS = 2**27
"""The last of them are those of moves."""
_CHUNKS = 64
"""Messages of a layer of a move, from one rank to another, that have tags of their own; fewer are under way."""
_NOBODY = -1


class StepComm:
    """The groups of one step.

    Exchanges connect ranks of the same shard of different instances, which have the same heads, where both are
    split alike. Tags are unique per (step, layer, channel, hop) among the steps that can be in flight.
    """

    def __init__(
        self,
        transport: Transport | None,
        number: int,
        *,
        cluster: Cluster,
        rank: int,
        num_layers: int,
    ) -> None:
        self.sent: Counter[tuple[str, Link]] = Counter()
        self._transport, self._cluster, self._hosts = transport, cluster, cluster.hosts
        self._instance, _, self._shard = cluster.at(rank)
        self._num_layers, self._hops = num_layers, hidden_hops(cluster.num_ranks)  # no exchange has more
        self._num_inside = 0
        per_step = 2 * (num_layers + 1) * _CHANNELS * self._hops  # inside instances a layer has more than channels
        self._first_tag = number % ((_NUM_TAGS - _NUM_MOVE_TAGS) // per_step) * per_step

    def channel(self, layer: int, channel: Channel) -> Group:
        """Connects the members of a channel in one layer."""
        if len(channel.members) == 1:
            return ALONE
        ranks = [self._beside(instance) for instance in channel.members]
        assert _NOBODY not in ranks, "instances that exchange are split alike"
        return self._group(ranks, channel.rank, channel.exchange.shown, self._tag(layer, channel.number))

    def everyone(self) -> Group | None:
        """Connects all instances, for what travels before the first layer between those that are split alike.

        None when there is only one rank.
        """
        if self._transport is None:
            return None
        ranks = [self._beside(instance) for instance in self._cluster.instances]
        return self._group(ranks, self._instance, "tokens", self._tag(self._num_layers, 0))

    def inside(self, name: str) -> Group:
        """Connects the ranks of this instance, which ask for it in the same order; no channel is between them."""
        tag = self._first_tag + self._num_inside * self._hops
        self._num_inside += 1
        return self._group(self._cluster.ranks(self._instance), self._shard, name, tag)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Returns the sum over the ranks of this instance."""
        return all_reduce(self.inside("all_reduce"), partial)

    def _beside(self, instance: int) -> int:
        """Returns the rank of this shard in another instance, if that is split alike."""
        alike = self._cluster.tp(instance) == self._cluster.tp(self._instance)
        return self._cluster.rank(instance, shard=self._shard) if alike else _NOBODY

    def _group(self, ranks: Sequence[int], index: int, name: str, first_tag: int) -> Group:
        assert self._transport is not None, "a group of several ranks has a transport"
        hosts = [self._hosts[rank] for rank in ranks]
        return Group(self._transport, ranks, index, hosts=hosts, name=name, first_tag=first_tag, sent=self.sent)

    def _tag(self, layer: int, channel: int) -> int:
        assert channel < _CHANNELS, "a step has few kinds of groups and exchanges"
        return self._first_tag + (layer * _CHANNELS + channel) * self._hops


class MoveComm:
    """All ranks, for the KV that moves between them on one lane, counted as `name`."""

    def __init__(self, transport: Transport, name: str, *, rank: int, hosts: Sequence[int], num_layers: int) -> None:
        self._transport, self._name, self._rank, self._hosts = transport, name, rank, hosts
        self._num_layers = num_layers

    def group(self, number: int, layer: int, sent: Counter[tuple[str, Link]], chunk: int = 0) -> Group:
        """Connects all ranks for one message of a layer of a MoveKV, whose only hop is 0; a member is a rank. Counts in
        `sent`.
        """
        per_move = self._num_layers * _CHUNKS
        within = layer * _CHUNKS + chunk % _CHUNKS
        tag = _NUM_TAGS - _NUM_MOVE_TAGS + number % (_NUM_MOVE_TAGS // per_move) * per_move + within
        ranks = range(len(self._hosts))
        return Group(self._transport, ranks, self._rank, hosts=self._hosts, name=self._name, first_tag=tag, sent=sent)

    def count(self, peer: int, num_bytes: int, sent: Counter[tuple[str, Link]]) -> None:
        """Counts what goes to a rank in messages whose groups do not."""
        link: Link = "same_host" if self._hosts[peer] == self._hosts[self._rank] else "other_host"
        sent[self._name, link] += num_bytes
