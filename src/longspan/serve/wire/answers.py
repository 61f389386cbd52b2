"""The engine's updates to the body of an answer, or to the chunks of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from longspan.core.request import FinishReason
from longspan.outputs import LogprobsOfToken
from longspan.serve.updates import ChoiceDelta, Update
from longspan.serve.wire.logprobs import Names
from longspan.serve.wire.requests import GenerationRequest
from longspan.text.input_processor import EngineRequest

Body = dict[str, Any]
RequestT = TypeVar("RequestT", bound=GenerationRequest)


class Assembler(Protocol):
    """Makes one answer: by `add` and `whole`, or, streaming, by `chunks` and `last_chunks`."""

    def add(self, index: int, update: Update) -> None:
        """Takes in what is new of the job with this index."""

    def whole(self) -> Body:
        """The body of the answer; every job is finished."""

    def chunks(self, index: int, update: Update) -> list[Body]:
        """What a stream tells of this update; may be nothing."""

    def last_chunks(self) -> list[Body]:
        """What a stream tells when every job is finished."""


@dataclass(frozen=True, kw_only=True)
class News:
    """What an answer tells anew of a choice. The lists of `logprobs` are pieces of those of the choice."""

    text: str
    token_ids: list[int]
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(kw_only=True)
class Choice:
    """One choice of one job.

    Attributes:
        index: among all choices of the answer.
        news: all of it, unless it is streamed.
        begun: whether a stream has told anything of it.
    """

    engine_request: EngineRequest
    request_index: int
    index: int
    num_tokens: int = 0
    news: list[News] = field(default_factory=list)
    begun: bool = False


@dataclass(kw_only=True)
class _Prompt:
    """What was told of a job's prompt."""

    choices: list[Choice]
    num_cached_tokens: int = 0
    logprobs: Sequence[LogprobsOfToken | None] | None = None


class AnswerAssembler(ABC, Generic[RequestT]):
    """What both kinds of answers have in common. Choice j of job i is choice `i * n + j` of the answer."""

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        request: RequestT,
        engine_requests: Sequence[EngineRequest],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        response_id: str,
        model: str,
        created: int,
    ) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.names = Names(tokenizer)
        n = engine_requests[0].params.n
        self._prompts = [
            _Prompt(
                choices=[
                    Choice(engine_request=engine_request, request_index=at, index=at * n + index) for index in range(n)
                ]
            )
            for at, engine_request in enumerate(engine_requests)
        ]
        self._head = {"id": response_id, "created": created, "model": model}

    def add(self, index: int, update: Update) -> None:
        """See `Assembler`."""
        for choice, news in self._take(index, update):
            choice.news.append(news)

    def whole(self) -> Body:
        """See `Assembler`."""
        choices = [self.whole_choice(choice, _joined(choice.news)) for choice in self.choices()]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage()}

    def chunks(self, index: int, update: Update) -> list[Body]:
        """See `Assembler`."""
        chunks = []
        for choice, news in self._take(index, update):
            for body in self.chunk_choices(choice, news):
                chunk: Body = {**self._head, "object": self.chunk_object, "choices": [body]}
                if self.request.include_usage:  # as OpenAI's: null but in the last chunk
                    chunk["usage"] = self._usage_of(choice) if self.request.continuous_usage else None
                chunks.append(chunk)
            choice.begun = True
        return chunks

    def last_chunks(self) -> list[Body]:
        """See `Assembler`."""
        if not self.request.include_usage:
            return []
        return [{**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage()}]

    @abstractmethod
    def news(self, choice: Choice, update: ChoiceDelta) -> News:
        """What the answer tells of an update."""

    @abstractmethod
    def whole_choice(self, choice: Choice, news: News) -> Body:
        """A choice of an answer that is not streamed."""

    @abstractmethod
    def chunk_choices(self, choice: Choice, news: News) -> Iterator[Body]:
        """Choices of the chunks that tell some news."""

    def scores_of(self, choice: Choice) -> Sequence[LogprobsOfToken | None]:
        """Logprobs of a choice's prompt, which come with the first update."""
        scores = self._prompts[choice.request_index].logprobs
        assert scores is not None, "they were asked for"
        return scores

    def _take(self, index: int, update: Update) -> Iterator[tuple[Choice, News]]:
        prompt = self._prompts[index]
        prompt.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs is not None:
            prompt.logprobs = update.prompt_logprobs
        for change in update.choices:
            choice = prompt.choices[change.index]
            news = self.news(choice, change)
            choice.num_tokens += len(news.token_ids)
            yield choice, news

    def choices(self) -> Iterator[Choice]:
        """All choices of the answer, in order."""
        for prompt in self._prompts:
            yield from prompt.choices

    def _usage(self) -> Body:
        num_prompt = sum(len(prompt.choices[0].engine_request.token_ids) for prompt in self._prompts)
        num_cached = sum(prompt.num_cached_tokens for prompt in self._prompts)
        return _usage(num_prompt, sum(choice.num_tokens for choice in self.choices()), num_cached)

    def _usage_of(self, choice: Choice) -> Body:
        num_cached = self._prompts[choice.request_index].num_cached_tokens
        return _usage(len(choice.engine_request.token_ids), choice.num_tokens, num_cached)


def _joined(news: Sequence[News]) -> News:
    """All news of a choice in one."""
    last = news[-1]
    return News(
        text="".join(piece.text for piece in news),
        token_ids=[token for piece in news for token in piece.token_ids],
        logprobs=_joined_lists([piece.logprobs for piece in news if piece.logprobs is not None]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _joined_lists(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    if not pieces:
        return None
    return {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}


def _usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Body:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
