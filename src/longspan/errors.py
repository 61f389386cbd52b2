"""Errors that cross rooms."""

from __future__ import annotations


class WorkerLostError(RuntimeError):
    """A worker process died or raised; the requests in flight cannot finish.

    Attributes:
        rank: the rank that was lost.
        reason: why, as far as it is known: its exception, or how its process ended.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"worker rank {rank} was lost: {reason}")
        self.rank = rank
        self.reason = reason
