"""Which instances a chunk of a given size goes to (Tetris §5.1, GetGroup): near each other, and soonest free.

Groups only grow, so that the KV of earlier chunks stays inside. Queueing times shrink by the same amount everywhere
while a plan goes on, and stop at 0 (Eq. 2). That changes no order, so groups depend on the times at its start alone: of
equals the one that was free first counts as sooner, then the lower number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


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
        self.sizes = tuple(sizes)
        lengths = {self.host_of.count(number) for number in numbers.values()}
        per_host = max(lengths)
        self.nested = len(lengths) == 1 and all(size <= per_host or size % per_host == 0 for size in sizes)

    def groups(self, queue_s: Sequence[float], initial: Sequence[int]) -> Groups:
        """All groups that begin with `initial`."""
        return _Found(self, queue_s).groups(frozenset(range(len(queue_s))), tuple(initial))


class _Found:
    """The groups that were looked for in one plan: many ways to cut a prompt come to the same ones."""

    def __init__(self, cluster: Cluster, queue_s: Sequence[float]) -> None:
        self.cluster, self.queue_s = cluster, queue_s
        by_queue = sorted(range(len(queue_s)), key=queue_s.__getitem__)
        self.turn = dict(zip(by_queue, range(len(by_queue)), strict=True))
        self._hosts: dict[frozenset[int], list[list[int]]] = {}
        self._groups: dict[tuple[frozenset[int], frozenset[int]], Groups] = {}

    def groups(self, pool: frozenset[int], initial: tuple[int, ...]) -> Groups:
        """Those that extend `initial` by instances of `pool`."""
        key = pool, frozenset(initial)
        if key not in self._groups:
            self._groups[key] = Groups(self, pool, initial)
        return self._groups[key]

    def hosts(self, pool: frozenset[int]) -> list[list[int]]:
        """The instances of each, the soonest free first; in the order in which hosts are taken whole."""
        if pool not in self._hosts:
            hosts: dict[int, list[int]] = {}
            for instance in sorted(pool, key=self.turn.__getitem__):
                hosts.setdefault(self.cluster.host_of[instance], []).append(instance)
            order = sorted((-len(members), self.queue_s[members[-1]], host) for host, members in hosts.items())
            self._hosts[pool] = [hosts[host] for *_, host in order]
        return self._hosts[pool]


class Groups:
    """The groups of all sizes that extend an `initial` one inside a pool; `k` counts sizes.

    First come the soonest free on the hosts of `initial`. What is still missing lies on one other host if one has so
    many, where the last of them is free soonest; else the largest hosts are taken whole, of equals the soonest free.

    Attributes:
        queue_s: by size, when the last member is free; for sizes that are smaller than `initial` it means nothing.
    """

    def __init__(self, found: _Found, pool: frozenset[int], initial: tuple[int, ...]) -> None:
        self._found, self._pool, self._initial = found, pool, initial
        self._inside: dict[int, Groups] = {}
        self._after: dict[int, Groups] = {}
        host_of, queue_s = found.cluster.host_of, found.queue_s
        own = {host_of[instance] for instance in initial}
        hosts = [members for members in found.hosts(pool) if host_of[members[0]] not in own]
        near = [i for members in found.hosts(pool) if host_of[members[0]] in own for i in members if i not in initial]
        near.sort(key=found.turn.__getitem__)
        self._order = [*initial, *near]
        self._lasts: list[Sequence[int]] = []  # of each size: who comes after the first ones in order
        self.queue_s: list[float] = []
        latest_s, num_counted, num_taken = 0.0, 0, 0
        for size in found.cluster.sizes:
            if size > len(pool):
                break
            while num_taken < len(hosts) and len(self._order) + len(hosts[num_taken]) <= size:
                self._order += hosts[num_taken]
                num_taken += 1
            for instance in self._order[num_counted:size]:
                latest_s = max(latest_s, queue_s[instance])
            num_counted = min(size, len(self._order))
            last = self._part_of_one(hosts[num_taken:], size - num_counted)
            self._lasts.append(last)
            self.queue_s.append(max(latest_s, queue_s[last[-1]]) if last else latest_s)

    def _part_of_one(self, hosts: Sequence[Sequence[int]], missing: int) -> Sequence[int]:
        """The last members of a group."""
        if not missing:
            return ()
        queue_s, host_of = self._found.queue_s, self._found.cluster.host_of
        fitting = takewhile(lambda members: len(members) >= missing, hosts)
        return min(fitting, key=lambda members: (queue_s[members[missing - 1]], host_of[members[0]]))[:missing]

    def group(self, k: int) -> tuple[int, ...]:
        """The instances of one, the latest added last."""
        last = self._lasts[k]
        return (*self._order[: self._found.cluster.sizes[k] - len(last)], *last)

    def inside(self, k: int) -> Groups:
        """The same, when only the instances of group `k` are there to choose from."""
        if self._found.cluster.nested and self._initial:
            return self
        if k not in self._inside:
            self._inside[k] = self._found.groups(frozenset(self.group(k)), self._initial)
        return self._inside[k]

    def after(self, k: int) -> Groups:
        """Those that extend group `k`."""
        if self._found.cluster.nested and self._initial:
            return self
        if k not in self._after:
            self._after[k] = self._found.groups(self._pool, self.group(k))
        return self._after[k]
