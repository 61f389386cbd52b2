"""The text that puts ranks of one machine on imitated hosts: a number of hosts, or rack and host of each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence

from longspan.core.locations import Location

_RACK_AND_HOST = re.compile(r"([0-9]+)-([0-9]+)")


def locations_of_ranks(num_ranks: int, hosts: str) -> tuple[Location, ...]:
    """Return the location of every rank.

    Args:
        hosts: a number of hosts in one rack that split the ranks evenly, or rack and host per rank: `0-0,0-1,1-0`.
    """
    if hosts.isascii() and hosts.strip().isdecimal():
        num_hosts = int(hosts)
        if not 1 <= num_hosts <= num_ranks:
            raise ValueError(f"{num_ranks} ranks lie on 1 to {num_ranks} hosts, but {num_hosts} given")
        return tuple(Location(host=rank * num_hosts // num_ranks, device=rank) for rank in range(num_ranks))
    matches = [_RACK_AND_HOST.fullmatch(text.strip()) for text in hosts.split(",")]
    if len(matches) != num_ranks or not all(matches):
        raise ValueError(
            f"the hosts of {num_ranks} ranks are a number of hosts, or for each rank its rack and host, as in "
            f"{','.join(f'0-{rank}' for rank in range(num_ranks))}; but {hosts!r} given"
        )
    return tuple(
        Location(int(match[1]), int(match[2]), rank) for rank, match in enumerate(matches) if match is not None
    )


def text_of(locations: Sequence[Location]) -> str:
    """Return rack and host per rank as text, for `locations_of_ranks`."""
    return ",".join(f"{location.rack}-{location.host}" for location in locations)
