"""Where prompts come from: the command line, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from longspan.cli.options import id_list

STDIN = "-"


def read_prompt(prompt: str | None, prompt_file: Path | None, token_ids: str | None) -> str | list[int]:
    """Returns the prompt from whichever of its sources was given; from stdin, if none was and it is no terminal.

    Raises:
        ValueError: when several were given, or none, or it cannot be read.
    """
    given = sum(source is not None for source in (prompt, prompt_file, token_ids))
    if given > 1 or (given == 0 and sys.stdin.isatty()):
        raise ValueError(f"exactly one of --prompt, --prompt-file and --token-ids is needed, but {given} given")
    if token_ids is not None:
        return id_list("--token-ids", token_ids)
    if prompt is not None and prompt != STDIN:
        return prompt
    return read_text(prompt_file or Path(STDIN), "prompt file")


def read_text(path: Path, what: str) -> str:
    """Returns the text of a file or, for the path `-`, of stdin without the line end that closes it.

    Raises:
        ValueError: when it cannot be read or is not UTF-8; the message calls it `what`.
    """
    try:
        if str(path) == STDIN:
            return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {str(path)!r} is not UTF-8: {error}") from None
