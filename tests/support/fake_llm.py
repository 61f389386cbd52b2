"""A replacement of `LLM` that records its arguments and answers from a script."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import pytest

import longspan
from longspan.cli import app
from longspan.core.sampling import SamplingParams
from longspan.outputs import CompletionOutput, Logprob, RequestOutput

WORDS = ["The", " key", " is", " 42", "."]
METRICS: Any = SimpleNamespace(
    ttft_s=0.5,
    tbt_s=[0.1, 0.3, 0.2, 0.2],
    exchanges={"prefill": {"ring_kv": 1}, "decode": {"ring_q": 4}},
    kv_tokens_per_instance=[5, 4],
    num_cached_tokens=3,
)
TOP = {7: Logprob(logprob=-0.5, rank=2, decoded_token="a"), 8: Logprob(logprob=-0.25, rank=1, decoded_token="b")}


class FakeLLM:
    """Every answer is `WORDS`. Tokens are characters. A prompt without any, or with a `!`, is refused."""

    last: FakeLLM
    failure: BaseException | None = None
    """Raised after the first word of an answer."""
    max_model_len = 1000
    engine = SimpleNamespace(settle=lambda _: True)
    input_processor = SimpleNamespace(check_chars=lambda _: None, tokenizer=None)

    def __init__(self, model: str, **arguments: Any) -> None:
        FakeLLM.last = self
        self.model, self.arguments, self.closed, self.aborted = model, arguments, False, False
        self.asked: list[tuple[str | list[int], SamplingParams]] = []
        self.bytes_exchanged = {"ring_kv": 1000, "ring_q": 24, "total": 1024}
        self.bytes_between_hosts = {"ring_kv": 400, "ring_q": 0, "total": 400}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def sparse_savings(self, _: RequestOutput) -> None:
        """Nothing is sparse."""

    def check(self, prompt: str | list[int], params: SamplingParams) -> None:
        del params
        if not prompt:
            raise ValueError("the prompt\nis empty")
        if "!" in prompt:
            raise ValueError("the prompt shouts")

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, chat_template: str | None = None) -> str:
        if chat_template == "refuse":
            raise ValueError("the chat template refuses these messages: no")
        return "".join(f"<{message['role']}>{message['content']}</>\n" for message in messages) + "<assistant>"

    def abort(self) -> None:
        self.aborted = True

    def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        self.check(prompt, params)
        self.asked.append((prompt, params))
        for count in range(1, len(WORDS) + 1):
            aborted, self.aborted = self.aborted, False
            yield output(prompt, params, count, aborted=aborted)
            if aborted:
                return
            if self.failure is not None:
                raise self.failure

    def generate_each(
        self, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> Iterator[RequestOutput]:
        self.use_tqdm = use_tqdm
        for prompt, one in zip(prompts, params, strict=True):
            [*_, last] = self.stream(prompt, one)
            yield last


def output(prompt: str | list[int], params: SamplingParams, num_words: int, *, aborted: bool = False) -> RequestOutput:
    """Return the state of a request after a number of words. The last token of a finished request has no text."""
    done = num_words == len(WORDS)
    completions = [
        CompletionOutput(
            index=index,
            text="".join(WORDS[:num_words]),
            token_ids=list(range(num_words)),
            cumulative_logprob=None if params.logprobs is None else -0.5 * num_words,
            logprobs=None if params.logprobs is None else [TOP] * num_words,
            finish_reason="abort" if aborted else "stop" if done else None,
        )
        for index in range(params.n)
    ]
    return RequestOutput(
        request_id=0,
        prompt=None,
        prompt_token_ids=prompt if isinstance(prompt, list) else list(range(len(prompt.split()))),
        prompt_logprobs=None if params.prompt_logprobs is None else [None, TOP],
        outputs=completions,
        finished=done or aborted,
        metrics=METRICS,
    )


def run(*arguments: str) -> int:
    """Runs the command line and returns its exit code."""
    with pytest.raises(SystemExit) as exit_:
        app.main(arguments)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the handlers of signals that the command line sets."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts it in the place of `LLM`, and lets nothing be started for it."""
    monkeypatch.setitem(vars(longspan), "LLM", FakeLLM)
    monkeypatch.setattr("longspan.cli.options.start_server", lambda: None)
    monkeypatch.setattr(FakeLLM, "failure", None)
