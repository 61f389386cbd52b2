"""What the HTTP face knows of the engine's policy: how it is set, what has been changed, and who waits for a change."""

from __future__ import annotations

import asyncio

from longspan.core.protocols import PolicySettings, option_text
from longspan.serve.answer import EngineLostError
from longspan.serve.messages import PolicyRefused, PolicySet


class PolicyRefusedError(ValueError):
    """The engine did not change an option; its words say why."""


class PolicyFace:
    """Of one server, whatever becomes of its engine processes.

    Attributes:
        settings: those in force; None until an engine process has told them.
    """

    def __init__(self) -> None:
        self.settings: PolicySettings | None = None
        self._asked: dict[int, asyncio.Future[PolicySettings]] = {}
        self._changes: dict[str, str] = {}

    @property
    def changes(self) -> dict[str, str]:
        """What a new engine process is to be told, to be set as the last one was; empty if nobody changed it."""
        return dict(self._changes)

    def ask(self, number: int) -> asyncio.Future[PolicySettings]:
        """What the engine makes of the change that was sent to it under this number.

        The future raises PolicyRefusedError, or EngineLostError when there is no engine any more.
        """
        self._asked[number] = future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        return future

    def take(self, report: PolicySet | PolicyRefused) -> None:
        """What an engine process says."""
        future = None if report.id is None else self._asked.get(report.id)
        if isinstance(report, PolicySet):
            self.settings = report.settings
            if report.id is not None:
                self._changes = {
                    name: option_text(report.settings.options[name]) for name in report.settings.changeable
                }
        if future is None or future.done():
            return
        if isinstance(report, PolicySet):
            future.set_result(report.settings)
        else:
            future.set_exception(PolicyRefusedError(report.reason))

    def lose(self, reason: str) -> None:
        """The engine process is gone: who waits learns that."""
        for future in list(self._asked.values()):
            if not future.done():
                future.set_exception(EngineLostError(reason))
