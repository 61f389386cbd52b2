"""The executor of an engine, the numbers of its steps, and the requests that ranks know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from longspan.core.blocks import BlockRef
from longspan.core.steps import Completion, Executor, Forward, Free, MoveKV, Reshard

if TYPE_CHECKING:  # types alone
    from longspan.core.observer import Observer


class Ranks:
    """Sends steps to the executor.

    Attributes:
        executor: takes the steps, and returns their completions.
        number: returns the next step's number.
        observer: records requests and steps from now on. None without a recording.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.number = count(1).__next__
        self.observer: Observer | None = None
        self._known: set[int] = set()  # requests with a part on ranks, or a move to a decode instance

    def restart(self, executor: Executor) -> None:
        """Use new workers, which know no request."""
        self.executor = executor
        self._known.clear()
        if self.observer is not None:
            self.observer.lost()

    def send(self, *steps: Forward | MoveKV | Reshard) -> None:
        for step in steps:
            if isinstance(step, Forward):
                self._known.update([part.request_id for part in step.parts])
            elif isinstance(step, MoveKV) and step.way == "across":
                self._known.add(step.request_id)
            if self.observer is not None:
                self.observer.sent(step)
            self.executor.submit(step)

    def poll(self, timeout_s: float | None) -> Sequence[Completion]:
        """Wait for completions, see `Executor.poll`."""
        completions = self.executor.poll(timeout_s)
        if self.observer is not None:
            for completion in completions:
                self.observer.completed(completion)
        return completions

    def free(self, *request_ids: int, cleared: Iterable[tuple[BlockRef, int]]) -> None:
        """Send a `Free` if ranks know any of the requests, or have slots to clear."""
        known, slots = tuple(self._known.intersection(request_ids)), tuple(cleared)
        self._known.difference_update(known)
        if known or slots:
            self.executor.submit(Free(number=self.number(), request_ids=known, cleared=slots))
