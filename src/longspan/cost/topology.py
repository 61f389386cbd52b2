"""The topology: links that the messages of ranks take, and how long collectives among them last."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from longspan.cost.catalog import LinkKind


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A link as messages find it.

    Attributes:
        bytes_per_s: that large messages between two devices reach, one way.
        ring_bytes_per_s: the same of rings of messages, as collectives send them.
        shared: whether these are of a host, whose devices share them.
        latency_s: of the smallest message.
        collective_s: of the smallest collective; between hosts, of each doubling of their number.
    """

    bytes_per_s: float
    ring_bytes_per_s: float
    shared: bool
    latency_s: float
    collective_s: float

    def flow(self, flows: int) -> float:
        """Returns bytes per second of each of so many messages that leave a host at once."""
        return self.bytes_per_s / flows if self.shared else self.bytes_per_s

    def at_least(self, other: Wire) -> Wire:
        """Whatever is better of two ways between the same devices, of which none shares its speed."""
        return replace(
            self,
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            ring_bytes_per_s=max(self.ring_bytes_per_s, other.ring_bytes_per_s),
        )


def wire(kind: LinkKind, bytes_per_s: float | None = None) -> Wire:
    """Makes a link as messages find it, of another nominal speed if one is given."""
    nominal = kind.bytes_per_s if bytes_per_s is None else bytes_per_s
    return Wire(
        bytes_per_s=nominal * kind.achieved,
        ring_bytes_per_s=nominal * kind.collective,
        shared=kind.per_host,
        latency_s=kind.latency_s,
        collective_s=kind.collective_s,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """Instances of `tp` ranks, one after the other on hosts of `gpus_per_host` devices.

    Attributes:
        inside, between: how messages of one host, and of different hosts, travel.
        first_instance, first_device: the number of the first of these instances, and where it begins.
    """

    tp: int
    gpus_per_host: int
    inside: Wire
    between: Wire
    first_instance: int = 0
    first_device: int = 0
    _known: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)

    def host(self, instance: int) -> int:
        """Returns the device of an instance's first rank."""
        return (self.first_device + (instance - self.first_instance) * self.tp) // self.gpus_per_host

    def send_s(self, num_bytes: float, sender: int, receiver: int) -> float:
        """Finds the wire from each rank of an instance to its counterpart in another, all at once."""
        if self.host(sender) == self.host(receiver):
            return self.inside.latency_s + num_bytes / self.inside.bytes_per_s
        flows = min(self.tp, self.gpus_per_host)
        return self.between.latency_s + num_bytes / self.between.flow(flows)

    def hop_s(self, num_bytes: float, group: tuple[int, ...]) -> float:
        """Every instance of a ring sends to the next one."""
        return self.send_s(num_bytes, group[0], group[-1]) if self.spans_hosts(group) else self._inside(num_bytes)

    def alltoall_s(self, num_bytes: float, group: tuple[int, ...]) -> float:
        """Each rank sends `num_bytes` in all to its counterparts in the other instances, evenly."""
        if len(group) == 1:
            return 0.0
        if not self.spans_hosts(group):
            return self._inside(num_bytes)
        here = self._members_per_host(group)
        outside = num_bytes * (len(group) - here) / (len(group) - 1)
        flows = here * min(self.tp, self.gpus_per_host)
        return self.between.collective_s * math.ceil(math.log2(len(group) // here)) + max(
            outside / self.between.flow(flows), (num_bytes - outside) / self.inside.bytes_per_s
        )

    def gather_s(self, num_bytes: float, group: tuple[int, ...]) -> float:
        """Each rank gets `num_bytes` from each of its counterparts; a reduce-scatter of such shares takes as long."""
        if len(group) == 1:
            return 0.0
        hosts = self._num_hosts(group)
        return self._ring_s((len(group) - 1) * num_bytes, len(group), hosts, min(self.tp, self.gpus_per_host))

    def all_reduce_s(self, num_bytes: float) -> float:
        """Times that the ranks of an instance add up `num_bytes` each."""
        if self.tp == 1:
            return 0.0
        hosts = -(-self.tp // self.gpus_per_host)
        return self._ring_s(2 * (self.tp - 1) / self.tp * num_bytes, self.tp, hosts, 1)

    def spans_hosts(self, group: tuple[int, ...]) -> bool:
        """Tells whether instances of a group are on different hosts."""
        return self._num_hosts(group) > 1

    def _inside(self, num_bytes: float) -> float:
        return self.inside.latency_s + num_bytes / self.inside.bytes_per_s

    def _ring_s(self, num_bytes: float, members: int, hosts: int, rings: int) -> float:
        """`num_bytes` pass through every rank, in so many rings at once. A host's devices feed the network together."""
        here = -(-members // hosts)
        speeds, latency_s = [], 0.0
        if here > 1:
            speeds.append(self.inside.ring_bytes_per_s)
            latency_s += self.inside.collective_s
        if hosts > 1:
            network = self.between.ring_bytes_per_s
            speeds.append(network / rings if self.between.shared else network * here)
            latency_s += self.between.collective_s * math.ceil(math.log2(hosts))
        return latency_s + num_bytes / min(speeds)

    def _members_per_host(self, group: tuple[int, ...]) -> int:
        return -(-len(group) // self._num_hosts(group))

    def _num_hosts(self, group: tuple[int, ...]) -> int:
        if group not in self._known:
            self._known[group] = len({self.host(instance) for instance in group})
        return self._known[group]
