"""The command ``longspan``, or ``python -m longspan``: a signal while it still imports ends it without a word."""

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line and exits."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    from longspan.cli import app  # noqa: PLC0415 - signals first

    app.main()  # which handles them from here on


def _leave(number: int, _: object) -> NoReturn:
    os._exit(128 + number)  # nothing has been begun; an exception might end up in whatever is being imported


if __name__ == "__main__":
    main()
