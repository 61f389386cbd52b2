"""Responses of `/v1/completions` and `/v1/chat/completions`, made of deltas: whole bodies, or the chunks of a stream.

Logprobs have the forms of OpenAI's two interfaces and of vLLM.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from longspan import __version__
from longspan.outputs import Logprob, LogprobsOfToken
from longspan.serve.chat_requests import ChatCompletionRequest, TextRequest
from longspan.serve.convert import ServedModel, chat_request, completion_requests, output_reader, read_request
from longspan.serve.errors import RequestFailedError, ServeError, WireError, as_wire_errors, error_body
from longspan.serve.messages import Delta, delta_of, failed
from longspan.serve.requests import CompletionRequest
from longspan.text.call_formats.base import CallDelta, OutputReader, Pieces
from longspan.text.input_processor import EngineRequest
from longspan.text.output_processor import Choice
from longspan.text.tokenizer import Detokenizer, echo_of, token_bytes, token_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longspan.llm import LLM

TagT = TypeVar("TagT")
Body = dict[str, Any]
_BODIES: dict[str, type[TextRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}
_NO_PROMPT_FIELDS: Body = {"prompt_logprobs": None, "prompt_token_ids": None}
"""Fields of every whole answer, because some clients read them unconditionally."""
_FINGERPRINT = f"longspan-{__version__}"
_MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def prepared(
    request: TextRequest,
    served: ServedModel,
    *,
    request_id: str,
    model: str,
    grammar: str | None = None,
    chat_form: Callable[..., ChatAssembler] | None = None,
) -> Assembler:
    """Make the engine requests of a request and return the assembler of its answer, in which the model is `model`.

    `chat_form` replaces `ChatAssembler`. For `grammar` and errors see `completion_requests`.
    """
    head: Body = {"created": int(time.time()), "model": model, "system_fingerprint": _FINGERPRINT}
    tokenizer = served.input_processor.tokenizer
    if isinstance(request, ChatCompletionRequest):
        engine_request = chat_request(request, served, grammar)
        reader = output_reader(request, served, engine_request.text or "")
        head = {"id": f"chatcmpl-{request_id}", **head, "service_tier": "default"}
        return (chat_form or ChatAssembler)(request, [engine_request], tokenizer, head, reader)
    engine_requests = completion_requests(request, served, grammar)
    return CompletionAssembler(request, engine_requests, tokenizer, {"id": f"cmpl-{request_id}", **head})


def engine_requests_of(url: str, body: bytes, served: ServedModel) -> Sequence[EngineRequest]:
    """Make the engine requests of a request by its route and its JSON. Raise WireError if it cannot be served."""
    request = read_request(_BODIES[url], body, served.settings.limits)
    return prepared(request, served, request_id="", model="").engine_requests


def answer_each(
    llm: LLM,
    served: ServedModel,
    requests: Iterable[tuple[TagT, str, bytes]],
    *,
    max_groups: int,
    max_waiting_tokens: int,
    stepped: Callable[[Sequence[Choice]], object] | None = None,
) -> Iterator[tuple[TagT, int, Body]]:
    """Answer requests without HTTP, `max_groups` concurrently, and yield each answer as soon as it is done.

    A request is a tag of the caller, a route and JSON. An answer is the tag, an HTTP status and a body. A request that
    cannot be served gets the answer of an HTTP server and does not affect other requests. `requests` is read lazily.
    For the other arguments see `LLM.finish_each`.

    Raises:
        WorkerLostError: a worker dies or raises.
    """

    def group(tag: TagT, url: str, body: bytes) -> tuple[tuple[TagT, Assembler | ServeError], Sequence[EngineRequest]]:
        try:
            request = read_request(_BODIES[url], body, served.settings.limits)
            served.check_name(request.model)
            if request.stream:
                raise WireError("batch files have no streamed answers: leave it out", "stream")
            assembler = prepared(request, served, request_id=uuid.uuid4().hex, model=served.settings.model_names[0])
            with as_wire_errors("messages" if isinstance(request, ChatCompletionRequest) else "prompt"):
                for engine_request in assembler.engine_requests:
                    llm.service.engine.check(len(engine_request.token_ids))
        except WireError as error:
            return (tag, error), ()
        return (tag, assembler), assembler.engine_requests

    groups = (group(*request) for request in requests)
    finished = llm.finish_each(groups, max_groups=max_groups, max_waiting_tokens=max_waiting_tokens, stepped=stepped)
    for (tag, prepared_request), states in finished:
        answer = prepared_request
        failure = next((state.failure for state in states if state.failure is not None), None)
        if failure is not None:
            report = failed(0, *failure)
            answer = RequestFailedError(report.reason, report.param, report.code)
        if isinstance(answer, ServeError):
            yield tag, answer.status, error_body(answer.status, str(answer), param=answer.param, code=answer.code)
            continue
        for index, state in enumerate(states):
            for choice in range(len(state.choices)):
                answer.add(index, delta_of(0, state, choice))
        yield tag, 200, answer.whole()


@dataclass(kw_only=True)
class AnswerChoice:
    """One choice of the answer.

    Attributes:
        prompt: the index of its engine request.
        index: its index among all choices of the answer.
        deltas: its deltas, empty if the answer is streamed.
        begun: True once a stream has sent a chunk of it.
        text_end: position of the next token in its text, in characters, if offsets are requested.
        detokenizer: determines `text_end`.
        reader: separates its reasoning and its calls from its content, if it may have some.
        reasoning: pieces of its reasoning.
    """

    engine_request: EngineRequest
    prompt: int
    index: int
    num_tokens: int = 0
    deltas: list[Delta] = field(default_factory=list)
    begun: bool = False
    text_end: int = 0
    detokenizer: Detokenizer | None = None
    reader: OutputReader | None = None
    reasoning: list[str] = field(default_factory=list)


class Assembler(ABC):
    """Makes one answer: by `add` and `whole`, or, for a stream, by `first_chunks`, `chunks` and `last_chunks`.

    Choice j of engine request i is choice `i * n + j` of the answer. All bodies begin with the fields of `head`.
    `reader` makes a reader for each output, if outputs may have more than content.

    Attributes:
        keep_alive: bytes that a stream sends in a pause.
        end: bytes at the end of a stream without an error.
    """

    keep_alive = b": still working\n\n"
    end = b"data: [DONE]\n\n"
    whole_object: str
    chunk_object: str
    request: TextRequest

    def __init__(
        self,
        request: TextRequest,
        engine_requests: Sequence[EngineRequest],
        tokenizer: PreTrainedTokenizerBase | None,
        head: Body,
        reader: Callable[[], OutputReader] | None = None,
    ) -> None:
        self.request, self.engine_requests, self.tokenizer = request, engine_requests, tokenizer
        self._n = engine_requests[0].params.n
        self.choices = [
            AnswerChoice(
                engine_request=engine_request,
                prompt=prompt,
                index=prompt * self._n + index,
                reader=None if reader is None else reader(),
            )
            for prompt, engine_request in enumerate(engine_requests)
            for index in range(self._n)
        ]
        self._num_cached = [0] * len(engine_requests)
        self._prompt_logprobs: dict[int, Sequence[LogprobsOfToken | None]] = {}  # by engine request
        self._head = head
        options = request.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._chunks_have_usage = bool(options and options.include_usage and options.continuous_usage_stats)

    def add(self, prompt: int, delta: Delta) -> None:
        """Add a delta of the engine request with index `prompt`."""
        choice, delta = self._record(prompt, delta)
        choice.num_tokens += len(delta.token_ids)
        choice.deltas.append(delta)

    def whole(self) -> Body:
        """Return the body of the answer when every engine request is finished."""
        choices = [self.whole_choice(choice, joined(choice.deltas)) for choice in self.choices]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self.final_usage()}

    def chunks(self, prompt: int, delta: Delta) -> list[Body]:
        """Return the chunks of a stream for a delta. There may be none."""
        choice, delta = self._record(prompt, delta)
        chunks = [] if choice.begun else [self._chunk(choice, body) for body in self.opening_choices(choice)]
        choice.num_tokens += len(delta.token_ids)
        chunks += [self._chunk(choice, body) for body in self.chunk_choices(choice, delta)]
        choice.begun = True
        return chunks

    def _chunk(self, choice: AnswerChoice, body: Body) -> Body:
        chunk: Body = {**self._head, "object": self.chunk_object, "choices": [body]}
        if self._has_usage:  # as in OpenAI's streams: null except in the last chunk
            chunk["usage"] = self._usage(choice) if self._chunks_have_usage else None
        return chunk

    def first_chunks(self) -> list[Body]:
        """Return the chunks of a stream before the first delta."""
        return []

    def failure_chunks(self, error: ServeError) -> list[Body]:
        """Return the last chunks of a stream that fails."""
        return [error_body(error.status, str(error), param=error.param, code=error.code)]

    def encoded(self, chunk: Body) -> bytes:
        """Encode a chunk as one server-sent event."""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def last_chunks(self) -> list[Body]:
        """Return the chunks of a stream after every engine request is finished."""
        if not self._has_usage:
            return []
        return [{**self._head, "object": self.chunk_object, "choices": [], "usage": self.final_usage()}]

    @abstractmethod
    def whole_choice(self, choice: AnswerChoice, delta: Delta) -> Body:
        """Return a choice of an answer that is not streamed. `delta` is its whole output."""

    def opening_choices(self, choice: AnswerChoice) -> Sequence[Body]:  # noqa: ARG002 - for chats
        """Return the choices of the chunks before the first token of a choice."""
        return ()

    @abstractmethod
    def chunk_choices(self, choice: AnswerChoice, delta: Delta) -> Iterator[Body]:
        """Yield the choices of the chunks of a delta. The last chunk of a choice has the finish reason."""

    def shown(self, delta: Delta) -> Delta:
        """Return the part of a delta that the answer shows."""
        return delta

    def prompt_fields(self, choice: AnswerChoice) -> Body:
        """Return the requested fields of a choice's prompt. Its logprobs are part of the first delta."""
        body: Body = {}
        if (num_top := self.request.prompt_logprobs) is not None:
            tokens = self._prompt_logprobs[choice.prompt]
            body["prompt_logprobs"] = [None if token is None else _prompt_logprobs(token, num_top) for token in tokens]
        if self.request.return_token_ids:
            body["prompt_token_ids"] = choice.engine_request.token_ids
        return body

    def output_fields(self, delta: Delta, logprobs: Body | None) -> Body:
        """Return the fields of a delta other than its text that both kinds of answers have."""
        body: Body = {"logprobs": logprobs, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return body | ({"token_ids": delta.token_ids} if self.request.return_token_ids else {})

    def _record(self, prompt: int, delta: Delta) -> tuple[AnswerChoice, Delta]:
        """Record the delta's facts about its prompt. Return its choice and the part that the answer shows."""
        self._num_cached[prompt] = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        return self.choices[prompt * self._n + delta.choice], self.shown(delta)

    def final_usage(self) -> Body:
        """Return the usage of the whole answer."""
        return self._usage(*self.choices)

    def _usage(self, *choices: AnswerChoice) -> Body:
        """Return the usage of some choices. Each prompt counts once."""
        prompts = {choice.prompt: len(choice.engine_request.token_ids) for choice in choices}
        num_prompt, num_output = sum(prompts.values()), sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached[prompt] for prompt in prompts)},
        }


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return successive deltas of a choice as one delta."""
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=None if deltas[-1].logprobs is None else logprobs,
    )


class ChatAssembler(Assembler):
    """Makes the answer to a conversation."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    request: ChatCompletionRequest

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning, without its markers. This takes as long as tokenizing the text."""
        encode = None if self.tokenizer is None else self.tokenizer.encode
        texts = ("".join(choice.reasoning) for choice in self.choices if choice.reasoning)
        return sum(len(encode(text, add_special_tokens=False)) for text in texts if encode is not None)

    def final_usage(self) -> Body:
        return super().final_usage() | {"completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens}}

    def whole(self) -> Body:
        return super().whole() | _NO_PROMPT_FIELDS | self.prompt_fields(self.choices[0])

    def chunks(self, prompt: int, delta: Delta) -> list[Body]:
        """Return the chunks of a delta. The first chunk of a stream has the requested fields of the prompt."""
        is_first = not any(choice.begun for choice in self.choices)
        chunks = super().chunks(prompt, delta)
        if is_first and chunks:
            chunks[0] |= self.prompt_fields(self.choices[0])
        return chunks

    def whole_choice(self, choice: AnswerChoice, delta: Delta) -> Body:
        pieces, fields = self._read(choice, delta)
        content = pieces.content if pieces.content or not (pieces.calls or pieces.reasoning) else None
        message: Body = {"role": "assistant", "content": content, "refusal": None, **_reasoning(pieces)}
        if pieces.calls:
            message["tool_calls"] = [_call(call) for call in pieces.calls]
        return {"index": choice.index, "message": message, **fields}

    def opening_choices(self, choice: AnswerChoice) -> Sequence[Body]:
        role = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": role, "logprobs": None, "finish_reason": None}]

    def chunk_choices(self, choice: AnswerChoice, delta: Delta) -> Iterator[Body]:
        pieces, fields = self._read(choice, delta)
        if any(pieces) or delta.finish_reason or fields["logprobs"] or self.request.return_token_ids:
            content = _reasoning(pieces) | ({"content": pieces.content} if pieces.content else {})
            if pieces.calls:
                content["tool_calls"] = [{"index": call.index, **_call(call)} for call in pieces.calls]
            yield {"index": choice.index, "delta": content, **fields}

    def _read(self, choice: AnswerChoice, delta: Delta) -> tuple[Pieces, Body]:
        """Return the parts of a delta, and its fields other than these."""
        fields = self.output_fields(delta, self._logprobs(delta))
        if choice.reader is None:
            return Pieces(content=delta.text), fields
        pieces = choice.reader.add(delta.text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if pieces.reasoning:
            choice.reasoning.append(pieces.reasoning)
        if delta.finish_reason == "stop" and choice.reader.has_called:
            fields["finish_reason"] = "tool_calls"
        return pieces, fields

    def _logprobs(self, delta: Delta) -> Body | None:
        if not self.request.logprobs:
            return None
        assert delta.logprobs is not None, "they were requested"
        content = []
        for token, entries in zip(delta.token_ids, delta.logprobs, strict=True):
            tops = [self._logprob(other, entry) for other, entry in _best(entries, self.request.top_logprobs or 0)]
            content.append({**self._logprob(token, entries[token]), "top_logprobs": tops})
        return {"content": content}

    def _logprob(self, token: int, entry: Logprob) -> Body:
        text = _token_name(self.tokenizer, token, entry)
        return {"token": text, "logprob": _finite(entry), "bytes": token_bytes(self.tokenizer, token, text)}


def _reasoning(pieces: Pieces) -> Body:
    """Return the reasoning under both names that clients read: DeepSeek's, and the newer one of vLLM."""
    return {"reasoning_content": pieces.reasoning, "reasoning": pieces.reasoning} if pieces.reasoning else {}


def _call(call: CallDelta) -> Body:
    """Return the first piece of a call, or a later piece, which has neither an id nor a name."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionAssembler(Assembler):
    """Makes the answer to a completion. With `echo` and `logprobs`, this takes as long as tokenizing the prompts."""

    whole_object = chunk_object = "text_completion"
    request: CompletionRequest

    def __init__(
        self,
        request: CompletionRequest,
        engine_requests: Sequence[EngineRequest],
        tokenizer: PreTrainedTokenizerBase | None,
        head: Body,
    ) -> None:
        super().__init__(request, engine_requests, tokenizer, head)
        special, with_offsets = request.add_special_tokens is not False, request.logprobs is not None
        self._echoes = [
            echo_of(engine_request.text, engine_request.token_ids, tokenizer, special, with_offsets=with_offsets)
            for engine_request in engine_requests
            if request.echo
        ]
        for choice in self.choices if with_offsets else ():
            choice.text_end = len(self._echoes[choice.prompt][0]) if request.echo else 0
            if tokenizer is not None:
                choice.detokenizer = Detokenizer(tokenizer, choice.engine_request.token_ids)

    def shown(self, delta: Delta) -> Delta:
        """Return the delta without the token that the engine makes even with `max_tokens` 0."""
        if self.request.max_tokens != 0:
            return delta
        if delta.finish_reason == "stop":
            delta = replace(delta, finish_reason="length", stop_reason=None)
        return replace(delta, text="", token_ids=[], logprobs=None if delta.logprobs is None else [])

    def whole_choice(self, choice: AnswerChoice, delta: Delta) -> Body:
        return self._choice(choice, delta) | _NO_PROMPT_FIELDS | self.prompt_fields(choice)

    def chunk_choices(self, choice: AnswerChoice, delta: Delta) -> Iterator[Body]:
        prompt_fields = {} if choice.begun else self.prompt_fields(choice)
        body = self._choice(choice, delta)
        has_logprobs = body["logprobs"] is not None and body["logprobs"]["tokens"]
        if prompt_fields or body["text"] or delta.finish_reason or has_logprobs or self.request.return_token_ids:
            yield body | prompt_fields

    def _choice(self, choice: AnswerChoice, delta: Delta) -> Body:
        """Return the body of a choice, or of its next chunk. The first chunk begins with the echo of the prompt."""
        text, offsets, tokens = delta.text, list[int](), list[tuple[int, LogprobsOfToken | None]]()
        if self._echoes and not choice.begun:
            echo, echo_offsets = self._echoes[choice.prompt]
            text = echo + text
            if self.request.logprobs is not None:
                offsets += echo_offsets
                tokens += zip(choice.engine_request.token_ids, self._prompt_logprobs[choice.prompt], strict=True)
        logprobs = None
        if self.request.logprobs is not None:
            tokens += zip(delta.token_ids, delta.logprobs or (), strict=False)
            offsets += self._offsets(choice, delta.token_ids)
            logprobs = self._logprobs(tokens, self.request.logprobs) | {"text_offset": offsets}
        return {"index": choice.index, "text": text, **self.output_fields(delta, logprobs)}

    def _offsets(self, choice: AnswerChoice, token_ids: Sequence[int]) -> Iterator[int]:
        """Yield the positions of the next tokens. Tokens that are parts of a character have its position."""
        for token in token_ids:
            yield choice.text_end
            if choice.detokenizer is not None:
                choice.text_end += len(choice.detokenizer.add([token]))

    def _logprobs(self, tokens: Sequence[tuple[int, LogprobsOfToken | None]], num_top: int) -> Body:
        """Return lists of the same length. If several likely tokens have the same text, the best counts."""
        texts, logprobs, tops = [], list[float | None](), list[dict[str, float] | None]()
        for token, entries in tokens:
            texts.append(_token_name(self.tokenizer, token, None if entries is None else entries[token]))
            logprobs.append(None if entries is None else _finite(entries[token]))
            best: dict[str, float] = {}
            for other, entry in _token_and_best(token, entries, num_top) if entries is not None else ():
                text, logprob = _token_name(self.tokenizer, other, entry), _finite(entry)
                best[text] = max(logprob, best.get(text, logprob))
            tops.append(None if entries is None else best)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops}


def _prompt_logprobs(entries: LogprobsOfToken, num_top: int) -> dict[str, dict[str, float | int | str | None]]:
    """Return the logprobs of a prompt token in vLLM's form."""
    return {
        str(token): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in _token_and_best(next(iter(entries)), entries, num_top)
    }


def _token_and_best(token: int, entries: LogprobsOfToken, num_top: int) -> Iterable[tuple[int, Logprob]]:
    return ({token: entries[token]} | dict(_best(entries, num_top))).items()


def _best(entries: LogprobsOfToken, num_top: int) -> list[tuple[int, Logprob]]:
    """Return the `num_top` most likely entries. `entries` may have more, for another part of the answer."""
    return sorted(entries.items(), key=lambda item: -item[1].logprob)[:num_top]


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _MIN_LOGPROB)


def _token_name(tokenizer: PreTrainedTokenizerBase | None, token: int, entry: Logprob | None) -> str:
    """Return a token's text, by `entry` if it has one. Without a tokenizer it is `token_id:` and the id, as in vLLM."""
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return f"token_id:{token}" if tokenizer is None else token_text(tokenizer, token)
