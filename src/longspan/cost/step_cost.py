"""The time of a step on every instance: the protocol of costs, and the roofline cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from operator import add
from typing import TYPE_CHECKING, NamedTuple, Protocol

from longspan.core.blocks import coupled_instances
from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_Q, Exchange
from longspan.core.splits import ParallelSpec
from longspan.core.steps import Forward, MoveKV, Part
from longspan.cost.architecture import Architecture
from longspan.cost.catalog import Kernels, Launch
from longspan.cost.channels import Channel, Share, Shares, attention_s, shares_of
from longspan.cost.flows import Flow, alone_s, block_pairs, host_flows
from longspan.cost.forward import Breakdown, Roofline, rooflines
from longspan.cost.shape import ModelShape
from longspan.cost.topology import Devices

if TYPE_CHECKING:
    from longspan.core.sparse import SparseSetting
    from longspan.cost.csa_pipeline import Members, Rates

_RATED_TOKENS = 16384
"""Length of the prompt whose speed prices sparse attention, in tokens. Shorter prompts use devices less."""


class StepCost(Protocol):
    """Predicts the seconds of steps."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float, ...]]:
        """Return the seconds of each pipeline stage of each of its `instances`, from the time when all have begun.

        They include `rebalances` as far as layers do not overlap them, and no `streams`. Passing a token on takes no
        time.
        """

    def exposed_s(self, forward: Forward) -> dict[int, float] | None:
        """Return the part of `seconds` in which each instance, or the member that it waits for, waits for messages.

        Return None if the cost does not separate them.
        """

    def flows(self, move: MoveKV) -> Sequence[Flow]:
        """Return the flows of a move from each source to each target, with their links."""

    def resharded(self, cluster: Cluster) -> StepCost:
        """Return the cost of the same model and devices in another cluster."""

    def reshard(self, cluster: Cluster) -> ReshardCost:
        """Return the cost of a `Reshard` to another cluster."""


class ReshardCost(NamedTuple):
    """The bytes of weights that all ranks copy for a `Reshard`, and the seconds of the last rank."""

    copied_bytes: float
    seconds: float


def missing_weights(model: Architecture, before: Cluster, after: Cluster) -> list[float]:
    """Return, for each rank, the bytes of its weights in cluster `after` that it does not have in cluster `before`.

    Shards have equal parts of each layer, the embedding and the head, in order. Both clusters know the model.
    """
    return [_missing(model, before, after, rank) for rank in range(after.num_ranks)]


def _missing(model: Architecture, before: Cluster, after: Cluster, rank: int) -> float:
    if after.is_spare(rank):
        return 0.0
    layers, (first, last) = _place(after, rank)
    missing = model.rank_bytes(layers, after.tp(after.at(rank)[0]))
    if not before.is_spare(rank):
        had, (first_had, last_had) = _place(before, rank)
        kept = range(max(layers.start, had.start), min(layers.stop, had.stop))
        if kept:
            copied = model.copied_bytes(kept)
            missing -= copied + (model.stage_bytes(kept) - copied) * max(
                0.0, min(last, last_had) - max(first, first_had)
            )
    return missing


def _place(cluster: Cluster, rank: int) -> tuple[range, tuple[float, float]]:
    """Return the layers of a rank, and its fraction of each."""
    instance, stage, shard = cluster.at(rank)
    tp = cluster.tp(instance)
    return cluster.layers(instance, stage), (shard / tp, (shard + 1) / tp)


def wait_for_balances(forward: Forward, layers_s: dict[int, float], cost: StepCost) -> None:
    """Add the time of `rebalances` that is not overlapped to the layers of each member.

    The moves of a layer overlap the previous layer. The moves of the first layer are not overlapped.
    """
    hiding_s = dict(layers_s)
    for move in forward.rebalances:
        if move.is_local:
            continue  # the time to copy one block within a pool is neglected
        group = next(part.group for part in forward.parts if part.request_id == move.request_id)
        layer_s = min(hiding_s[instance] for instance in group) / cost.num_layers
        moved_s = alone_s(cost.flows(move)) / cost.num_layers
        for instance in group:
            layers_s[instance] += moved_s + (cost.num_layers - 1) * max(0.0, moved_s - layer_s)


def sparse_share(part: Part, members: Members) -> float:
    """Predict the time of a part with drops or micro-partitions, relative to the same part by the exact exchange."""
    from longspan.cost.csa_price import time_share  # noqa: PLC0415 - few prompts are sparse

    return time_share(part.exchange, part.start, part.runs, members)


def rates_of_roofline(line: Roofline, hosts: tuple[int, ...], slow: float = 1.0) -> Rates:
    """Return the speeds of each member of a prefill group on these hosts, slowed by the factor `slow`."""
    from longspan.cost.csa_pipeline import LinkSpeed, Rates  # noqa: PLC0415 - few prompts are sparse

    layer, topology, number = line.layer, line.topology, _RATED_TOKENS
    shape, pairs = layer.model.attention, number * (number + 1) // 2
    attended_s = attention_s(layer, Share(number, pairs, number**2, number), keys=number)
    members, senders = len(hosts), max(Counter(hosts).values())
    inside_s = slow * topology.inside.latency_s
    between_s = slow * topology.between.collective_s * (len(set(hosts)) - 1).bit_length()
    return Rates(
        inside=LinkSpeed(layer.tp * topology.inside.bytes_per_s / slow, inside_s / max(1, senders - 1)),
        between=LinkSpeed(
            layer.tp * topology.between.flow(senders * min(layer.tp, topology.gpus_per_host)) / slow,
            between_s / max(1, members - senders),
        ),
        pairs_per_s=shape.num_heads * pairs / attended_s / slow,
        rest_s=slow * line.times([], {0: number}, {})[0].total_s / number / members,
        projected_s=slow * shape.num_layers * layer.projections_s(number) / number / members,
    )


class RooflineCost:
    """Seconds of Forwards whose parts may differ in group and exchange, from the operators that `estimate` uses.

    Linear layers are computed over all tokens of an instance together. Attention and messages are computed by channel:
    the parts of one group and exchange. Keys of earlier steps count as spread evenly over the group, but members of a
    chain have all of them. A prompt by the sparse form of an exchange takes a fraction of the exact form's time, see
    `csa_price`.

    Prefill and decode instances may be split differently. A Forward has instances of one role.

    Args:
        block_size: tokens of a KV block.

    Attributes:
        lines: the cost model of each role, prefill first.
        shape: of the model.
    """

    def __init__(
        self,
        model: Architecture,
        devices: Devices,
        cluster: Cluster,
        *,
        block_size: int,
        kernels: Kernels = "flash",
        launch: Launch | None = None,
    ) -> None:
        self._model, self._devices, self._kernels, self._launch = model, devices, kernels, launch
        self._by_spec: dict[ParallelSpec, RooflineCost] = {cluster.spec: self}
        self.lines = rooflines(model, devices, cluster, kernels, launch=launch)
        self.num_layers = model.attention.num_layers
        self._block_size, self._num_prefill = block_size, cluster.spec.instances
        self._bus, self._is_host = devices.device.bus, devices.device.is_host
        self.cluster, self.shape = cluster, model.attention
        self._path = lru_cache(maxsize=2**16)(self._find_path)
        self._alone_s = lru_cache(maxsize=2**17)(_find_alone_s)
        self._members = lru_cache(maxsize=2**8)(self._find_members)

    def flows(self, move: MoveKV) -> tuple[Flow, ...]:
        """Return the flows of a move. Each target rank receives its own heads, and source ranks send equal parts.

        Ends of links are devices, or hosts whose devices share a link. Links are full duplex. Between device and host,
        each rank copies its own heads and layers over its own bus.
        """
        if move.way != "across":
            return host_flows(move, self.cluster, self._block_bytes, self._bus.latency_s, self._bus.bytes_per_s)
        flows = [
            self._path(*pair)._replace(num_bytes=number * self._block_bytes(pair[1]))
            for pair, number in block_pairs(move)
        ]
        speed = self.lines[0].topology.speed
        return tuple(flows if speed is None else [flow.slowed(speed(flow.source, flow.target)) for flow in flows])

    def with_speeds(self, speed: Callable[[int, int], float]) -> RooflineCost:
        """Return the cost with factors of the speed of links between instances, see `Topology`."""
        cost = copy(self)
        cost.lines = tuple([replace(line, topology=replace(line.topology, speed=speed)) for line in self.lines])
        return cost

    def resharded(self, cluster: Cluster) -> RooflineCost:
        if cluster.spec not in self._by_spec:
            size, kernels, launch = self._block_size, self._kernels, self._launch
            cost = RooflineCost(self._model, self._devices, cluster, block_size=size, kernels=kernels, launch=launch)
            self._by_spec[cluster.spec], cost._by_spec = cost, self._by_spec  # each cost is made once
        return self._by_spec[cluster.spec]

    def reshard(self, cluster: Cluster) -> ReshardCost:
        """Return the cost of copying missing weights from the host to each rank, over its own bus (Seesaw §4.1).

        The copy does not overlap with earlier steps.
        """
        missing = missing_weights(self._model, self.cluster, cluster)
        return ReshardCost(sum(missing), self._bus.latency_s + max(missing) / self._bus.bytes_per_s)

    def _block_bytes(self, target: int) -> float:
        layer = self._line(target).layer
        return self._block_size * layer.kv_bytes * layer.tp * layer.model.attention.num_layers

    def _find_path(self, source: int, target: int) -> Flow:
        """Return an empty flow with the links between two instances."""
        topology = self._line(target).topology
        out_of, into = topology.hosts[source], topology.hosts[target]
        link = topology.inside if out_of == into else topology.between
        if link.shared:
            ends = [("out", out_of, 1), ("in", into, 1)]
        else:
            ends = [("out", source, self._line(source).layer.tp), ("in", target, self._line(target).layer.tp)]
        s_per_byte = tuple(((link.where, way, place), 1 / (devices * link.bytes_per_s)) for way, place, devices in ends)
        return Flow(source, target, 0.0, link.latency_s, s_per_byte)

    def _line(self, instance: int) -> Roofline:
        return self.lines[-1 if instance >= self._num_prefill else 0]

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float, ...]]:
        has_stages = bool(self._line(forward.instances[0]).hops)
        if not has_stages and (counts := _local_decode_counts(forward, self.shape)) is not None:
            [instance] = forward.instances
            return {instance: (self._alone_s(self._line(instance), *counts),)}
        layers_s, heads_s = self._layers_and_heads_s(forward)
        if not has_stages:
            return {instance: (layers_s[instance] + head_s,) for instance, head_s in heads_s.items()}
        tokens = computed_tokens(forward)
        return {
            instance: self._line(instance).by_stage(layers_s[instance], head_s, tokens[instance])
            for instance, head_s in heads_s.items()
        }

    def _find_members(self, hosts: tuple[int, ...]) -> Members:
        from longspan.cost.csa_pipeline import Members  # noqa: PLC0415 - few prompts are sparse

        return Members(hosts, self.shape, self.rates(hosts))

    def rates(self, hosts: tuple[int, ...], slow: float = 1.0) -> Rates:
        """Return the speeds of each member of a prefill group on these hosts, slowed by the factor `slow`."""
        return rates_of_roofline(self.lines[0], hosts, slow)

    def _layers_and_heads_s(self, forward: Forward) -> tuple[dict[int, float], dict[int, float]]:
        """Return the seconds of all layers, and of the output head, of each instance."""
        times, channels = self._times(forward)
        layers_s = {instance: spent.total_s - spent.head_s for instance, spent in times.items()}
        _wait_for_members(layers_s, channels)
        if forward.rebalances:
            wait_for_balances(forward, layers_s, self)
        return layers_s, {instance: spent.head_s for instance, spent in times.items()}

    def exposed_s(self, forward: Forward) -> dict[int, float]:
        times, channels = self._times(forward)
        layers_s = {instance: spent.total_s - spent.head_s for instance, spent in times.items()}
        exposed_s = {instance: spent.all_reduce_s + spent.exchange_s for instance, spent in times.items()}
        for coupled in _coupled(channels):
            slowest = max(coupled, key=layers_s.__getitem__)
            exposed_s.update(dict.fromkeys(coupled, exposed_s[slowest]))
        if forward.rebalances:
            _wait_for_members(layers_s, channels)
            before_s = dict(layers_s)
            wait_for_balances(forward, layers_s, self)
            exposed_s = {i: waits_s + layers_s[i] - before_s[i] for i, waits_s in exposed_s.items()}
        return exposed_s

    def _times(self, forward: Forward) -> tuple[dict[int, Breakdown], list[Channel]]:
        """Return the breakdown of each instance without waits for other instances, and all channels."""
        tokens = dict.fromkeys(forward.instances, 0)
        sampled: dict[int, int] = {}
        decodes: dict[tuple[tuple[int, ...], Exchange], _Decodes] = {}
        prompts: dict[tuple[tuple[int, ...], Exchange, int], list[Part]] = {}
        for part in forward.parts:
            group, exchange = part.group, part.exchange
            if part.sample is not None:
                instance = part.sample.instance
                sampled[instance] = sampled.get(instance, 0) + 1
            if part.stop - part.start == 1:
                single = decodes.get((group, exchange))
                if single is None:
                    single = decodes[group, exchange] = _Decodes(group, exchange.sparse, self.shape)
                tokens[single.add(part)] += 1
                continue
            # Chains, and prompts with drops or micro-partitions, are not merged.
            is_alone = exchange.is_priced_by_share or exchange.traits.skewed
            prompts.setdefault((group, exchange, part.request_id if is_alone else -1), []).append(part)
        channels = [single.channel(exchange) for (_, exchange), single in decodes.items()]
        for parts in prompts.values():
            channel = _channel(parts, self.shape)
            channels.append(channel)
            for instance, queries in zip(channel.group, channel.shares.queries, strict=True):
                tokens[instance] += queries
        times = self._line(forward.parts[0].group[0]).times(channels, tokens, sampled)
        for parts, channel in zip(prompts.values(), channels[len(decodes) :], strict=True):
            if parts[0].exchange.is_priced_by_share:
                self._take_share(parts[0], channel, times)
        self._wait_for_hosts(forward, times)
        return times, channels

    def _take_share(self, part: Part, channel: Channel, times: dict[int, Breakdown]) -> None:
        """Reduce the times of an exact channel to the fraction of its form with drops or micro-partitions."""
        line = self._line(part.group[0])
        hosts = tuple([line.topology.hosts[instance] for instance in part.group])
        share = sparse_share(part, self._find_members(hosts) if self.lines[0].topology.speed else self._members(hosts))
        tokens = dict(zip(channel.group, channel.shares.queries, strict=True))
        for instance, alone in line.times([channel], tokens, {}).items():
            if part.exchange.sparse is None:  # only messages are hidden
                times[instance] += Breakdown(exchange_s=(share - 1) * alone.total_s)
                continue
            saved = {name: (share - 1) * seconds for name, seconds in alone.as_dict().items()}
            times[instance] += Breakdown(**saved)

    def _wait_for_hosts(self, forward: Forward, times: dict[int, Breakdown]) -> None:
        """Add the copies of keys on hosts: each rank copies the keys of its heads over its own bus.

        Copies for prompts overlap attention. Copies for decodes do not. In fact the host attends to the keys of decodes
        in less time, since its memory is faster than the bus, but data sheets of devices lack its speed.
        """
        parts = [part for part in forward.parts if part.hosted]
        if not parts or self._is_host:
            return
        hosted = Counter[tuple[int, bool]]()
        for part in parts:
            for instance, number in zip(part.group, part.hosted, strict=True):
                hosted[instance, part.stop - part.start == 1] += number
        waits_s = dict.fromkeys(times, 0.0)
        for (instance, is_decode), number in hosted.items():
            tp = self._line(instance).layer.tp
            seconds = number * self._block_bytes(instance) / (self._bus.bytes_per_s * tp)
            waits_s[instance] += max(0.0, seconds - (0.0 if is_decode else times[instance].attention_s))
        for coupled in coupled_instances({part.group for part in forward.parts}):  # instances that wait for each other
            longest_s = max(waits_s[instance] for instance in coupled)
            for instance in coupled:
                times[instance] += Breakdown(exchange_s=longest_s)


def computed_tokens(forward: Forward) -> Counter[int]:
    """Return the number of tokens that each instance computes."""
    tokens = Counter[int]()
    for part in forward.parts:
        for instance, runs in zip(part.group, part.runs, strict=True):
            tokens[instance] += sum(map(len, runs))
    return tokens


class _Decodes:
    """Single tokens of several requests in one group by one exchange."""

    def __init__(self, group: tuple[int, ...], sparse: SparseSetting | None, shape: ModelShape) -> None:
        self._group, self._sparse, self._shape = group, sparse, shape
        self._queries = dict.fromkeys(group, 0)
        self._keys: dict[int, float] = dict.fromkeys(group, 0)
        self._squares = 0.0

    def add(self, part: Part) -> int:
        instance = next(compress(self._group, part.runs))
        self._queries[instance] += 1
        keys = self._shape.seen(part.stop) if self._sparse is None else self._num_kept(self._sparse, part.stop)
        self._keys[instance] += keys
        self._squares += keys * keys
        return instance

    def _num_kept(self, setting: SparseSetting, num_tokens: int) -> float:
        """Return the keys that a decode reads after a prompt with drops."""
        from longspan.core.sparse_plan import decode_share  # noqa: PLC0415 - few requests are sparse

        return num_tokens * decode_share(setting, num_tokens, len(self._group), self._shape.num_layers)

    def channel(self, exchange: Exchange) -> Channel:
        seen = tuple(self._keys.values())
        keys = sum(seen)
        held = (keys / len(seen),) * len(seen)
        shares = Shares(tuple(self._queries.values()), seen, seen, held)
        exchange = RING_Q if exchange.traits.skewed else exchange.exact_form
        evenness = _evenness(sum(self._queries.values()), keys, self._squares)
        return Channel(exchange=exchange, group=self._group, shares=shares, keys=keys, decode=True, evenness=evenness)


def _evenness(num_requests: int, num_keys: float, squares: float) -> float:
    return num_keys * num_keys / (num_requests * squares)


def _local_decode_counts(forward: Forward, shape: ModelShape) -> tuple[int, float, float, int] | None:
    """Count the tokens, keys, squares of keys and samples of a step on one instance.

    Return None unless every part is a single token without exchange, and if keys are on hosts.
    """
    if len(forward.instances) > 1:
        return None
    num_sampled, num_keys, squares, has_windows = 0, 0.0 if shape.windows else 0, 0.0, shape.windows is not None
    for part in forward.parts:
        if part.stop - part.start > 1 or part.exchange != LOCAL or part.hosted:
            return None
        keys = shape.seen(part.stop) if has_windows else part.stop
        num_keys += keys
        squares += keys * keys
        num_sampled += part.sample is not None
    return len(forward.parts), num_keys, squares, num_sampled


def _find_alone_s(line: Roofline, num_decodes: int, num_keys: float, squares: float, num_sampled: int) -> float:
    shares = Shares(queries=(num_decodes,), pairs=(num_keys,), scores=(num_keys,), held=(num_keys,))
    evenness = _evenness(num_decodes, num_keys, squares)
    channel = Channel(exchange=LOCAL, group=(0,), shares=shares, keys=num_keys, decode=True, evenness=evenness)
    return line.times([channel], {0: num_decodes}, {0: num_sampled})[0].total_s


def _wait_for_members(layers_s: dict[int, float], channels: Sequence[Channel]) -> None:
    """Set the layer time of all members of a group to the slowest, since they wait for each other in every layer.

    Members of a chain keep their own times, since earlier members may be ahead.
    """
    for coupled in _coupled(channels):
        layers_s.update(dict.fromkeys(coupled, max([layers_s[instance] for instance in coupled])))


def _coupled(channels: Sequence[Channel]) -> Iterable[Collection[int]]:
    """Return the sets of instances that wait for each other."""
    groups = {channel.group for channel in channels if len(channel.group) > 1 and not channel.exchange.traits.skewed}
    return groups if len(groups) == 1 else coupled_instances(groups)


def _channel(parts: Sequence[Part], shape: ModelShape) -> Channel:
    first, exchange = parts[0], parts[0].exchange.exact_form
    keys = sum(shape.seen(part.stop, part.stop - part.start) for part in parts)
    shares = shares_of(exchange, first.runs, first.start, first.stop, shape)
    for part in parts[1:]:
        more = shares_of(exchange, part.runs, part.start, part.stop, shape)
        shares = [Share(*map(add, *both)) for both in zip(shares, more, strict=True)]
    return Channel(exchange=exchange, group=first.group, shares=Shares.of(shares), keys=keys, decode=False)
