"""KV transfers between simulated instances, in the order in which ranks send them (`runtime/moves.py`)."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from dataclasses import dataclass

from longspan.cost.flows import Flow, shared_rates

Pair = tuple[int, int]


@dataclass(kw_only=True, slots=True)
class _Queued:
    """A flow of a move with `unsent` bytes. It begins at `ready_s` or later, and arrives at `earliest_s` or later."""

    number: int
    flow: Flow
    unsent: float
    ready_s: float
    earliest_s: float


class Links:
    """Simulates flows between instances: first in, first out per pair and direction, all pairs concurrently.

    Flows through the same end of a link share its bandwidth.

    Attributes:
        next_s: the time of the next event. Call `advance` at this time or earlier.
    """

    def __init__(self) -> None:
        self.next_s = math.inf
        self._queues: defaultdict[Pair, deque[_Queued]] = defaultdict(deque)
        self._beginning: list[tuple[float, Pair]] = []
        self._active: dict[Pair, _Queued] = {}
        self._rates: dict[Pair, float] = {}
        self._ends_s: dict[Pair, float] = {}
        self._since_s = 0.0

    def send(self, number: int, flow: Flow, *, ready_s: float, earliest_s: float) -> None:
        """Queue a flow of a move, see `_Queued`."""
        pair = flow.source, flow.target
        queue = self._queues[pair]
        queue.append(_Queued(number=number, flow=flow, unsent=flow.num_bytes, ready_s=ready_s, earliest_s=earliest_s))
        if len(queue) == 1:
            self._begin_at(ready_s, pair)

    def advance(self, now_s: float) -> list[tuple[int, float]]:
        """Advance to `now_s`. Return the move number and arrival time of each flow that was sent completely."""
        if now_s < self.next_s:
            return []
        for pair, queued in self._active.items():
            queued.unsent = max(0.0, queued.unsent - self._rates[pair] * (now_s - self._since_s))
        self._since_s = now_s
        arrivals = []
        for pair in [pair for pair, end_s in self._ends_s.items() if end_s <= now_s]:
            queued, queue = self._active.pop(pair), self._queues[pair]
            queue.popleft()
            arrivals.append((queued.number, max(now_s + queued.flow.latency_s, queued.earliest_s)))
            if queue:
                self._begin_at(_begin_after(queued, queue[0], now_s), pair)
        while self._beginning and self._beginning[0][0] <= now_s:
            _, pair = heapq.heappop(self._beginning)
            self._active[pair] = self._queues[pair][0]
        self._share()
        return arrivals

    def _begin_at(self, at_s: float, pair: Pair) -> None:
        heapq.heappush(self._beginning, (at_s, pair))
        self.next_s = min(self.next_s, at_s)

    def _share(self) -> None:
        """Recompute the rates of the active flows."""
        flows = [queued.flow for queued in self._active.values()]
        self._rates = dict(zip(self._active, shared_rates(flows), strict=True))
        self._ends_s = {pair: self._since_s + q.unsent / self._rates[pair] for pair, q in self._active.items()}
        self.next_s = min([*self._ends_s.values(), *(at_s for at_s, _ in self._beginning[:1])], default=math.inf)


def _begin_after(sent: _Queued, following: _Queued, now_s: float) -> float:
    """Return when a flow begins whose predecessor was sent. The layers of streams alternate, and arrive in order."""
    if not following.earliest_s:
        return max(now_s, sent.earliest_s, following.ready_s)
    following.earliest_s = max(sent.earliest_s, following.earliest_s)
    return max(now_s, following.ready_s)
