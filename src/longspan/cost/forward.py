"""Seconds of a forward pass over channels, and of transfers of KV, per instance, and what they consist of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from longspan.cost.chain import Member, skewed
from longspan.cost.channels import Channel, attention_s, cached_in_chain, channel_time, copies_s, cost_of
from longspan.cost.roofline import Layer
from longspan.cost.topology import Topology, Wire


@dataclass(kw_only=True, slots=True)
class Breakdown:
    """Seconds of one instance in a forward pass, by what they are spent on. Instances alike share one: write to none.

    Attributes:
        linear_s: projections and feed-forward layers.
        elementwise_s: norms, rotary embeddings, activations, additions.
        attention_s: scores, softmax, values; while waiting for the slowest member, too.
        overhead_s: hops, merges and copies of an exchange.
        all_reduce_s: sums over the ranks of an instance.
        exchange_s: messages between instances that nothing hides, and waiting for them.
        launch_s: what the host needs beyond all of that to start all operators.
        head_s: the output head.
        total_s: all.
    """

    linear_s: float = 0.0
    elementwise_s: float = 0.0
    attention_s: float = 0.0
    overhead_s: float = 0.0
    all_reduce_s: float = 0.0
    exchange_s: float = 0.0
    launch_s: float = 0.0
    head_s: float = 0.0
    total_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.total_s = (
            self.linear_s
            + self.elementwise_s
            + self.attention_s
            + self.overhead_s
            + self.all_reduce_s
            + self.exchange_s
            + self.launch_s
            + self.head_s
        )

    def __add__(self, other: Breakdown) -> Breakdown:
        """Adds both, one after the other."""
        return Breakdown(
            linear_s=self.linear_s + other.linear_s,
            elementwise_s=self.elementwise_s + other.elementwise_s,
            attention_s=self.attention_s + other.attention_s,
            overhead_s=self.overhead_s + other.overhead_s,
            all_reduce_s=self.all_reduce_s + other.all_reduce_s,
            exchange_s=self.exchange_s + other.exchange_s,
            launch_s=self.launch_s + other.launch_s,
            head_s=self.head_s + other.head_s,
        )

    @property
    def exposed_communication_s(self) -> float:
        """Nothing hides these seconds of messages."""
        return self.all_reduce_s + self.exchange_s

    def as_dict(self) -> dict[str, float]:
        """Returns seconds by name, without the total."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init}


_IDLE = Breakdown()


def _add(found: dict[int, Breakdown], group: Sequence[int], more: Breakdown) -> None:
    """Adds the same to all members; those that were alike before still share one object."""
    befores = [found[instance] for instance in group]
    alike: dict[int, Breakdown] = {}
    for before in befores:
        if id(before) not in alike:
            alike[id(before)] = more if before is _IDLE else before + more
    found.update(zip(group, [alike[id(before)] for before in befores], strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Roofline:
    """Predicts forward passes of a model on a cluster."""

    layer: Layer
    topology: Topology
    _known: dict[tuple[float, float], Breakdown] = field(default_factory=dict, repr=False)

    def times(
        self, channels: Sequence[Channel], tokens: Mapping[int, float], sampled: Mapping[int, float]
    ) -> dict[int, Breakdown]:
        """Returns what each instance spends its time on.

        Args:
            channels: all that is attended to.
            tokens: that each instance computes; those with none do not take part.
            sampled: for how many of them it computes the output head.
        """
        found = dict.fromkeys(tokens, _IDLE)
        chains: list[Channel] = []
        starts = self.layer.chip.attention.unfused
        for channel in channels:
            starts = starts or not channel.decode
            if channel.exchange.traits.skewed and len(channel.group) > 1:
                chains.append(channel)
                continue
            _add(found, channel.group, self._exchanged(channel))
        for channel in chains:
            self._chain(channel, found, tokens, sampled)
        self._compute(found, tokens, sampled)
        if starts:
            self._start(found, channels)
        return found

    def _exchanged(self, channel: Channel) -> Breakdown:
        """Returns what each member of a channel spends on it."""
        time, num_layers = channel_time(self.layer, self.topology, channel), self.layer.model.attention.num_layers
        return Breakdown(
            attention_s=num_layers * time.attention_s,
            overhead_s=num_layers * time.overhead_s,
            exchange_s=num_layers * time.exposed_s,
        )

    def _compute(self, found: dict[int, Breakdown], tokens: Mapping[int, float], sampled: Mapping[int, float]) -> None:
        """Adds what does not depend on channels."""
        alike: dict[tuple[float, float, int], Breakdown] = {}
        for instance, before in list(found.items()):  # which keeps all of them, so that none has another's id
            number, asked = tokens[instance], sampled.get(instance, 0)
            if number or asked:
                kind = number, asked, id(before)
                if kind not in alike:
                    alike[kind] = before + self._computed(number, asked)
                found[instance] = alike[kind]

    def _computed(self, tokens: float, sampled: float) -> Breakdown:
        key = tokens, sampled
        if key not in self._known:
            layer, shape = self.layer, self.layer.model.attention
            before, behind = layer.before(tokens), layer.behind(tokens)
            reduced_s = 0.0
            if layer.tp > 1 and tokens:
                sums = 1 if layer.model.parallel else 2
                reduced = tokens * shape.hidden_size * layer.chip.bytes_per_element
                reduced_s = sums * self.topology.all_reduce_s(reduced)
            self._known[key] = Breakdown(
                linear_s=shape.num_layers * (before.linear_s + behind.linear_s),
                elementwise_s=shape.num_layers * (before.elementwise_s + behind.elementwise_s),
                all_reduce_s=shape.num_layers * reduced_s,
                head_s=layer.head_s(sampled) if sampled else 0.0,
            )
        return self._known[key]

    def _start(self, found: dict[int, Breakdown], channels: Sequence[Channel]) -> None:
        """Adds how much longer it takes since the host has to start everything."""
        chip, extra = self.layer.chip, Counter[int]()
        for channel in channels:
            if launches := self._extra_launches(channel):
                extra.update(dict.fromkeys(channel.group, launches))
        launch_s = self.layer.model.attention.num_layers * chip.attention.launch_us * 1e-6
        smooth = chip.efficiency.host_smooth
        alike: dict[tuple[int, int], Breakdown] = {}
        for instance, one in list(found.items()):
            if one is _IDLE:
                continue
            kind = extra[instance], id(one)
            if kind not in alike:
                device_s, host_s = one.total_s, (self.layer.num_launches + extra[instance]) * launch_s
                waiting_s = float((device_s**smooth + host_s**smooth) ** (1 / smooth)) - device_s
                alike[kind] = one + Breakdown(launch_s=waiting_s)
            found[instance] = alike[kind]

    def _chain(
        self,
        channel: Channel,
        found: dict[int, Breakdown],
        tokens: Mapping[int, float],
        sampled: Mapping[int, float],
    ) -> None:
        """Adds a chain; all else that its members compute comes behind its attention, layer by layer."""
        num_layers = self.layer.model.attention.num_layers
        members, busy_s, cached = [], [], cached_in_chain(channel)
        for index, instance in enumerate(channel.group):
            share = channel.shares.of_member(index)
            attended_s = num_layers * attention_s(self.layer, share, keys=share.held)
            copied_s = num_layers * copies_s(self.layer, share.held) if index else 0.0
            found[instance] += Breakdown(attention_s=attended_s, overhead_s=copied_s)
            whole = found[instance] + self._computed(tokens[instance], sampled.get(instance, 0))
            busy_s.append(whole.total_s - whole.head_s)
            before_s = self.layer.before(share.queries).total_s
            rest_s = busy_s[-1] / num_layers - before_s
            sent_s = latency_s = 0.0
            if index + 1 < len(channel.group):
                receiver = channel.group[index + 1]
                latency_s = self.topology.send_s(0.0, instance, receiver)
                new = max(0.0, share.held - cached)
                sent_s = self.topology.send_s(new * self.layer.kv_bytes, instance, receiver) - latency_s
            members.append(Member(before_s=before_s, behind_s=rest_s, message_s=sent_s, latency_s=latency_s))
        ends = skewed(members, num_layers, rendezvous=self.layer.chip.attention.rendezvous)
        for instance, end_s, own_s in zip(channel.group, ends, busy_s, strict=True):
            found[instance] += Breakdown(exchange_s=max(0.0, end_s - own_s))

    def _extra_launches(self, channel: Channel) -> int:
        """Copies as unfused code does, which gathers into a list of tensors and joins them, keys and values apart."""
        if len(channel.group) == 1 or not self.layer.chip.attention.unfused:
            return 0
        return 2 * len(channel.group) if cost_of(channel.exchange).joins_all else 2


_End = tuple[Wire, Literal["out", "in"], int]
"""Where bytes enter or leave a link: of a device of an instance, or of a host where its devices share the link."""


def moved_s(tokens: Mapping[tuple[int, int], int], line_of: Callable[[int], Roofline]) -> float:
    """Times sending every layer's KV of so many tokens from one instance to another, for all these pairs at once.

    Each rank of a target gets its own heads, and the ranks of a source send equal parts of all that the target gets.
    The busiest device, or host where the devices of one share a link, says how long it takes; both directions of a
    link are used at the same time.

    Args:
        tokens: by source and target.
        line_of: the cost model of an instance.
    """
    loads, latency_s = _loads(tokens, line_of)
    return latency_s + max((load / link.bytes_per_s for (link, _, _), load in loads.items()), default=0.0)


def received_s(tokens: Mapping[tuple[int, int], int], line_of: Callable[[int], Roofline]) -> float:
    """Times how long that keeps the busiest link of a target busy."""
    loads, _ = _loads(tokens, line_of)
    return max((load / link.bytes_per_s for (link, way, _), load in loads.items() if way == "in"), default=0.0)


def _loads(
    tokens: Mapping[tuple[int, int], int], line_of: Callable[[int], Roofline]
) -> tuple[Mapping[_End, float], float]:
    """Counts bytes by where they enter or leave a link, and finds the longest latency."""
    loads = defaultdict[_End, float](float)
    latency_s = 0.0
    for (source, target), number in tokens.items():
        sender, receiver = line_of(source), line_of(target)
        layer, topology = receiver.layer, receiver.topology
        num_bytes = number * layer.kv_bytes * layer.tp * layer.model.attention.num_layers
        out_of, into = sender.topology.host(source), topology.host(target)
        link = topology.inside if out_of == into else topology.between
        latency_s = max(latency_s, link.latency_s)
        if link.shared:
            loads[link, "out", out_of] += num_bytes
            loads[link, "in", into] += num_bytes
        else:
            loads[link, "out", source] += num_bytes / sender.layer.tp
            loads[link, "in", target] += num_bytes / layer.tp
    return loads, latency_s


def exposed_s(move_s: float, layer_s: float, num_layers: int) -> float:
    """Returns what remains of a transfer that goes layer by layer beside the layers before, each of which takes
    `layer_s`.

    Nothing hides that of the first layer.
    """
    part_s = move_s / num_layers
    return part_s + (num_layers - 1) * max(0.0, part_s - layer_s)
