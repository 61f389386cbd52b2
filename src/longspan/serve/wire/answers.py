"""Answers of `/v1/completions` and `/v1/chat/completions`, made of deltas: whole bodies, or the chunks of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec.structs import replace
from transformers import PreTrainedTokenizerBase

from longspan.outputs import LogprobsOfToken
from longspan.serve.messages import Delta, joined
from longspan.serve.wire.logprobs import Echo, Names, chat_logprobs, completion_logprobs, echo_of, prompt_logprobs
from longspan.serve.wire.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from longspan.text.input_processor import EngineRequest
from longspan.text.tokenizer import Detokenizer

Body = dict[str, Any]
RequestT = TypeVar("RequestT", bound=GenerationRequest)


@dataclass(kw_only=True)
class Choice:
    """One choice of the answer.

    Attributes:
        prompt: the index of its engine request.
        index: among all choices of the answer.
        deltas: all of them, unless the answer is streamed.
        begun: whether a stream has sent anything of it.
    """

    engine_request: EngineRequest
    prompt: int
    index: int
    num_tokens: int = 0
    deltas: list[Delta] = field(default_factory=list)
    begun: bool = False


class Assembler(ABC, Generic[RequestT]):
    """Makes one answer: by `add` and `whole`, or, streaming, by `chunks` and `last_chunks`.

    Choice j of engine request i is choice `i * n + j` of the answer.
    """

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
        self._n = engine_requests[0].params.n
        self.choices = [
            Choice(engine_request=engine_request, prompt=prompt, index=prompt * self._n + index)
            for prompt, engine_request in enumerate(engine_requests)
            for index in range(self._n)
        ]
        self._num_cached = [0] * len(engine_requests)
        self._prompt_logprobs: dict[int, Sequence[LogprobsOfToken | None]] = {}
        self._head = {"id": response_id, "created": created, "model": model}

    def add(self, prompt: int, delta: Delta) -> None:
        """Take in a delta of the engine request with this index."""
        choice, delta = self._seen(prompt, delta)
        choice.deltas.append(delta)

    def whole(self) -> Body:
        """Return the body of the answer; every engine request is finished."""
        choices = [self.whole_choice(choice, joined(choice.deltas)) for choice in self.choices]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage(*self.choices)}

    def chunks(self, prompt: int, delta: Delta) -> list[Body]:
        """Return what a stream sends for a delta; that may be nothing."""
        choice, delta = self._seen(prompt, delta)
        chunks = []
        for body in self.chunk_choices(choice, delta):
            chunk: Body = {**self._head, "object": self.chunk_object, "choices": [body]}
            if self.request.include_usage:  # as OpenAI's: null but in the last chunk
                chunk["usage"] = self._usage(choice) if self.request.continuous_usage else None
            chunks.append(chunk)
        choice.begun = True
        return chunks

    def last_chunks(self) -> list[Body]:
        """Return what a stream sends when every engine request is finished."""
        if not self.request.include_usage:
            return []
        return [{**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage(*self.choices)}]

    @abstractmethod
    def whole_choice(self, choice: Choice, delta: Delta) -> Body:
        """Return a choice of an answer that is not streamed; `delta` is all of it."""

    @abstractmethod
    def chunk_choices(self, choice: Choice, delta: Delta) -> Iterator[Body]:
        """Yield the choices of the chunks that a delta makes."""

    def shown(self, delta: Delta) -> Delta:
        """Return what the answer shows of a delta."""
        return delta

    def prompt_fields(self, choice: Choice) -> Body:
        """Return what is asked for of a choice's prompt; its logprobs come with the first delta."""
        body: Body = {}
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.prompt_scores(choice), self.request.prompt_logprobs)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = choice.engine_request.token_ids
        return body

    def prompt_scores(self, choice: Choice) -> Sequence[LogprobsOfToken | None]:
        """Return the logprobs of a choice's prompt."""
        return self._prompt_logprobs[choice.prompt]

    def output_fields(self, delta: Delta, logprobs: dict[str, list[Any]] | None) -> Body:
        """Return what both kinds of answers say of a delta beside its text."""
        body: Body = {"logprobs": logprobs, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return body | ({"token_ids": delta.token_ids} if self.request.return_token_ids else {})

    def _seen(self, prompt: int, delta: Delta) -> tuple[Choice, Delta]:
        """Note what a delta says of its prompt, and count its tokens."""
        self._num_cached[prompt] = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        choice, delta = self.choices[prompt * self._n + delta.choice], self.shown(delta)
        choice.num_tokens += len(delta.token_ids)
        return choice, delta

    def _usage(self, *choices: Choice) -> Body:
        """Return the usage of some choices; a prompt counts once."""
        prompts = {choice.prompt: len(choice.engine_request.token_ids) for choice in choices}
        num_prompt, num_output = sum(prompts.values()), sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached[prompt] for prompt in prompts)},
        }


class ChatAssembler(Assembler[ChatCompletionRequest]):
    """Makes the answer to a conversation."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> Body:
        """Return the body of the answer, with what is asked for of the prompt."""
        return super().whole() | self.prompt_fields(self.choices[0])

    def chunks(self, prompt: int, delta: Delta) -> list[Body]:
        """Return the chunks of a delta; the first of a stream has what is asked for of the prompt."""
        is_first = not any(choice.begun for choice in self.choices)
        chunks = super().chunks(prompt, delta)
        if is_first and chunks:
            chunks[0] |= self.prompt_fields(self.choices[0])
        return chunks

    def whole_choice(self, choice: Choice, delta: Delta) -> Body:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": choice.index, "message": message, **self.output_fields(delta, self._logprobs(delta))}

    def chunk_choices(self, choice: Choice, delta: Delta) -> Iterator[Body]:
        """Yield first the role without text; the last chunk of a choice has the reason."""
        if not choice.begun:
            role = {"role": "assistant", "content": ""}
            yield {"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None}
        logprobs = self._logprobs(delta)
        if delta.text or delta.finish_reason or logprobs or self.request.return_token_ids:
            content = {"content": delta.text} if delta.text else {}
            yield {"index": choice.index, "delta": content, **self.output_fields(delta, logprobs)}

    def _logprobs(self, delta: Delta) -> dict[str, list[Any]] | None:
        if not self.request.logprobs:
            return None
        assert delta.logprobs is not None, "they were asked for"
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        num_top = self.request.top_logprobs or 0
        return {"content": [chat_logprobs(token, entries, num_top, self.names) for token, entries in pairs]}


class CompletionAssembler(Assembler[CompletionRequest]):
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

    def shown(self, delta: Delta) -> Delta:
        """Leave out the token that the engine makes even with `max_tokens` 0."""
        if self.request.max_tokens != 0:
            return delta
        if delta.finish_reason == "stop":
            delta = replace(delta, finish_reason="length", stop_reason=None)
        return replace(delta, text="", token_ids=[], logprobs=None if delta.logprobs is None else [])

    def whole_choice(self, choice: Choice, delta: Delta) -> Body:
        return self._choice(choice, delta) | self.prompt_fields(choice)

    def chunk_choices(self, choice: Choice, delta: Delta) -> Iterator[Body]:
        """Yield nothing where nothing is new; the first chunk of a choice has what is asked for of its prompt."""
        prompt_fields = {} if choice.begun else self.prompt_fields(choice)
        body = self._choice(choice, delta)
        has_logprobs = body["logprobs"] is not None and body["logprobs"]["tokens"]
        if prompt_fields or body["text"] or delta.finish_reason or has_logprobs or self.request.return_token_ids:
            yield body | prompt_fields

    def _choice(self, choice: Choice, delta: Delta) -> Body:
        """Return the body of a choice, or of its next chunk; what comes first begins with the echo of the prompt."""
        echo = self._echoes[choice.prompt] if self._echoes and not choice.begun else None
        logprobs = None if self.request.logprobs is None else self._logprobs(choice, delta, echo)
        text = delta.text if echo is None else echo.text + delta.text
        return {"index": choice.index, "text": text, **self.output_fields(delta, logprobs)}

    def _logprobs(self, choice: Choice, delta: Delta, echo: Echo | None) -> dict[str, list[object]]:
        tokens: list[tuple[int, LogprobsOfToken | None]] = []
        offsets: list[int] = []
        if echo is not None:
            tokens += zip(choice.engine_request.token_ids, self.prompt_scores(choice), strict=True)
            offsets += echo.offsets
        tokens += zip(delta.token_ids, delta.logprobs or (), strict=False)
        offsets += self._offsets_of(choice).add(delta.token_ids)
        return completion_logprobs(tokens, offsets, self.request.logprobs or 0, self.names)

    def _offsets_of(self, choice: Choice) -> _Offsets:
        if choice.index not in self._offsets:
            begin = len(self._echoes[choice.prompt].text) if self._echoes else 0
            self._offsets[choice.index] = _Offsets(self.tokenizer, choice.engine_request.token_ids, begin)
        return self._offsets[choice.index]

    def _echo(self, engine_request: EngineRequest) -> Echo:
        special = self.request.add_special_tokens is not False
        return echo_of(engine_request, self.tokenizer, special, with_offsets=self.request.logprobs is not None)


class _Offsets:
    """Counts where output tokens begin in a text whose output begins at `begin`, in characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int], begin: int) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt)
        self._end = begin

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens; the parts of one character all begin where it begins."""
        offsets = []
        for token in token_ids:
            offsets.append(self._end)
            if self._detokenizer is not None:
                self._end += len(self._detokenizer.add([token]))
        return offsets
