"""KV under way between simulated instances, as their ranks send it (`runtime/moves.py`)."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from dataclasses import dataclass

from longspan.cost.flows import Flow, shared_rates

Pair = tuple[int, int]


@dataclass(kw_only=True, slots=True)
class _Queued:
    """A flow of a move with `left` bytes to send, which begins after `ready_s` and arrives after `least_s`."""

    number: int
    flow: Flow
    left: float
    ready_s: float
    least_s: float


class Links:
    """Carries flows from each instance to each other first in, first out; all pairs at the same time, in both
    directions. Those that pass the same end of a link share it.

    Attributes:
        next_s: when something happens next: call `advance` no later.
    """

    def __init__(self) -> None:
        self.next_s = math.inf
        self._queues: defaultdict[Pair, deque[_Queued]] = defaultdict(deque)
        self._beginning: list[tuple[float, Pair]] = []
        self._under_way: dict[Pair, _Queued] = {}
        self._rates: dict[Pair, float] = {}
        self._ends_s: dict[Pair, float] = {}
        self._since_s = 0.0

    def send(self, number: int, flow: Flow, *, ready_s: float, least_s: float) -> None:
        """Queues a flow of a move."""
        pair = flow.source, flow.target
        queue = self._queues[pair]
        queue.append(_Queued(number=number, flow=flow, left=flow.num_bytes, ready_s=ready_s, least_s=least_s))
        if len(queue) == 1:
            self._begin_at(ready_s, pair)

    def advance(self, now_s: float) -> list[tuple[int, float]]:
        """Moves on; returns the flows of which the last byte has left, by number, and when each of them is there."""
        if now_s < self.next_s:
            return []
        for pair, queued in self._under_way.items():
            queued.left = max(0.0, queued.left - self._rates[pair] * (now_s - self._since_s))
        self._since_s = now_s
        found = []
        for pair in [pair for pair, end_s in self._ends_s.items() if end_s <= now_s]:
            queued, queue = self._under_way.pop(pair), self._queues[pair]
            queue.popleft()
            found.append((queued.number, max(now_s + queued.flow.latency_s, queued.least_s)))
            if queue:
                self._begin_at(max(now_s, queued.least_s, queue[0].ready_s), pair)
        while self._beginning and self._beginning[0][0] <= now_s:
            _, pair = heapq.heappop(self._beginning)
            self._under_way[pair] = self._queues[pair][0]
        self._share()
        return found

    def _begin_at(self, at_s: float, pair: Pair) -> None:
        heapq.heappush(self._beginning, (at_s, pair))
        self.next_s = min(self.next_s, at_s)

    def _share(self) -> None:
        """Shares links anew among what is under way."""
        flows = [queued.flow for queued in self._under_way.values()]
        self._rates = dict(zip(self._under_way, shared_rates(flows), strict=True))
        self._ends_s = {pair: self._since_s + one.left / self._rates[pair] for pair, one in self._under_way.items()}
        self.next_s = min([*self._ends_s.values(), *(at_s for at_s, _ in self._beginning[:1])], default=math.inf)
