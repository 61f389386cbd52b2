"""The command `longspan`: its verbs, and what becomes of errors.

Numbers are checked where they are used (`LLM`, `SamplingParams`, `ParallelSpec`), not here; this file turns what they
raise into one line and an exit code: 0 done, 1 a worker was lost (or the reader of stdout left), 2 a mistake of the
user, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

import longspan
from longspan.cli.batch import batch
from longspan.cli.chat import chat
from longspan.cli.estimate import estimate
from longspan.cli.generate import generate
from longspan.cli.profile import profile
from longspan.cli.serve import serve
from longspan.cli.simulate import simulate
from longspan.errors import WorkerLostError

app = typer.Typer(
    name="longspan",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(batch)
app.command()(profile)
app.command()(simulate)
app.command()(estimate)


@app.command(
    hidden=True, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench() -> None:
    """Refuses: load for servers comes from tools that are made for it."""
    raise ValueError(
        "longspan bench is gone: guidellm, aiperf and vllm bench serve measure any server, see docs/benchmarking.md"
    )


@app.callback(invoke_without_command=True)
def longspan_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Serves one long prompt over several devices, exactly."""
    if version:
        typer.echo(f"longspan {longspan.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits; never shows a stack trace for what a user can cause."""
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _on_signal)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background starts us with it ignored
        returned = app(args=arguments, prog_name="longspan", standalone_mode=False)
    except typer.TyperException as error:
        _fail(error.format_message() + _given(error), code=2)
    except ValueError as error:
        _fail(str(error), code=2)
    except WorkerLostError as error:
        _fail(str(error), code=1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(returned if isinstance(returned, int) else 0)


def _fail(message: str, *, code: int) -> NoReturn:
    typer.echo(f"longspan: {' '.join(message.split())}", err=True)
    sys.exit(code)


def _given(error: typer.TyperException) -> str:
    """Returns the words about the value that is wrong, where the message does not say it."""
    from pydantic import ValidationError  # noqa: PLC0415 - nothing was wrong so far

    cause = error.__cause__
    return f", but {cause.errors()[0]['input']!r:.100} given" if isinstance(cause, ValidationError) else ""


def _on_signal(number: int, _: object) -> NoReturn:
    """Unwinds the stack, so that the workers are shut down on the way, and does it once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
