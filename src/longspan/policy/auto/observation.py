"""What `auto` knows of the load: recent arrivals, and the state of each instance while a plan is made."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from longspan.core.view import ClusterView, RequestView, ScheduledPart
from longspan.policy.auto.estimates import Estimates
from longspan.policy.routing import goes_on

Numbers = NDArray[np.float64]

_WINDOW = 2500.0
"""Window over which arrivals are counted, in decode steps of one request: 29 s for llama-3-8b on an A100. A longer
window gives steadier rates, which follow a change of the load later.
"""
_MIN_WINDOW = 85.0
"""Shortest window of a rate, in decode steps of one request: the first arrivals would count as a high rate."""
_MEMORY = 850.0
"""Decay time of the prefill seconds counted for an instance, in decode steps of one request. A longer time keeps
decodes away longer from an instance that has prefilled.
"""
MAX_BUSY = 0.9
"""Upper bound for the busy fraction of instances. It bounds the expected waits."""
_SAMPLES_PER_MEDIAN = 16
"""The medians are updated after this fraction of the window's arrivals, since sorting takes time."""


class Arrivals:
    """Recent prompts, with the seconds of each on one instance and on its fastest group.

    Attributes:
        usual_s, usual_fastest_s: medians of these seconds, at most 1/16 of the window old.

    Args:
        window_s: seconds over which arrivals count.
        min_window_s: lower bound for the span of a rate, while fewer seconds have passed.
    """

    def __init__(self, window_s: float, min_window_s: float) -> None:
        self._window_s, self._min_window_s = window_s, min_window_s
        self._recent: deque[tuple[float, float, float]] = deque()
        self._total_s, self._begun_s, self._num_new = 0.0, math.inf, 0
        self.usual_s = self.usual_fastest_s = 0.0

    @classmethod
    def in_steps_of(cls, token_s: float) -> Arrivals:
        return cls(_WINDOW * token_s, _MIN_WINDOW * token_s)

    def add(self, arrival_s: float, single_s: float, fastest_s: float) -> None:
        self._begun_s = min(self._begun_s, arrival_s)
        self._recent.append((arrival_s, single_s, fastest_s))
        self._total_s += single_s
        self._num_new += 1
        if self._num_new > len(self._recent) // _SAMPLES_PER_MEDIAN:
            self._num_new = 0
            self.usual_s = median([single for _, single, _ in self._recent])
            self.usual_fastest_s = median([fastest for _, _, fastest in self._recent])

    def rates(self, now_s: float) -> tuple[float, float]:
        """Return requests per second, and the seconds of one instance that they take per second."""
        while self._recent and self._recent[0][0] < now_s - self._window_s:
            self._total_s -= self._recent.popleft()[1]
        span_s = min(self._window_s, max(self._min_window_s, now_s - self._begun_s))
        return len(self._recent) / span_s, max(0.0, self._total_s) / span_s


@dataclass(slots=True)
class InstanceState:
    """An instance while a plan is made.

    Attributes:
        decodes: requests that decode here now, or after their prefill.
        active: requests that decode here now.
        context: tokens of `decodes`.
        wait_s: seconds until the instance has no prefill to do.
        free_blocks: blocks that no running request needs.
        free_slots: requests that may still join.
    """

    decodes: int
    active: int
    context: int
    wait_s: float
    free_blocks: int
    free_slots: int


class Observer:
    """Tracks running prefills and decodes between plans, and describes all instances for a plan.

    Args:
        has_roles: other instances decode.
    """

    def __init__(self, instances: Sequence[int], estimates: Estimates, *, has_roles: bool) -> None:
        self._instances, self._estimates, self._has_roles = instances, estimates, has_roles
        self._place = {instance: place for place, instance in enumerate(instances)}
        self._free_at_s = dict.fromkeys(instances, 0.0)
        """When planned steps are expected to be done with prefills."""
        self._begun: dict[int, tuple[int, ...]] = {}
        """Groups of the requests that were admitted and do more than decode."""
        self._decodes: dict[int, tuple[int, int, int]] = dict.fromkeys(instances, (-1, 0, 0))
        """By instance: `running.changes` when they were counted, decoding requests, and their tokens."""
        self._memory_s = _MEMORY * estimates.token_s
        self._prefilled_s: Numbers = np.zeros(len(instances))
        self.now_s = 0.0

    @property
    def has_prefills(self) -> bool:
        return bool(self._begun)

    def advance(self, now_s: float) -> None:
        """Decay the counted prefill seconds."""
        self._prefilled_s *= math.exp((self.now_s - now_s) / self._memory_s)
        self.now_s = now_s

    def free_fractions(self) -> Numbers:
        """Return the fraction of its time that each instance does not prefill: [num_instances]."""
        free: Numbers = 1 - np.minimum(MAX_BUSY, self._prefilled_s / self._memory_s)
        return free

    def admitted(self, request: RequestView, group: tuple[int, ...]) -> None:
        self._begun[request.id] = group

    def scheduled(self, parts: Iterable[ScheduledPart]) -> None:
        """Count the seconds of the prefills in a plan."""
        for part in parts:
            if part.stop - part.start > 1:
                seconds = self._estimates.prefill_s(len(part.group), part.stop - part.start, part.start)
                end_s = max(self.now_s, *(self._free_at_s[i] for i in part.group)) + seconds
                for instance in part.group:
                    self._prefilled_s[self._place[instance]] += seconds
                    self._free_at_s[instance] = end_s

    def states(self, view: ClusterView) -> dict[int, InstanceState]:
        """Describe all instances. If no request can start, describe only those that run a prefill or receive its KV."""
        kv, running, reserved = view.kv, view.running, view.running.due_blocks
        begun = self._still_begun(view)
        expected, max_num_seqs = view.expected, view.max_num_seqs
        states = {}
        involved = {i for request in begun for i in (*request.group, *(() if self._has_roles else request.targets))}
        for i in self._instances if view.startable else involved:
            changes, active, context = self._decodes[i]
            if changes != running.changes[i]:
                _, active, context = self._count(i, view)
            free_blocks = kv.num_free(i) - max(0, reserved[i]) - expected.get(i, 0)
            states[i] = InstanceState(active, active, context, 0.0, free_blocks, max_num_seqs - len(running.on(i)))
        for request in begun if not self._has_roles else ():
            decoders = request.targets or request.group
            count_decode(request, decoders, states)
            for instance in decoders:
                states[instance].free_slots -= bool(request.targets)
                states[instance].active += not _is_prefill(request) and not request.targets
        self._add_waits(view, begun, states)
        return states

    def _add_waits(self, view: ClusterView, begun: Sequence[RequestView], states: Mapping[int, InstanceState]) -> None:
        """Add up the seconds of prefills in flight and of prefills still to be scheduled."""
        busy_s: dict[int, float] = {}
        for request in begun:
            group = request.group
            if request.in_flight and request.num_computed < request.num_prompt:
                busy_s |= {i: max(0.0, self._free_at_s[i] - view.now_s) for i in group}
            if _is_prefill(request):
                new_tokens = request.num_tokens - request.num_scheduled
                seconds = self._estimates.prefill_s(len(group), new_tokens, request.num_scheduled)
                for instance in group:
                    states[instance].wait_s += seconds
        for instance, state in states.items():
            if instance in busy_s:
                state.wait_s += busy_s[instance]
            else:
                self._free_at_s[instance] = view.now_s  # the prediction was too late

    def _count(self, instance: int, view: ClusterView) -> tuple[int, int, int]:
        """Count the requests that only decode on an instance, and their tokens."""
        begun = self._begun
        tokens = [request.num_tokens for request in view.running.on(instance) if request.id not in begun]
        counted = self._decodes[instance] = view.running.changes[instance], len(tokens), sum(tokens)
        return counted

    def _still_begun(self, view: ClusterView) -> list[RequestView]:
        """List the running requests that do more than decode, and forget the others."""
        begun = []
        for request_id, group in list(self._begun.items()):
            request = view.running.get(request_id)
            if request is not None and (
                request.targets
                or request.num_computed < request.num_prompt
                or request.num_tokens > request.num_scheduled + 1
            ):
                begun.append(request)
                continue
            del self._begun[request_id]
            for instance in group if request is None else request.group:
                self._decodes[instance] = (-1, 0, 0)
        return begun


def count_decode(request: RequestView, instances: Collection[int], states: Mapping[int, InstanceState]) -> None:
    """Count a request on the instances that will decode it, unless it ends with its next token."""
    for instance in instances if goes_on(request) else ():
        states[instance].decodes += 1
        states[instance].context += request.num_tokens // len(instances)


def _is_prefill(request: RequestView) -> bool:
    """Return True if more than the next token of a request is still to be scheduled."""
    return request.num_scheduled < max(request.num_prompt, request.num_tokens - 1)
