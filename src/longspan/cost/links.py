"""Links between devices, and the seconds of messages and collectives over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

_MEMBERS = (2, 4, 8)
"""Group sizes of the measurements. Values between are linear in the number of members."""

_KERNEL_BYTES = 2**23
"""Engines sum messages from this size on by NCCL. It is vLLM's limit. SGLang's is twice as large."""


class Protocol(NamedTuple):
    """One way to run a collective: a time to start, and a time per byte, for each size in `_MEMBERS`."""

    start_s: tuple[float, ...]
    byte_s: tuple[float, ...]

    def of(self, members: int) -> tuple[float, float]:
        """Return both times for a number of members. Beyond 8, each member adds to the start as from 4 to 8."""
        low = 0 if members <= _MEMBERS[1] else 1
        part = (members - _MEMBERS[low]) / (_MEMBERS[low + 1] - _MEMBERS[low])
        start_s, byte_s = (times[low] + part * (times[low + 1] - times[low]) for times in self)
        return start_s, byte_s if members <= _MEMBERS[-1] else self.byte_s[-1]


Collective = tuple[Protocol, ...]
"""The protocols of a collective, such as NCCL's for low latency and for throughput. The fastest one is used."""


def collective_s(protocols: Collective, num_bytes: float, members: int) -> float:
    """Return the seconds of a collective in which each member sends `num_bytes` in total."""
    return min(start_s + num_bytes * byte_s for start_s, byte_s in _lines(protocols, members))


@lru_cache(maxsize=256)
def _lines(protocols: Collective, members: int) -> tuple[tuple[float, float], ...]:
    return tuple(protocol.of(members) for protocol in protocols)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link inside a host, or between hosts.

    Attributes:
        nominal_bytes_per_s: nominal speed one way, of a device, or of a host if its devices share the link.
        bytes_per_s: achieved speed of large messages between two devices.
        ring_bytes_per_s: achieved speed of rings of messages, as in collectives over several hosts.
        latency_s: seconds of the smallest message.
        collective_s: seconds of the smallest collective over several hosts. Between hosts, the increase per doubling of
            hosts.
        all_reduce, gather, alltoall: NCCL's collectives inside a host. A reduce-scatter takes as long as a gather.
        kernels: the engines' own kernels for small all-reduces inside a host.
    """

    name: str
    where: Literal["inside", "between"]
    nominal_bytes_per_s: float
    bytes_per_s: float
    ring_bytes_per_s: float
    shared: bool
    latency_s: float
    collective_s: float
    all_reduce: Collective
    gather: Collective
    alltoall: Collective
    kernels: Collective = ()

    def send_s(self, num_bytes: float, flows: int = 1) -> float:
        """Return the seconds of a message, one of `flows` concurrent messages of a host."""
        return self.latency_s + num_bytes / self.flow(flows)

    def flow(self, flows: int) -> float:
        """Return the bytes per second of each of `flows` concurrent messages of a host."""
        return self.bytes_per_s / flows if self.shared else self.bytes_per_s

    def all_reduce_s(self, num_bytes: float, members: int, *, kernels: bool) -> float:
        """Return the seconds of an all-reduce of `num_bytes` inside a host, by NCCL, or by faster `kernels`."""
        usable = self.kernels if kernels and num_bytes < _KERNEL_BYTES else ()
        return collective_s(self.all_reduce + usable, 2 * (members - 1) / members * num_bytes, members)

    def at(self, bytes_per_s: float) -> Link:
        """Return the link with another nominal speed. All speeds change by the same factor."""
        factor = bytes_per_s / self.nominal_bytes_per_s

        def scaled(protocols: Collective) -> Collective:
            return tuple(p._replace(byte_s=tuple(time / factor for time in p.byte_s)) for p in protocols)

        return replace(
            self,
            nominal_bytes_per_s=bytes_per_s,
            bytes_per_s=factor * self.bytes_per_s,
            ring_bytes_per_s=factor * self.ring_bytes_per_s,
            all_reduce=scaled(self.all_reduce),
            gather=scaled(self.gather),
            alltoall=scaled(self.alltoall),
            kernels=scaled(self.kernels),
        )

    def faster_of(self, other: Link) -> Link:
        """Return a link whose messages use the faster of two links. Latencies and kernels stay its own."""
        return replace(
            self,
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            ring_bytes_per_s=max(self.ring_bytes_per_s, other.ring_bytes_per_s),
            all_reduce=self.all_reduce + other.all_reduce,
            gather=self.gather + other.gather,
            alltoall=self.alltoall + other.alltoall,
        )


def link_of(name: str, entry: Mapping[str, Any], table: Mapping[str, Mapping[str, Any]]) -> Link:
    """Make a link from its fields, and the collectives of the link in `table` whose `collectives` it names."""
    nominal, start_s = entry["gbytes_per_s"] * 1e9, entry["collective_us"] * 1e-6
    measured = table[entry["collectives"]] if "collectives" in entry else entry
    ring = (_same(start_s, 1 / (nominal * entry["collective"])),)
    spread = (_same(entry["latency_us"] * 1e-6, 1 / (nominal * entry["achieved"])),)

    def collective(kind: str, otherwise: Collective) -> Collective:
        return _collective(measured[kind], nominal) if kind in measured else otherwise

    return Link(
        name=name,
        where=entry["where"],
        nominal_bytes_per_s=nominal,
        bytes_per_s=nominal * entry["achieved"],
        ring_bytes_per_s=nominal * entry["collective"],
        shared=entry.get("per") == "host",
        latency_s=entry["latency_us"] * 1e-6,
        collective_s=start_s,
        all_reduce=collective("all_reduce", ring),
        gather=collective("gather", ring),
        alltoall=collective("alltoall", spread),
        kernels=collective("kernels", ()),
    )


def _same(start_s: float, byte_s: float) -> Protocol:
    """Return a protocol that is alike for all group sizes."""
    return Protocol((start_s,) * len(_MEMBERS), (byte_s,) * len(_MEMBERS))


def _collective(fields: Mapping[str, Any], nominal: float) -> Collective:
    """Return the protocols of a table with `start_us` and `part` of the nominal speed, one row for each protocol."""
    return tuple(
        Protocol(tuple(1e-6 * start for start in starts), tuple(1 / (nominal * part) for part in parts))
        for starts, parts in zip(fields["start_us"], fields["part"], strict=True)
    )
