"""Which instances a chunk of a given size goes to (Tetris §5.1, GetGroup): near each other, and soonest free.

Groups only grow, so that the KV of earlier chunks stays inside. Queueing times shrink by the same amount everywhere
while a plan goes on, and stop at 0 (Eq. 2). That changes no order, so groups depend on the times at its start alone: of
equals the one that was free first counts as sooner, then the lower number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def get_group(
    pool: Sequence[Sequence[int]], initial: Sequence[int], size: int, queue_s: Sequence[float], host_of: Sequence[int]
) -> list[int]:
    """`initial`, extended to `size` instances: those added later stand further behind.

    First come the soonest free on the hosts of `initial`. What is still missing lies on one other host if one has so
    many, where the last of them is free soonest; else the largest hosts are taken whole, of equals the soonest free.

    Args:
        pool: the instances to choose from, by host, each host's soonest free first.
        queue_s: of every instance.
        host_of: every instance's place in `pool`.
    """
    chosen, free = list(initial), [host for host in pool if host]
    if initial:
        own = {host_of[instance] for instance in initial}
        near = [i for host in sorted(own) for i in pool[host] if i not in initial]
        near.sort(key=lambda i: (queue_s[i], i))
        chosen += near[: max(0, size - len(chosen))]
        free = [host for host in free if host_of[host[0]] not in own]
    missing = size - len(chosen)
    if missing > 0:
        free.sort(key=lambda host: (-len(host), queue_s[host[-1]]))
    for place, host in enumerate(free):
        if missing <= 0:
            break
        if len(host) >= missing:
            fitting = [one for one in free[place:] if len(one) >= missing]
            chosen += min(fitting, key=lambda one: (queue_s[one[missing - 1]], host_of[one[0]]))[:missing]
            break
        chosen += host
        missing -= len(host)
    return chosen


class Cluster:
    """What does not change from plan to plan: which instance is on which host, and the sizes of groups.

    Attributes:
        sizes: ascending.
        nested: whether smaller groups are the beginnings of larger ones, once they begin alike: hosts are equally
            large, and every size is part of a host or whole hosts. Then few groups have to be looked for.
    """

    def __init__(self, hosts: Sequence[int], sizes: Sequence[int]) -> None:
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        self.host_of = [numbers[host] for host in hosts]
        self.members = [[i for i, own in enumerate(self.host_of) if own == host] for host in numbers.values()]
        self.sizes = tuple(sizes)
        lengths = {len(members) for members in self.members}
        per_host = max(lengths)
        self.nested = len(lengths) == 1 and all(size <= per_host or size % per_host == 0 for size in sizes)
        self.num_within_host = sum(size <= per_host for size in sizes)

    def groups(self, queue_s: Sequence[float], initial: Sequence[int]) -> Groups:
        """All groups that begin with `initial`."""
        by_queue = [sorted(members, key=queue_s.__getitem__) for members in self.members]
        return Groups(self, queue_s, by_queue, tuple(initial))


class Groups:
    """The groups of all sizes that extend an `initial` one inside a pool; `k` counts sizes.

    Attributes:
        queue_s: by size, when the last member is free; for sizes that are smaller than `initial` or larger than the
            pool it means nothing.
    """

    def __init__(
        self,
        cluster: Cluster,
        queue_s: Sequence[float],
        pool: Sequence[Sequence[int]],
        initial: tuple[int, ...],
    ) -> None:
        self._cluster, self._all_s, self._pool, self._initial = cluster, queue_s, pool, initial
        self._inside: dict[int, Groups] = {}
        self._after: dict[int, Groups] = {}
        room = sum(map(len, pool))
        sizes = [size for size in cluster.sizes if size <= room]
        num_apart = len(sizes)
        if cluster.nested:
            num_apart = 0 if initial else min(num_apart, cluster.num_within_host)
        self._apart = [self._find(size) for size in sizes[:num_apart]]
        self.queue_s = [max(map(queue_s.__getitem__, group)) for group in self._apart]
        self._order: list[int] = []
        if num_apart < len(sizes):
            self._order = self._find(sizes[-1])
            latest_s = list(accumulate(map(queue_s.__getitem__, self._order), max))
            self.queue_s += [latest_s[size - 1] for size in sizes[num_apart:]]

    def _find(self, size: int) -> list[int]:
        return get_group(self._pool, self._initial, size, self._all_s, self._cluster.host_of)

    def group(self, k: int) -> tuple[int, ...]:
        """The instances of one, the latest added last."""
        if k < len(self._apart):
            return tuple(self._apart[k])
        return tuple(self._order[: self._cluster.sizes[k]])

    def inside(self, k: int) -> Groups:
        """The same, when only the instances of group `k` are there to choose from."""
        if self._cluster.nested and self._initial:
            return self
        if k not in self._inside:
            kept = set(self.group(k))
            pool = [[i for i in host if i in kept] for host in self._pool]
            self._inside[k] = Groups(self._cluster, self._all_s, pool, self._initial)
        return self._inside[k]

    def after(self, k: int) -> Groups:
        """Those that extend group `k`."""
        if self._cluster.nested and self._initial:
            return self
        if k not in self._after:
            self._after[k] = Groups(self._cluster, self._all_s, self._pool, self.group(k))
        return self._after[k]
