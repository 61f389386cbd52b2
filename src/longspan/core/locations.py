"""Locations of devices: racks, hosts and device numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Location:
    """A device by rack, host in the rack, and number. Neighbours in ascending order are near (CSPS §3.2.4)."""

    rack: int = 0
    host: int = 0
    device: int = 0

    @property
    def host_id(self) -> tuple[int, int]:
        """The rack and the host in it, which together identify a host."""
        return self.rack, self.host


def hosts_of(locations: Sequence[Location]) -> tuple[int, ...]:
    """Return the host number of each location. Hosts are numbered in order of appearance."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(location.host_id for location in locations))}
    return tuple(numbers[location.host_id] for location in locations)
