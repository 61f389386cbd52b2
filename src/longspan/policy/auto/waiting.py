"""Waiting requests, and the groups that were assigned to some of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from longspan.core.view import RequestView
from longspan.policy.auto.observation import Observation


@dataclass(slots=True)
class Waiting:
    """A request that was able to start.

    Attributes:
        fastest_s: seconds on its fastest group, by the prefix that was cached at its arrival.
        overdue_s: the time from which it precedes all prompts that are not overdue, see `WaitingQueue`.
        group: the assigned group, or empty.
        seconds, num_blocks: the prefill on the assigned group, and the blocks that it needs there.
    """

    request: RequestView
    fastest_s: float
    overdue_s: float
    group: tuple[int, ...] = ()
    seconds: float = 0.0
    num_blocks: int = 0


class WaitingQueue:
    """Requests that wait for a group, or for admission on their group.

    Short prompts of a burst pass long ones until these are overdue. A prompt is overdue once it has waited for
    `overtaking` times the time of first come, first served on instances that only prefill. It is not overdue while it
    can keep `ttft_slowdown`.

    Attributes:
        new: requests that arrived or were preempted, and could not start since; by id.
        assigned: requests with a group, in the order of assignment; by id.
    """

    def __init__(self, num_instances: int, overtaking: float, ttft_slowdown: float) -> None:
        self._num_instances = num_instances
        self._overtaking, self._ttft_slowdown = overtaking, ttft_slowdown
        self.new: dict[int, RequestView] = {}
        self.assigned: dict[int, Waiting] = {}
        self._startable: dict[int, Waiting] = {}
        self._served_s = 0.0
        """When all prompts so far would be done, first come, first served."""

    def add(self, request: RequestView) -> None:
        self.new[request.id] = request

    def remove(self, request_id: int) -> None:
        for requests in (self.new, self._startable, self.assigned):
            requests.pop(request_id, None)

    def remove_admitted(self) -> None:
        for request_id in [request_id for request_id, one in self.assigned.items() if one.request.group]:
            self.remove(request_id)

    def started(self, request: RequestView, fastest_s: float, single_s: float) -> None:
        """Add a request that can start, which takes `single_s` on one instance."""
        arrival_s = request.arrival_s
        self._served_s = max(self._served_s, arrival_s) + single_s / self._num_instances
        in_turn_s = self._overtaking * (self._served_s - arrival_s)
        overdue_s = arrival_s + max(in_turn_s, (self._ttft_slowdown - 1) * fastest_s)
        self._startable[request.id] = Waiting(request, fastest_s, overdue_s)

    def ordered(self, now_s: float) -> list[Waiting]:
        """Return the requests that can start and have no group.

        Overdue requests are first. The rest is ordered by wait over the square root of seconds, between
        first come, first served and the highest response ratio.
        """
        able = [
            waiting
            for request_id, waiting in self._startable.items()
            if request_id not in self.assigned and waiting.request.residency.can_start
        ]
        able.sort(
            key=lambda one: (
                min(one.overdue_s, now_s),
                (one.request.arrival_s - now_s) / math.sqrt(one.fastest_s),
                one.fastest_s,
            )
        )
        return able

    def assign(self, waiting: Waiting, group: tuple[int, ...], seconds: float, num_blocks: int) -> None:
        waiting.group, waiting.seconds, waiting.num_blocks = group, seconds, num_blocks
        self.assigned[waiting.request.id] = waiting

    def reconsider(self, seen: Observation, place: Mapping[int, int]) -> None:
        """Take back assigned groups that lack blocks or slots. Add the seconds of the kept ones to their instances."""
        for request_id, waiting in list(self.assigned.items()):
            members = [place[i] for i in waiting.group]
            has_blocks = np.maximum(0, seen.free_blocks[members]).sum() >= waiting.num_blocks
            has_slots = waiting.request.residency.can_start and seen.free_slots[members].min() > 0
            if has_blocks and has_slots:
                seen.wait_s[members] = seen.wait_s[members].max() + waiting.seconds
            else:
                del self.assigned[request_id]
