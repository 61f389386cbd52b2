"""The observer of an engine, which records its requests and steps."""

from __future__ import annotations

from typing import Protocol

from longspan.core.request import FinishReason, Request
from longspan.core.steps import Completion, Forward, MoveKV, Reshard


class Observer(Protocol):
    """The engine calls these methods in its own thread."""

    def arrived(self, request: Request) -> None:
        """Record a request that is added."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Record that a request has finished. Its blocks are not freed yet."""

    def sent(self, step: Forward | MoveKV | Reshard) -> None:
        """Record a step that is about to be sent to its ranks."""

    def completed(self, done: Completion) -> None:
        """Record a completion that the engine has not used yet."""

    def lost(self) -> None:
        """Record that all workers are replaced. No step in flight completes."""
