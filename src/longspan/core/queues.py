"""The requests that wait and those that hold KV, also by instance."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from longspan.core.owners import coupled_instances
from longspan.core.request import Request


class Waiting:
    """Requests in the order of their ids: one that was preempted stands where it stood before.

    Attributes:
        changes: how many have come or gone.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._all: list[Request] = []
        self._num_followers = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, request: Request) -> None:
        self._all.insert(self._place(request), request)
        self.changes += 1
        self._num_followers += request.leader is not None

    def remove(self, request: Request) -> None:
        del self._all[self._place(request)]
        self.changes += 1
        self._num_followers -= request.leader is not None

    def able(self) -> Sequence[Request]:
        """Returns the requests that could run if there were room, not those whose leader has yet to compute their
        prompt.
        """
        return [r for r in self._all if not r.must_wait] if self._num_followers else self._all

    def _place(self, request: Request) -> int:
        return bisect_left(self._all, request.id, key=lambda one: one.id)


class Running:
    """Running requests, first admitted first. The engine changes it, and says which requests have changed.

    One that is `set_aside` runs on no instance.

    Attributes:
        changes: how often anything has changed of what runs on each instance.
    """

    def __init__(self, num_instances: int) -> None:
        self.changes = [0] * num_instances
        self._all: dict[int, Request] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._alone: dict[int, dict[int, Request]] = {}
        self._shared: dict[tuple[int, ...], dict[int, Request]] = {}
        self._coupled_sets: list[frozenset[int]] | None = None  # of `_shared`, while it has the same groups
        self._on: list[dict[int, Request]] = [{} for _ in range(num_instances)]
        self._occupied: set[int] = set()
        self._tokens, self._blocks = [0] * num_instances, [0] * num_instances
        self._asks: dict[int, _Ask] = {}
        self._stale: set[int] = set()

    @classmethod
    def of(cls, requests: Iterable[Request], num_instances: int) -> Self:
        running = cls(num_instances)
        for request in requests:
            running.join(request)
        return running

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all.values())

    def get(self, request_id: int) -> Request | None:
        return self._all.get(request_id)

    def on(self, instance: int) -> Collection[Request]:
        """Returns the requests that an instance takes part in."""
        return self._on[instance].values()

    @property
    def coupled_sets(self) -> Sequence[frozenset[int]]:
        """Coupled instances share requests; the sets are found once after each change of groups."""
        if self._coupled_sets is None:
            self._coupled_sets = coupled_instances(self._shared)
        return self._coupled_sets

    @property
    def shared(self) -> Iterator[Request]:
        """Requests of several instances are shared."""
        return (request for found in self._shared.values() for request in found.values())

    @property
    def occupied(self) -> Collection[int]:
        """Occupied instances take part in some request."""
        return self._occupied

    def within(self, instances: set[int] | frozenset[int]) -> Iterator[Request]:
        """Iterates, in no order, over the requests that no other instances take part in."""
        for instance in self._alone.keys() & instances:
            yield from self._alone[instance].values()
        for group, found in self._shared.items() if len(instances) > 1 else ():
            if group[0] in instances and instances.issuperset(group):
                yield from found.values()

    @property
    def due_tokens(self) -> Sequence[int]:
        """So many tokens are still to be computed on each instance, if the members of a group share evenly."""
        self._update_asks()
        return self._tokens

    @property
    def due_blocks(self) -> Sequence[int]:
        """So many blocks are still asked of each instance for the tokens that the requests have."""
        self._update_asks()
        return self._blocks

    def join(self, request: Request) -> None:
        """Adds a request that was admitted after all others."""
        self._all[request.id] = request
        self._seat(request)

    def regroup(self, request: Request) -> None:
        """Follows a request whose group is another than when it joined."""
        if self._groups[request.id] != request.group:
            self._unseat(request)
            self._seat(request)

    def set_aside(self, request: Request) -> None:
        """Keeps a request that holds KV on its group, but asks nothing of it until it gets another."""
        self._unseat(request)
        self._groups[request.id] = ()

    def leave(self, request: Request) -> None:
        """Removes a request that has ended, or waits again."""
        if self._all.pop(request.id, None) is not None:
            self._unseat(request)
            self.changed(request.group, ())

    def changed(self, instances: Iterable[int], request_ids: Iterable[int]) -> None:
        """Notes that counters of these requests have changed, or what these instances have in flight."""
        for instance in instances:
            self.changes[instance] += 1
        self._stale.update(request_ids)

    def _seat(self, request: Request) -> None:
        group = self._groups[request.id] = request.group
        if len(group) == 1:
            self._alone.setdefault(group[0], {})[request.id] = request
        else:
            if group not in self._shared:
                self._shared[group], self._coupled_sets = {}, None
            self._shared[group][request.id] = request
        for instance in group:
            self._on[instance][request.id] = request
        self._occupied.update(group)
        self.changed(group, (request.id,))

    def _unseat(self, request: Request) -> None:
        group = self._groups.pop(request.id)
        for instance in group:
            del self._on[instance][request.id]
            if not self._on[instance]:
                self._occupied.discard(instance)
        if len(group) == 1:
            del self._alone[group[0]][request.id]
            if not self._alone[group[0]]:
                del self._alone[group[0]]
        elif group:
            del self._shared[group][request.id]
            if not self._shared[group]:
                del self._shared[group]
                self._coupled_sets = None
        self._ask(request.id, None)
        self.changed(group, ())

    def _update_asks(self) -> None:
        """Updates what the changed requests ask."""
        for request_id in self._stale:
            if self._groups.get(request_id):
                self._ask(request_id, _Ask.of(self._all[request_id]))
        self._stale.clear()

    def _ask(self, request_id: int, ask: _Ask | None) -> None:
        """Replaces what a request asks of its instances."""
        before = self._asks.pop(request_id, None)
        if ask is not None:
            self._asks[request_id] = ask
        if ask == before:
            return
        for one, sign in ((before, -1), (ask, 1)):
            if one is not None:
                for instance in one.group:
                    self._tokens[instance] += sign * one.tokens
                for instance in one.kv_owners:
                    self._blocks[instance] += sign * one.blocks


class _Ask(NamedTuple):
    """A running request will still ask so much of each instance of its group, and of those that keep its KV."""

    group: tuple[int, ...]
    tokens: int
    kv_owners: tuple[int, ...]
    blocks: int

    @classmethod
    def of(cls, request: Request) -> Self:
        num_tokens, group, kv_owners = request.num_tokens, request.group, request.kv_owners
        missing = request.blocks_for(num_tokens) - len(request.table)
        return cls(
            group, -(-(num_tokens - request.num_computed) // len(group)), kv_owners, -(-missing // len(kv_owners))
        )
