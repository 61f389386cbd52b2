"""The verb `chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from longspan.cli.bundles import bundled
from longspan.cli.conversation import Conversation
from longspan.cli.options import EngineOptions, ModelArgument, SamplingOptions
from longspan.cli.prompts import read_text
from longspan.cli.report import stats_table, stream_to_stdout
from longspan.core.sampling import SamplingParams

if TYPE_CHECKING:
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput

_ENGINE = EngineOptions()
_SAMPLING = SamplingOptions(max_tokens=None)
_HELP = """\
/reset  forget the conversation
/stats  tokens and times of the last answer
/help   this list
/exit   leave; so do Ctrl-D, and Ctrl-C between answers
Ctrl-C stops an answer."""


@bundled()
def chat(
    model: ModelArgument = "smollm2-135m",
    *,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Jinja template instead of the model's own.")
    ] = None,
    sampling: SamplingOptions = _SAMPLING,
    engine: EngineOptions = _ENGINE,
) -> None:
    """Talks with a model: a line of input is a turn; /help lists the commands.

    Answers go to stdout, everything else to stderr, so that a script can pipe its lines in and read answers.
    """
    params = sampling.params()
    if (params.n, params.logprobs, params.prompt_logprobs) != (1, None, None):
        raise ValueError("a chat shows one answer and no logprobs: leave --n, --logprobs and --prompt-logprobs out")
    template = None if chat_template is None else read_text(chat_template, "chat template")
    with engine.start(model, seed=sampling.seed) as llm:
        Chat(llm, params, Conversation(llm, system=system, chat_template=template)).run()


class Chat:
    """The loop: takes lines, answers them, and obeys commands."""

    def __init__(self, llm: LLM, params: SamplingParams, conversation: Conversation) -> None:
        self._llm, self._params, self._conversation = llm, params, conversation
        self._last: RequestOutput | None = None
        self._commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/stats": self._stats,
            "/help": lambda: _note(_HELP),
        }

    def run(self) -> None:
        """Until the input ends or says /exit.

        Raises:
            ValueError: at once, when the model has no chat template or it refuses the system message.
        """
        self._conversation.prompt("Hello")
        for line in _lines():
            text = line.strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                self._commands.get(text, lambda: _note("unknown command: /help lists them"))()
            elif text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        prompt = self._conversation.prompt(text)
        limit = self._llm.max_model_len
        if len(prompt) >= limit:
            _note(f"the context is full: this turn needs {len(prompt)} tokens, {limit} is the most; /reset empties it")
            return
        with _on_interrupt(self._llm.abort):
            output = stream_to_stdout(self._llm, prompt, self._params)
        self._conversation.add(text, output)
        self._last = output
        reason = output.outputs[0].finish_reason
        if reason == "abort":
            _note("stopped")
        elif reason == "error":
            _note(f"ended early: {output.outputs[0].stop_reason}")
        elif reason == "length" and len(self._conversation.token_ids) >= limit:
            _note(f"the context is full ({limit} tokens): /reset empties it")
        elif reason == "length":
            _note(f"cut off at {self._params.max_tokens} tokens (--max-tokens)")

    def _reset(self) -> None:
        self._conversation.reset()
        self._last = None

    def _stats(self) -> None:
        if self._last is None:
            _note("no answer yet")
            return
        table = stats_table(self._last.metrics, self._llm.bytes_exchanged, self._llm.bytes_between_hosts)
        table.add_row("tokens in context", f"{len(self._conversation.token_ids):,} of {self._llm.max_model_len:,}")
        cached, num_prompt = self._last.num_cached_tokens, len(self._last.prompt_token_ids)
        table.add_row("cached tokens of the last turn", f"{cached:,} of {num_prompt:,}")
        Console(stderr=True).print(table)


def _lines() -> Iterator[str]:
    """What the user types, edited with readline on a terminal; or the lines of stdin."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from sys.stdin
        return
    with suppress(ImportError):
        import_module("readline")  # input() uses it from then on
    with suppress(EOFError):
        while True:
            yield input(">>> ")
    sys.stdout.write("\n")


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C inside calls `stop`; a second one is a KeyboardInterrupt again."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, before)
        stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _note(text: str) -> None:
    typer.echo(text, err=True)
