"""Classes of links: inside a host, between hosts of a rack, and between racks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from longspan.core.locations import Location

LinkClass = Literal["same_host", "other_host", "other_rack"]
"""The slowest class of link between the ranks of a group. `other_host` is in the same rack."""
LINK_CLASSES: tuple[LinkClass, ...] = get_args(LinkClass)
"""Classes from fast to slow."""
SAME_HOST: LinkClass = "same_host"


def slowest_link(locations: Iterable[Location]) -> LinkClass:
    hosts = {location.host_id for location in locations}
    if len({rack for rack, _ in hosts}) > 1:
        return "other_rack"
    return "other_host" if len(hosts) > 1 else SAME_HOST
