"""Chunkwise dynamic sequence parallelism: how a prompt is cut into chunks on growing groups (Tetris §5.1)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import NamedTuple

from longspan.cost.profile import PrefillTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """`num_tokens` tokens of a prompt, computed by a group that contains those of the chunks before."""

    num_tokens: int
    group: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """The chunks of a prompt in order, and when the last is expected to end, seconds from now."""

    chunks: tuple[Chunk, ...]
    ttft_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt that is to be cut into chunks.

    Attributes:
        cached_tokens: tokens that were computed before, and lie on the instances `held`.
        improvement_rate: a larger group must be quicker by this part of the time (Algorithm 2, line 13).
        chunking: whether there may be several chunks.
        instance_tokens: how many tokens one instance has room for; None is plenty.
    """

    new_tokens: int
    cached_tokens: int = 0
    held: tuple[int, ...] = ()
    improvement_rate: float = 0.0
    chunking: bool = True
    instance_tokens: int | None = None


class Planner:
    """Plans for instances on `hosts` (a number for each), with groups of the sizes that `times` has.

    A chunk but the last is too short to pay (line 12 of Algorithm 1) below `min_chunk_tokens`, or when the next smaller
    group that it could have is as quick. Groups of more than `usual_size` instances are for prompts that fewer have no
    room for, or that more of them hold already.

    Attributes:
        sizes: ascending.
        nested: whether smaller groups are the beginnings of larger ones, once they begin alike: hosts are equally
            large, and every size is part of a host or whole hosts. Then few groups have to be looked for.
    """

    def __init__(
        self,
        times: Mapping[int, PrefillTime],
        hosts: Sequence[int],
        *,
        min_chunk_tokens: int = 1,
        usual_size: int | None = None,
    ) -> None:
        sizes = self.sizes = sorted(times)
        assert sizes and sizes[0] >= 1 and sizes[-1] <= len(hosts), f"{sizes} are numbers of {len(hosts)} instances"
        self.min_chunk_tokens = min_chunk_tokens
        self.by_size = [times[size] for size in sizes]
        assert all(one.token_s + one.square_s > 0 for one in self.by_size), "tokens take some time"
        self._usual = max(0, sum(usual_size is None or size <= usual_size for size in sizes) - 1)
        self.floors = [_floors(self.by_size[low:]) for low in range(len(sizes))]
        self.host_of, lengths = hosts, set(Counter(hosts).values())
        per_host = max(lengths)
        self.nested = len(lengths) == 1 and all(size <= per_host or size % per_host == 0 for size in sizes)

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def seconds(self, size: int, new_tokens: int, cached_tokens: int) -> float:
        """Predicts a chunk on `size` instances; of a size that is not planned on the next smaller one."""
        return self.by_size[max(0, bisect_right(self.sizes, size) - 1)].seconds(new_tokens, cached_tokens)

    def plan(self, prompt: Prompt, queue_s: Sequence[float], used: Sequence[int] = ()) -> ChunkPlan | None:
        """Finds the chunks with the least time to first token, when each instance is free in `queue_s` seconds.

        Of instances that are free at the same time, those with less `used` come first; without it the first ones. None
        when more instances hold a part than a group can have.
        """
        assert prompt.new_tokens > 0, "there is something to compute"
        low = next((k for k, size in enumerate(self.sizes) if size >= len(prompt.held)), None)
        if low is None:
            return None
        search, groups = _Search(self, prompt), self.groups(queue_s, prompt.held, used)
        high = max(low, self._usual, search.fewest)
        ttft_s, chain = search.explore(groups, low, high, prompt.new_tokens, prompt.cached_tokens, 0.0)
        chunks: list[Chunk] = []
        found: _Chain | None = chain
        while found is not None:
            chunks.append(Chunk(num_tokens=found.num_tokens, group=found.groups.group(found.k)))
            found = found.rest
        return ChunkPlan(chunks=tuple(chunks), ttft_s=ttft_s)

    def groups(self, queue_s: Sequence[float], initial: tuple[int, ...], used: Sequence[int] = ()) -> Groups:
        return _Found(self, queue_s, used).groups(frozenset(range(len(queue_s))), initial)


_SLACK = 1 - 1e-9
"""Bounds are cut by so much, so that rounding never hides a better plan."""
_ROUNDING = 1e-6
"""The part of a token that rounding may cost a chunk, which would then be one token shorter than it has time for."""


class _Chain(NamedTuple):
    """A chunk for the k-th of some groups, and the chunks after it."""

    num_tokens: int
    groups: Groups
    k: int
    rest: _Chain | None = None


class _Search:
    """The search for one prompt's plan. Sizes are counted by `k`; times are seconds from now, but for those of Eq. 1.

    Attributes:
        fewest: the smallest size that has room for the prompt.
    """

    def __init__(self, planner: Planner, prompt: Prompt) -> None:
        self._times, self._floors = planner.by_size, planner.floors
        self._min_tokens = planner.min_chunk_tokens
        self._keep = 1 - prompt.improvement_rate
        self._chunking = prompt.chunking
        sizes, room = planner.sizes, prompt.instance_tokens
        self._most = [math.inf if room is None else size * room for size in sizes]
        whole = prompt.cached_tokens + prompt.new_tokens
        self.fewest = next((k for k, most in enumerate(self._most) if most >= whole), len(sizes) - 1)
        self._best_s = math.inf

    def explore(
        self, groups: Groups, low: int, high: int, new: int, cached: int, elapsed_s: float
    ) -> tuple[float, _Chain]:
        """Runs Algorithm 1: the best plan for `new` tokens with sizes `low` to `high`, from `elapsed_s` on (Eq. 2).

        A chunk has as many tokens as its group computes before the following one is free (Algorithm 3).
        """
        ttft_s, k = self._single_chunk(groups.queue_s, low, high, new, cached, elapsed_s)
        best_s = elapsed_s + ttft_s
        best = _Chain(new, groups, k)
        self._best_s = min(self._best_s, best_s)
        latest_s = groups.queue_s[k]  # when all groups inside this one are free
        if not self._chunking or k <= low or latest_s <= elapsed_s:
            return best_s, best
        groups = groups.inside(k)
        for current in range(low, k):
            times, start_s = self._times[current], max(elapsed_s, groups.queue_s[current])
            if latest_s - start_s <= times.start_s:
                continue
            extended = groups.after(current)
            for following in range(current + 1, k + 1):
                budget_s = extended.queue_s[following] - start_s
                if budget_s <= times.start_s:
                    continue
                tokens = int(times.most_tokens(budget_s, cached) + _ROUNDING)
                if tokens >= new or not self._pays(current, low, tokens, cached):
                    continue
                end_s, left = start_s + times.seconds(tokens, cached), new - tokens
                least_s = self._floors[following][k - following].seconds(left, cached + tokens)
                if end_s + least_s * _SLACK >= self._best_s:
                    continue
                found_s, rest = self.explore(extended, following, k, left, cached + tokens, end_s)
                if found_s < best_s:
                    best_s, best = found_s, _Chain(tokens, groups, current, rest)
        return best_s, best

    def _single_chunk(
        self, queue_s: Sequence[float], low: int, high: int, new: int, cached: int, elapsed_s: float
    ) -> tuple[float, int]:
        """Runs Algorithm 2: returns seconds from `elapsed_s` on, and the size."""
        best_s, best = math.inf, low
        for k in range(max(low, min(self.fewest, high)), min(high + 1, len(queue_s))):
            times = self._times[k]
            ttft_s = times.start_s + (times.token_s + times.cached_s * cached + times.square_s * new) * new
            if queue_s[k] > elapsed_s:
                ttft_s += queue_s[k] - elapsed_s
            if ttft_s < best_s * self._keep:
                best_s, best = ttft_s, k
        return best_s, best

    def _pays(self, k: int, low: int, tokens: int, cached: int) -> bool:
        """Tells whether a chunk is legal: it has room, and is not too short for its group."""
        if tokens < self._min_tokens or cached + tokens > self._most[k]:
            return False
        return k == low or self._times[k].seconds(tokens, cached) < self._times[k - 1].seconds(tokens, cached)


def _floors(times: Sequence[PrefillTime]) -> list[PrefillTime]:
    """Returns the least that chunks take on the first, the first two, and so on of these sizes of groups.

    Chunks of L tokens behind C have LC + L²/2 pairs, which add up to the same however a prompt is cut.
    """
    pairs_s = (min(one.cached_s, 2 * one.square_s) for one in times)
    of_each = ((one.start_s for one in times), (one.token_s for one in times), pairs_s)
    return [
        PrefillTime(start_s=start_s, token_s=token_s, cached_s=pair_s, square_s=pair_s / 2)
        for start_s, token_s, pair_s in zip(*(accumulate(terms, min) for terms in of_each), strict=True)
    ]


# ---------------------------------------------------------------- groups


class _Found:
    """The groups looked up in one plan: many ways to cut a prompt come to the same ones."""

    def __init__(self, planner: Planner, queue_s: Sequence[float], used: Sequence[int]) -> None:
        self.planner, self.queue_s = planner, queue_s
        by_queue = sorted(range(len(queue_s)), key=used.__getitem__ if used else None)
        by_queue.sort(key=queue_s.__getitem__)
        self.turn = dict(zip(by_queue, range(len(by_queue)), strict=True))
        self._hosts: dict[frozenset[int], list[list[int]]] = {}
        self._groups: dict[tuple[frozenset[int], frozenset[int]], Groups] = {}

    def groups(self, pool: frozenset[int], initial: tuple[int, ...]) -> Groups:
        """Returns the groups that extend `initial` by instances of `pool`."""
        key = pool, frozenset(initial)
        if key not in self._groups:
            self._groups[key] = Groups(self, pool, initial)
        return self._groups[key]

    def hosts(self, pool: frozenset[int]) -> list[list[int]]:
        """Lists the instances of each host, the soonest free first; in the order in which hosts are taken whole."""
        if pool not in self._hosts:
            hosts: dict[int, list[int]] = {}
            for instance in sorted(pool, key=self.turn.__getitem__):
                hosts.setdefault(self.planner.host_of[instance], []).append(instance)
            order = sorted((-len(members), self.turn[members[-1]], host) for host, members in hosts.items())
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
        host_of, queue_s = found.planner.host_of, found.queue_s
        own = {host_of[instance] for instance in initial}
        hosts = [members for members in found.hosts(pool) if host_of[members[0]] not in own]
        near = [i for members in found.hosts(pool) if host_of[members[0]] in own for i in members if i not in initial]
        near.sort(key=found.turn.__getitem__)
        self._order = [*initial, *near]
        self._lasts: list[Sequence[int]] = []  # of each size: who comes after the first ones in order
        self.queue_s: list[float] = []
        latest_s, num_counted, num_taken = 0.0, 0, 0
        for size in found.planner.sizes:
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
        """Returns the soonest free on one host that has as many as are missing; hosts with most come first."""
        if not missing:
            return ()
        fitting = takewhile(lambda members: len(members) >= missing, hosts)
        return min(fitting, key=lambda members: self._found.turn[members[missing - 1]])[:missing]

    def group(self, k: int) -> tuple[int, ...]:
        """Returns the instances of a group, the latest added last."""
        last = self._lasts[k]
        return (*self._order[: self._found.planner.sizes[k] - len(last)], *last)

    def inside(self, k: int) -> Groups:
        """Returns the groups when only the instances of group `k` are available."""
        if self._found.planner.nested and self._initial:
            return self
        return self._found.groups(frozenset(self.group(k)), self._initial)

    def after(self, k: int) -> Groups:
        if self._found.planner.nested and self._initial:
            return self
        return self._found.groups(self._pool, self.group(k))
