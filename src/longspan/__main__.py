"""The command `longspan`, or `python -m longspan`: it handles signals before it imports anything that takes long."""

import os
import signal


def main() -> None:
    """Run the command line and exits."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _leave)
    from longspan.cli import app  # noqa: PLC0415 - signals first

    app.run_process()  # which handles them from here on


def _leave(number: int, _: object) -> None:
    os._exit(128 + number)  # nothing has begun; an exception may turn into another one in the module being imported


if __name__ == "__main__":
    main()
