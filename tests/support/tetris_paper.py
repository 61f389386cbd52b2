"""Algorithms 1 to 3 of Tetris as in the paper: the slow reference of `policy.tetris.planner`.

Open points follow `policy.tetris.planner`. Ties go to the instance that was free first, then to the lower number. A
chunk is too short below `min_chunk`, or when the next smaller size is as quick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longspan.cost.profile import PrefillTime

Allocation = list[tuple[int, frozenset[int]]]
"""A: the tokens and the instances of every chunk."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """An entry of P."""

    number: int
    host: int
    first_s: float
    queue_s: float

    @property
    def order(self) -> tuple[float, float, int]:
        return self.queue_s, self.first_s, self.number


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Arguments of all calls: the models of Eq. 1 by size, the improvement rate, and the shortest chunk."""

    times: Mapping[int, PrefillTime]
    improvement_rate: float
    min_chunk: int
    chunking: bool = True
    instance_tokens: float = math.inf
    total: int = 0

    def cdsp_schedule(
        self, length: int, before: Allocation, sizes: Sequence[int], pool: Sequence[Instance]
    ) -> tuple[float, Allocation]:
        """Algorithm 1, and the time from now to the first token."""
        ttft_s, group = self.single_chunk_schedule(length, before, sizes, pool)
        best_s, best = ttft_s, [*before, (length, numbers(group))]
        if not self.chunking:
            return best_s, best
        of_cdsp = [size for size in sizes if size <= len(group)]
        for current, following in [(a, b) for a in of_cdsp for b in of_cdsp if a < b]:
            tokens, current_group = self.get_chunk_plan(length, before, current, following, group)
            if self.is_illegal(tokens, length, before, current, of_cdsp):
                continue
            took_s = max(one.queue_s for one in current_group)
            took_s += self.times[current].seconds(tokens, computed(before))
            updated = [  # Eq. 2
                Instance(number=p.number, host=p.host, first_s=p.first_s, queue_s=max(0.0, p.queue_s - took_s))
                for p in group
            ]
            rest_s, found = self.cdsp_schedule(
                length - tokens,
                [*before, (tokens, numbers(current_group))],
                [size for size in of_cdsp if size >= following],
                updated,
            )
            if best_s > took_s + rest_s:
                best_s, best = took_s + rest_s, found
        return best_s, best

    def single_chunk_schedule(
        self, length: int, before: Allocation, sizes: Sequence[int], pool: Sequence[Instance]
    ) -> tuple[float, list[Instance]]:
        """Algorithm 2."""
        enough = [size for size in sizes if size * self.instance_tokens >= self.total] or [max(sizes)]
        best_s, best = math.inf, []
        for size in enough:
            if size > len(pool):
                continue
            group = get_group(pool, instances(before), size)
            ttft_s = max(one.queue_s for one in group) + self.times[size].seconds(length, computed(before))
            if ttft_s < best_s * (1 - self.improvement_rate):
                best_s, best = ttft_s, group
        return best_s, best

    def get_chunk_plan(
        self, length: int, before: Allocation, current: int, following: int, pool: Sequence[Instance]
    ) -> tuple[int, list[Instance]]:
        """Algorithm 3. The quadratic is solved by bisection."""
        current_group = get_group(pool, instances(before), current)
        next_group = get_group(pool, numbers(current_group), following)
        budget_s = max(one.queue_s for one in next_group) - max(one.queue_s for one in current_group)
        low, high = 0, length
        while low < high:
            middle = (low + high + 1) // 2
            if self.times[current].seconds(middle, computed(before)) <= budget_s + 1e-12:
                low = middle
            else:
                high = middle - 1
        return low, current_group

    def is_illegal(self, tokens: int, length: int, before: Allocation, size: int, sizes: Sequence[int]) -> bool:
        if tokens < self.min_chunk or tokens >= length:
            return True
        if computed(before) + tokens > size * self.instance_tokens:
            return True
        smaller = [one for one in sizes if one < size]
        seconds = self.times[size].seconds(tokens, computed(before))
        return bool(smaller) and self.times[max(smaller)].seconds(tokens, computed(before)) <= seconds


def computed(before: Allocation) -> int:
    return sum(tokens for tokens, _ in before)


def instances(before: Allocation) -> frozenset[int]:
    return frozenset().union(*(group for _, group in before))


def numbers(group: Sequence[Instance]) -> frozenset[int]:
    return frozenset(one.number for one in group)


def get_group(pool: Sequence[Instance], initial: frozenset[int], size: int) -> list[Instance]:
    """The node-aware extension, one step after the other."""
    group = [one for one in pool if one.number in initial]
    own_hosts = {one.host for one in group}
    near = sorted((p for p in pool if p.host in own_hosts and p.number not in initial), key=lambda p: p.order)
    while near and len(group) < size:
        group.append(near.pop(0))
    hosts = [
        sorted((p for p in pool if p.host == host), key=lambda p: p.order)
        for host in sorted({p.host for p in pool} - own_hosts)
    ]
    while len(group) < size:
        missing = size - len(group)
        if any(len(host) >= missing for host in hosts):
            fitting = [host for host in hosts if len(host) >= missing]
            best = min(fitting, key=lambda host: (*host[missing - 1].order[:2], host[0].host))
            group += best[:missing]
        else:
            whole = min(hosts, key=lambda host: (-len(host), *host[-1].order[:2], host[0].host))
            group += whole
            hosts.remove(whole)
    return group
