"""The state of each instance while a plan is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from longspan.core.view import ClusterView, RequestView, ScheduledPart
from longspan.policy.auto.estimates import Estimates, Numbers
from longspan.policy.auto.history import MAX_BUSY, History
from longspan.policy.routing import goes_on

_CHANGES_PER_COUNT = 64
"""Contexts are counted again after this many changes of an instance. Each request grows by a token per two changes."""


@dataclass(slots=True)
class Observation:
    """The state of all instances while a plan is made: arrays of [num_instances], in the order of `Policy.instances`.

    Attributes:
        decodes: requests that decode here now, or after their prefill.
        active: requests that decode here now.
        context: tokens of `decodes`.
        wait_s: seconds until the instance has no prefill to do.
        free_blocks: blocks that no running request needs.
        free_slots: requests that may still join.
    """

    decodes: Numbers
    active: Numbers
    context: Numbers
    wait_s: Numbers
    free_blocks: Numbers
    free_slots: Numbers

    def add_decode(self, request: RequestView, places: Sequence[int]) -> None:
        """Count a request where it will decode, unless it ends with its next token."""
        for place in places if goes_on(request) else ():
            self.decodes[place] += 1
            self.context[place] += request.num_tokens // len(places)


class Observer:
    """Tracks running prefills and decodes between plans, and describes all instances for a plan.

    Args:
        place: of each instance among all.
        has_roles: other instances decode.
    """

    def __init__(self, place: Mapping[int, int], estimates: Estimates, history: History, *, has_roles: bool) -> None:
        self._place, self._estimates, self._has_roles = place, estimates, has_roles
        self._free_at_s = dict.fromkeys(place, 0.0)
        """When planned steps are expected to be done with prefills."""
        self._admitted: dict[int, RequestView] = {}
        """Requests by id that were admitted, and did more than decode at the last plan."""
        self._busy: set[int] = set()
        """Instances with a prefill in flight."""
        self._context, self._counted, self._counted_at = ([0] * len(place) for _ in range(3))
        """Tokens of decodes, the number of these decodes, and `running.changes` when they were counted."""
        self._instances = list(place)
        self._history = history
        self._prefilled_s, self._prefilled_at_s = np.zeros(len(place)), 0.0
        self.num_ended = 0
        """Requests that ended their prefill, or lost their KV during it, so far."""

    def update(self, view: ClusterView) -> None:
        """Forget the requests that only decode by now, or have lost their KV."""
        self._busy.clear()
        _ = view.running.due_blocks  # a few requests at each plan: many plans at once would take long
        for request_id, request in list(self._admitted.items()):
            if view.running.get(request_id) is None or not (
                request.targets
                or request.num_computed < request.num_prompt
                or request.num_tokens > request.num_scheduled + 1
            ):
                del self._admitted[request_id]
                self.num_ended += 1
            elif request.in_flight and request.num_computed < request.num_prompt:
                self._busy.update(request.group)

    def admitted(self, request: RequestView) -> None:
        self._admitted[request.id] = request

    def scheduled(self, parts: Iterable[ScheduledPart], now_s: float) -> None:
        """Count the seconds of the prefills in a plan."""
        for part in parts:
            if (new_tokens := part.stop - part.start) > 1:
                seconds = self._estimates.prefill_s(len(part.group), new_tokens, part.start, new_tokens)
                end_s = max(now_s, *(self._free_at_s[i] for i in part.group if i in self._busy), now_s) + seconds
                prefilled_s = self._prefilled(now_s)
                for instance in part.group:
                    prefilled_s[self._place[instance]] += seconds
                    self._free_at_s[instance] = end_s
                    self._busy.add(instance)

    def free_fractions(self, now_s: float, wait_s: Numbers) -> Numbers:
        """Return the fraction of its time that each instance does not prefill: [num_instances].

        An answer gets the rest of mixed steps while prefills of `wait_s` last. It is taken to have half of the expected
        tokens, since the mean over requests of the time per token depends most on short answers. The mean of recent
        steps counts for prefills that are not known yet.
        """
        answer_s = self._history.answer_s
        mixed = np.minimum(1.0, 2 * wait_s * (1 - MAX_BUSY) / answer_s)  # fraction of its tokens in mixed steps
        free: Numbers = 1 - np.minimum(MAX_BUSY, self._prefilled(now_s) / answer_s)
        return np.minimum(free, 1 / (1 + mixed * MAX_BUSY / (1 - MAX_BUSY)))

    def _prefilled(self, now_s: float) -> Numbers:
        """Return the recent prefill seconds of each instance: [num_instances]. They decay in the time of an answer."""
        if now_s > self._prefilled_at_s:
            self._prefilled_s *= math.exp((self._prefilled_at_s - now_s) / self._history.answer_s)
            self._prefilled_at_s = now_s
        return self._prefilled_s

    def decode_s(self, group: Iterable[int], view: ClusterView) -> float:
        """Predict a step of the requests that decode on a group now. It is 0 without requests."""
        admitted, running = self._admitted, view.running
        seconds = 0.0
        for instance in group:
            requests = running.on(instance)
            own = (admitted.get(request.id) for request in requests)
            if any(one is None or not (one.targets or _is_prefill(one)) for one in own):
                context = float(self._context[self._place[instance]])
                seconds = max(seconds, self._estimates.step_s(float(len(requests)), context))
        return seconds

    def observe(self, view: ClusterView) -> Observation:
        """Describe all instances. Numbers are gathered in lists, whose items change faster than items of arrays."""
        instances, place, num_free = self._instances, self._place, view.kv.num_free
        num_running, due_blocks = list(map(len, map(view.running.on, instances))), view.running.due_blocks
        free_blocks = [num_free(instance) - max(0, due_blocks[instance]) for instance in instances]
        for instance, number in view.expected.items():
            if number and instance in place:
                free_blocks[place[instance]] -= number
        active, num_slots = num_running.copy(), [view.max_num_seqs - number for number in num_running]
        for request in self._admitted.values():
            if _is_prefill(request) or not request.targets:  # while its KV is sent, a request runs nowhere
                for instance in request.group:
                    active[place[instance]] -= 1
        context, decodes = self._contexts(view, active), active.copy()
        self._add_later_decodes(decodes, context, num_slots)
        wait_s = self._add_prefills(view, active)
        return Observation(
            wait_s=np.array(wait_s),
            decodes=np.array(decodes, float),
            active=np.array(active, float),
            context=np.array(context, float),
            free_blocks=np.array(free_blocks, float),
            free_slots=np.array(num_slots, float),
        )

    def _add_prefills(self, view: ClusterView, active: list[int]) -> list[float]:
        """Count the requests that decode before their prefill is known to be done. Return the seconds of prefills."""
        place, wait_s = self._place, [0.0] * len(self._place)
        for request in self._admitted.values():
            group = request.group
            if _is_prefill(request):
                start, max_tokens = request.num_scheduled, view.max_num_batched_tokens
                seconds = self._estimates.prefill_s(len(group), request.num_tokens - start, start, max_tokens)
                for instance in group:
                    wait_s[place[instance]] += seconds
            elif not request.targets:
                for instance in group:
                    active[place[instance]] += 1
        for instance in self._busy:
            wait_s[place[instance]] += max(0.0, self._free_at_s[instance] - view.now_s)
        return wait_s

    def _add_later_decodes(self, decodes: list[int], context: list[int], num_slots: list[int]) -> None:
        """Count the later decodes of each instance and their tokens, and subtract slots if KV is sent there."""
        place = self._place
        for request in self._admitted.values() if not self._has_roles else ():
            for instance in (decoders := request.targets or request.group):
                if goes_on(request):
                    decodes[place[instance]] += 1
                    context[place[instance]] += request.num_tokens // len(decoders)
                num_slots[place[instance]] -= bool(request.targets)

    def _contexts(self, view: ClusterView, decodes: Sequence[int]) -> list[int]:
        """Return the tokens of decodes on each instance: [num_instances]. Recent growth is left out."""
        running, admitted, changes = view.running, self._admitted, view.running.changes
        for place, instance in enumerate(self._instances):
            num_changes = changes[instance] - self._counted_at[place]
            if decodes[place] != self._counted[place] or num_changes >= _CHANGES_PER_COUNT:
                requests = running.on(instance)
                self._context[place] = sum([request.num_tokens for request in requests if request.id not in admitted])
                self._counted[place], self._counted_at[place] = decodes[place], changes[instance]
        return self._context.copy()


def _is_prefill(request: RequestView) -> bool:
    """Return True if more than the next token of a request is still to be scheduled."""
    return request.num_scheduled < max(request.num_prompt, request.num_tokens - 1)
