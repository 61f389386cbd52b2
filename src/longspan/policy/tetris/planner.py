"""Chunkwise dynamic sequence parallelism: cuts of a prompt into chunks on growing groups (Tetris §5.1)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter

from longspan.cost.profile import PrefillTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """`num_tokens` tokens of a prompt, computed by a group that contains the groups of earlier chunks."""

    num_tokens: int
    group: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """The chunks of a prompt in order, and the expected end of the last chunk in seconds from now."""

    chunks: tuple[Chunk, ...]
    ttft_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt to cut into chunks.

    Attributes:
        cached_tokens: cached tokens, whose blocks are on the instances `held`.
        improvement_rate: a larger group must save this share of the time (Algorithm 2, line 13).
        chunking: whether there may be several chunks.
        instance_tokens: tokens that fit into one instance's pool. None is no limit.
    """

    new_tokens: int
    cached_tokens: int = 0
    held: tuple[int, ...] = ()
    improvement_rate: float = 0.0
    chunking: bool = True
    instance_tokens: int | None = None


class Planner:
    """Plans for instances on `hosts` (a number for each), with groups of the sizes in `times`.

    A chunk before the last must have `min_chunk_tokens` and be quicker than on the next smaller possible group (line 12
    of Algorithm 1). Groups of more than `usual_size` instances are for prompts that need more pools or hold more.

    Attributes:
        sizes: ascending.
        nested: whether groups that begin alike contain each other, because hosts are equally large and every size is a
            part of a host or whole hosts. The search then has few groups.
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
        assert all(size.token_s + size.square_s > 0 for size in self.by_size), "tokens take some time"
        self._usual = max(0, sum(usual_size is None or size <= usual_size for size in sizes) - 1)
        self.floors = [_floors(self.by_size[low:]) for low in range(len(sizes))]
        self.host_of, per_hosts = hosts, Counter(hosts)
        self.num_hosts, lengths = len(per_hosts), set(per_hosts.values())
        self.alike, per_host = len(lengths) == 1, max(lengths)
        self.nested = self.alike and all(size <= per_host or size % per_host == 0 for size in sizes)

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def seconds(self, size: int, new_tokens: int, cached_tokens: int) -> float:
        """Predict a chunk on `size` instances, or on the next smaller size if this one is not planned."""
        return self.by_size[max(0, bisect_right(self.sizes, size) - 1)].seconds(new_tokens, cached_tokens)

    def plan(self, prompt: Prompt, queue_s: Sequence[float], used: Sequence[int] = ()) -> ChunkPlan | None:
        """Return the chunks with the least time to first token, if each instance is free in `queue_s` seconds.

        Of instances that are free at the same time, less `used` ones are chosen first, then lower numbers. Return None
        if more instances hold cached blocks than the largest group has.
        """
        assert prompt.new_tokens > 0, "a prompt has tokens to compute"
        low = next((k for k, size in enumerate(self.sizes) if size >= len(prompt.held)), None)
        if low is None:
            return None
        search, order = _Search(self, prompt), _Order(self, queue_s, used)
        groups = order.groups(prompt.held)
        search.explore(
            groups, low, max(low, self._usual, search.min_size), prompt.new_tokens, prompt.cached_tokens, 0.0
        )
        chunks = tuple([Chunk(num_tokens=tokens, group=groups.group(k)) for tokens, groups, k in search.best])
        order.known.clear()  # breaks the cycle of references, which the garbage collector would free late
        return ChunkPlan(chunks=chunks, ttft_s=search.best_s)

    def groups(self, queue_s: Sequence[float], initial: tuple[int, ...], used: Sequence[int] = ()) -> Groups:
        return _Order(self, queue_s, used).groups(initial)


_SLACK = 1 - 1e-9
"""Factor for lower bounds, so that rounding never hides a better plan."""
_ROUNDING = 1e-6
"""Added to the tokens of a chunk before it is rounded down, so that rounding errors do not shorten it by a token."""
_Choice = tuple[int, "Groups", int]
"""Tokens of a chunk, groups, and the index of the group that computes it."""


class _Search:
    """The search for one prompt's plan. `k` is an index of sizes. Times are seconds from now, or durations by Eq. 1.

    Eq. 1 and its root are inlined in the inner loops, because calls took longer than the arithmetic.

    Attributes:
        min_size: index of the smallest size whose pools can hold the prompt.
        best_s: the end of the best plan so far.
        best: the chunks of that plan.
    """

    def __init__(self, planner: Planner, prompt: Prompt) -> None:
        self._times, self._floors = planner.by_size, planner.floors
        self._min_tokens = planner.min_chunk_tokens
        self._keep = 1 - prompt.improvement_rate
        self._chunking = prompt.chunking
        self._instance_tokens, self._sizes, self.min_size = prompt.instance_tokens, planner.sizes, 0
        if self._instance_tokens is not None:
            smallest = -(-(prompt.cached_tokens + prompt.new_tokens) // self._instance_tokens)
            self.min_size = min(bisect_left(planner.sizes, smallest), len(planner.sizes) - 1)
        self.best_s, self.best = math.inf, list[_Choice]()
        self._before: list[_Choice] = []  # chunks that are already chosen

    def explore(self, groups: Groups, low: int, high: int, new: int, cached: int, elapsed_s: float) -> None:
        """Run Algorithm 1: search better plans for `new` tokens with sizes `low` to `high`, from `elapsed_s` on.

        The search starts with the best single chunk (Algorithm 2).
        """
        all_times, queue_s, keep = self._times, groups.queue_s, self._keep
        least_s, k = math.inf, low
        for size in range(low if low >= self.min_size else min(self.min_size, high), high + 1):
            times = all_times[size]
            ttft_s = times.start_s + (times.token_s + times.cached_s * cached + times.square_s * new) * new
            if (free_s := queue_s[size]) > elapsed_s:
                ttft_s += free_s - elapsed_s
            if ttft_s < least_s * keep:
                least_s, k = ttft_s, size
        if elapsed_s + least_s < self.best_s or not self.best:  # instances may never be free
            self.best_s, self.best = elapsed_s + least_s, [*self._before, (new, groups, k)]
        latest_s = queue_s[k]  # when all groups inside this one are free
        if not self._chunking or k <= low or latest_s <= elapsed_s:
            return
        groups = groups.inside(k)
        for current in range(low, k):
            start_s = max(elapsed_s, groups.queue_s[current])
            if latest_s - start_s > all_times[current].start_s:
                self._extend(groups, (low, current, k), new, cached, start_s)

    def _extend(self, groups: Groups, sizes: tuple[int, int, int], new: int, cached: int, start_s: float) -> None:
        """Try chunks on the second of `sizes` from `start_s` on, followed by chunks on larger sizes up to the third.

        A chunk has the tokens that its group can compute until the following group is free (Algorithm 3).
        """
        low, current, high = sizes
        times, smaller, extended = self._times[current], self._times[current - 1], groups.after(current)
        slope, floors = times.token_s + times.cached_s * cached, self._floors
        max_tokens = math.inf if self._instance_tokens is None else self._sizes[current] * self._instance_tokens
        for following in range(current + 1, high + 1):
            rest_s = extended.queue_s[following] - start_s - times.start_s
            if rest_s <= 0:
                continue
            root = math.sqrt(slope * slope + 4 * times.square_s * rest_s)
            tokens = int(2 * rest_s / (slope + root) + _ROUNDING)
            if tokens >= new or tokens < self._min_tokens or cached + tokens > max_tokens:
                continue
            seconds, left = times.start_s + (slope + times.square_s * tokens) * tokens, new - tokens
            if current > low:
                per_token_s = smaller.token_s + smaller.cached_s * cached + smaller.square_s * tokens
                if seconds >= smaller.start_s + per_token_s * tokens:
                    continue
            end_s, least = start_s + seconds, floors[following][high - following]
            per_token_s = least.token_s + least.cached_s * (cached + tokens) + least.square_s * left
            if end_s + (least.start_s + per_token_s * left) * _SLACK < self.best_s:
                self._before.append((tokens, groups, current))
                self.explore(extended, following, high, left, cached + tokens, end_s)
                self._before.pop()


def _floors(times: Sequence[PrefillTime]) -> list[PrefillTime]:
    """Return lower bounds for the times of chunks on the first size, on the first two sizes, and so on.

    L tokens behind C cached ones have LC pairs with these, and L²/2 with each other. Cuts turn the latter into cached.
    """
    of_each = (
        (size.start_s for size in times),
        (size.token_s for size in times),
        (size.cached_s for size in times),
        (min(size.square_s, size.cached_s / 2) for size in times),
    )
    return [
        PrefillTime(start_s=start_s, token_s=token_s, cached_s=cached_s, square_s=square_s)
        for start_s, token_s, cached_s, square_s in zip(*(accumulate(terms, min) for terms in of_each), strict=True)
    ]


# ---------------------------------------------------------------- groups


class _Order:
    """The order in which instances become free. Of equals, instances with less `used` are first.

    Attributes:
        instances: in this order.
        hosts: the positions of the instances of each host, ascending, in the order in which groups add whole hosts.
        known: the groups computed so far, which many cuts of a prompt share.
    """

    def __init__(self, planner: Planner, queue_s: Sequence[float], used: Sequence[int]) -> None:
        self.planner, self.queue_s = planner, queue_s
        self.instances = list(range(len(queue_s)))
        if used:
            self.instances.sort(key=used.__getitem__)
        self.instances.sort(key=queue_s.__getitem__)
        self.hosts: list[list[int]] = [[] for _ in range(planner.num_hosts)]
        for position, host in enumerate(map(planner.host_of.__getitem__, self.instances)):
            self.hosts[host].append(position)
        self.hosts.sort(key=itemgetter(-1))
        if not planner.alike:
            self.hosts.sort(key=len, reverse=True)
        self.known: dict[_Key, Groups] = {}

    def groups(self, initial: Sequence[int]) -> Groups:
        """Return the groups that extend `initial` by any instances."""
        sizes, key = self.planner.sizes, None if self.planner.nested else (frozenset[int](), frozenset[int]())
        if not initial:
            return Groups(self, key, sizes, ([], -1), [], self.hosts)
        positions = [self.instances.index(instance) for instance in initial]
        own: list[list[int]] = []
        others: list[list[int]] = []
        for members in self.hosts:
            (others if set(positions).isdisjoint(members) else own).append(members)
        near = sorted({position for members in own for position in members}.difference(positions))
        return Groups(self, key, sizes, (positions, max(positions)), near, others)


_Tail = tuple[int, list[int], int]
"""The last members of a group: a number of whole hosts, then some instances of another host, and their number."""
_NO_TAIL: _Tail = (0, [], 0)
_Key = tuple[frozenset[int], frozenset[int]] | None
"""The positions of a pool (empty for all instances) and of an initial group. None if no two cuts share groups."""


class Groups:
    """The groups of all sizes that extend an `initial` one inside a pool. `k` is an index of sizes.

    The first instances added are the soonest free ones on the hosts of `initial`. Missing instances are on one other
    host if it has enough, where the last of them is free soonest. Otherwise the largest hosts are added whole.

    Attributes:
        queue_s: by size, the seconds until the last member is free. Undefined for sizes below `initial`.
    """

    def __init__(
        self,
        order: _Order,
        key: _Key,
        sizes: Sequence[int],
        initial: tuple[list[int], int],
        near: list[int],
        hosts: list[list[int]],
    ) -> None:
        self._order, self._key, self._sizes, self._near, self._hosts = order, key, sizes, near, hosts
        self._initial, (members, latest) = initial, initial
        self._are_nested = order.planner.nested and latest >= 0
        """Whether each group contains the smaller ones, so that `inside` and `after` need no other groups."""
        num_initial = self._num_initial = len(members)
        num_near, num_own = bisect_right(sizes, num_initial), bisect_right(sizes, num_initial + len(near))
        self._positions = [latest] * num_near
        for size in sizes[num_near:num_own]:
            self._positions.append(max(latest, near[size - num_initial - 1]))
        self._tails: list[_Tail] = [_NO_TAIL] * num_own
        if num_own < len(sizes):
            self._add_hosts(sizes[num_own:], max(latest, near[-1]) if near else latest)
        self.queue_s = [order.queue_s[order.instances[position]] for position in self._positions]
        self._inside: dict[int, Groups] = {}
        self._after: dict[int, Groups] = {}
        has_all = self._tails[-1][0] == len(hosts) and sizes[-1] >= num_initial + len(near)
        self._all = len(sizes) - 1 if has_all else None
        """Index of the group with all instances of the pool, if there is one."""
        if key is not None:
            order.known[key] = self

    def _add_hosts(self, sizes: Sequence[int], latest: int) -> None:
        """Add hosts to groups of these sizes. `latest` is the last position on the hosts of `initial`."""
        hosts, num_whole, num_taken = self._hosts, 0, self._num_initial + len(self._near)
        for size in sizes:
            while num_whole < len(hosts) and (each := len(hosts[num_whole])) <= size - num_taken:
                num_more = (size - num_taken) // each if len(hosts[-1]) == each else 1
                num_whole, num_taken = num_whole + num_more, num_taken + num_more * each
                latest = max(latest, hosts[num_whole - 1][-1])
            if missing := size - num_taken:
                part = _soonest(hosts[num_whole:], missing)
                self._tails.append((num_whole, part, missing))
                self._positions.append(max(latest, part[missing - 1]))
            else:
                self._tails.append((num_whole, [], 0))
                self._positions.append(latest)

    def group(self, k: int) -> tuple[int, ...]:
        """Return the instances of a group, in the order in which they were added."""
        return tuple(map(self._order.instances.__getitem__, self._members(k)))

    def inside(self, k: int) -> Groups:
        """Return the groups if only the instances of group `k` are available."""
        if self._are_nested or k == self._all:
            return self
        if k not in self._inside:
            key = None if self._key is None else (frozenset(self._members(k)), self._key[1])
            self._inside[k] = self._order.known.get(key) or self._only(k, key)
        return self._inside[k]

    def _only(self, k: int, key: _Key) -> Groups:
        num_whole, part, missing = self._tails[k]
        hosts = [*self._hosts[:num_whole], part[:missing]] if missing else self._hosts[:num_whole]
        near = self._near[: self._sizes[k] - self._num_initial]
        return Groups(self._order, key, self._sizes[: k + 1], self._initial, near, hosts)

    def after(self, k: int) -> Groups:
        """Return the groups that extend group `k`."""
        if self._are_nested:
            return self
        if k not in self._after:
            members = self._members(k)
            key = None if self._key is None else (self._key[0], frozenset(members))
            self._after[k] = self._order.known.get(key) or self._grown(k, key, members)
        return self._after[k]

    def _grown(self, k: int, key: _Key, members: list[int]) -> Groups:
        num_whole, part, missing = self._tails[k]
        near = self._near[self._sizes[k] - self._num_initial :] + part[missing:]
        hosts = [host for host in self._hosts[num_whole:] if host is not part]
        return Groups(self._order, key, self._sizes, (members, self._positions[k]), near, hosts)

    def _members(self, k: int) -> list[int]:
        num_whole, part, missing = self._tails[k]
        near = self._near[: self._sizes[k] - self._num_initial]
        return [*self._initial[0], *near, *chain.from_iterable(self._hosts[:num_whole]), *part[:missing]]


def _soonest(hosts: Sequence[list[int]], number: int) -> list[int]:
    """Return the host whose first `number` instances are free soonest. Larger hosts are first in `hosts`."""
    if len(hosts[-1]) < number:
        hosts = [members for members in hosts if len(members) >= number]
    return min(hosts, key=itemgetter(number - 1))
