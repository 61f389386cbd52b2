"""Candidate groups of a prompt, and the cost of each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from longspan.policy.auto.estimates import Estimates, Numbers
from longspan.policy.auto.history import MAX_BUSY, History
from longspan.policy.auto.waiting import Waiting

_LONG = 10.0
"""Usual answers in the time of a long prompt's fastest prefill. From 10 to 30 it decides alike."""


class CandidateGroups:
    """The groups to choose from: 1, 2, 4 and so on neighbours, of one host if it has enough, all, and all but a few.

    Groups of one size do not overlap. On hosts of 2, 4 or 8 instances, groups of half the size are halves of them. So
    prompts of different lengths seldom wait for a member while other members are idle.

    Attributes:
        groups: ascending in size.
        sizes: of each group, `[num_groups]`.
        places: of the members of each group among all instances.
        members: the places of all groups together, [sum of sizes].
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
        self.places = [np.array([place[instance] for instance in group]) for group in self.groups]
        self.sizes = np.array(list(map(len, self.groups)))
        self.members = np.concatenate(self.places)
        self._starts = np.cumsum(self.sizes) - self.sizes

    def by_size(self, values: Numbers) -> Numbers:
        """Repeat per-size values for the candidate groups: [num_groups]."""
        return values.take(self._kinds)

    def sum(self, values: Numbers) -> Numbers:
        """Sum a per-instance value over the members of each group: [num_groups]."""
        return np.add.reduceat(values.take(self.members), self._starts)

    def sum_members(self, values: Numbers) -> Numbers:
        """Sum one value per entry of `members` over each group: [num_groups]."""
        return np.add.reduceat(values, self._starts)

    def max(self, values: Numbers) -> Numbers:
        """Return the maximum of a per-instance value over the members of each group: [num_groups]."""
        return np.maximum.reduceat(values.take(self.members), self._starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of all instances while groups are chosen: [num_instances] each.

    Attributes:
        wait_s: seconds until each instance has no prefill to do.
        token_s: expected mean time between tokens of a request that decodes there.
        decodes: requests that decode there, if any does now.
        later: requests that will decode there, if none does now.
    """

    wait_s: Numbers
    token_s: Numbers
    decodes: Numbers
    later: Numbers


class Costs:
    """Prices candidate groups by how near they bring requests to their latency bounds.

    Args:
        ttft_slowdown: bound for a first token, relative to the fastest group of the prompt.
        tbt_slowdown: bound for the mean time between tokens of a request, relative to a request that decodes alone.
    """

    def __init__(
        self,
        candidates: CandidateGroups,
        estimates: Estimates,
        history: History,
        ttft_slowdown: float,
        tbt_slowdown: float,
    ) -> None:
        self.candidates, self.estimates, self.history = candidates, estimates, history
        self._max_ttft, self._max_tbt_s = ttft_slowdown, tbt_slowdown * estimates.token_s

    def haste(self, waiting: Waiting, now_s: float) -> float:
        """Return the cost of a second of delay for a waiting prompt: the derivative of `_penalty` at its TTFT."""
        max_s = self._max_ttft * waiting.fastest_s
        return 2 * min(1.0, (now_s - waiting.request.arrival_s + waiting.fastest_s) / max_s) / max_s

    def of(self, waiting: Waiting, seconds: Numbers, haste: float, now_s: float, load: Load) -> Numbers:
        """Return the cost of a prefill on each group, where it takes `seconds`: [num_groups].

        The choice adds to the penalties of the prompt, of prompts that wait behind it or come later, and of answers on
        the group. For an overdue prompt, answers count only as far as they wait longer than it has.

        Args:
            haste: the sum of `Costs.haste` over the prompts that wait behind this one.
        """
        candidates, num_instances, wait_s = self.candidates, len(load.wait_s), load.wait_s
        requests_per_s, busy = self.history.rates(now_s)
        usual_s, usual_fastest_s, fastest_s = self.history.usual_s, self.history.usual_fastest_s, waiting.fastest_s
        begins_s = candidates.max(wait_s)
        idle_s = candidates.sizes * begins_s - candidates.sum(wait_s)
        single_s = seconds[:num_instances].min()
        more_s = np.maximum(0.0, idle_s + candidates.sizes * seconds - single_s) / num_instances
        later_delay = more_s / ((1 - min(MAX_BUSY, busy / num_instances)) * max(usual_fastest_s, fastest_s))
        if seconds.max() > 2 * usual_s:  # otherwise no usual prompt would wait for longer than it takes
            later_delay += self._held_up_s(seconds, wait_s, requests_per_s) / max(usual_fastest_s, usual_s)

        waited_s = now_s - waiting.request.arrival_s
        ttft_s = waited_s + begins_s + seconds
        costs: Numbers = _penalty(ttft_s / (self._max_ttft * fastest_s)) + haste * more_s
        costs += 2 / self._max_ttft**2 * requests_per_s * seconds * later_delay
        unpaid = 1.0 if now_s < waiting.overdue_s else np.maximum(0.0, 1 - waited_s / seconds)
        costs += unpaid * self._answers(seconds, load, outlasts=fastest_s > _LONG * self.history.answer_s)
        return costs

    def _held_up_s(self, seconds: Numbers, wait_s: Numbers, requests_per_s: float) -> Numbers:
        """Return the seconds that a usual prompt waits longer while each group prefills: [num_groups].

        An instance that is free within the time of a usual prompt counts as free.
        """
        usual_s = self.history.usual_s
        free = wait_s <= usual_s
        queues_s = _queues_s(int(free.sum()), requests_per_s, usual_s)
        longest_s = np.maximum(0.0, seconds / 2 - usual_s)
        behind_s = queues_s[-1 - self.candidates.sum(free.astype(float)).astype(int)]
        held_up_s: Numbers = np.minimum(longest_s, behind_s) - np.minimum(longest_s, queues_s[-1])
        return held_up_s

    def _answers(self, seconds: Numbers, load: Load, *, outlasts: bool) -> Numbers:
        """Return the penalties that a prefill adds to the answers on each group: [num_groups].

        Later answers count for a prefill that outlasts them. A short one may be done before they begin.
        """
        members, more_s = self.candidates.members, seconds / self.history.answer_tokens
        decodes = (load.decodes + load.later if outlasts else load.decodes).take(members)
        before = (load.token_s / self._max_tbt_s).take(members)
        after = before + (more_s / self._max_tbt_s).repeat(self.candidates.sizes)
        return self.candidates.sum_members(decodes * (_penalty(after) - _penalty(before)))


def _penalty(part: Numbers) -> Numbers:
    """Return the penalty of a latency that is this part of its bound: its square, and a line beyond the bound.

    Short delays far from the bound cost little. Beyond it, each further second costs as much as at the bound.
    """
    return np.where(part < 1, part * part, 2 * part - 1)


def _queues_s(number: int, requests_per_s: float, service_s: float) -> Numbers:
    """Estimate the waits of prompts for one of 0 to `number` free instances: [number + 1] (roughly M/M/c queues)."""
    load, counts = requests_per_s * service_s, np.arange(number + 1)
    waits_s = np.full(number + 1, math.inf)
    enough = counts[counts > load]
    waits_s[number + 1 - len(enough) :] = (load / enough) ** enough * service_s / (enough - load)
    return waits_s
