"""Places for the ranks of an engine: ranks that one host must hold, and the location and threads that each rank got."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from longspan.core.cluster import Cluster
from longspan.core.locations import Location


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


def in_order_of_hosts(groups: Sequence[range], hosts: Sequence[int]) -> list[int]:
    """Assign a bundle to each group, so that neighbouring groups share hosts. Return the bundle of each group.

    Args:
        hosts: the host of each bundle. Bundle i was reserved for group i, and groups of one size may exchange theirs.
    """
    bundles = defaultdict[int, deque[int]](deque)
    for bundle in sorted(range(len(groups)), key=lambda bundle: hosts[bundle]):
        bundles[len(groups[bundle])].append(bundle)
    return [bundles[len(group)].popleft() for group in groups]
