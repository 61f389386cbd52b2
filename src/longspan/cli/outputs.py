"""Output of verbs: notes on stderr, tables, and files of results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.file_errors import unwritten, why_unwritable

if TYPE_CHECKING:
    from rich.table import Table


def note(text: str) -> None:
    """Print a line for the user to stderr."""
    print(f"longspan: {text}", file=sys.stderr)


def note_progress(text: str) -> None:
    """Print a line to stderr, unless it is a terminal, which shows a progress bar instead."""
    if not sys.stderr.isatty():
        note(text)


def number_table(title: str, *columns: str) -> Table:
    """Return a table with columns of numbers. A column without a name has texts."""
    from rich.table import Table  # noqa: PLC0415 - needed by verbs with tables only

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    return table


def check_writable(flag: str, path: Path) -> None:
    """Raise ValueError, before a run, for a file that cannot be written after it."""
    if (problem := why_unwritable(path)) is not None:
        raise ValueError(f"{flag} {problem}")


def write_result(flag: str, path: Path, content: str) -> None:
    """Write the results of a run to a file, or raise ValueError."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {unwritten(path, error)}") from None
