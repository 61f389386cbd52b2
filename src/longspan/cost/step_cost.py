"""The time of a step on every instance, by the roofline: the cost that a simulated cluster runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Protocol

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_Q, Exchange
from longspan.core.owners import coupled_instances
from longspan.core.steps import Forward, MoveKV, Part
from longspan.cost.architecture import Architecture
from longspan.cost.catalog import Kernels
from longspan.cost.channels import Channel, Share, Shares, chain_share_of, share_of
from longspan.cost.cluster import Devices, rooflines
from longspan.cost.forward import Roofline, exposed_s, moved_s, received_s

_NOTHING = Share(queries=0, pairs=0.0, scores=0.0, held=0.0)


class StepCost(Protocol):
    """Predicts how long steps take."""

    @property
    def num_layers(self) -> int:
        """The model has so many layers: what goes layer by layer goes in so many pieces."""
        ...

    def seconds(self, forward: Forward) -> dict[int, float]:
        """Times each of its `instances`, from the moment all of them have begun; what of its `rebalances` the layers
        do not hide is in it, its `streams` are not.
        """
        ...

    def move_s(self, move: MoveKV) -> float:
        """Times a transfer on links that carry nothing else, from one pair of instances to the next at the same
        time.
        """
        ...

    def received_s(self, move: MoveKV) -> float:
        """Times how long its bytes keep the links of its targets busy, which together may be quicker than a
        source's.
        """
        ...


class RooflineCost:
    """Seconds of Forwards whose parts may differ in group and exchange, from the operators that `estimate` uses.

    Linear layers are computed over all tokens of an instance together, attention and messages by channel: the parts of
    one group and exchange. Keys of earlier steps count as spread evenly over the group, except that the members of a
    chain have them all.

    Prefill and decode instances may be split differently; a Forward is of one kind of them.

    Args:
        block_size: tokens of a KV block, which transfers consist of.

    Raises:
        ValueError: see `roofline`.
    """

    def __init__(
        self,
        model: Architecture,
        devices: Devices,
        cluster: Cluster,
        *,
        block_size: int,
        kernels: Kernels = "flash",
    ) -> None:
        self._lines: tuple[Roofline, ...] = rooflines(model, devices, cluster, kernels)
        self._block_size = block_size
        self._sent_s = lru_cache(maxsize=2**16)(self._find_sent_s)
        self._alone_s = lru_cache(maxsize=2**17)(_find_alone_s)

    @property
    def lines(self) -> tuple[Roofline, ...]:
        """Each role has a cost model, prefill first."""
        return self._lines

    @property
    def num_layers(self) -> int:
        return self._lines[0].layer.model.attention.num_layers

    def move_s(self, move: MoveKV) -> float:
        """Messages between two instances on one host stay inside."""
        return self._sent_s(_blocks(move))[0]

    def received_s(self, move: MoveKV) -> float:
        return self._sent_s(_blocks(move))[1]

    def _find_sent_s(self, blocks: tuple[tuple[tuple[int, int], int], ...]) -> tuple[float, float]:
        """Times what a transfer takes, and how long it keeps the links of its targets busy."""
        tokens = {pair: number * self._block_size for pair, number in blocks}
        return moved_s(tokens, self._line), received_s(tokens, self._line)

    def _line(self, instance: int) -> Roofline:
        last = self._lines[-1]
        return last if instance >= last.topology.first_instance else self._lines[0]

    def seconds(self, forward: Forward) -> dict[int, float]:
        """Passing a token on takes no time."""
        if (decodes_alone := _decodes_alone(forward)) is not None:
            [instance] = forward.instances
            return {instance: self._alone_s(self._line(instance), *decodes_alone)}
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
            # Each chain has pieces of its own.
            prompts.setdefault((group, exchange, part.request_id if exchange.traits.skewed else -1), []).append(part)
        channels = [found.channel(exchange) for (_, exchange), found in decodes.items()]
        for parts in prompts.values():
            channel = _channel(parts)
            channels.append(channel)
            for instance, queries in zip(channel.group, channel.shares.queries, strict=True):
                tokens[instance] += queries
        times = self._line(forward.parts[0].group[0]).times(channels, tokens, sampled)
        layers_s = {instance: one.total_s - one.head_s for instance, one in times.items()}
        _wait_for_members(layers_s, channels)
        if forward.rebalances:
            self._wait_for_balances(forward, layers_s)
        return {instance: layers_s[instance] + one.head_s for instance, one in times.items()}

    def _wait_for_balances(self, forward: Forward, layers_s: dict[int, float]) -> None:
        """Adds what of them is not hidden to the time of all layers of each member."""
        hiding_s = dict(layers_s)
        for move in forward.rebalances:
            group = next(part.group for part in forward.parts if part.request_id == move.request_id)
            layer_s = min(hiding_s[instance] for instance in group) / self.num_layers
            waiting_s = exposed_s(self.move_s(move), layer_s, self.num_layers)
            for instance in group:
                layers_s[instance] += waiting_s


class _Decodes:
    """Single tokens of several requests in one group by one exchange."""

    def __init__(self, group: tuple[int, ...]) -> None:
        self._group = group
        self._queries = dict.fromkeys(group, 0)
        self._seen = dict.fromkeys(group, 0)

    def add(self, part: Part) -> int:
        """Counts one; returns the instance that computes it."""
        instance = next(compress(self._group, part.runs))
        self._queries[instance] += 1
        self._seen[instance] += part.stop
        return instance

    def channel(self, exchange: Exchange) -> Channel:
        seen = tuple(self._seen.values())
        keys = sum(seen)
        held = (keys / len(seen),) * len(seen)
        shares = Shares(queries=tuple(self._queries.values()), pairs=seen, scores=seen, held=held)
        exchange = RING_Q if exchange.traits.skewed else exchange
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
        if part.stop - part.start > 1 or part.exchange != LOCAL:
            return None
        num_keys += part.stop
        num_sampled += part.sample is not None
    return len(forward.parts), num_keys, num_sampled


def _find_alone_s(line: Roofline, num_decodes: int, num_keys: int, num_sampled: int) -> float:
    """Times what `_decodes_alone` found."""
    shares = Shares(queries=(num_decodes,), pairs=(num_keys,), scores=(num_keys,), held=(num_keys,))
    channel = Channel(exchange=LOCAL, group=(0,), shares=shares, keys=num_keys, decode=True)
    return line.times([channel], {0: num_decodes}, {0: num_sampled})[0].total_s


def _wait_for_members(layers_s: dict[int, float], channels: Sequence[Channel]) -> None:
    """Gives all members of a group the time of all layers of the slowest: they wait for each other in every layer.

    Not those of a chain, whose first may be ahead.
    """
    groups = {channel.group for channel in channels if len(channel.group) > 1 and not channel.exchange.traits.skewed}
    for coupled in groups if len(groups) == 1 else coupled_instances(groups):
        layers_s.update(dict.fromkeys(coupled, max([layers_s[instance] for instance in coupled])))


def _blocks(move: MoveKV) -> tuple[tuple[tuple[int, int], int], ...]:
    """Counts the blocks that go from one instance to another."""
    return tuple(Counter([(source.instance, target.instance) for source, target in move.copies]).items())


def _channel(parts: Sequence[Part]) -> Channel:
    """Makes the channel of prompts."""
    first = parts[0]
    group, exchange = first.group, first.exchange
    members = len(group)
    shares = [_NOTHING] * members
    for part in parts:
        for index, runs in enumerate(part.runs):
            if exchange.traits.skewed and members > 1:
                share = chain_share_of(runs)
            else:
                share = share_of(runs, cached=part.start / members, width=part.stop)
            shares[index] = share if len(parts) == 1 else _sum(shares[index], share)
    return Channel(
        exchange=exchange, group=group, shares=Shares.of(shares), keys=sum(part.stop for part in parts), decode=False
    )


def _sum(one: Share, other: Share) -> Share:
    return Share(
        queries=one.queries + other.queries,
        pairs=one.pairs + other.pairs,
        scores=one.scores + other.scores,
        held=one.held + other.held,
    )
