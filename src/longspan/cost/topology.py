"""The topology: devices, their links, and the seconds of messages and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from longspan.core.options import at_least_one
from longspan.cost import catalog
from longspan.cost.catalog import Device
from longspan.cost.links import Link, collective_s
from longspan.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a cluster and the links between them.

    Attributes:
        hardware: the name of a device, or a device of the user.
        link: the slowest link between devices of a group, by its name in the device's file or the catalog. With several
            hosts, it is between hosts.
        link_gbytes_per_s: the nominal speed of that link, instead of its name. Inside a host, a link no faster than
            the bus uses the bus, and achieves the same fraction of the nominal speed.

    Raises:
        ValueError: for numbers below 1, unknown names, one host with a link between hosts, or several hosts with a
            link inside a host.
    """

    hardware: str | Device
    gpus_per_host: int
    hosts: int = 1
    link: str | None = None
    link_gbytes_per_s: float | None = None

    def __post_init__(self) -> None:
        at_least_one(gpus_per_host=self.gpus_per_host, hosts=self.hosts)
        speed = self.link_gbytes_per_s
        if speed is not None and not 0 < speed < math.inf:
            raise ParameterError("link_gbytes_per_s", f"must be above 0 and finite, but {speed:g} given", speed)
        if self.link is None:
            return
        if speed is not None:
            problem = f"{speed:g} and link {self.link} both give its speed: give one"
            raise ParameterError("link_gbytes_per_s", problem, speed)
        link = self.device.link_by(self.link)
        if self.hosts > 1 and link.where == "inside":
            known = [*self.device.links, *map(catalog.link, catalog.names("links"))]
            networks = [link.name for link in known if link.where == "between"]
            problem = (
                f"{self.link} is inside a host, but {self.hosts} hosts given: choose one between hosts "
                f"({', '.join(networks)}), or put all devices into one host"
            )
            raise ParameterError("link", problem, self.link)
        if self.hosts == 1 and link.shared:
            problem = f"{self.link} is between hosts, and shared by the devices of each: give 2 hosts or more"
            raise ParameterError("link", problem, self.link)

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_host * self.hosts

    @property
    def device(self) -> Device:
        return catalog.device(self.hardware) if isinstance(self.hardware, str) else self.hardware

    @property
    def slowest_link(self) -> Link:
        """The slowest link in use."""
        device, speed = self.device, self._bytes_per_s
        if self.link is not None:
            return device.link_by(self.link)
        inside = device.bus if self._uses_bus else device.link
        slowest = device.network if self.hosts > 1 else inside
        return slowest if speed is None else slowest.at(speed)

    def links(self) -> tuple[Link, Link]:
        """Return the links inside a host, and between hosts."""
        device, slowest = self.device, self.slowest_link
        if self.hosts > 1:
            return device.link, slowest
        if self._bytes_per_s is not None and not self._uses_bus:
            slowest = slowest.faster_of(device.bus)
        return slowest, device.network

    @property
    def _uses_bus(self) -> bool:
        """Whether the link of a single host is no faster than the bus."""
        return self._bytes_per_s is not None and self._bytes_per_s <= self.device.bus.nominal_bytes_per_s

    @property
    def _bytes_per_s(self) -> float | None:
        return None if self.link_gbytes_per_s is None else self.link_gbytes_per_s * 1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """Instances of `tp` ranks on hosts of `gpus_per_host` devices.

    Attributes:
        inside, between: the links of messages inside a host, and between hosts.
        hosts: the host of each instance's first rank, of all roles.
        recorded: whether decode steps are recorded graphs, which may use the engine's kernels for small all-reduces.
        speed: returns the factor of the speed of the link between two instances. None is 1. A collective waits for the
            slowest link between neighbours of its group.
    """

    tp: int
    gpus_per_host: int
    inside: Link
    between: Link
    hosts: Sequence[int]
    recorded: bool = True
    speed: Callable[[int, int], float] | None = None
    _known: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second from all ranks of an instance to another instance, between hosts if there are several."""
        link = self.between if len(set(self.hosts)) > 1 else self.inside
        return self.tp * link.flow(self._flows)

    def send_s(self, num_bytes: float, sender: int, receiver: int) -> float:
        """Return the seconds of concurrent messages from each rank of an instance to its counterpart in another."""
        if self.speed is not None:
            num_bytes /= self.speed(sender, receiver)
        if self.hosts[sender] == self.hosts[receiver]:
            return self.inside.send_s(num_bytes)
        return self.between.send_s(num_bytes, self._flows)

    def hop_s(self, num_bytes: float, group: tuple[int, ...]) -> float:
        """Return the seconds in which every instance of a ring sends to the next, over the slowest link of the ring."""
        if self.speed is not None:
            return max(self.send_s(num_bytes, *pair) for pair in _neighbours(group))
        return self.send_s(num_bytes, group[0], group[-1])

    def alltoall_s(self, num_bytes: float, group: tuple[int, ...]) -> float:
        """Return the seconds in which each rank sends `num_bytes`, split evenly over its counterparts."""
        num_bytes, hosts = self._slowed(num_bytes, group), self._num_hosts(group)
        if hosts == 1:
            return collective_s(self.inside.alltoall, num_bytes, len(group))
        here = -(-len(group) // hosts)
        outside = num_bytes * (len(group) - here) / (len(group) - 1)
        return self.between.collective_s * math.ceil(math.log2(len(group) // here)) + max(
            outside / self.between.flow(here * self._flows), (num_bytes - outside) / self.inside.bytes_per_s
        )

    def gather_s(self, num_bytes: float, group: tuple[int, ...]) -> float:
        """Return the seconds in which each rank gets `num_bytes` from each counterpart, or of a reduce-scatter."""
        num_bytes, hosts = (len(group) - 1) * self._slowed(num_bytes, group), self._num_hosts(group)
        if hosts == 1:
            return collective_s(self.inside.gather, num_bytes, len(group))
        return self._ring_s(num_bytes, len(group), hosts, self._flows)

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of `num_bytes` over the ranks of an instance."""
        if self.tp == 1:
            return 0.0
        hosts = -(-self.tp // self.gpus_per_host)
        if hosts == 1:
            return self.inside.all_reduce_s(num_bytes, self.tp, kernels=self.recorded)
        return self._ring_s(2 * (self.tp - 1) / self.tp * num_bytes, self.tp, hosts, 1)

    def scatter_s(self, num_bytes: float) -> float:
        """Return the seconds in which each rank of an instance sends `num_bytes`, split evenly over its other ranks."""
        hosts = -(-self.tp // self.gpus_per_host)
        if hosts == 1:
            return collective_s(self.inside.alltoall, num_bytes, self.tp)
        outside = num_bytes * (self.tp - self._flows) / (self.tp - 1)
        return self.between.collective_s * math.ceil(math.log2(hosts)) + max(
            outside / self.between.flow(self._flows), (num_bytes - outside) / self.inside.bytes_per_s
        )

    @property
    def _flows(self) -> int:
        """Number of ranks of an instance on one host."""
        return min(self.tp, self.gpus_per_host)

    def _ring_s(self, num_bytes: float, members: int, hosts: int, rings: int) -> float:
        """Return the seconds of `num_bytes` through each rank in `rings` rings, over several hosts.

        A host's devices share the network.
        """
        here, network = -(-members // hosts), self.between.ring_bytes_per_s
        speed = network / rings if self.between.shared else network * here
        latency_s = self.between.collective_s * math.ceil(math.log2(hosts))
        if here > 1:
            speed = min(speed, self.inside.ring_bytes_per_s)
            latency_s += self.inside.collective_s
        return latency_s + num_bytes / speed

    def _slowed(self, num_bytes: float, group: tuple[int, ...]) -> float:
        """Return the bytes that links of full speed send in the time of the group's slowest link."""
        return num_bytes if self.speed is None else num_bytes / min(self.speed(*pair) for pair in _neighbours(group))

    def _num_hosts(self, group: tuple[int, ...]) -> int:
        if group not in self._known:
            self._known[group] = len({self.hosts[instance] for instance in group})
        return self._known[group]


def _neighbours(group: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Return the pairs of neighbours in a ring."""
    return zip(group, (*group[1:], group[0]), strict=True)
