"""Waiting requests, and the groups that were assigned to some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longspan.core.view import RequestView
from longspan.policy.auto.observation import InstanceState


@dataclass(slots=True)
class Waiting:
    """A request that was able to start.

    Attributes:
        fastest_s: seconds on its fastest group, by the prefix that was cached at its arrival.
        group: the assigned group, or empty.
        seconds, num_blocks: the prefill on the assigned group, and the blocks that it needs there.
    """

    request: RequestView
    fastest_s: float
    group: tuple[int, ...] = ()
    seconds: float = 0.0
    num_blocks: int = 0


class WaitingQueue:
    """Requests that wait for a group, or for admission on their group.

    Attributes:
        new: requests that arrived or were preempted, and could not start since; by id.
        assigned: requests with a group, in the order of assignment; by id.
    """

    def __init__(self) -> None:
        self.new: dict[int, RequestView] = {}
        self.assigned: dict[int, Waiting] = {}
        self._startable: dict[int, Waiting] = {}

    def add(self, request: RequestView) -> None:
        self.new[request.id] = request

    def remove(self, request_id: int) -> None:
        for requests in (self.new, self._startable, self.assigned):
            requests.pop(request_id, None)

    def remove_admitted(self) -> None:
        for request_id in [request_id for request_id, one in self.assigned.items() if one.request.group]:
            self.remove(request_id)

    def started(self, request: RequestView, fastest_s: float) -> None:
        self._startable[request.id] = Waiting(request, fastest_s)

    def unassigned(self) -> Iterator[Waiting]:
        """Yield the requests that can start and have no group."""
        assigned = self.assigned
        for request_id, waiting in self._startable.items():
            if request_id not in assigned and waiting.request.residency.can_start:
                yield waiting

    def assign(self, waiting: Waiting, group: tuple[int, ...], seconds: float, num_blocks: int) -> None:
        waiting.group, waiting.seconds, waiting.num_blocks = group, seconds, num_blocks
        self.assigned[waiting.request.id] = waiting

    def reconsider(self, states: Mapping[int, InstanceState]) -> None:
        """Take back assigned groups that lack blocks or slots. Add the seconds of the others to their instances."""
        for request_id, waiting in list(self.assigned.items()):
            members = [states[i] for i in waiting.group]
            has_blocks = sum([max(0, one.free_blocks) for one in members]) >= waiting.num_blocks
            has_slots = waiting.request.residency.can_start and all(one.free_slots > 0 for one in members)
            if has_blocks and has_slots:
                end_s = max([one.wait_s for one in members]) + waiting.seconds
                for one in members:
                    one.wait_s = end_s
            else:
                del self.assigned[request_id]
