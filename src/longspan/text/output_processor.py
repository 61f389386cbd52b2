"""State of requests in progress: converts the engine's tokens to text, its logprobs to dictionaries and to outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longspan.core.request import ErrorKind, FinishReason, Request
from longspan.core.steps import TokenLogprobs
from longspan.outputs import CompletionOutput, Logprob, LogprobsOfToken, RequestOutput
from longspan.text.input_processor import EngineRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longspan.text.tokenizer import Detokenizer

_FAILURES: dict[ErrorKind, str] = {
    "structured_outputs": "an output could not be completed in the form that structured_outputs, response_format or "
    "tools require",
    "non_finite": "an output ended with an error",
    "capacity": "an output ended after the loss of a worker",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Size of a choice's output at one moment. Tokens and text only grow, so other threads can read up to this size."""

    num_tokens: int
    num_characters: int
    cumulative_logprob: float
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class RequestState:
    """An engine request with its `n` choices, which it has once it is started.

    Args:
        request_id: the id of its outputs. By default the engine's own number.
    """

    def __init__(
        self,
        engine_request: EngineRequest,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        request_id: str | None = None,
    ) -> None:
        self.engine_request = engine_request
        self._request_id = request_id
        self.choices: tuple[Choice, ...] = ()
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[LogprobsOfToken | None] | None = None

    def attach(self, requests: Sequence[Request]) -> None:
        """Take the engine's requests for the `n` choices."""
        shown = self.engine_request.shown_token_ids
        self.choices = tuple(Choice(request, self._tokenizer, shown) for request in requests)

    @property
    def finished(self) -> bool:
        """Whether the request was started and all its choices have ended."""
        return bool(self.choices) and all(choice.finished for choice in self.choices)

    @property
    def num_taken(self) -> int:
        """Number of tokens of all choices so far."""
        return sum(choice.num_taken for choice in self.choices)

    @property
    def failure(self) -> tuple[ErrorKind, str] | None:
        """The kind of error of the first failed choice, and a sentence about it. None without an error."""
        for request in (choice.request for choice in self.choices):
            if request.finish_reason == "error":
                assert request.error is not None, "an error has a kind"
                return request.error, f"{_FAILURES[request.error]}: {request.stop_reason}"
        return None

    def snapshot(self) -> tuple[Snapshot, ...]:
        """Return the present size of each choice's output."""
        return tuple([choice.snapshot() for choice in self.choices])

    def output(self, snapshot: Sequence[Snapshot] = ()) -> RequestOutput:
        """Return the output up to now, or up to an earlier snapshot."""
        leader, ends = self.choices[0].request, snapshot or self.snapshot()
        return RequestOutput(
            request_id=leader.id if self._request_id is None else self._request_id,
            prompt=self.engine_request.text,
            prompt_token_ids=list(leader.prompt),
            prompt_logprobs=self.prompt_logprobs() if ends[0].num_tokens else None,
            prompt_attention=_shares(leader.attention) if leader.attention else None,
            outputs=[
                choice.output(index, end) for index, (choice, end) in enumerate(zip(self.choices, ends, strict=True))
            ],
            finished=all(end.finish_reason is not None for end in ends),
            metrics=leader.metrics,
        )

    def prompt_logprobs(self) -> list[LogprobsOfToken | None] | None:
        """Return logprobs of the prompt. None before the first output token, or if they are not requested."""
        leader = self.choices[0].request
        if self.engine_request.params.prompt_logprobs is not None and self._prompt_logprobs is None and leader.output:
            text_of = _texts_by(self._tokenizer)
            self._prompt_logprobs = [
                None if report is None else by_token(token, report, text_of)
                for token, report in zip(leader.prompt, leader.prompt_logprobs, strict=True)
            ]
        return self._prompt_logprobs


class Choice:
    """One output of a prompt: a request of the engine with its text."""

    def __init__(
        self, request: Request, tokenizer: PreTrainedTokenizerBase | None, shown_token_ids: Sequence[int] = ()
    ) -> None:
        self.request = request
        self.num_taken = 0
        self._text_of = _texts_by(tokenizer)
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            from longspan.text.tokenizer import Detokenizer  # noqa: PLC0415 - not for token ids alone

            stop, min_tokens = request.params.stop_strings, request.params.min_tokens
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt, stop, min_tokens=min_tokens, shown_token_ids=shown_token_ids
            )
        self.logprobs: list[LogprobsOfToken] = []
        self._cumulative = 0.0

    @property
    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.request.finish_reason is not None

    @property
    def text(self) -> str:
        """The text so far, without an end that may be the beginning of a stop string."""
        return "" if self._detokenizer is None else self._detokenizer.text

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token that ended the output, or the message of an error."""
        stopped_by = None if self._detokenizer is None else self._detokenizer.stopped_by
        return self.request.stop_reason if stopped_by is None else stopped_by

    def take_new_tokens(self) -> bool:
        """Turn new tokens into text. Return True if a stop string ends the output, so that the request must end."""
        request, start = self.request, self.num_taken
        self.num_taken = len(request.output)
        for token, report in zip(request.output[start:], request.logprobs[start:], strict=False):
            self.logprobs.append(by_token(token, report, self._text_of))
            self._cumulative += report.logprob
        if self._detokenizer is None:
            return False
        # Until stop strings are looked for, "stop" means that the last token is a stop token, which has no text.
        stop = self.num_taken - (request.finish_reason == "stop" and self.num_taken > start)
        self._detokenizer.add(request.output[start:stop], finished=self.finished)
        return self._detokenizer.stopped_by is not None

    def snapshot(self) -> Snapshot:
        """Return the present size of the output."""
        return Snapshot(
            num_tokens=self.num_taken,
            num_characters=len(self.text),
            cumulative_logprob=self._cumulative,
            finish_reason=self.request.finish_reason,
            stop_reason=self.stop_reason,
        )

    def output(self, index: int, end: Snapshot) -> CompletionOutput:
        request, params, size = self.request, self.request.params, end.num_tokens
        logits = [np.frombuffer(data, dtype=np.float32) for data in request.logits[:size]]
        return CompletionOutput(
            index=index,
            text=self.text[: end.num_characters],
            token_ids=request.output[:size],
            cumulative_logprob=None if params.logprobs is None else end.cumulative_logprob,
            logprobs=None if params.logprobs is None else self.logprobs[:size],
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            error=request.error if end.finish_reason == "error" else None,
            logits=logits if params.output_logits else None,
        )


def _shares(reports: Sequence[bytes]) -> npt.NDArray[np.float32]:
    """Sum the attention that ranks report, as shares of all attention."""
    total = np.sum([np.frombuffer(report, dtype=np.float32) for report in reports], axis=0)
    return np.asarray(total / total.sum(), dtype=np.float32)


def by_token(token: int, report: TokenLogprobs, text: Callable[[int], str | None]) -> LogprobsOfToken:
    """Map token ids to logprobs: first `token`, then the most likely tokens, best first. `text` decodes each token."""
    logprobs = {token: Logprob(logprob=report.logprob, rank=report.rank, decoded_token=text(token))}
    for rank, (other, logprob) in enumerate(zip(report.top_ids, report.top_logprobs, strict=True), start=1):
        if other != token:
            logprobs[other] = Logprob(logprob=logprob, rank=rank, decoded_token=text(other))
    return logprobs


def _texts_by(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int], str | None]:
    if tokenizer is None:
        return lambda _: None
    from longspan.text.tokenizer import token_text  # noqa: PLC0415 - not for token ids alone

    return partial(token_text, tokenizer)
