"""Reading of texts from files and stdin. Each text has a maximum length, so that endless files fill no memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from longspan.errors import ParameterError
from longspan.file_errors import unread
from longspan.limits import MAX_TEXT_BYTES, read_all, read_bytes

STDIN = "-"
TOO_LONG = f"is longer than {MAX_TEXT_BYTES >> 20} MiB"


def read_text(path: Path, parameter: str) -> str:
    """Return the text of a file or, for the path `-`, of stdin without its last line end.

    Raises:
        ParameterError: the text cannot be read, is too long or is not UTF-8.
    """
    try:
        is_stdin = str(path) == STDIN
        data = read_all(sys.stdin.buffer).removesuffix(b"\n") if is_stdin else read_bytes(path)
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(parameter, unread(path, error), path) from None


def read_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of a file with their ends, and None in place of a line that is too long."""
    while line := file.readline(MAX_TEXT_BYTES + 1):
        is_whole = len(line) <= MAX_TEXT_BYTES
        yield line if is_whole else None
        while not is_whole and line and not line.endswith(b"\n"):
            line = file.readline(MAX_TEXT_BYTES)
