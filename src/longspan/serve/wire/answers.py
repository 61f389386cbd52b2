"""The engine's updates to the body of an answer, or to the chunks of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from longspan.core.request import FinishReason
from longspan.outputs import LogprobsOfToken
from longspan.serve.messages import ChoiceDelta, Update
from longspan.serve.wire.logprobs import Echo, Names, chat_logprobs, completion_logprobs, echo_of, prompt_logprobs
from longspan.serve.wire.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from longspan.text.input_processor import EngineRequest
from longspan.text.tokenizer import Detokenizer

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


class ChatAssembler(AnswerAssembler[ChatCompletionRequest]):
    """Makes a chat's answer."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> Body:
        """See `Assembler`."""
        return super().whole() | self._of_prompt()

    def chunks(self, index: int, update: Update) -> list[Body]:
        """See `Assembler`; the first chunk has what is told of the prompt."""
        is_first = not any(choice.begun for choice in self.choices())
        chunks = super().chunks(index, update)
        if is_first and chunks:
            chunks[0] |= self._of_prompt()
        return chunks

    def news(self, choice: Choice, update: ChoiceDelta) -> News:
        """See `AnswerAssembler`."""
        del choice
        logprobs = None
        if self.request.logprobs:
            assert update.logprobs is not None, "they were asked for"
            num_top = self.request.top_logprobs or 0
            pairs = zip(update.token_ids, update.logprobs, strict=True)
            logprobs = {"content": [chat_logprobs(token, entries, num_top, self.names) for token, entries in pairs]}
        return News(
            text=update.text,
            token_ids=update.token_ids,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
        )

    def whole_choice(self, choice: Choice, news: News) -> Body:
        """See `AnswerAssembler`."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": news.text, "refusal": None},
            **self._of_output(news),
        }

    def chunk_choices(self, choice: Choice, news: News) -> Iterator[Body]:
        """The first chunk of a choice has the role and no text; the last one has the reason."""
        if not choice.begun:
            role = {"role": "assistant", "content": ""}
            yield {"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None}
        if news.text or news.finish_reason or news.logprobs or self.request.return_token_ids:
            delta = {"content": news.text} if news.text else {}
            yield {"index": choice.index, "delta": delta, **self._of_output(news)}

    def _of_output(self, news: News) -> Body:
        body: Body = {
            "logprobs": news.logprobs,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        return body | ({"token_ids": news.token_ids} if self.request.return_token_ids else {})

    def _of_prompt(self) -> Body:
        [first, *_] = self.choices()
        body: Body = {}
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.scores_of(first), self.request.prompt_logprobs)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = first.engine_request.token_ids
        return body


class CompletionAssembler(AnswerAssembler[CompletionRequest]):
    """Makes a completion's answer. With `echo` and `logprobs`, making it takes as long as tokenizing the prompts."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        engine_requests: Sequence[EngineRequest],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        response_id: str,
        model: str,
        created: int,
    ) -> None:
        super().__init__(request, engine_requests, tokenizer, response_id=response_id, model=model, created=created)
        self._echoes = [self._echo(engine_request) for engine_request in engine_requests] if request.echo else []
        self._offsets: dict[int, _Offsets] = {}  # by choice

    def news(self, choice: Choice, update: ChoiceDelta) -> News:
        """See `AnswerAssembler`. With `max_tokens` 0, the token that the engine makes anyway is left out."""
        silent = self.request.max_tokens == 0
        reason = update.finish_reason, update.stop_reason
        if silent and update.finish_reason == "stop":
            reason = "length", None
        echo = self._echoes[choice.request_index] if self._echoes and not self._has_news(choice) else None
        token_ids, text = ([], "") if silent else (update.token_ids, update.text)
        return News(
            text=text if echo is None else echo.text + text,
            token_ids=token_ids,
            logprobs=None if self.request.logprobs is None else self._logprobs(choice, token_ids, update, echo),
            finish_reason=reason[0],
            stop_reason=reason[1],
        )

    def whole_choice(self, choice: Choice, news: News) -> Body:
        """See `AnswerAssembler`."""
        return self._choice(choice, news) | self._of_prompt(choice)

    def chunk_choices(self, choice: Choice, news: News) -> Iterator[Body]:
        """See `AnswerAssembler`; the first chunk of a choice has what is told of its prompt."""
        of_prompt = {} if choice.begun else self._of_prompt(choice)
        has_logprobs = news.logprobs is not None and news.logprobs["tokens"]
        if of_prompt or news.text or news.finish_reason or has_logprobs or self.request.return_token_ids:
            yield self._choice(choice, news) | of_prompt

    def _choice(self, choice: Choice, news: News) -> Body:
        body: Body = {
            "index": choice.index,
            "text": news.text,
            "logprobs": news.logprobs,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        return body | ({"token_ids": news.token_ids} if self.request.return_token_ids else {})

    def _of_prompt(self, choice: Choice) -> Body:
        body: Body = {}
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.scores_of(choice), self.request.prompt_logprobs)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = choice.engine_request.token_ids
        return body

    def _logprobs(
        self, choice: Choice, token_ids: Sequence[int], update: ChoiceDelta, echo: Echo | None
    ) -> dict[str, list[object]]:
        tokens: list[tuple[int, LogprobsOfToken | None]] = []
        offsets: list[int] = []
        if echo is not None:
            tokens += zip(choice.engine_request.token_ids, self.scores_of(choice), strict=True)
            offsets += echo.offsets
        tokens += zip(token_ids, update.logprobs or (), strict=False)
        offsets += self._offsets_of(choice).add(token_ids)
        return completion_logprobs(tokens, offsets, self.request.logprobs or 0, self.names)

    def _offsets_of(self, choice: Choice) -> _Offsets:
        if choice.index not in self._offsets:
            begin = len(self._echoes[choice.request_index].text) if self._echoes else 0
            self._offsets[choice.index] = _Offsets(self.tokenizer, choice.engine_request.token_ids, begin)
        return self._offsets[choice.index]

    def _has_news(self, choice: Choice) -> bool:
        return choice.begun or bool(choice.news)

    def _echo(self, engine_request: EngineRequest) -> Echo:
        special = self.request.add_special_tokens is not False
        return echo_of(engine_request, self.tokenizer, special, with_offsets=self.request.logprobs is not None)


class _Offsets:
    """Where output tokens begin in a text whose output begins at `begin`, in characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int], begin: int) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt)
        self._end = begin

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next tokens. Those that are parts of one character all begin where it begins."""
        offsets = []
        for token in token_ids:
            offsets.append(self._end)
            if self._detokenizer is not None:
                self._end += len(self._detokenizer.add([token]))
        return offsets
