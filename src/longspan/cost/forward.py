"""Seconds of a forward pass over channels, per instance, by kind of work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise, repeat
from operator import add, attrgetter

from longspan.core.cluster import Cluster
from longspan.cost import catalog
from longspan.cost.architecture import Architecture
from longspan.cost.catalog import Efficiency, Kernels, Launch
from longspan.cost.channels import (
    Channel,
    ExchangeCost,
    attention_s,
    cached_in_chain,
    channel_time,
    copies_s,
    cost_of,
)
from longspan.cost.links import Link
from longspan.cost.partitions import Member, skewed
from longspan.cost.roofline import Layer
from longspan.cost.topology import Devices, Topology
from longspan.errors import ParameterError


@dataclass(slots=True)
class Breakdown:
    """Seconds of one instance in a forward pass, by kind of work. Equal instances share an object, so it is read-only.

    Attributes:
        linear_s: projections and feed-forward layers.
        elementwise_s: norms, rotary embeddings, activations, additions.
        attention_s: scores, softmax and values, including the wait for the slowest member.
        overhead_s: hops, merges and copies of an exchange.
        all_reduce_s: sums over the ranks of an instance.
        exchange_s: messages between instances that are not overlapped, and waits for them.
        launch_s: further seconds of the host to launch all operators.
        head_s: the output head.
        pipeline_s: waits of the last pipeline stage for earlier stages, or of requests for stages.
    """

    linear_s: float = 0.0
    elementwise_s: float = 0.0
    attention_s: float = 0.0
    overhead_s: float = 0.0
    all_reduce_s: float = 0.0
    exchange_s: float = 0.0
    launch_s: float = 0.0
    head_s: float = 0.0
    pipeline_s: float = 0.0
    total_s: float = field(init=False)

    def __post_init__(self) -> None:
        device_s = self.linear_s + self.elementwise_s + self.attention_s + self.overhead_s
        self.total_s = device_s + self.all_reduce_s + self.exchange_s + self.launch_s + self.head_s + self.pipeline_s

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(*map(add, _parts(self), _parts(other)))

    def of_stage(self, part: float, seconds: float) -> Breakdown:
        """Return the breakdown of the last stage, which has a `part` of all layers, over `seconds`."""
        own = {name: part * spent_s for name, spent_s in self.as_dict().items()} | {"head_s": self.head_s}
        return Breakdown(**(own | {"pipeline_s": max(0.0, seconds - sum(own.values()))}))

    def as_dict(self) -> dict[str, float]:
        """Return seconds by name, without the total."""
        return dict(zip(_KINDS, _parts(self), strict=True))


_KINDS = tuple(kind.name for kind in fields(Breakdown) if kind.init)
_parts: Callable[[Breakdown], tuple[float, ...]] = attrgetter(*_KINDS)
_IDLE = Breakdown()


def _add(times: dict[int, Breakdown], more: Mapping[int, Breakdown]) -> None:
    """Add to the breakdowns of instances. Instances that shared an object and get equal additions still share one."""
    befores = []  # kept alive, so that ids are unique
    alike: dict[tuple[int, int], Breakdown] = {}
    for instance, extra in more.items():
        before = times[instance]
        kind = id(before), id(extra)
        after = alike.get(kind)
        if after is None:
            after = alike[kind] = extra if before is _IDLE else before + extra
            befores.append(before)
        times[instance] = after


@dataclass(frozen=True, kw_only=True, eq=False)
class Roofline:
    """Predicts the seconds of forward passes of a model on a cluster.

    Attributes:
        stages: the layers of each pipeline stage of an instance.
        hops: the slowest link of hidden states from each stage to the next.
        launch: how the engine launches operators. No engine compiles prompts that several instances share.
        costs: costs of exchanges that replace the registered ones, for other systems with the same exchanges.
    """

    layer: Layer
    topology: Topology
    stages: Sequence[range]
    hops: Sequence[Link]
    launch: Launch = "compiled"
    costs: Mapping[str, ExchangeCost] = field(default_factory=dict)
    _known: dict[tuple[float, float], Breakdown] = field(default_factory=dict, repr=False)

    def times(
        self, channels: Sequence[Channel], tokens: Mapping[int, float], sampled: Mapping[int, float]
    ) -> dict[int, Breakdown]:
        """Return the breakdown of each instance.

        Args:
            channels: all attention of the pass.
            tokens: number of tokens that each instance computes. Instances without tokens take no part.
            sampled: number of tokens for which each instance computes the output head.
        """
        times = {
            instance: self._computed(number, asked) if (asked := sampled.get(instance, 0)) or number else _IDLE
            for instance, number in tokens.items()
        }
        chains: list[Channel] = []
        for channel in channels:
            if channel.exchange.traits.skewed and len(channel.group) > 1:
                chains.append(channel)
            else:
                _add(times, dict.fromkeys(channel.group, self._exchanged(channel)))
        for channel in chains:
            self._chain(channel, times)
        if self.launch == "eager" or not all(channel.decode for channel in channels):
            _add(times, self._waiting_for_host(times, channels))
        return times

    def by_stage(self, layers_s: float, head_s: float, tokens: float) -> tuple[float, ...]:
        """Split the seconds of all layers over stages. All but the first also wait for hidden states of `tokens`."""
        num_bytes = tokens * self.layer.model.attention.hidden_size * self.layer.bytes_per_element
        hops_s = (link.send_s(num_bytes, self.layer.tp) if tokens else 0.0 for link in self.hops)
        heads_s = chain(repeat(0.0, len(self.hops)), (head_s,))
        num_layers = self.layer.model.attention.num_layers
        return tuple(
            hop_s + layers_s * len(layers) / num_layers + head_s
            for layers, hop_s, head_s in zip(self.stages, chain((0.0,), hops_s), heads_s, strict=True)
        )

    def _exchanged(self, channel: Channel) -> Breakdown:
        num_layers, cost = self.layer.model.attention.num_layers, self.costs.get(channel.exchange.kind)
        time = channel_time(self.layer, self.topology, channel, cost)
        return Breakdown(
            attention_s=num_layers * time.attention_s,
            overhead_s=num_layers * time.overhead_s,
            exchange_s=num_layers * time.exposed_s,
        )

    def _computed(self, tokens: float, sampled: float) -> Breakdown:
        key = tokens, sampled
        if key not in self._known:
            layer, shape = self.layer, self.layer.model.attention
            before, behind = layer.before(tokens), layer.behind(tokens)
            self._known[key] = Breakdown(
                linear_s=shape.num_layers * (before.linear_s + behind.linear_s),
                elementwise_s=shape.num_layers * (before.elementwise_s + behind.elementwise_s),
                all_reduce_s=self.summing(tokens)[0] if tokens else 0.0,
                head_s=layer.head_s(sampled) if sampled else 0.0,
            )
        return self._known[key]

    def summing(self, tokens: float) -> tuple[float, float]:
        """Return the seconds and bytes of sums over the ranks of an instance, in all layers.

        Many tokens are scattered to whole experts by all-to-alls instead, if these are quicker than a sum.
        """
        model, topology = self.layer.model, self.topology
        num_layers, hidden = model.attention.num_layers, tokens * model.attention.hidden_size
        hidden_bytes, sums = hidden * self.layer.bytes_per_element, num_layers * (1 if model.parallel else 2)
        sum_s, sum_bytes = topology.all_reduce_s(hidden_bytes), 2 * (self.layer.tp - 1) * hidden_bytes
        sizes = self._scattered_bytes(hidden)
        both_s = sum(map(topology.scatter_s, sizes))
        num_sparse = model.num_sparse(range(num_layers)) if sizes and both_s < sum_s else 0
        seconds = (sums - num_sparse) * sum_s + num_sparse * both_s
        return seconds, (sums - num_sparse) * sum_bytes + num_sparse * self.layer.tp * sum(sizes)

    def _scattered_bytes(self, hidden: float) -> tuple[float, ...]:
        """Return the bytes of a rank in both all-to-alls of a layer, for `hidden` elements. Empty without them.

        A rank sends its part of the tokens to their experts, in the precision of the products, and outputs return.
        """
        layer, experts = self.layer, self.layer.model.experts
        if experts is None or not experts.are_whole or layer.tp == 1:
            return ()
        sent = experts.ranks_per_token(layer.tp) * (layer.tp - 1) / layer.tp * hidden / layer.tp
        narrow = layer.device.multiplies_narrow(layer.precision.ffn)
        return sent * (layer.precision.ffn_bytes if narrow else layer.bytes_per_element), sent * layer.bytes_per_element

    def _waiting_for_host(self, times: Mapping[int, Breakdown], channels: Sequence[Channel]) -> dict[int, Breakdown]:
        """Return the time that instances wait for the host to launch operators."""
        layer, messages = self.layer, Counter[int]()
        for channel in channels:
            if (members := len(channel.group)) > 1:
                # Unfused code gathers into a list of tensors and joins them, keys and values apart.
                joined = cost_of(channel.exchange).joins_all
                messages.update(dict.fromkeys(channel.group, 2 * members if joined else 2))
        num_layers, smooth = layer.model.attention.num_layers, layer.efficiency.host_smooth
        alike: dict[tuple[int, float], Breakdown] = {}
        waiting: dict[int, Breakdown] = {}
        for instance, computed in times.items():
            if computed is _IDLE:
                continue
            kind = messages[instance], computed.total_s
            if kind not in alike:
                compiled = self.launch == "compiled" and not messages[instance]
                host_s = num_layers * layer.host_s(messages[instance], compiled=compiled)
                waiting_s = float((computed.total_s**smooth + host_s**smooth) ** (1 / smooth)) - computed.total_s
                alike[kind] = Breakdown(launch_s=waiting_s)
            waiting[instance] = alike[kind]
        return waiting

    def _chain(self, channel: Channel, times: dict[int, Breakdown]) -> None:
        """Add a chain. All other work of its members follows its attention in each layer."""
        num_layers = self.layer.model.attention.num_layers
        members, busy_s, cached = [], [], cached_in_chain(channel)
        for index, instance in enumerate(channel.group):
            share = channel.shares.of_member(index)
            attended_s = num_layers * attention_s(
                self.layer, share, keys=self.layer.model.attention.seen(share.held, share.queries)
            )
            copied_s = num_layers * copies_s(self.layer, share.held) if index else 0.0
            times[instance] += Breakdown(attention_s=attended_s, overhead_s=copied_s)
            busy_s.append(times[instance].total_s - times[instance].head_s)
            before_s = self.layer.before(share.queries).total_s
            rest_s = busy_s[-1] / num_layers - before_s
            sent_s = latency_s = 0.0
            if index + 1 < len(channel.group):
                receiver = channel.group[index + 1]
                latency_s = self.topology.send_s(0.0, instance, receiver)
                new = max(0.0, share.held - cached)
                sent_s = self.topology.send_s(new * self.layer.kv_bytes, instance, receiver) - latency_s
            members.append(Member(before_s=before_s, behind_s=rest_s, message_s=sent_s, latency_s=latency_s))
        own_bytes = cached / len(channel.group) * self.layer.kv_bytes
        gather_s = self.topology.gather_s(own_bytes, channel.group) if cached else 0.0
        ends = skewed(members, num_layers, rendezvous=self.layer.attention.rendezvous, gather_s=gather_s)
        for instance, end_s, own_s in zip(channel.group, ends, busy_s, strict=True):
            times[instance] += Breakdown(exchange_s=max(0.0, end_s - own_s))


def pipelined_s(steps: Iterable[Sequence[float]]) -> float:
    """Return the time when the last step leaves the last stage, from the seconds of each step per stage."""
    ends_s: list[float] = []
    for stages_s in steps:
        ends_s, before_s = ends_s or [0.0] * len(stages_s), 0.0
        for stage, own_s in enumerate(stages_s):
            before_s = ends_s[stage] = max(before_s, ends_s[stage]) + own_s
    return ends_s[-1]


def rooflines(
    model: Architecture,
    devices: Devices,
    cluster: Cluster,
    kernels: Kernels = "flash",
    constants: Efficiency | None = None,
    launch: Launch | None = None,
) -> tuple[Roofline, ...]:
    """Return the cost model of each role: of all instances, or of prefill instances and of decode instances.

    Args:
        constants: efficiency constants that replace efficiency.toml.
        launch: how the engine launches operators. None is `compiled`, or `eager` for kernels `eager`.

    Raises:
        ValueError: for unknown names, more ranks than devices, or heads that these ranks cannot share.
    """
    specs = [cluster.spec] if cluster.decode_spec is None else [cluster.spec, cluster.decode_spec]
    if cluster.num_ranks > devices.num_gpus:
        ranks = " + ".join(f"{spec.instances} * {spec.num_ranks // spec.instances}" for spec in specs)
        raise ValueError(
            f"{cluster} needs {ranks} = {cluster.num_ranks} GPUs, but there are {devices.hosts} hosts * "
            f"{devices.gpus_per_host} = {devices.num_gpus}: use more hosts or fewer ranks"
        )
    for spec in specs:
        if model.attention.num_heads < spec.tp:
            raise ValueError(
                f"tp({spec.tp}) ranks cannot share {model.attention.num_heads} query heads: use a smaller tp"
            )
        if (experts := model.experts) is not None and experts.are_whole:
            if spec.tp == 1:
                problem = "needs tp 2 or more, to share experts: use a larger tp, or leave it out"
                raise ParameterError("expert_parallel", problem, True)
            if experts.number < spec.tp:
                problem = f"tp({spec.tp}) ranks cannot share {experts.number} whole experts: use a smaller tp"
                raise ParameterError("expert_parallel", problem, True)
    launch = launch or ("eager" if kernels == "eager" else "compiled")
    if kernels == "eager" != launch:
        problem = f"{launch} needs fused attention: leave it out, or choose attention flash"
        raise ParameterError("launch", problem, launch)
    constants = constants or catalog.efficiency()
    inside, between = devices.links()
    device, attention = devices.device, constants.attention[kernels]
    per_host, located = devices.gpus_per_host, cluster if cluster.locations else cluster.on_hosts(devices.gpus_per_host)
    located = located.with_layers(model.attention.num_layers, model.head_layers)
    hosts = [located.hosts[located.rank(instance)] for instance in located.instances]
    lines = []
    for spec, role in zip(specs, (located.prefill, located.decode), strict=False):
        places = Topology(tp=spec.tp, gpus_per_host=per_host, inside=inside, between=between, hosts=hosts)
        topology = replace(places, recorded=launch != "eager")
        layer = Layer(model=model, device=device, efficiency=constants, attention=attention, tp=spec.tp)
        stages = [located.layers(role[0], stage) for stage in range(spec.pp)]
        ranks_hosts = [[located.hosts[located.rank(i, stage)] for i in role] for stage in range(spec.pp)]
        hops = [inside if here == there else between for here, there in pairwise(ranks_hosts)]
        lines.append(Roofline(layer=layer, topology=topology, stages=stages, hops=hops, launch=launch))
    return tuple(lines)
