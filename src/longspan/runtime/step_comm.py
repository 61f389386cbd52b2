"""The groups of ranks that one step sends messages in, and the tags of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from longspan.attn.all_reduce import all_reduce
from longspan.attn.comm import Group, Transport
from longspan.attn.exchanges.gather_hidden import hidden_hops
from longspan.core.steps import Link, shown_name
from longspan.runtime.batch import Channel

_CHANNELS = 1024
"""Channels of one Forward, over all ranks, that get tags of their own."""
_NUM_TAGS = 2**31


class StepComm:
    """One step's groups; `hosts` has the host of every rank.

    Exchanges connect ranks of different instances that have the same place in theirs, and so the same heads. Tags are
    unique per (step, layer, channel, hop) among the steps that can be in flight.
    """

    def __init__(
        self,
        transport: Transport | None,
        number: int,
        *,
        rank: int,
        hosts: Sequence[int],
        num_layers: int,
        tp: int = 1,
    ) -> None:
        self.sent: Counter[tuple[str, Link]] = Counter()
        self._transport, self._hosts = transport, hosts
        self._tp, (self._instance, self._tp_index) = tp, divmod(rank, tp)
        self._num_layers, self._hops = num_layers, hidden_hops(len(hosts))  # no exchange has more
        self._num_inside = 0
        per_step = 2 * (num_layers + 1) * _CHANNELS * self._hops  # inside instances a layer has more than channels
        self._first_tag = number % (_NUM_TAGS // per_step) * per_step

    def channel(self, layer: int, channel: Channel) -> Group:
        """The members of a channel in one layer."""
        ranks = [instance * self._tp + self._tp_index for instance in channel.members]
        return self._group(ranks, channel.rank, shown_name(channel.exchange), self._tag(layer, channel.number))

    def everyone(self) -> Group | None:
        """All instances, for what travels before the first layer; None when there is only one rank."""
        if self._transport is None:
            return None
        everyone = range(self._tp_index, len(self._hosts), self._tp)
        return self._group(everyone, self._instance, "tokens", self._tag(self._num_layers, 0))

    def inside(self, name: str) -> Group:
        """The ranks of this instance, who ask for it in the same order; no exchange of a channel is between them."""
        tag = self._first_tag + self._num_inside * self._hops
        self._num_inside += 1
        ranks = range(self._instance * self._tp, (self._instance + 1) * self._tp)
        return self._group(ranks, self._tp_index, name, tag)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of this instance."""
        return all_reduce(self.inside("all_reduce"), partial)

    def _group(self, ranks: Sequence[int], index: int, name: str, first_tag: int) -> Group:
        assert self._transport is not None, "a group of several ranks has a transport"
        hosts = [self._hosts[rank] for rank in ranks]
        return Group(self._transport, ranks, index, hosts=hosts, name=name, first_tag=first_tag, sent=self.sent)

    def _tag(self, layer: int, channel: int) -> int:
        assert channel < _CHANNELS, "a step has few kinds of groups and exchanges"
        return self._first_tag + (layer * _CHANNELS + channel) * self._hops
