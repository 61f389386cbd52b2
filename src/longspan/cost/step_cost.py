"""The time of a step on every instance: what a simulated cluster takes, and how the roofline says it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import compress
from operator import add
from typing import TYPE_CHECKING, NamedTuple, Protocol

from longspan.core.blocks import coupled_instances
from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_Q, Exchange
from longspan.core.parallel_spec import ParallelSpec
from longspan.core.steps import Forward, MoveKV, Part
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, ModelShape
from longspan.cost.catalog import Kernels
from longspan.cost.channels import Channel, Share, Shares, attention_s, shares_of
from longspan.cost.flows import Flow, alone_s, block_pairs, host_flows
from longspan.cost.forward import Breakdown, Roofline, rooflines
from longspan.cost.topology import Devices

if TYPE_CHECKING:
    from longspan.cost.csa_pipeline import Rates

_RATED_TOKENS = 16384
"""Tokens of the prompt by whose speed sparse attention is priced. Shorter prompts fill devices less."""


class StepCost(Protocol):
    """Predicts how long steps take."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    def seconds(self, forward: Forward) -> dict[int, float]:
        """Times each of its `instances`, from the moment all of them have begun; what of its `rebalances` the layers
        do not hide is in it, its `streams` are not. Passing a token on takes no time.
        """

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float, ...]]:
        """Says the same of each pipeline stage of its `instances`, one after the other: they add up to `seconds`."""

    def exposed_s(self, forward: Forward) -> dict[int, float] | None:
        """Says which part of `seconds` each instance, or the member that it waits for, waits for messages.

        None when the cost does not tell them apart.
        """

    def flows(self, move: MoveKV) -> Sequence[Flow]:
        """Says what a transfer sends over which links, from each of its sources to each of its targets, or what goes
        between them and the pools of their hosts.
        """

    def resharded(self, cluster: Cluster) -> StepCost:
        """Returns the cost of the same model and devices in another cluster."""

    def reshard(self, cluster: Cluster) -> ReshardCost:
        """Says what it takes to take places in another cluster."""


class ReshardCost(NamedTuple):
    """The bytes of weights that all ranks copy for a `Reshard`, and the seconds until the last has its own."""

    copied_bytes: float
    seconds: float


def missing_weights(model: Architecture, before: Cluster, after: Cluster) -> list[float]:
    """Counts for each rank the bytes of its share of the weights in a cluster that it lacks after another one.

    Shards have equal parts of each layer and of what comes before and behind the layers, the first those that come
    first. Both clusters know the model.
    """
    return [_missing(model, before, after, rank) for rank in range(after.num_ranks)]


def _missing(model: Architecture, before: Cluster, after: Cluster, rank: int) -> float:
    if after.is_spare(rank):
        return 0.0
    layers, (first, last) = _place(after, rank)
    missing = model.stage_bytes(layers) * (last - first)
    if not before.is_spare(rank):
        had, (first_had, last_had) = _place(before, rank)
        kept = range(max(layers.start, had.start), min(layers.stop, had.stop))
        if kept:
            missing -= model.stage_bytes(kept) * max(0.0, min(last, last_had) - max(first, first_had))
    return missing


def _place(cluster: Cluster, rank: int) -> tuple[range, tuple[float, float]]:
    """Returns the layers of a rank, and which part of each."""
    instance, stage, shard = cluster.at(rank)
    tp = cluster.tp(instance)
    return cluster.layers(instance, stage), (shard / tp, (shard + 1) / tp)


def wait_for_balances(forward: Forward, layers_s: dict[int, float], cost: StepCost) -> None:
    """Adds to the time of all layers of each member what the layers do not hide of `rebalances`.

    Those go layer by layer beside the layers before. Nothing hides that of the first layer.
    """
    hiding_s = dict(layers_s)
    for move in forward.rebalances:
        if move.is_local:
            continue  # the copy of one block within a pool takes next to nothing
        group = next(part.group for part in forward.parts if part.request_id == move.request_id)
        layer_s = min(hiding_s[instance] for instance in group) / cost.num_layers
        moved_s = alone_s(cost.flows(move)) / cost.num_layers
        for instance in group:
            layers_s[instance] += moved_s + (cost.num_layers - 1) * max(0.0, moved_s - layer_s)


def sparse_share(part: Part, hosts: tuple[int, ...], shape: ModelShape, rates: Rates) -> float:
    """Predict the time of a part with drops, relative to the same part by the exact exchange.

    Each chunk of a prompt has the share of the whole prompt, so that chunks sum up to it. The length of the prompt is
    known from its last chunk, and before that from its partitions.
    """
    from longspan.cost.csa_price import time_share  # noqa: PLC0415 - few prompts are sparse

    assert part.exchange.sparse is not None, f"{part.exchange} has a setting"
    num_tokens = part.stop if part.sample is not None else part.exchange.sparse.partition * len(hosts)
    return time_share(part.exchange, num_tokens, hosts, shape, rates)


class RooflineCost:
    """Seconds of Forwards whose parts may differ in group and exchange, from the operators that `estimate` uses.

    Linear layers are computed over all tokens of an instance together, attention and messages by channel: the parts of
    one group and exchange. Keys of earlier steps count as spread evenly over the group, except that the members of a
    chain have them all. A prompt by the sparse form of an exchange takes a share of the time of the exact one, see
    `csa_price`.

    Prefill and decode instances may be split differently; a Forward is of one kind of them.

    Args:
        block_size: tokens of a KV block, which transfers consist of.

    Attributes:
        lines: the cost model of each role, prefill first.
    """

    def __init__(
        self, model: Architecture, devices: Devices, cluster: Cluster, *, block_size: int, kernels: Kernels = "flash"
    ) -> None:
        self._model, self._devices, self._kernels = model, devices, kernels
        self._turns: dict[ParallelSpec, RooflineCost] = {cluster.spec: self}
        self.lines = rooflines(model, devices, cluster, kernels)
        self.num_layers = model.attention.num_layers
        self._block_size, self._num_prefill = block_size, cluster.spec.instances
        device = catalog.device(devices.hardware)
        self._cluster, self._bus, self._is_host = cluster, catalog.link(device.bus), device.is_host
        self._path = lru_cache(maxsize=2**16)(self._find_path)
        self._alone_s = lru_cache(maxsize=2**17)(_find_alone_s)
        self._rates = lru_cache(maxsize=2**8)(self.rates)

    def flows(self, move: MoveKV) -> tuple[Flow, ...]:
        """Returns flows of which each rank of a target gets its own heads, and the ranks of a source send equal parts.

        They pass devices, or hosts where the devices of one share a link; both directions of a link at the same time.
        Out to a host and in again, each rank copies its own heads and layers over its own bus.
        """
        if move.way != "across":
            return host_flows(move, self._cluster, self._block_bytes, self._bus.latency_s, self._bus.bytes_per_s)
        return tuple(
            self._path(*pair)._replace(num_bytes=number * self._block_bytes(pair[1]))
            for pair, number in block_pairs(move)
        )

    def resharded(self, cluster: Cluster) -> RooflineCost:
        if cluster.spec not in self._turns:
            size, kernels = self._block_size, self._kernels
            found = RooflineCost(self._model, self._devices, cluster, block_size=size, kernels=kernels)
            self._turns[cluster.spec], found._turns = found, self._turns  # so that none is made anew at each turn
        return self._turns[cluster.spec]

    def reshard(self, cluster: Cluster) -> ReshardCost:
        """Returns the cost of copying what each rank lacks from the memory of its host, over its own bus (Seesaw §4.1).

        Nothing of it overlaps with what is computed before.
        """
        missing = missing_weights(self._model, self._cluster, cluster)
        return ReshardCost(sum(missing), self._bus.latency_s + max(missing) / self._bus.bytes_per_s)

    def _block_bytes(self, target: int) -> float:
        layer = self._line(target).layer
        return self._block_size * layer.kv_bytes * layer.tp * layer.model.attention.num_layers

    def _find_path(self, source: int, target: int) -> Flow:
        """Returns an empty flow, which says which links it takes."""
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

    def seconds(self, forward: Forward) -> dict[int, float]:
        if self._line(forward.instances[0]).hops:
            return {instance: sum(stages) for instance, stages in self.stage_seconds(forward).items()}
        if (decodes_alone := _decodes_alone(forward)) is not None:
            [instance] = forward.instances
            return {instance: self._alone_s(self._line(instance), *decodes_alone)}
        layers_s, heads_s = self._layers_and_heads_s(forward)
        return {instance: layers_s[instance] + head_s for instance, head_s in heads_s.items()}

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float, ...]]:
        if not self._line(forward.instances[0]).hops:
            return {instance: (seconds,) for instance, seconds in self.seconds(forward).items()}
        layers_s, heads_s = self._layers_and_heads_s(forward)
        tokens = computed_tokens(forward)
        return {
            instance: self._line(instance).by_stage(layers_s[instance], head_s, tokens[instance])
            for instance, head_s in heads_s.items()
        }

    def rates(self, hosts: tuple[int, ...], slow: float = 1.0) -> Rates:
        """Return the speeds of each member of a prefill group on these hosts, which takes `slow` times as long."""
        from longspan.cost.csa_pipeline import LinkSpeed, Rates  # noqa: PLC0415 - few prompts are sparse

        line, number = self.lines[0], _RATED_TOKENS
        layer, topology, shape = line.layer, line.topology, self._model.attention
        pairs = number * (number + 1) // 2
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
        )

    def _layers_and_heads_s(self, forward: Forward) -> tuple[dict[int, float], dict[int, float]]:
        """Returns the time of all layers of each instance, and that of its output head."""
        times, channels = self._times(forward)
        layers_s = {instance: one.total_s - one.head_s for instance, one in times.items()}
        _wait_for_members(layers_s, channels)
        if forward.rebalances:
            wait_for_balances(forward, layers_s, self)
        return layers_s, {instance: one.head_s for instance, one in times.items()}

    def exposed_s(self, forward: Forward) -> dict[int, float]:
        times, channels = self._times(forward)
        layers_s = {instance: one.total_s - one.head_s for instance, one in times.items()}
        found = {instance: one.all_reduce_s + one.exchange_s for instance, one in times.items()}
        for coupled in _coupled(channels):
            slowest = max(coupled, key=layers_s.__getitem__)
            found.update(dict.fromkeys(coupled, found[slowest]))
        if forward.rebalances:
            _wait_for_members(layers_s, channels)
            before_s = dict(layers_s)
            wait_for_balances(forward, layers_s, self)
            found = {instance: waits_s + layers_s[instance] - before_s[instance] for instance, waits_s in found.items()}
        return found

    def _times(self, forward: Forward) -> tuple[dict[int, Breakdown], list[Channel]]:
        """Returns what each instance spends its time on by itself, and all that is attended to."""
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
                found = decodes.get((group, exchange))
                if found is None:
                    found = decodes[group, exchange] = _Decodes(group)
                tokens[found.add(part)] += 1
                continue
            # Each chain has pieces of its own, and each prompt with drops its own share.
            is_alone = exchange.sparse is not None or exchange.traits.skewed
            prompts.setdefault((group, exchange, part.request_id if is_alone else -1), []).append(part)
        channels = [found.channel(exchange) for (_, exchange), found in decodes.items()]
        for parts in prompts.values():
            channel = _channel(parts)
            channels.append(channel)
            for instance, queries in zip(channel.group, channel.shares.queries, strict=True):
                tokens[instance] += queries
        times = self._line(forward.parts[0].group[0]).times(channels, tokens, sampled)
        for parts, channel in zip(prompts.values(), channels[len(decodes) :], strict=True):
            if parts[0].exchange.sparse is not None:
                self._take_share(parts[0], channel, times)
        self._wait_for_hosts(forward, times)
        return times, channels

    def _take_share(self, part: Part, channel: Channel, times: dict[int, Breakdown]) -> None:
        """Reduce the times of an exact channel to the share that its sparse form takes."""
        line = self._line(part.group[0])
        hosts = tuple([line.topology.hosts[instance] for instance in part.group])
        share = sparse_share(part, hosts, self._model.attention, self._rates(hosts))
        tokens = dict(zip(channel.group, channel.shares.queries, strict=True))
        for instance, alone in line.times([channel], tokens, {}).items():
            saved = {name: (share - 1) * seconds for name, seconds in alone.as_dict().items()}
            times[instance] += Breakdown(**saved)

    def _wait_for_hosts(self, forward: Forward, times: dict[int, Breakdown]) -> None:
        """Adds what keys on hosts take: each rank of an instance gets those of its heads over its own bus.

        Those of prompts come beside attention. Those of decodes are priced as if they came, too, with nothing beside:
        the host attends to them in less time, as its memory is faster, but no data sheet of a device says how fast.
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
        for coupled in coupled_instances({part.group for part in forward.parts}):  # who waits for each other
            longest_s = max(waits_s[instance] for instance in coupled)
            for instance in coupled:
                times[instance] += Breakdown(exchange_s=longest_s)


def computed_tokens(forward: Forward) -> Counter[int]:
    """Counts the tokens that each instance computes."""
    found = Counter[int]()
    for part in forward.parts:
        for instance, runs in zip(part.group, part.runs, strict=True):
            found[instance] += sum(map(len, runs))
    return found


class _Decodes:
    """Single tokens of several requests in one group by one exchange."""

    def __init__(self, group: tuple[int, ...]) -> None:
        self._group = group
        self._queries = dict.fromkeys(group, 0)
        self._seen = dict.fromkeys(group, 0)

    def add(self, part: Part) -> int:
        instance = next(compress(self._group, part.runs))
        self._queries[instance] += 1
        self._seen[instance] += part.stop
        return instance

    def channel(self, exchange: Exchange) -> Channel:
        seen = tuple(self._seen.values())
        keys = sum(seen)
        held = (keys / len(seen),) * len(seen)
        shares = Shares(tuple(self._queries.values()), seen, seen, held)
        exchange = RING_Q if exchange.traits.skewed else exchange.exact_form
        return Channel(exchange=exchange, group=self._group, shares=shares, keys=keys, decode=True)


def _decodes_alone(forward: Forward) -> tuple[int, int, int] | None:
    """Counts how many single tokens an instance computes by itself, how many keys these see, and how many tokens are
    sampled.

    None for any other step.
    """
    if len(forward.instances) > 1:
        return None
    num_keys = num_sampled = 0
    for part in forward.parts:
        if part.stop - part.start > 1 or part.exchange != LOCAL or part.hosted:
            return None
        num_keys += part.stop
        num_sampled += part.sample is not None
    return len(forward.parts), num_keys, num_sampled


def _find_alone_s(line: Roofline, num_decodes: int, num_keys: int, num_sampled: int) -> float:
    shares = Shares(queries=(num_decodes,), pairs=(num_keys,), scores=(num_keys,), held=(num_keys,))
    channel = Channel(exchange=LOCAL, group=(0,), shares=shares, keys=num_keys, decode=True)
    return line.times([channel], {0: num_decodes}, {0: num_sampled})[0].total_s


def _wait_for_members(layers_s: dict[int, float], channels: Sequence[Channel]) -> None:
    """Gives all members of a group the time of all layers of the slowest: they wait for each other in every layer.

    Members of a chain keep their own, since the first may be ahead.
    """
    for coupled in _coupled(channels):
        layers_s.update(dict.fromkeys(coupled, max([layers_s[instance] for instance in coupled])))


def _coupled(channels: Sequence[Channel]) -> Iterable[Collection[int]]:
    """Returns the instances that wait for each other, of each such set."""
    groups = {channel.group for channel in channels if len(channel.group) > 1 and not channel.exchange.traits.skewed}
    return groups if len(groups) == 1 else coupled_instances(groups)


def _channel(parts: Sequence[Part]) -> Channel:
    first, keys, exchange = parts[0], sum(part.stop for part in parts), parts[0].exchange.exact_form
    shares = shares_of(exchange, first.runs, first.start, first.stop)
    for part in parts[1:]:
        more = shares_of(exchange, part.runs, part.start, part.stop)
        shares = [Share(*map(add, *both)) for both in zip(shares, more, strict=True)]
    return Channel(exchange=exchange, group=first.group, shares=Shares.of(shares), keys=keys, decode=False)
