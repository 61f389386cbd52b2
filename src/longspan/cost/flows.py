"""KV flows between instances, hosts and disks: their links, and the shares of concurrent flows in them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, ItemsView, Sequence
from typing import NamedTuple

from longspan.core.cluster import Cluster
from longspan.core.steps import MoveKV

DISK_BYTES_PER_S = 1e9
"""Typical for SSDs when whole blocks are read or written with a checksum."""


class Flow(NamedTuple):
    """KV from one instance to another.

    Attributes:
        latency_s: seconds from the departure of the last byte to its arrival.
        s_per_byte: seconds per byte at each end of a link, one way.
    """

    source: int
    target: int
    num_bytes: float
    latency_s: float
    s_per_byte: tuple[tuple[Hashable, float], ...]

    def slowed(self, factor: float) -> Flow:
        """Return the flow over a link whose speed is multiplied by `factor`."""
        return self._replace(s_per_byte=tuple([(end, seconds / factor) for end, seconds in self.s_per_byte]))


def alone_s(flows: Sequence[Flow]) -> float:
    """Return the seconds of flows that start together on idle links: the busiest end's plus the longest latency."""
    busy_s: defaultdict[Hashable, float] = defaultdict(float)
    for flow in flows:
        for end, seconds in flow.s_per_byte:
            busy_s[end] += flow.num_bytes * seconds
    return max((flow.latency_s for flow in flows), default=0.0) + max(busy_s.values(), default=0.0)


def shared_rates(flows: Sequence[Flow]) -> list[float]:
    """Return the bytes per second of concurrent flows.

    Shares are max-min fair, as for connections. Flows through a full end get equal rates. A flow with a lower rate at
    another end leaves the difference to the rest.
    """
    rates, ends_of = [0.0] * len(flows), [flow.s_per_byte for flow in flows]
    left: defaultdict[Hashable, float] = defaultdict(lambda: 1.0)
    rising = list(range(len(flows)))
    while rising:
        demand: defaultdict[Hashable, float] = defaultdict(float)
        for index in rising:
            for end, seconds in ends_of[index]:
                demand[end] += seconds
        fullest = min(demand, key=lambda end: left[end] / demand[end])
        rate = left[fullest] / demand[fullest]
        stopped = dict.fromkeys(index for index in rising if any(end == fullest for end, _ in ends_of[index]))
        for index in stopped:
            rates[index] = rate
            for end, seconds in ends_of[index]:
                left[end] = max(0.0, left[end] - rate * seconds)
        rising = [index for index in rising if index not in stopped]
    return rates


def block_pairs(move: MoveKV) -> ItemsView[tuple[int, int], int]:
    """Return the number of blocks from each source to each target."""
    return Counter([(source.instance, target.instance) for source, target in move.copies]).items()


def host_flows(
    move: MoveKV, cluster: Cluster, block_bytes: Callable[[int], float], latency_s: float, bytes_per_s: float
) -> tuple[Flow, ...]:
    """Return flows between instances and host pools, each over the links of all ranks of the instance.

    Flows between a host pool and the host's disk have a typical speed.
    """
    flows = []
    for pair, number in block_pairs(move):
        if move.way in ("save", "load"):
            lane = "disk", max(pair)  # both ways: disk pools have the highest numbers
            flows.append(Flow(*pair, number * block_bytes(0), 0.0, ((lane, 1 / DISK_BYTES_PER_S),)))
            continue
        instance = pair[move.way == "in"]
        byte_s = 1 / (bytes_per_s * len(cluster.ranks(instance)))
        flows.append(Flow(*pair, number * block_bytes(instance), latency_s, (((move.way, instance), byte_s),)))
    return tuple(flows)
