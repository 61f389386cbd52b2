"""The commands of the pages: the command line accepts their flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspan.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "tasks").glob("*.md")))
PLUGINS = ("last", "broadcast")
"""A policy and an exchange that a page adds."""
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
SEPARATORS = {"|", "||", "&&", ";", "&", ">", "2>", "<", "(", ")"}
VARIABLE = re.compile(r"\w+=")


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `longspan` in the shell blocks of a page."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (command for command in commands_in(line) if not {*PLUGINS}.intersection(command))


def commands_in(line: str) -> Iterator[list[str]]:
    tokens = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
    tokens.whitespace_split = True
    command: list[str] = []
    for token in [*tokens, ";"]:
        if token not in SEPARATORS:
            command.append(token)
            continue
        while command and VARIABLE.match(command[0]):
            command.pop(0)
        if command and Path(command[0]).name == "longspan":
            yield command[1:]
        command = []


COMMANDS = {f"{page.relative_to(ROOT)}: {shlex.join(words)}": words for page in PAGES for words in commands_of(page)}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_command_line_accepts_the_flags_of_the_pages(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--config" in command:
        Path(command[command.index("--config") + 1]).touch()
    app.parse_args(command)


def test_commands_of_the_tasks_are_found() -> None:
    """Otherwise a change of the pages could empty the test above."""
    verbs = {command[0] for page in (ROOT / "docs" / "tasks").glob("*.md") for command in commands_of(page)}
    assert verbs == {"ask", "chat", "profile", "serve", "simulate"}
