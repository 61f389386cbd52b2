"""The slowest class of link between the instances of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from longspan.core.cluster import Cluster
from longspan.core.link_classes import LINK_CLASSES, SAME_HOST, LinkClass, slowest_link


def link_of_group(cluster: Cluster, group: Sequence[int]) -> LinkClass:
    """Return the slowest class of link between members. Ranks of one stage and shard send messages to each other."""
    if not cluster.locations or len(group) == 1:
        return SAME_HOST
    counterparts = zip(*map(cluster.ranks, group), strict=False)  # roles may have different splits
    links = (slowest_link([cluster.locations[rank] for rank in ranks]) for ranks in counterparts)
    return max(links, key=LINK_CLASSES.index)


def links_by_size(cluster: Cluster) -> dict[int, LinkClass]:
    """Return the class of link of the nearest group of each size, from 1 to all instances that share prompts.

    Such a group lies on one host if a host has enough instances, or else in one rack if a rack has enough.
    """
    on_host, in_rack = Counter[tuple[tuple[int, int], ...]](), Counter[tuple[int, ...]]()
    for instance in cluster.prefill:
        hosts = tuple(
            [cluster.locations[rank].host_id for rank in cluster.ranks(instance)] if cluster.locations else ()
        )
        on_host[hosts] += 1
        in_rack[tuple([rack for rack, _ in hosts])] += 1
    largest_on_host, largest_in_rack = max(on_host.values()), max(in_rack.values())
    return {
        size: SAME_HOST if size <= largest_on_host else "other_host" if size <= largest_in_rack else "other_rack"
        for size in range(1, cluster.spec.instances + 1)
    }


def between_hosts(cluster: Cluster, size: int) -> LinkClass:
    """Return the class of the links between hosts in the nearest group of a size that lies on several hosts."""
    classes: tuple[LinkClass, LinkClass] = ("other_host", links_by_size(cluster)[size])
    return max(classes, key=LINK_CLASSES.index)
