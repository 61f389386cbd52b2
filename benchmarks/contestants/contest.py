"""Starts all contestants of a run once, and passes each job to one after another. A failing contestant is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from contestants.child import Child, ContestantError
from contestants.roster import Entry
from contestants.serving import Answer, Submission


class Contest:
    """Starts contestants and passes jobs to them. Leaving this context manager ends all their processes.

    Args:
        options: arguments of every contestant's `start`.
        tell: called with a description of the next action.

    Attributes:
        versions: package versions of each contestant that started.
        failures: the error of each contestant that did not start or was dropped.
    """

    def __init__(self, options: dict[str, Any], tell: Callable[[str], None]) -> None:
        self._options, self._tell = options, tell
        self._members: dict[str, tuple[Entry, Child]] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.failures: dict[str, str] = {}

    def start(self, entries: Iterable[Entry]) -> None:
        """Start and pause one contestant after another."""
        for entry in entries:
            self._tell(f"{entry.name}: starting")
            try:
                child = Child(entry, self._options)
                self._members[entry.name] = entry, child
                self.versions[entry.name] = child.start()
                child.pause()
            except ContestantError as error:
                self._drop(entry.name, error)

    def ask(self, title: str, submissions: Sequence[Submission]) -> dict[str, Answer]:
        """Run a job on each remaining contestant that supports it, one at a time. Return the answers by name."""
        answers = {}
        for name, (entry, child) in list(self._members.items()):
            if not entry.takes(submissions):
                continue
            self._tell(f"{name}: {title}")
            try:
                answers[name] = child.run(submissions)
                child.pause()
            except ContestantError as error:
                self._drop(name, error)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Kill all contestants at once after an error or Ctrl-C. Otherwise let them end first."""
        children = [child for _entry, child in self._members.values()]
        try:
            if kind is None:
                self._tell("ending the contestants")
                for child in children:
                    child.close_input()
                for child in children:
                    child.wait()
        finally:
            for child in children:
                child.kill()

    def _drop(self, name: str, error: ContestantError) -> None:
        self.failures[name] = str(error)
        if name in self._members:
            self._members.pop(name)[1].kill()
