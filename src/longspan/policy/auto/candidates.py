"""Candidate groups of a prompt, and the cost of each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from longspan.cost.profile import PrefillTime
from longspan.policy.auto.estimates import Estimates
from longspan.policy.auto.observation import MAX_BUSY, Arrivals, Numbers

_BESIDE = 1.25
"""Predicted prefill seconds are multiplied by this on instances that decode, where steps are shorter."""
_MIN_PREFILL = 0.01
"""Lower bound for predicted prefill seconds, in decode steps of one request: shorter times are measurement noise."""
AHEAD = 4.0
"""A prompt is assigned to an instance at most this many decode steps before the instance is free. A later decision uses
fresher load.
"""


class CandidateGroups:
    """The groups to choose from: 1, 2, 4 and so on neighbours, of one host if it has enough of them, and all instances.

    Groups of one size do not overlap. On hosts of 2, 4 or 8 instances, groups of half the size are halves of them. So
    prompts of different lengths seldom wait for a member while other members are idle.

    Attributes:
        groups: ascending in size.
        sizes: of each group, `[num_groups]`.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], sizes: Collection[int], place: Mapping[int, int]) -> None:
        all_instances = [instance for host in hosts for instance in host]
        self.groups: list[tuple[int, ...]] = []
        kinds = []
        for kind, size in enumerate(sizes):
            for host in hosts if size <= max(map(len, hosts)) else [all_instances]:
                groups = [host[first : first + size] for first in range(0, len(host) - size + 1, size)]
                self.groups += [tuple(group) for group in groups]
                kinds += [kind] * len(groups)
        self._kinds = np.array(kinds)
        self._places = np.array([place[instance] for group in self.groups for instance in group])
        self.sizes = np.array(list(map(len, self.groups)))
        self._starts = np.cumsum(self.sizes) - self.sizes

    def by_size(self, values: Numbers) -> Numbers:
        """Expand a per-size value to one value per candidate group: [num_groups]."""
        return values[self._kinds]

    def sum(self, values: Numbers) -> Numbers:
        """Sum a per-instance value over the members of each group: [num_groups]."""
        return np.add.reduceat(values[self._places], self._starts)

    def max(self, values: Numbers) -> Numbers:
        """Return the maximum of a per-instance value over the members of each group: [num_groups]."""
        return np.maximum.reduceat(values[self._places], self._starts)


class SizeTimes:
    """Prefill times of all group sizes as arrays: [num_sizes]."""

    def __init__(self, times: Collection[PrefillTime]) -> None:
        terms = [(one.start_s, one.token_s, one.cached_s, one.square_s) for one in times]
        self._start_s, self._token_s, self._cached_s, self._square_s = np.array(terms).T

    def seconds(self, new_tokens: int, cached_tokens: int = 0) -> Numbers:
        per_token = self._token_s + self._cached_s * cached_tokens + self._square_s * new_tokens
        found: Numbers = self._start_s + per_token * new_tokens
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of all instances while groups are chosen.

    Attributes:
        wait_s: seconds until each instance has no prefill to do: [num_instances].
        strains: slowdown of the answers on each group, in answers per second of prefill: [num_groups].
        answer_s: seconds of a usual answer.
    """

    wait_s: Numbers
    strains: Numbers
    answer_s: float


class Costs:
    """Prices candidate groups by the slowdowns that they cause.

    Args:
        num_instances: of the cluster.
    """

    def __init__(
        self, candidates: CandidateGroups, estimates: Estimates, arrivals: Arrivals, num_instances: int
    ) -> None:
        self._candidates, self._arrivals, self._num_instances = candidates, arrivals, num_instances
        self._group_sizes = tuple(estimates.prefill)
        self.min_prefill_s, self.ahead_s = _MIN_PREFILL * estimates.token_s, AHEAD * estimates.token_s

    def of(self, seconds: Numbers, fastest_s: float, slowness: float, now_s: float, load: Load) -> Numbers:
        """Return the sum of slowdowns for each group on which a prompt takes these seconds: [num_groups].

        The slowdowns are those of the prompt's first token, relative to its fastest group; of prompts that wait behind
        it or come later, for which more of the instances' time is spent, or which find no instance free; and of answers
        on the group, which wait during the prefill.

        Args:
            slowness: the sum of 1 / fastest_s over the prompts that wait behind this one.
        """
        candidates, num_instances, wait_s = self._candidates, self._num_instances, load.wait_s
        requests_per_s, busy = self._arrivals.rates(now_s)
        slack = 1 - min(MAX_BUSY, busy / num_instances)
        num_free, usual_s = int((wait_s <= self.ahead_s).sum()), self._arrivals.usual_s
        usual_fastest_s = max(self.min_prefill_s, self._arrivals.usual_fastest_s)
        queues_s = np.array([_queue_s(num_free - size, requests_per_s, usual_s) for size in self._group_sizes])

        begins_s = candidates.max(wait_s)
        idle_s = candidates.sizes * begins_s - candidates.sum(wait_s)
        single_s = seconds[:num_instances].min()
        more_s = np.maximum(0.0, idle_s + candidates.sizes * seconds - single_s) / num_instances
        seconds = np.where(load.strains > 0, _BESIDE * seconds, seconds)
        held_up_s = np.minimum(np.maximum(0.0, seconds / 2 - usual_s), candidates.by_size(queues_s))
        coming = requests_per_s * seconds
        costs: Numbers = (begins_s + seconds) / fastest_s + slowness * more_s
        costs += load.strains * seconds / load.answer_s
        costs += coming * more_s / (slack * max(usual_fastest_s, fastest_s))
        costs += coming * held_up_s / max(usual_fastest_s, usual_s)
        return costs


def _queue_s(number: int, requests_per_s: float, service_s: float) -> float:
    """Estimate the wait of a prompt for one of `number` free instances (roughly that of an M/M/c queue)."""
    load = requests_per_s * service_s
    return (load / number) ** number * service_s / (number - load) if number > load else math.inf
