"""The chunks of a streamed answer: which of them bring how many tokens, and when."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from longspan.loadgen.results import Answered

_DONE = b"[DONE]"


class AnswerError(Exception):
    """A stream that is no whole answer. `kind` is what failures are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return any((self.text, delta.content, delta.reasoning_content, delta.reasoning))


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Arrival(msgspec.Struct):
    """A chunk with a choice. `num_tokens` is None when the server did not say it with the chunk."""

    time_s: float
    has_text: bool
    num_tokens: int | None


class Answer:
    """Takes in the events of one stream; `answered` says what they are together."""

    def __init__(self) -> None:
        self._arrivals: list[_Arrival] = []
        self._usage: _Usage | None = None
        self._finish_reason: str | None = None
        self._done = False
        self._decoder = msgspec.json.Decoder(_Chunk)

    def take(self, data: bytes, now_s: float) -> None:
        """An event's data that came now.

        Raises:
            AnswerError: for an error of the server, or what is no chunk.
        """
        if data == _DONE:
            self._done = True
            return
        try:
            chunk = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise AnswerError("malformed", f"no chunk: {error}: {data[:80]!r}") from None
        if chunk.error is not None:
            raise AnswerError("error in stream", error_message(chunk.error))
        before = 0 if self._usage is None else self._usage.completion_tokens
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        new = None if chunk.usage is None else chunk.usage.completion_tokens - before
        if new is not None and new < 0:
            raise AnswerError("malformed", f"completion_tokens went back by {-new}")
        self._arrivals.append(_Arrival(now_s, choice.has_text, new))
        self._finish_reason = choice.finish_reason or self._finish_reason

    def answered(self, due_s: float) -> Answered:
        """The whole answer, with times counted from `due_s`, on the clock of `take`.

        Raises:
            AnswerError: when its end has not come.
        """
        if not self._done or self._finish_reason is None:
            missing = "[DONE]" if not self._done else "a finish_reason"
            raise AnswerError("incomplete", f"the stream ended without {missing}")
        if self._usage is None:
            raise AnswerError("no usage", "the server sent no usage, though stream_options.include_usage asks for it")
        total = self._usage.completion_tokens
        if total < 1:
            raise AnswerError("no token", "the answer has no token")
        times = [arrival.time_s for arrival in self._arrivals]
        chunks = [pair for pair in zip(times, tokens_per_chunk(self._arrivals, total), strict=True) if pair[1]]
        return Answered(
            ttft_s=chunks[0][0] - due_s,
            e2el_s=times[-1] - due_s,
            tbt_s=times_between(chunks),
            num_prompt_tokens=self._usage.prompt_tokens,
            num_output_tokens=total,
            finish_reason=self._finish_reason,
        )


def tokens_per_chunk(arrivals: Sequence[_Arrival], total: int) -> list[int]:
    """How many of `total` tokens each chunk brought.

    A server that adds the usage so far to every chunk (`continuous_usage_stats`) says it. If not, the first chunk with
    text is taken for one token, and the others for equal shares of the rest.
    """
    said = [arrival.num_tokens for arrival in arrivals if arrival.num_tokens is not None]
    if len(said) == len(arrivals) and any(said):
        return [*said[:-1], said[-1] + total - sum(said)]
    with_text = [index for index, arrival in enumerate(arrivals) if arrival.has_text] or [len(arrivals) - 1]
    counts = [0] * len(arrivals)
    first, others = with_text[0], with_text[1:]
    counts[first] = 1 if others else total
    for order, index in enumerate(others):
        counts[index] = (order + 1) * (total - 1) // len(others) - order * (total - 1) // len(others)
    return counts


def times_between(chunks: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """Times between tokens from the times of chunks and how many tokens each brought.

    A chunk of k tokens counts as k tokens that took an equal share of the time since the chunk before. Those that come
    together with the first token took none. So there is one time less than tokens, and their sum is the time from the
    first chunk to the last.
    """
    gaps = [0.0] * (chunks[0][1] - 1)
    for (before_s, _), (time_s, num) in pairwise(chunks):
        gaps += [(time_s - before_s) / num] * num
    return tuple(gaps)


def error_message(error: object) -> str:
    """The message in an error as OpenAI and others write it."""
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return str(error)
