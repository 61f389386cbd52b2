"""Where devices stand: whom a group's members are next to, and which of their messages go from host to host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_RACK_AND_HOST = re.compile(r"([0-9]+)-([0-9]+)")


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """A device by rack, host in the rack, and number. In ascending order neighbours are near (CSPS §3.2.4)."""

    rack: int = 0
    host: int = 0
    device: int = 0

    @property
    def host_id(self) -> tuple[int, int]:
        """Names the host in all racks."""
        return self.rack, self.host


def places_of_ranks(num_ranks: int, hosts: str) -> tuple[Place, ...]:
    """The place of each rank.

    Args:
        hosts: on how many hosts of one rack the ranks lie, neighbours together and as evenly as possible: `2`. Or rack
            and host of every rank: `0-0,0-1,1-0`.

    Raises:
        ValueError: for neither, more hosts than ranks, or not one host for each rank.
    """
    if hosts.isascii() and hosts.strip().isdecimal():
        num_hosts = int(hosts)
        if not 1 <= num_hosts <= num_ranks:
            raise ValueError(f"{num_ranks} ranks lie on 1 to {num_ranks} hosts, but {num_hosts} given")
        return tuple(Place(host=rank * num_hosts // num_ranks, device=rank) for rank in range(num_ranks))
    found = [_RACK_AND_HOST.fullmatch(one.strip()) for one in hosts.split(",")]
    if len(found) != num_ranks or not all(found):
        raise ValueError(
            f"the hosts of {num_ranks} ranks are a number of hosts, or for each rank its rack and host, as in "
            f"{','.join(f'0-{rank}' for rank in range(num_ranks))}; but {hosts!r} given"
        )
    return tuple(Place(int(one[1]), int(one[2]), rank) for rank, one in enumerate(found) if one is not None)


def hosts_of(places: Sequence[Place]) -> tuple[int, ...]:
    """A number for the host of each place, the same for the same host."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(place.host_id for place in places))}
    return tuple(numbers[place.host_id] for place in places)
