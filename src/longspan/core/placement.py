"""Places for the ranks of an engine: ranks that one host must hold, and the location and threads that each rank got."""

from __future__ import annotations

import ipaddress
import tomllib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from longspan.core.cluster import Cluster
from longspan.core.locations import Location
from longspan.errors import ParameterError

RACK_LABEL = "rack"
"""The label of a Ray node with the name of its rack."""
_EXAMPLE = '`[racks]` with the addresses of the hosts of each rack, such as a = ["10.0.0.1", "10.0.0.2"]'


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Real hosts of all ranks, in place of one host.

    Attributes:
        locations: one per rank.
        threads: CPU threads of each rank.
    """

    locations: tuple[Location, ...]
    threads: int

    def of(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the locations of its ranks."""
        return replace(cluster, locations=self.locations[: cluster.num_ranks])


def rank_groups(clusters: Sequence[Cluster]) -> list[range]:
    """Return the ranks in groups that one host must hold: the shards of a stage, in every phase of the same ranks."""
    return _merged(
        cluster.stage_ranks(instance, stage)
        for cluster in clusters
        for instance in cluster.instances
        for stage in range(cluster.pp(instance))
    )


def group_sizes(clusters: Sequence[Cluster]) -> list[list[int]]:
    """Return the sizes of `rank_groups` by instance. Instances of several phases that share ranks count as one."""
    groups = rank_groups(clusters)
    instances = _merged(cluster.ranks(instance) for cluster in clusters for instance in cluster.instances)
    return [[len(group) for group in groups if group.start in ranks] for ranks in instances]


def _merged(ranges: Iterable[range]) -> list[range]:
    """Join the ranges that overlap."""
    merged: list[range] = []
    for ranks in sorted(ranges, key=lambda ranks: ranks.start):
        if merged and ranks.start < merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, ranks.stop))
        else:
            merged.append(ranks)
    return merged


def largest_share(capacities: Sequence[int], groups: Sequence[range]) -> int:
    """Return the largest number of CPUs per rank with which all groups fit hosts of these numbers of CPUs.

    Without such a number it is 1, and Ray reports the lack.
    """
    for share in range(max(capacities, default=1), 1, -1):
        free = sorted(capacities, reverse=True)
        for group in sorted(groups, key=len, reverse=True):
            free[0] -= share * len(group)
            if free[0] < 0:
                break
            free.sort(reverse=True)
        else:
            return share
    return 1


def near_hosts(
    instances: Sequence[Sequence[int]], free: Mapping[str, int], racks: Mapping[str, int]
) -> list[list[str]] | None:
    """Choose a host for each group of ranks, so that groups that work together are near each other.

    All groups are on one host if a host has the capacity. Otherwise they are on few hosts of one rack if a rack has the
    capacity, or else in few racks. The same holds for the groups of each instance. Large groups are placed first.

    Args:
        instances: the size of each group of each instance.
        free: the number of ranks that each host can take.
        racks: the rack of each host, in order of proximity to the engine. Equally good hosts are taken in this order.

    Returns:
        The host of each group of each instance, or None if the groups do not fit.
    """
    for hosts in _areas(free, racks, sum(map(sum, instances))):
        left, chosen = {host: free[host] for host in hosts}, dict[int, list[str]]()
        for number in sorted(range(len(instances)), key=lambda number: -max(instances[number], default=0)):
            sizes = instances[number]
            found = (_first_fit(sizes, {host: left[host] for host in area}) for area in _areas(left, racks, sum(sizes)))
            if (near := next((hosts for hosts in found if hosts is not None), None)) is None:
                break
            chosen[number] = near
            for host, size in zip(near, sizes, strict=True):
                left[host] -= size
        else:
            return [chosen[number] for number in range(len(instances))]
    return None


def _areas(free: Mapping[str, int], racks: Mapping[str, int], num_ranks: int) -> Iterator[list[str]]:
    """Yield hosts with a capacity of `num_ranks`: single hosts, the largest hosts of each rack, then of all racks."""
    order = [host for host in racks if host in free]
    of_rack = defaultdict[int, list[str]](list)
    for host in sorted(order, key=lambda host: -free[host]):
        of_rack[racks[host]].append(host)
    largest = sorted(of_rack.values(), key=lambda hosts: -sum(free[host] for host in hosts))
    nearest = [of_rack[rack] for rack in dict.fromkeys(racks[host] for host in order)]
    for candidates in (*([host] for host in order), *nearest, [*chain(*largest)]):
        for number, capacity in enumerate(accumulate(free[host] for host in candidates), 1):
            if capacity >= num_ranks:
                yield sorted(candidates[:number], key=order.index)


def _first_fit(sizes: Sequence[int], free: dict[str, int]) -> list[str] | None:
    """Return the first of these hosts that has the capacity for each group, or None. Changes `free`."""
    chosen: list[str] = []
    for size in sizes:
        if (host := next((host for host, number in free.items() if number >= size), None)) is None:
            return None
        free[host] -= size
        chosen.append(host)
    return chosen


def bundles_of_groups(
    instances: Sequence[Sequence[int]], sizes: Sequence[int], hosts: Mapping[int, str], racks: Mapping[str, int]
) -> list[int] | None:
    """Assign a bundle of its size to each group by `near_hosts`. Return None if there are too few.

    Args:
        instances, racks: see `near_hosts`.
        sizes: the number of ranks that each bundle holds.
        hosts: the host of each usable bundle.
    """
    assigned = dict[tuple[int, int], int]()
    for size in {size for groups in instances for size in groups}:
        bundles = defaultdict[str, deque[int]](deque)
        for bundle in sorted(hosts):
            if sizes[bundle] == size:
                bundles[hosts[bundle]].append(bundle)
        free = {host: len(found) for host, found in bundles.items()}
        if (chosen := near_hosts([[1] * groups.count(size) for groups in instances], free, racks)) is None:
            return None
        for instance, (groups, near) in enumerate(zip(instances, chosen, strict=True)):
            places = [(instance, group) for group, other in enumerate(groups) if other == size]
            assigned |= {place: bundles[host].popleft() for place, host in zip(places, near, strict=True)}
    return [assigned[place] for place in sorted(assigned)]


@dataclass(frozen=True, kw_only=True)
class PlacedHost:
    """A host by its address, and the name of its rack by a label. None without a label."""

    address: str
    label: str | None = None


class Racks:
    """The racks of hosts, by a topology file or else by labels. Without either, all hosts are in one rack.

    Args:
        by_address: the rack of each address, in the order of the file. None: there is no file.
    """

    def __init__(self, by_address: Mapping[str, str] | None = None) -> None:
        self._by_address = by_address
        self._numbers: dict[str | None, int] = {}
        """By name of the rack. Numbers do not change when hosts come and go."""

    def check(self, hosts: Iterable[PlacedHost]) -> None:
        """Raise ParameterError for hosts that are not in the file, or if only a part of the hosts has labels."""
        hosts = list(hosts)
        unknown = sorted({host.address for host in hosts if self._name(host) is None})
        if self._by_address is not None and unknown:
            problem = f"lacks {', '.join(unknown)}, which the cluster has: add them to a rack, or leave out the file"
            raise ParameterError("topology", problem, unknown[0])
        if unknown and any(host.label is not None for host in hosts):
            problem = (
                f"is not given, and {', '.join(unknown)} have no label {RACK_LABEL}, which other hosts have: start all "
                f"with `ray start --labels {RACK_LABEL}=NAME`, or give a file"
            )
            raise ParameterError("topology", problem)

    def in_order(self, hosts: Mapping[str, PlacedHost], own: str) -> dict[str, int]:
        """Return the number of the rack of each host, by id in order of proximity.

        The rack of the engine's own host is the first one, with this host first. Other racks follow in the order of the
        file, or by name. Hosts of a rack follow by address.
        """
        names = [*(self._by_address or {}).values(), *sorted(host.label for host in hosts.values() if host.label)]
        first = [self._name(hosts[own])] if own in hosts else []
        for name in (*first, *names, None):
            if name is not None or any(self._name(host) is None for host in hosts.values()):
                self._numbers.setdefault(name, len(self._numbers))
        numbers = {host_id: self._numbers[self._name(host)] for host_id, host in hosts.items()}

        def key(host_id: str) -> tuple[int, bool, int, str]:
            return numbers[host_id], host_id != own, int(ipaddress.ip_address(hosts[host_id].address)), host_id

        return {host_id: numbers[host_id] for host_id in sorted(hosts, key=key)}

    def _name(self, host: PlacedHost) -> str | None:
        return host.label if self._by_address is None else self._by_address.get(host.address)


def parse_racks(text: str) -> dict[str, str]:
    """Return the name of the rack of each host address, by a topology file in TOML.

    Raises:
        ParameterError: the text has another form, or an address is wrong or in two racks.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError("topology", f"is not TOML ({error}): give {_EXAMPLE}") from None
    racks = content.get("racks")
    if content.keys() != {"racks"} or not isinstance(racks, dict) or not racks:
        raise ParameterError("topology", f"has {', '.join(content) or 'nothing'}: give {_EXAMPLE}")
    by_address: dict[str, str] = {}
    for name, addresses in racks.items():
        if not isinstance(addresses, list) or not addresses:
            raise ParameterError("topology", f"has no list of addresses in rack {name}: give {_EXAMPLE}", name)
        for address in addresses:
            try:
                ipaddress.ip_address(address if isinstance(address, str) else "")
            except ValueError:
                problem = f"has {address!r} in rack {name}, which is no IP address: give the address of the Ray node"
                raise ParameterError("topology", problem, str(address)) from None
            if address in by_address:
                problem = f"has {address} in racks {by_address[address]} and {name}: keep one of them"
                raise ParameterError("topology", problem, address)
            by_address[address] = name
    return by_address
