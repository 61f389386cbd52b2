"""The contestants of a run: all started once, then asked in turns; one that fails leaves, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from contestants.child import Child, ContestantError
from contestants.roster import Entry
from contestants.serving import Answer, Submission


class Contest:
    """Starts contestants and passes jobs to them; a context manager, at whose end none of their processes is left.

    Args:
        options: what every contestant's `start` gets.
        tell: called with what is about to be done.

    Attributes:
        versions: what each contestant that started runs on.
        failures: why a contestant does not take part, or no more.
    """

    def __init__(self, options: dict[str, Any], tell: Callable[[str], None]) -> None:
        self._options, self._tell = options, tell
        self._members: dict[str, tuple[Entry, Child]] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.failures: dict[str, str] = {}

    def start(self, entries: Iterable[Entry]) -> None:
        """Starts them one after the other."""
        for entry in entries:
            self._tell(f"{entry.name}: starting")
            try:
                child = Child(entry, self._options)
                self._members[entry.name] = entry, child
                self.versions[entry.name] = child.start()
                child.pause()
            except ContestantError as error:
                self._drop(entry.name, error)

    def ask(self, what: str, submissions: Sequence[Submission]) -> dict[str, Answer]:
        """Returns the answers to a job of all who are still there and take it; only one of them runs at a time."""
        found = {}
        for name, (entry, child) in list(self._members.items()):
            if not entry.takes(submissions):
                continue
            self._tell(f"{name}: {what}")
            try:
                found[name] = child.run(submissions)
                child.pause()
            except ContestantError as error:
                self._drop(name, error)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for nobody after an error or Ctrl-C."""
        children = [child for _entry, child in self._members.values()]
        try:
            if kind is None:
                self._tell("ending the contestants")
                for child in children:
                    child.leave()
                for child in children:
                    child.wait()
        finally:
            for child in children:
                child.kill()

    def _drop(self, name: str, error: ContestantError) -> None:
        self.failures[name] = str(error)
        if name in self._members:
            self._members.pop(name)[1].kill()
