"""The verb `chat`: holds a conversation in the terminal."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from longspan.args import EngineArgs
from longspan.cli.documents import Content, Document, in_prompt, read_documents
from longspan.cli.generate import SAMPLING, FormOptions, stats_table, stream_to_stdout
from longspan.cli.inputs import TOO_LONG, read_lines, read_text
from longspan.cli.keep import KeepArgument, Kept
from longspan.cli.options import ModelArgument, start, verb
from longspan.core.options import Option
from longspan.core.sampling import SamplingParams

if TYPE_CHECKING:
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput
    from longspan.text.input_processor import Message

_log = logging.getLogger("longspan")
_SAMPLING = replace(SAMPLING, max_tokens=None)
_NO_CONTENT = Content()
_HELP = """\
/file PATH  add a file or a folder to the next question
/reset  forget the conversation and added files, but no file of --file
/stats  tokens and times of the last answer
/help   this list
/exit   end; so do Ctrl-D, and Ctrl-C between answers
Ctrl-C stops an answer. Pasted lines are one question, which Enter sends."""


@verb
def chat(
    model: ModelArgument = "smollm2-135m",
    *,
    system: Annotated[str | None, Option("The system message.", metavar="TEXT")] = None,
    chat_template: Annotated[
        Path | None, Option("A Jinja template instead of the model's own.", metavar="FILE")
    ] = None,
    file: Annotated[
        list[Path] | None, Option("A file or a folder before the first question. Repeatable.", repeatable=True)
    ] = None,
    keep: KeepArgument = None,
    sampling: SamplingParams = _SAMPLING,
    form: FormOptions = FormOptions(),
    engine: EngineArgs = EngineArgs(),
) -> None:
    """Hold a conversation with a model. Each line of input is a turn, and /help lists the commands.

    Answers are written to stdout, everything else to stderr, so that a script can pipe lines in and read answers.
    """
    params = replace(sampling, structured_outputs=form.params())
    if (params.n, params.logprobs, params.prompt_logprobs) != (1, None, None):
        raise ValueError("a chat shows one answer and no logprobs: leave out --n, --logprobs and --prompt-logprobs")
    template = None if chat_template is None else read_text(chat_template, "chat_template")
    content = Content(documents=read_documents(file or ()), system=system, chat_template=template)
    fixed = {"system": system, "chat_template": chat_template}
    kept = None if keep is None else Kept(keep, content if file else None, fixed)
    content = content if kept is None else kept.content
    with ExitStack() as stack:
        if kept is not None:
            stack.callback(kept.finish, model)
        llm = stack.enter_context((start if kept is None else kept.start)(model, engine, seed=sampling.seed))
        conversation = Conversation(llm, content)
        check_fits(llm, conversation.prompt("Hello"))  # raises early, also if there is no template or it refuses
        if kept is not None:
            kept.check(llm, conversation.prompt("Hello"))
        try:
            _converse(llm, params, conversation)
        finally:  # also after Ctrl-C between answers
            if kept is not None:
                conversation.reset()
                kept.save(llm, conversation.shared_tokens("Hello"))


def _converse(llm: LLM, params: SamplingParams, conversation: Conversation) -> None:
    """Answer lines and execute commands until the input ends or a line is /exit."""
    last: RequestOutput | None = None
    for line in _lines():
        match line.strip():
            case "":
                pass
            case "/exit":
                return
            case "/reset":
                conversation.reset()
                last = None
            case "/stats":
                _show_stats(llm, conversation, last)
            case "/help":
                _note(_HELP)
            case command if command.split(maxsplit=1)[0] == "/file" and "\n" not in command:
                _attach(conversation, command.removeprefix("/file").strip())
            case text if text.startswith("/") and "\n" not in text:
                _note("unknown command: /help lists them")
            case text:
                last = _answer(llm, params, conversation, text) or last


def _answer(llm: LLM, params: SamplingParams, conversation: Conversation, text: str) -> RequestOutput | None:
    prompt, limit = conversation.prompt(text), llm.max_model_len
    if len(prompt) >= limit:
        _note(f"the context is full: this turn needs {len(prompt)} tokens, of at most {limit}; /reset empties it")
        return None
    with _on_interrupt(llm.abort):
        output = stream_to_stdout(llm, prompt, params)
    conversation.add(text, output)
    reason = output.outputs[0].finish_reason
    if reason == "abort":
        _note("stopped")
    elif reason == "error":
        _note(f"ended early: {output.outputs[0].stop_reason}")
    elif reason == "length" and len(conversation.token_ids) >= limit:
        _note(f"the context is full ({limit} tokens): /reset empties it")
    elif reason == "length":
        _note(f"cut off at {params.max_tokens} tokens (--max-tokens)")
    return output


def check_fits(llm: LLM, prompt: Sequence[int]) -> None:
    """Raise ValueError for a prompt with documents that leaves no token for an answer."""
    if len(prompt) >= llm.max_model_len:
        from longspan.core.long_models import long_model  # noqa: PLC0415 - an error

        problem = f"the files and the question have {len(prompt)} tokens, but at most {llm.max_model_len - 1} fit"
        remedy = f"give fewer files or, if KV memory suffices, {long_model(len(prompt) + 1)}"
        raise ValueError(f"{problem}: {remedy}")


def _attach(conversation: Conversation, path: str) -> None:
    """Add a file to the next question."""
    try:
        documents = read_documents([Path(path).expanduser()]) if path else []
        conversation.attach(documents)
    except ValueError as error:
        _note(str(error))
        return
    for document in documents:
        _note(f"{document.name}: {len(document.text):,} characters, part of the next question")
    if not documents:
        _note("give the path of a file or a folder: /file PATH")


def _show_stats(llm: LLM, conversation: Conversation, last: RequestOutput | None) -> None:
    if last is None:
        _note("no answer yet")
        return
    table = stats_table(last.metrics, llm.bytes_exchanged, llm.bytes_between_hosts)
    table.add_row("tokens in context", f"{len(conversation.token_ids):,} of {llm.max_model_len:,}")
    table.add_row("cached tokens of the last turn", f"{last.num_cached_tokens:,} of {len(last.prompt_token_ids):,}")
    Console(stderr=True).print(table)


class Conversation:
    """The messages of a conversation and their token ids.

    An answer keeps its sampled tokens. Tokenizing its text again can give other tokens, whose KV is not cached. A turn
    appends the tokens of the text that the template renders after the answer.

    Args:
        content: stands before the first question, also after a reset.
    """

    def __init__(self, llm: LLM, content: Content = _NO_CONTENT) -> None:
        self._llm, self._content = llm, content
        self._check_chars(content.documents)
        self.reset()

    def reset(self) -> None:
        self._messages: list[Message] = []
        if self._content.system is not None:
            self._messages.append({"role": "system", "content": self._content.system})
        self._text = ""  # the text of `token_ids`, or empty if the whole conversation must be tokenized
        self.token_ids: list[int] = []
        self._attached = [*self._content.documents]

    def attach(self, documents: Sequence[Document]) -> None:
        """Put documents before the next question. Raise ValueError if they are longer than any prompt."""
        self._check_chars(documents)
        self._attached += documents

    def _check_chars(self, documents: Sequence[Document]) -> None:
        """Raise ValueError for texts that are too long for the model, without tokenizing them."""
        if documents:
            self._llm.input_processor.check_chars(sum(len(document.text) for document in documents))

    def prompt(self, user: str) -> list[int]:
        """Return the token ids of the prompt for the answer to `user`. The conversation does not change."""
        text = self.rendered(user)
        if self._text and text.startswith(self._text):
            return self.token_ids + self._llm.tokenize(text[len(self._text) :], add_special_tokens=False)
        if self._text:
            _log.info("the chat template changed an answer: the conversation is tokenized again")
        return self._llm.tokenize(text, add_special_tokens=False)

    def shared_tokens(self, user: str) -> list[int]:
        """Return the tokens at the beginning of the prompt for `user` that do not depend on the question."""
        first, second = self.prompt(user), self.prompt("0" if user[0] != "0" else "1")
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]

    def add(self, user: str, output: RequestOutput) -> None:
        """Append a question and the whole output for `prompt(user)`."""
        [answer] = output.outputs
        rendered = self.rendered(user)
        self._messages += [self._turn(user), {"role": "assistant", "content": answer.text}]
        self._attached.clear()
        # The template renders the end of an answer. A stop string is in the tokens, and not in the text.
        by_token = answer.finish_reason == "stop"
        self.token_ids = output.prompt_token_ids + (answer.token_ids[:-1] if by_token else answer.token_ids)
        self._text = "" if isinstance(answer.stop_reason, str) else rendered + answer.text

    def rendered(self, user: str) -> str:
        """Return the text of the prompt for the answer to `user`."""
        messages = [*self._messages, self._turn(user)]
        return self._llm.render_chat(messages, chat_template=self._content.chat_template)

    def _turn(self, user: str) -> Message:
        """Return the message of a question, with the documents that precede it."""
        return {"role": "user", "content": in_prompt(self._attached, user)}


def _lines() -> Iterator[str]:
    """Yield the lines of stdin. On a terminal, readline edits them, and several pasted lines are one."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for number, line in enumerate(read_lines(sys.stdin.buffer), start=1):
            if line is None:
                raise ValueError(f"line {number} of stdin {TOO_LONG}, so it is no turn of a conversation: shorten it")
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number} of stdin is not UTF-8: {error}") from None
        return
    with suppress(ImportError):
        readline = import_module("readline")  # input() uses it from then on
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
    with suppress(EOFError):
        while True:
            yield input(">>> ")
    sys.stdout.write("\n")


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C in the block. A second Ctrl-C raises KeyboardInterrupt."""

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
    print(text, file=sys.stderr)
