"""KV that flows between instances, hosts and disks: the links it takes, and how all that is under way shares them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, ItemsView, Sequence
from typing import NamedTuple

from longspan.core.cluster import Cluster
from longspan.core.steps import MoveKV

DISK_BYTES_PER_S = 1e9
"""Typical of disks without moving parts, of which each block is read or written whole, and its checksum made."""


class Flow(NamedTuple):
    """KV from one instance to another.

    Attributes:
        latency_s: from the last byte that leaves to its arrival.
        s_per_byte: how long each byte keeps the ends of links busy that it passes, one way each.
    """

    source: int
    target: int
    num_bytes: float
    latency_s: float
    s_per_byte: tuple[tuple[Hashable, float], ...]


def alone_s(flows: Sequence[Flow]) -> float:
    """Times flows that begin at once on links that carry nothing else: the busiest end says how long it takes."""
    busy_s: defaultdict[Hashable, float] = defaultdict(float)
    for flow in flows:
        for end, seconds in flow.s_per_byte:
            busy_s[end] += flow.num_bytes * seconds
    return max((flow.latency_s for flow in flows), default=0.0) + max(busy_s.values(), default=0.0)


def shared_rates(flows: Sequence[Flow]) -> list[float]:
    """Returns bytes per second of flows that are under way at once.

    They are fair as connections are: where an end is full, all that pass it get as many bytes, but for those that get
    fewer elsewhere, which leave theirs to the others.
    """
    rates = [0.0] * len(flows)
    left: defaultdict[Hashable, float] = defaultdict(lambda: 1.0)
    rising = list(range(len(flows)))
    while rising:
        asked: defaultdict[Hashable, float] = defaultdict(float)
        for index in rising:
            for end, seconds in flows[index].s_per_byte:
                asked[end] += seconds
        fullest = min(asked, key=lambda end: left[end] / asked[end])
        rate = left[fullest] / asked[fullest]
        stopped = [index for index in rising if any(end == fullest for end, _ in flows[index].s_per_byte)]
        for index in stopped:
            rates[index] = rate
            for end, seconds in flows[index].s_per_byte:
                left[end] = max(0.0, left[end] - rate * seconds)
        rising = [index for index in rising if index not in stopped]
    return rates


def block_pairs(move: MoveKV) -> ItemsView[tuple[int, int], int]:
    """Counts the blocks that go from each source to each target."""
    return Counter([(source.instance, target.instance) for source, target in move.copies]).items()


def host_flows(
    move: MoveKV, cluster: Cluster, block_bytes: Callable[[int], float], latency_s: float, bytes_per_s: float
) -> tuple[Flow, ...]:
    """Returns flows between instances and pools of hosts, each over the links of all ranks of the instance; or between
    such a pool and the one on the host's disk, which has a typical speed.
    """
    found = []
    for pair, number in block_pairs(move):
        if move.way in ("save", "load"):
            lane = "disk", max(pair)  # both ways: disks come last
            found.append(Flow(*pair, number * block_bytes(0), 0.0, ((lane, 1 / DISK_BYTES_PER_S),)))
            continue
        instance = pair[move.way == "in"]
        byte_s = 1 / (bytes_per_s * len(cluster.ranks(instance)))
        found.append(Flow(*pair, number * block_bytes(instance), latency_s, (((move.way, instance), byte_s),)))
    return tuple(found)
