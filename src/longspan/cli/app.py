"""The command `longspan`: its verbs, and the conversion of exceptions to messages and exit codes.

Values are checked where they are used (`LLM`, `SamplingParams`, `ParallelSpec`). An exception becomes one line and an
exit code. It is 1 if a worker was lost or the output cannot be written, 2 for a mistake of the user. Ctrl-C is 130,
SIGTERM 143, success 0. A closed pipe prints no line.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, NoReturn, TextIO

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownOptionError, UnusedCliTokensError

import longspan
from longspan.cli import signals
from longspan.cli.options import read_config
from longspan.errors import WorkerLostError

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_SHORT = {"-tp": "tp", "-pp": "pp", "-dp": "instances", "-n": "n"}
"""Short flags of vLLM, by their parameter here."""
_MODEL = ("--model", "--model-path", "--model-name-or-path", "-m")
app = App(
    name="longspan",
    help="Serves one long prompt over several devices, exactly.",
    version=f"longspan {longspan.__version__}",
    help_format="plaintext",
    # The last of several values is used, and a value may begin with a dash.
    default_parameter=Parameter(allow_repeating=True, allow_leading_hyphen=True, json_list=False, json_dict=False),
    config=read_config,
    result_action="return_value",
    print_error=False,
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
)
for _number, _verb in enumerate(
    (
        *(
            "generate",
            "ask",
            "chat",
            "serve",
            "batch",
            "models",
            "profile",
            "eval",
            "tune",
            "simulate",
            "estimate",
            "plan",
        ),
        *("cache", "get"),
    )
):
    # Registered by name, so that a verb loads no module of another verb.
    app.command(f"longspan.cli.{_verb}:{_verb}", name=_verb, version_flags=(), sort_key=_number)
app.register_install_completion_command(help="Install completion of verbs and flags for your shell.")


@app.command(show=False, help_flags=(), version_flags=())
def bench(*_: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Refuse the former verb. Other tools measure servers."""
    raise ValueError(
        "longspan bench was removed: measure servers by guidellm, aiperf or vllm bench serve, see docs/benchmarking.md"
    )


def run_process() -> NoReturn:
    """Run the command line of this process and end the process.

    os._exit skips the unloading of modules, which takes 0.5 s and in which Python's own signal handlers are active. It
    also ends threads of a server's worker pools, which the interpreter would wait for or crash under.
    """
    try:
        main()
    except SystemExit as ending:
        atexit._run_exitfuncs()  # noqa: SLF001 - as in multiprocessing, before os._exit
        for file in (sys.stdout, sys.stderr):
            _flush(file)
        os._exit(ending.code if isinstance(ending.code, int) else 1)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. A mistake of the user never shows a stack trace."""
    signals.catch()
    _open_standard_files()
    try:
        code, message = _outcome(sys.argv[1:] if arguments is None else arguments)
    except Exception:
        if signals.exit_code() is None:
            raise
        code, message = 1, ""  # an exception that the signal has caused
    if signals.exit_code() is None and message:
        with suppress(OSError):
            print(f"longspan: {' '.join(message.split())}", file=sys.stderr)
    for file in (sys.stdout, sys.stderr):
        code = code or _flush(file)
    sys.exit(signals.exit_code() or code)


def _outcome(arguments: Sequence[str]) -> tuple[int, str]:
    """Run a verb and return the exit code with the error message, which may be empty."""
    code, message = 1, ""
    try:
        returned = _run(arguments)
        sys.stdout.flush()
        code = returned if isinstance(returned, int) else 0
    except ValueError as error:
        code, message = 2, str(error)
    except WorkerLostError as error:
        message = str(error)
    except MemoryError as error:
        message = f"there is too little memory: {error}"
    except BrokenPipeError:
        pass  # the reader of stdout has closed the pipe
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        message = f"{error.filename or 'the output'} cannot be written: {error.strerror}"
    except KeyboardInterrupt:
        code = 130
    return code, message


def _run(arguments: Sequence[str]) -> object:
    """Run a verb. Convert Cyclopts' errors to ValueError, with the flag in the message."""
    if not arguments or arguments[0].startswith("-"):
        app.resolved_commands()  # the list of verbs shows their docstrings, so they must be loaded
    try:
        return app(arguments)
    except UnknownOptionError as error:
        flags = [flag for argument in error.argument_collection for flag in argument.names]
        raise ValueError(_unknown_option(error.token.keyword or error.token.value, flags)) from error
    except UnusedCliTokensError as error:
        unused = " ".join(error.unused_tokens or ())
        raise ValueError(f"{unused!r:.60} is not expected: remove it, or give it as the value of a flag") from error
    except MissingArgumentError as error:
        flag = "an argument" if error.argument is None else error.argument.name
        raise ValueError(f"{flag} must be given, with a value") from error
    except CycloptsError as error:
        flag = "" if error.argument is None else error.argument.name
        raise ValueError(str(error) if flag in str(error) else f"{flag}: {error}") from error


def _unknown_option(given: str, flags: Sequence[str]) -> str:
    """Return the error about an unknown flag, with a flag for the same purpose or a similar one."""
    from longspan.names import closest  # noqa: PLC0415 - an error

    name = given.partition("=")[0]
    fields = {flag.lstrip("-").replace("-", "_"): flag for flag in flags if flag.startswith("--")}
    field = closest(_SHORT.get(name, name), fields)
    if field is not None:
        return f"there is no option {name}: use {fields[field]}"
    if name in _MODEL:
        return f"there is no option {name}: give the model as the first argument, without a flag"
    return f"there is no option {name}: the option --help lists all"


def _open_standard_files() -> None:
    """Replace closed standard files by the null device. Otherwise sockets would get their file descriptors."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115, PTH123


def _flush(file: TextIO) -> int:
    """Flush a file. If that fails, discard its buffer, which Python would write again at exit, and return 1."""
    try:
        file.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        return 1
    return 0
