"""Answers to `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from longspan.outputs import LogprobsOfToken
from longspan.serve.updates import ChoiceDelta
from longspan.serve.wire.answers import AnswerAssembler, Body, Choice, News
from longspan.serve.wire.echo import Echo, echo_of
from longspan.serve.wire.logprobs import completion_logprobs, prompt_logprobs
from longspan.serve.wire.requests import CompletionRequest
from longspan.text.input_processor import EngineRequest
from longspan.text.tokenizer import Detokenizer


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
