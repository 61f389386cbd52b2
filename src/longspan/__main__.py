"""The command `longspan`, or `python -m longspan`: it installs signal handlers before slow imports."""

import os
import signal


def main() -> None:
    """Run the command line and exit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _exit)
    from longspan.cli import app  # noqa: PLC0415 - signals first

    app.run_process()  # it installs its own handlers


def _exit(number: int, _: object) -> None:
    os._exit(128 + number)  # no cleanup is needed, and an exception may be converted by the module being imported


if __name__ == "__main__":
    main()
