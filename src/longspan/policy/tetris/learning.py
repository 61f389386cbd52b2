"""Improvement rates that follow the requests of a server (Tetris §5.1, without an offline profile).

The lengths of the latest prompts are kept. For the observed request rate, random arrivals of such prompts are simulated
with every improvement rate. The planner of the policy plans them, and they take the seconds of Eq. 1. The rate with the
lowest mean TTFT enters the table. Each plan of the policy simulates a few, which delays no step noticeably.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

import msgspec

from longspan.policy.tetris.execution import QueueTimes
from longspan.policy.tetris.planner import Planner, Prompt
from longspan.policy.tetris.rates import IMPROVEMENT_RATES, RateTable
from longspan.policy.traffic import NUM_LENGTHS, Traffic

_NUM_SIMULATED = 256
"""Prompts of a simulation. Half as many find rates that are too low near saturation, twice as many nearly the same."""
_LEAST_PER_PLAN, _MOST_PER_PLAN, _PROMPTS_PER_S = 16, 512, 300
"""Simulated prompts, of 0.03 ms each, for a plan of the policy, and per second since the plan before, 1 % of it."""
_MIN_PROMPTS = 32
"""Prompts that are enough for a first search. Each search is repeated when their number has doubled."""
_MAX_AGE = 1024
"""Maximum number of prompts before a search is repeated, since lengths may have changed."""
_PLACES_PER_DOUBLING = 4
"""Request rates of the table per factor of 2. A window of 30 s has larger errors up to 1 request per second."""


class Learner:
    """Keeps the lengths of prompts, and searches improvement rates for them.

    Attributes:
        traffic: the lengths and the table at the end of the latest search. Before, that of an earlier server, or None.
    """

    def __init__(self, planner: Planner, traffic: Traffic | None = None) -> None:
        self.traffic, self._planner, self._num_prompts = traffic, planner, 0
        known = traffic or Traffic()
        self._lengths = deque(known.lengths, maxlen=NUM_LENGTHS)
        self._found: dict[int, float] = {}
        """The best improvement rates by place, see `_place`."""
        self._due: dict[int, int] = {}
        """The number of prompts from which each search is repeated."""
        self._latest: Prompt | None = None
        self._place, self._advanced_s = 0, 0.0
        self._search: Generator[None, None, float] | None = None
        if known.improvement_rates:
            table = RateTable.parse(known.improvement_rates)
            self._found = {_place(requests_per_s): rate for requests_per_s, rate in table.entries}
            self._due = dict.fromkeys(self._found, _MIN_PROMPTS)

    @property
    def table(self) -> RateTable | None:
        """The rates found so far. None before the first search has ended."""
        found = sorted(self._found.items())
        return RateTable(entries=tuple([(_requests_per_s(place), rate) for place, rate in found])) if found else None

    @property
    def is_searching(self) -> bool:
        return self._search is not None

    def add(self, prompt: Prompt) -> None:
        """Count a prompt. Its limits, and whether it has chunks, hold for simulated prompts, too."""
        self._lengths.append(prompt.new_tokens)
        self._latest, self._num_prompts = prompt, self._num_prompts + 1

    def advance(self, requests_per_s: float, now_s: float) -> RateTable | None:
        """Simulate some prompts at this request rate, if a search is due. Return the new table when it has ended."""
        if self._search is None:
            if self._latest is None or requests_per_s <= 0 or len(self._lengths) < _MIN_PROMPTS:
                return None
            self._place = _place(requests_per_s)
            if self._num_prompts < self._due.get(self._place, 0):
                return None
            self._due[self._place] = min(max(2 * self._num_prompts, _MIN_PROMPTS), self._num_prompts + _MAX_AGE)
            self._search = _best_rate(self._planner, tuple(self._lengths), _requests_per_s(self._place), self._latest)
        number, self._advanced_s = int(_PROMPTS_PER_S * (now_s - self._advanced_s)), now_s
        try:
            for _ in range(sorted((_LEAST_PER_PLAN, number, _MOST_PER_PLAN))[1]):
                next(self._search)
        except StopIteration as end:
            self._search, self._found[self._place] = None, end.value
            found = {"lengths": tuple(self._lengths), "improvement_rates": str(self.table)}
            self.traffic = msgspec.structs.replace(self.traffic or Traffic(), **found)
            return self.table
        return None


def _place(requests_per_s: float) -> int:
    """Return the place of a request rate in a geometric grid."""
    return round(_PLACES_PER_DOUBLING * math.log2(requests_per_s))


def _requests_per_s(place: int) -> float:
    return float(2 ** (place / _PLACES_PER_DOUBLING))


def _best_rate(
    planner: Planner, lengths: Sequence[int], requests_per_s: float, prompt: Prompt
) -> Generator[None, None, float]:
    """Find the improvement rate with the lowest mean TTFT, the lowest of equals. Stop after each simulated prompt."""
    draw = Random(0)  # every improvement rate gets the same prompts
    gaps_s = [draw.expovariate(requests_per_s) for _ in range(_NUM_SIMULATED)]
    arrivals = [
        (at_s, replace(prompt, new_tokens=length))
        for at_s, length in zip(accumulate(gaps_s), draw.choices(lengths, k=_NUM_SIMULATED), strict=True)
    ]
    best, best_s = IMPROVEMENT_RATES[0], math.inf
    for rate in IMPROVEMENT_RATES:
        queue, total_s = QueueTimes(len(planner.host_of)), 0.0
        for at_s, arrival in arrivals:
            plan = planner.plan(replace(arrival, improvement_rate=rate), queue.waits_s(at_s))
            assert plan is not None, "a prompt without cached blocks fits every group"
            queue.book(plan.chunks[-1].group, at_s + plan.ttft_s)
            total_s += plan.ttft_s
            yield
            if total_s >= best_s:
                break
        else:
            best, best_s = rate, total_s
    return best
