"""The requests that hold no KV, first come first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

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
        """The request waits from now on."""
        self._all.insert(self._place(request), request)
        self.changes += 1
        self._num_followers += request.leader is not None

    def remove(self, request: Request) -> None:
        """The request waits no more."""
        del self._all[self._place(request)]
        self.changes += 1
        self._num_followers -= request.leader is not None

    def able(self) -> Sequence[Request]:
        """Those that could run if there were room: not those whose leader has yet to compute their prompt."""
        return [r for r in self._all if not r.must_wait] if self._num_followers else self._all

    def _place(self, request: Request) -> int:
        return bisect_left(self._all, request.id, key=lambda one: one.id)
