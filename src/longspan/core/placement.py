"""Places for the ranks of an engine: ranks that one host must hold, and the location and threads that each rank got."""

from __future__ import annotations

import ipaddress
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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


def rank_groups(clusters: Iterable[Cluster]) -> list[range]:
    """Return the ranks in groups that one host must hold: the shards of a stage, in every phase of the same ranks."""
    groups: list[range] = []
    stages = [
        cluster.stage_ranks(instance, stage)
        for cluster in clusters
        for instance in cluster.instances
        for stage in range(cluster.pp(instance))
    ]
    for ranks in sorted(stages, key=lambda ranks: ranks.start):
        if groups and ranks.start < groups[-1].stop:
            groups[-1] = range(groups[-1].start, max(groups[-1].stop, ranks.stop))
        else:
            groups.append(ranks)
    return groups


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


def in_order_of_hosts(groups: Sequence[range], sizes: Sequence[int], hosts: Mapping[int, int]) -> list[int] | None:
    """Assign a bundle to each group, so that neighbouring groups share hosts. Return None if there are too few.

    Args:
        sizes: the number of ranks that each bundle holds. A group gets a bundle of its size.
        hosts: the host of each usable bundle, by its position in the order of proximity.
    """
    bundles = defaultdict[int, deque[int]](deque)
    for bundle in sorted(hosts, key=lambda bundle: (hosts[bundle], bundle)):
        bundles[sizes[bundle]].append(bundle)
    if any(count > len(bundles[size]) for size, count in Counter(map(len, groups)).items()):
        return None
    return [bundles[len(group)].popleft() for group in groups]


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
