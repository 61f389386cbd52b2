"""`longspan chat`: turns, commands, Ctrl-C, and the tokens that a turn starts from, with a scripted engine."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_llm import WORDS, FakeLLM, output, run

from longspan.cli.chat import Conversation
from longspan.core.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("fake_llm")

Type = Callable[[str], None]
Capture = pytest.CaptureFixture[str]
ANSWER = "".join(WORDS)
ANSWER_TOKENS = list(range(len(WORDS) - 1))  # without the token that ended it


def asked() -> list[list[int]]:
    return [list(prompt) for prompt, _ in FakeLLM.last.asked]  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return list(map(ord, text))


def test_each_line_is_a_turn_and_only_answers_go_to_stdout(type_in: Type, capsys: Capture) -> None:
    type_in("one\n\n  two \n")
    assert run("chat") == 0
    assert capsys.readouterr() == (f"{ANSWER}\n{ANSWER}\n", "")
    assert FakeLLM.last.closed
    assert FakeLLM.last.asked[0][1] == SamplingParams(temperature=0.0, max_tokens=None, seed=0)


def test_a_turn_begins_with_all_tokens_of_the_turns_before(type_in: Type) -> None:
    type_in("one\ntwo\nthree\n")
    assert run("chat", "--system", "be kind") == 0
    first, second, third = asked()
    assert first == ids("<system>be kind</>\n<user>one</>\n<assistant>")
    assert second == first + ANSWER_TOKENS + ids("</>\n<user>two</>\n<assistant>")
    assert third == second + ANSWER_TOKENS + ids("</>\n<user>three</>\n<assistant>")


def test_reset_forgets_all_but_the_system_message(type_in: Type) -> None:
    type_in("one\n/reset\ntwo\n")
    assert run("chat", "--system", "be kind") == 0
    assert asked()[1] == ids("<system>be kind</>\n<user>two</>\n<assistant>")


def test_commands_answer_on_stderr_and_exit_leaves(type_in: Type, capsys: Capture) -> None:
    type_in("/stats\n/help\n/what\none\n/stats\n/exit\ntwo\n")
    assert run("chat") == 0
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert "no answer yet" in err
    assert all(command in err for command in ("/reset", "/stats", "/help", "/exit"))
    assert "unknown command" in err
    num_prompt, limit = len(asked()[0]), FakeLLM.max_model_len
    for words in (
        f"tokens in context *│ *{num_prompt + len(ANSWER_TOKENS)} of {limit:,}",
        f"cached tokens of the last turn *│ *3 of {num_prompt}",
        "time to first token *│ *500 ms",
        "median time between tokens *│ *200 ms",
        "bytes exchanged *│ *1,024",
    ):
        assert re.search(words, err)


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
    type_in: Type, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeLLM.stream

    def interrupted(llm: FakeLLM, prompt: list[int], params: SamplingParams) -> Iterator[Any]:
        for count, part in enumerate(whole(llm, prompt, params), start=1):
            yield part
            if count == 2 and len(llm.asked) == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(FakeLLM, "stream", interrupted)
    type_in("one\ntwo\n")
    assert run("chat") == 0
    assert capsys.readouterr() == (f"The key is\n{ANSWER}\n", "stopped\n")
    assert asked()[1] == asked()[0] + [0, 1, 2] + ids("</>\n<user>two</>\n<assistant>")


def test_a_second_ctrl_c_ends_the_chat(type_in: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object) -> Iterator[Any]:
        signal.raise_signal(signal.SIGINT)
        assert FakeLLM.last.aborted, "the first one only asks"
        signal.raise_signal(signal.SIGINT)
        yield

    monkeypatch.setattr(FakeLLM, "stream", stuck)
    type_in("one\n")
    assert run("chat") == 130
    assert FakeLLM.last.closed


def test_a_full_context_is_said_and_asks_nothing(
    type_in: Type, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "max_model_len", 60)
    type_in("one\n" + "x" * 60 + "\ntwo\n")
    assert run("chat") == 0
    assert len(asked()) == 2, "the turn that did not fit left no trace"
    err = capsys.readouterr().err
    assert "of at most 60" in err
    assert "/reset" in err


@pytest.mark.parametrize(("limit", "words"), [(28, "the context is full (28 tokens)"), (1000, "--max-tokens")])
def test_a_cut_answer_is_said_and_can_be_followed(
    limit: int, words: str, type_in: Type, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeLLM.stream

    def cut(llm: FakeLLM, prompt: list[int], params: SamplingParams) -> Iterator[Any]:
        *_, last = whole(llm, prompt, params)
        yield replace(last, outputs=[replace(last.outputs[0], finish_reason="length")])

    monkeypatch.setattr(FakeLLM, "stream", cut)
    monkeypatch.setattr(FakeLLM, "max_model_len", limit)
    type_in("one\n" if limit == 28 else "one\ntwo\n")
    assert run("chat", "--max-tokens", "5") == 0
    assert words in capsys.readouterr().err
    if limit == 1000:
        assert asked()[1] == asked()[0] + [0, 1, 2, 3, 4] + ids("</>\n<user>two</>\n<assistant>")


def test_an_answer_that_could_not_go_on_is_said_with_the_reason(
    type_in: Type, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(_: FakeLLM, prompt: list[int], params: SamplingParams) -> Iterator[Any]:
        last = output(prompt, params, 2)
        yield replace(last, outputs=[replace(last.outputs[0], finish_reason="error", stop_reason="no token fits")])

    monkeypatch.setattr(FakeLLM, "stream", stuck)
    type_in("one\n")
    assert run("chat") == 0
    assert capsys.readouterr().err == "ended early: no token fits\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n", "2", "--temperature", "1"], "--n"),
        (["--logprobs", "1"], "--logprobs"),
        (["--chat-template", "no/such/file"], "no/such/file"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(arguments: list[str], words: str, capsys: Capture) -> None:
    assert run("chat", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_a_template_that_refuses_is_known_before_the_first_turn(tmp_path: Path, type_in: Type, capsys: Capture) -> None:
    (tmp_path / "template").write_text("refuse")
    type_in("one\n")
    assert run("chat", "--chat-template", str(tmp_path / "template")) == 2
    assert "refuses" in capsys.readouterr().err


class Trimming(FakeLLM):
    """Its template removes spaces around a content."""

    def render_chat(self, messages: Sequence[Mapping[str, object]], **options: Any) -> str:
        return super().render_chat([{**m, "content": str(m["content"]).strip()} for m in messages], **options)


def add(conversation: Conversation, user: str, **answer: Any) -> list[int]:
    """Add an answer. Return its prompt."""
    prompt = conversation.prompt(user)
    whole = output(prompt, SamplingParams(), len(WORDS))
    conversation.add(user, replace(whole, outputs=[replace(whole.outputs[0], **answer)]))
    return prompt


def test_an_answer_that_the_template_changes_is_tokenized_again() -> None:
    conversation = Conversation(Trimming("m"))  # type: ignore[arg-type]
    add(conversation, "one", text="fine ")
    assert conversation.prompt("two") == ids("<user>one</>\n<assistant>fine</>\n<user>two</>\n<assistant>")


def test_a_stop_string_is_no_part_of_the_conversation() -> None:
    conversation = Conversation(FakeLLM("m"))  # type: ignore[arg-type]
    add(conversation, "one", text="fine", stop_reason="STOP")
    assert conversation.prompt("two") == ids("<user>one</>\n<assistant>fine</>\n<user>two</>\n<assistant>")


def test_asking_for_the_prompt_changes_nothing() -> None:
    conversation = Conversation(FakeLLM("m"))  # type: ignore[arg-type]
    add(conversation, "one")
    assert conversation.prompt("two") == conversation.prompt("two")


# The loop in a process of its own, on a terminal. Each answer takes a minute unless it is stopped.
_SLOW = """
import sys, time
sys.path.insert(0, "tests")
import longspan, longspan.cli.app, fake_llm
class Slow(fake_llm.FakeLLM):
    def __exit__(self, *_): print("engine closed", file=sys.stderr, flush=True)
    def stream(self, prompt, params):
        for _ in range(600):
            aborted, self.aborted = self.aborted, False
            yield fake_llm.output(prompt, params, 2, aborted=aborted)
            if aborted:
                return
            time.sleep(0.1)
longspan.LLM = Slow
longspan.cli.options.start_server = lambda: None
longspan.cli.app.main(["chat"])
"""


@pytest.mark.parametrize(("last_key", "code"), [(b"\x04", 0), (b"\x03", 130)])
def test_keys_on_a_terminal(last_key: bytes, code: int) -> None:
    """Ctrl-C stops an answer. Between answers Ctrl-C or Ctrl-D ends the chat."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(Path(__file__).parents[2])
        os.execv(sys.executable, [sys.executable, "-c", _SLOW])
    _read_until(terminal, b">>> ")
    os.write(terminal, b"hi\n")
    _read_until(terminal, b"The key")
    _press_until(terminal, b"\x03", b"stopped")
    _read_until(terminal, b">>> ")
    _press_until(terminal, last_key, b"engine closed")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    os.close(terminal)


_ECHO = """
import sys
sys.path.insert(0, "tests")
import longspan, longspan.cli.app, fake_llm
class Echo(fake_llm.FakeLLM):
    def stream(self, prompt, params):
        print("turn", repr("".join(map(chr, prompt))), flush=True)
        return super().stream(prompt, params)
longspan.LLM = Echo
longspan.cli.options.start_server = lambda: None
longspan.cli.app.main(["chat"])
"""


def test_pasted_lines_are_one_turn() -> None:
    """Terminals mark pasted text. A pasted line that begins with a slash is no command."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(Path(__file__).parents[2])
        os.execve(sys.executable, [sys.executable, "-c", _ECHO], {**os.environ, "TERM": "xterm"})
    _read_until(terminal, b"\x1b[?2004h")  # asks the terminal for the marks
    _read_until(terminal, b">>> ")
    os.write(terminal, b"\x1b[200~/one\ntwo\n\nthree\x1b[201~")
    _read_until(terminal, b"three")
    os.write(terminal, b"\r")
    _read_until(terminal, b"turn '<user>/one\\ntwo\\n\\nthree</>")
    _read_until(terminal, b">>> ")
    os.write(terminal, b"\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def _press_until(terminal: int, keys: bytes, words: bytes) -> None:
    """Once more if nothing happens, as people do: a signal just before readline waits is seen at the next key."""
    for is_last in (False, False, True):
        os.write(terminal, keys)
        try:
            _read_until(terminal, words, 5)
            break
        except TimeoutError:
            if is_last:
                raise


def _read_until(terminal: int, words: bytes, timeout_s: float = 20) -> None:
    shown, deadline = b"", time.monotonic() + timeout_s
    while words not in shown:
        left_s = deadline - time.monotonic()
        if left_s < 0 or not select.select([terminal], [], [], left_s)[0]:
            raise TimeoutError(f"no {words!r} after {shown!r}")
        shown += os.read(terminal, 1)
