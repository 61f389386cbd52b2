"""Seconds of one forward pass over channels, per instance, and what they consist of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from longspan.cost.chain import Member, skewed
from longspan.cost.channels import Channel, ChannelTime, attention_s, cached_in_chain, channel_time, copies_s
from longspan.cost.layer import Layer
from longspan.cost.topology import Topology


@dataclass(kw_only=True, slots=True)
class Breakdown:
    """Seconds of one instance in a forward pass, by what they are spent on.

    Attributes:
        linear_s: projections and feed-forward layers.
        elementwise_s: norms, rotary embeddings, activations, additions.
        attention_s: scores, softmax, values; while waiting for the slowest member, too.
        overhead_s: hops, merges and copies of an exchange.
        all_reduce_s: sums over the ranks of an instance.
        exchange_s: messages between instances that nothing hides, and waiting for them.
        launch_s: what the host needs beyond all of that to start all operators.
        head_s: the output head.
    """

    linear_s: float = 0.0
    elementwise_s: float = 0.0
    attention_s: float = 0.0
    overhead_s: float = 0.0
    all_reduce_s: float = 0.0
    exchange_s: float = 0.0
    launch_s: float = 0.0
    head_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All."""
        return (
            self.linear_s
            + self.elementwise_s
            + self.attention_s
            + self.overhead_s
            + self.all_reduce_s
            + self.exchange_s
            + self.launch_s
            + self.head_s
        )

    @property
    def exposed_communication_s(self) -> float:
        """Messages that nothing hides."""
        return self.all_reduce_s + self.exchange_s

    def as_dict(self) -> dict[str, float]:
        """Seconds by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Roofline:
    """Predicts forward passes of a model on a cluster."""

    layer: Layer
    topology: Topology
    _known: dict[tuple[float, float], dict[str, float]] = field(default_factory=dict, repr=False)

    def times(
        self, channels: Sequence[Channel], tokens: Mapping[int, float], sampled: Mapping[int, float]
    ) -> dict[int, Breakdown]:
        """What each instance spends its time on.

        Args:
            channels: all that is attended to.
            tokens: that each instance computes; those with none do not take part.
            sampled: for how many of them it computes the output head.
        """
        layer, num_layers = self.layer, self.layer.model.attention.num_layers
        found = {
            instance: Breakdown(**self._computed(tokens[instance], sampled.get(instance, 0))) for instance in tokens
        }
        launches = dict.fromkeys(tokens, layer.num_launches)
        chains = []
        for channel in channels:
            if channel.exchange == "chain" and len(channel.group) > 1:
                chains.append(channel)
            else:
                time = channel_time(layer, self.topology, channel)
                _add([found[instance] for instance in channel.group], time, num_layers)
            if extra := self._extra_launches(channel):
                for instance in channel.group:
                    launches[instance] += extra
        for channel in chains:
            self._chain(channel, found)
        if layer.chip.attention.unfused or not all(channel.decode for channel in channels):
            launch_s = num_layers * layer.chip.attention.launch_us * 1e-6
            for instance, breakdown in found.items():
                breakdown.launch_s = self._waiting_s(breakdown.total_s, launches[instance] * launch_s)
        return found

    def _computed(self, tokens: float, sampled: float) -> dict[str, float]:
        """What does not depend on channels, as fields of `Breakdown`."""
        key = tokens, sampled
        if key not in self._known:
            layer, shape = self.layer, self.layer.model.attention
            before, behind = layer.before(tokens), layer.behind(tokens)
            reduced_s = 0.0
            if layer.tp > 1 and tokens:
                sums = 1 if layer.model.parallel else 2
                reduced = tokens * shape.hidden_size * layer.chip.bytes_per_element
                reduced_s = sums * self.topology.all_reduce_s(reduced)
            self._known[key] = {
                "linear_s": shape.num_layers * (before.linear_s + behind.linear_s),
                "elementwise_s": shape.num_layers * (before.elementwise_s + behind.elementwise_s),
                "all_reduce_s": shape.num_layers * reduced_s,
                "head_s": layer.head_s(sampled) if sampled else 0.0,
            }
        return self._known[key]

    def _waiting_s(self, device_s: float, host_s: float) -> float:
        """How much longer it takes since the host has to start everything."""
        smooth = self.layer.chip.efficiency.host_smooth
        return float((device_s**smooth + host_s**smooth) ** (1 / smooth)) - device_s

    def _chain(self, channel: Channel, found: dict[int, Breakdown]) -> None:
        """Adds a chain; all else that its members compute comes behind its attention, layer by layer."""
        num_layers = self.layer.model.attention.num_layers
        members, cached = [], cached_in_chain(channel)
        for index, (instance, share) in enumerate(zip(channel.group, channel.shares, strict=True)):
            breakdown = found[instance]
            attended_s = attention_s(self.layer, share, keys=share.held)
            copied_s = copies_s(self.layer, share.held) if index else 0.0
            breakdown.attention_s += num_layers * attended_s
            breakdown.overhead_s += num_layers * copied_s
            before_s = self.layer.before(share.queries).total_s
            rest_s = (breakdown.total_s - breakdown.head_s) / num_layers - before_s
            sent_s = latency_s = 0.0
            if index + 1 < len(channel.group):
                receiver = channel.group[index + 1]
                latency_s = self.topology.send_s(0.0, instance, receiver)
                new = max(0.0, share.held - cached)
                sent_s = self.topology.send_s(new * self.layer.kv_bytes, instance, receiver) - latency_s
            members.append(Member(before_s=before_s, behind_s=rest_s, message_s=sent_s, latency_s=latency_s))
        ends = skewed(members, num_layers, rendezvous=self.layer.chip.attention.rendezvous)
        for instance, end_s in zip(channel.group, ends, strict=True):
            breakdown = found[instance]
            breakdown.exchange_s += max(0.0, end_s - (breakdown.total_s - breakdown.head_s))

    def _extra_launches(self, channel: Channel) -> int:
        """Unfused code gathers into a list of tensors and joins them, keys and values apart."""
        if len(channel.group) == 1 or not self.layer.chip.attention.unfused:
            return 0
        return 2 * len(channel.group) if channel.exchange in ("gather_kv", "gather_kv_dense") else 2


def _add(breakdowns: Iterable[Breakdown], time: ChannelTime, num_layers: int) -> None:
    attended_s, overhead_s = num_layers * time.attention_s, num_layers * time.overhead_s
    exposed_s = num_layers * time.exposed_s
    for breakdown in breakdowns:
        breakdown.attention_s += attended_s
        breakdown.overhead_s += overhead_s
        breakdown.exchange_s += exposed_s
