"""The contestants of a run: all started once, then asked in turns; one that fails leaves, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

from contestants.child import Child, ContestantError
from contestants.roster import Entry


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
        self._children: dict[str, Child] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.failures: dict[str, str] = {}

    def start(self, entries: Iterable[Entry]) -> None:
        """Starts them one after the other."""
        for entry in entries:
            self._tell(f"{entry.name}: starting")
            try:
                self._children[entry.name] = child = Child(entry, self._options)
                self.versions[entry.name] = child.start()
                child.pause()
            except ContestantError as error:
                self._drop(entry.name, error)

    def ask(self, what: str, prompts: list[list[int]], new_tokens: int) -> dict[str, dict[str, Any]]:
        """Returns the answers of all who are still there to the same job; only one of them runs at a time."""
        answers = {}
        for name, child in list(self._children.items()):
            self._tell(f"{name}: {what}")
            try:
                answers[name] = child.run(prompts, new_tokens)
                child.pause()
            except ContestantError as error:
                self._drop(name, error)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for nobody after an error or Ctrl-C."""
        try:
            if kind is None:
                self._tell("ending the contestants")
                for child in self._children.values():
                    child.leave()
                for child in self._children.values():
                    child.wait()
        finally:
            for child in self._children.values():
                child.kill()

    def _drop(self, name: str, error: ContestantError) -> None:
        self.failures[name] = str(error)
        if name in self._children:
            self._children.pop(name).kill()
