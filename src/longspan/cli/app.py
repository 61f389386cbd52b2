"""The command `longspan`: its verbs, and what becomes of errors.

Numbers are checked where they are used (`LLM`, `SamplingParams`, `ParallelSpec`), not here; this file turns what they
raise into one line and an exit code: 0 done, 1 a worker was lost (or the reader of stdout left), 2 a mistake of the
user, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

from cyclopts import App, CycloptsError, Parameter

import longspan
from longspan.cli.options import read_config
from longspan.errors import WorkerLostError

app = App(
    name="longspan",
    help="Serves one long prompt over several devices, exactly.",
    version=f"longspan {longspan.__version__}",
    help_format="plaintext",
    # The last of several values counts, and a value may begin with a dash.
    default_parameter=Parameter(allow_repeating=True, allow_leading_hyphen=True, json_list=False, json_dict=False),
    config=read_config,
    result_action="return_value",
    print_error=False,
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
)
for _number, _verb in enumerate(
    ("generate", "chat", "serve", "batch", "profile", "eval", "tune", "simulate", "estimate")
):
    # Given by name, so that a verb loads nothing of the others.
    app.command(f"longspan.cli.{_verb}:{_verb}", name=_verb, version_flags=(), sort_key=_number)


@app.command(show=False, help_flags=(), version_flags=())
def bench(*_: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Refuses: load for servers comes from tools that are made for it."""
    raise ValueError(
        "longspan bench is gone: guidellm, aiperf and vllm bench serve measure any server, see docs/benchmarking.md"
    )


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits; never shows a stack trace for what a user can cause."""
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _on_signal)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background starts us with it ignored
        returned = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except ValueError as error:
        _fail(str(error), code=2)
    except WorkerLostError as error:
        _fail(str(error), code=1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python can flush it
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(returned if isinstance(returned, int) else 0)


def _run(arguments: Sequence[str]) -> object:
    """Runs a verb. Mistakes in flags raise ValueError, as all others do, with the flag and not only its variable."""
    if not arguments or arguments[0].startswith("-"):
        app.resolved_commands()  # the list of verbs shows their sentences, so they must be loaded
    try:
        return app(arguments)
    except CycloptsError as error:
        flag = "" if error.argument is None else error.argument.name
        raise ValueError(str(error) if flag in str(error) else f"{flag}: {error}") from error


def _fail(message: str, *, code: int) -> NoReturn:
    print(f"longspan: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _on_signal(number: int, _: object) -> NoReturn:
    """Unwinds the stack, so that the workers are shut down on the way, and does it once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
