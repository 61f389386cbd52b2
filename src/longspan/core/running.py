"""The requests that hold KV, also by instance: a plan for a few instances need not look at what the others do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from longspan.core.request import Request


@dataclass(frozen=True, slots=True)
class Due:
    """What running requests will still ask of one instance.

    Attributes:
        tokens: to compute there, if the members of a group share evenly.
        blocks: for the tokens that the requests have.
    """

    tokens: int
    blocks: int


class Running:
    """Running requests, first admitted first. The engine changes it, and says where requests have changed.

    One that is `set_aside` runs on no instance.
    """

    def __init__(self, num_instances: int) -> None:
        self._all: dict[int, Request] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._shared: dict[int, Request] = {}
        self._on: list[dict[int, Request]] = [{} for _ in range(num_instances)]
        self._due: list[Due | None] = [None] * num_instances
        self._occupied: set[int] = set()

    @classmethod
    def of(cls, requests: Iterable[Request], num_instances: int) -> Self:
        """With these requests."""
        running = cls(num_instances)
        for request in requests:
            running.join(request)
        return running

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all.values())

    def get(self, request_id: int) -> Request | None:
        """The one of that id, if it runs."""
        return self._all.get(request_id)

    def on(self, instance: int) -> Collection[Request]:
        """Those that an instance has a part in."""
        return self._on[instance].values()

    @property
    def shared(self) -> Collection[Request]:
        """Those that several instances have a part in."""
        return self._shared.values()

    @property
    def occupied(self) -> Collection[int]:
        """The instances that have a part in any."""
        return self._occupied

    def due(self, instance: int) -> Due:
        """What is still asked of an instance; found out once after each change there."""
        due = self._due[instance]
        if due is None:
            due = self._due[instance] = _due(instance, self._on[instance].values())
        return due

    def join(self, request: Request) -> None:
        """A request was admitted, after all others."""
        self._all[request.id] = request
        self._seat(request)

    def regroup(self, request: Request) -> None:
        """The group of a request is another than when it joined."""
        if self._groups[request.id] != request.group:
            self._unseat(request)
            self._seat(request)

    def set_aside(self, request: Request) -> None:
        """A request holds KV on its group, but asks nothing of it any more, until it gets another."""
        self._unseat(request)
        self._groups[request.id] = ()

    def leave(self, request: Request) -> None:
        """A request has ended, or waits again."""
        if self._all.pop(request.id, None) is not None:
            self._unseat(request)

    def changed(self, instances: Iterable[int]) -> None:
        """Counters of requests on these instances are others."""
        for instance in instances:
            self._due[instance] = None

    def _seat(self, request: Request) -> None:
        self._groups[request.id] = request.group
        for instance in request.group:
            self._on[instance][request.id] = request
            self._occupied.add(instance)
        if len(request.group) > 1:
            self._shared[request.id] = request
        self.changed(request.group)

    def _unseat(self, request: Request) -> None:
        group = self._groups.pop(request.id)
        for instance in group:
            del self._on[instance][request.id]
            if not self._on[instance]:
                self._occupied.discard(instance)
        self._shared.pop(request.id, None)
        self.changed(group)


def _due(instance: int, requests: Collection[Request]) -> Due:
    tokens = blocks = 0
    for request in requests:
        num_tokens, keepers = request.num_tokens, request.keepers
        missing = request.blocks_for(num_tokens) - len(request.table)
        tokens += -(-(num_tokens - request.num_computed) // len(request.group))
        if instance in keepers:
            blocks += -(-missing // len(keepers))
    return Due(tokens, blocks)
