"""Deltas to answers: they fit OpenAI's types, streams equal whole answers, and offsets locate tokens."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
import pytest
from chat_chunk import ChatCompletionChunk
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk
from wire_world import NAMES, deltas_of, read, scores, stream, tokenizer, whole, world

from longspan.outputs import Logprob
from longspan.serve.chat_requests import ChatCompletionRequest
from longspan.serve.convert import chat_request, completion_requests
from longspan.serve.messages import Delta
from longspan.serve.requests import CompletionRequest
from longspan.serve.responses import Assembler, ChatAssembler, CompletionAssembler
from longspan.serve.schemas import ChatCompletionResponse, CompletionResponse
from longspan.text.input_processor import EngineRequest

SERVED = world()
HELLO = [{"role": "user", "content": "Hello"}]
USAGE = {"include_usage": True}
TEXT = st.text(st.sampled_from("ab é😀\n€"), min_size=1, max_size=12)
OUTPUT = TEXT.map(lambda text: tokenizer()(text)["input_ids"])


def completion(fields: dict[str, Any]) -> tuple[CompletionRequest, list[EngineRequest]]:
    request = read(CompletionRequest, fields)
    return request, completion_requests(request, SERVED)


def chat(fields: dict[str, Any]) -> tuple[ChatCompletionRequest, list[EngineRequest]]:
    request = read(ChatCompletionRequest, {"messages": HELLO, **fields})
    return request, [chat_request(request, SERVED)]


def assembler(request: CompletionRequest | ChatCompletionRequest, engine_requests: list[EngineRequest]) -> Assembler:
    if isinstance(request, CompletionRequest):
        return CompletionAssembler(request, engine_requests, tokenizer(), NAMES)
    return ChatAssembler(request, engine_requests, tokenizer(), NAMES)


def on_wire(body: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(body))


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the text of each choice at the end of a stream."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": None})
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            choice["text"] += part["delta"].get("content", "") if "delta" in part else part["text"]
            choice["token_ids"] += part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
    return dict(choices)


def of_whole(body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same of an answer that is not streamed."""
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "token_ids": choice.get("token_ids", []),
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in body["choices"]
    }


@st.composite
def completions(draw: st.DrawFn) -> tuple[CompletionRequest, list[EngineRequest], list[list[Delta]]]:
    fields = {
        "prompt": draw(TEXT | st.lists(TEXT, min_size=1, max_size=2) | st.lists(OUTPUT, min_size=1, max_size=2)),
        "n": draw(st.integers(1, 2)),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, 0, 3])),
        "echo": draw(st.booleans()),
        "max_tokens": draw(st.sampled_from([0, 20])),
        "stop": draw(st.sampled_from([None, ["zz", "b€"]])),
        "return_token_ids": draw(st.booleans()),
        "stream_options": USAGE,
    }
    request, engine_requests = completion(fields)
    return request, engine_requests, draw(drawn_deltas(engine_requests, one=fields["max_tokens"] == 0))


@st.composite
def chats(draw: st.DrawFn) -> tuple[ChatCompletionRequest, list[EngineRequest], list[list[Delta]]]:
    fields: dict[str, Any] = {
        "n": draw(st.integers(1, 2)),
        "prompt_logprobs": draw(st.sampled_from([None, 1])),
        "return_token_ids": draw(st.booleans()),
        "stream_options": USAGE,
    }
    if draw(st.booleans()):
        fields |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 3))}
    request, engine_requests = chat(fields)
    return request, engine_requests, draw(drawn_deltas(engine_requests))


@st.composite
def drawn_deltas(draw: st.DrawFn, engine_requests: list[EngineRequest], *, one: bool = False) -> list[list[Delta]]:
    outputs = [
        [draw(OUTPUT)[: 1 if one else None] for _ in range(engine_request.params.n)]
        for engine_request in engine_requests
    ]
    steps = [*draw(st.lists(st.integers(0, 3), max_size=2)), 1]
    return [
        list(deltas_of(engine_request, of_request, steps))
        for engine_request, of_request in zip(engine_requests, outputs, strict=True)
    ]


@settings(deadline=None)
@given(completions() | chats())
def test_chunks_joined_are_the_whole_answer(drawn: Any) -> None:
    request, engine_requests, deltas = drawn
    body, chunks = (
        on_wire(whole(assembler(request, engine_requests), deltas)),
        on_wire(stream(assembler(request, engine_requests), deltas)),
    )
    assert joined(chunks) == of_whole(body)
    assert sorted(of_whole(body)) == list(range(len(engine_requests) * engine_requests[0].params.n))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == body["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert body.get(name) == chunks[0].get(name)
        first = {part["index"]: part for chunk in reversed(chunks) for part in chunk["choices"]}
        assert all(choice.get(name) == first[choice["index"]].get(name) for choice in body["choices"])


@settings(deadline=None)
@given(completions() | chats())
def test_answers_are_as_the_documents_and_openais_types_say(drawn: Any) -> None:
    request, engine_requests, deltas = drawn
    body, chunks = (
        on_wire(whole(assembler(request, engine_requests), deltas)),
        on_wire(stream(assembler(request, engine_requests), deltas)),
    )
    is_chat = isinstance(request, ChatCompletionRequest)
    for model, values in (
        (ChatCompletionResponse if is_chat else CompletionResponse, [body]),
        (ChatCompletionChunk if is_chat else CompletionResponse, chunks),
    ):
        for value in values:
            assert model.model_validate(value, strict=True).model_dump(exclude_unset=True) == value
    if is_chat:
        ChatCompletion.model_validate(body)
        for chunk in chunks:
            OpenAIChunk.model_validate(chunk)
    elif not request.echo:  # OpenAI's types lack the missing logprob of the first token of a prompt. Its server has it.
        Completion.model_validate(body)


@settings(deadline=None)
@given(completions())
def test_tokens_begin_where_the_offsets_say(drawn: Any) -> None:
    """Against a plain computation: the whole characters among the bytes of all tokens before."""
    request, engine_requests, deltas = drawn
    body = whole(assembler(request, engine_requests), deltas)
    for choice in body["choices"]:
        if choice["logprobs"] is None:
            continue
        engine_request, of_request = (
            engine_requests[choice["index"] // engine_requests[0].params.n],
            deltas[choice["index"] // engine_requests[0].params.n],
        )
        output = [
            token
            for delta in of_request
            for token in delta.token_ids
            if delta.choice == choice["index"] % engine_request.params.n
        ]
        shown = (list(engine_request.token_ids) if request.echo else []) + (output if request.max_tokens else [])
        lengths = [len(characters(shown[:index])) for index in range(len(shown))]
        assert choice["logprobs"]["text_offset"] == lengths
        assert len(choice["logprobs"]["tokens"]) == len(shown)
        if request.echo or not request.stop:
            assert characters(shown).startswith(choice["text"])


def characters(token_ids: list[int]) -> str:
    """Return the complete characters, by the bytes that GPT-2's vocabularies write as letters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = printable + [byte for byte in range(256) if byte not in printable]
    table = {chr(byte if at < len(printable) else 256 + at - len(printable)): byte for at, byte in enumerate(letters)}
    names = tokenizer().convert_ids_to_tokens(token_ids)
    return bytes(table[letter] for name in names for letter in name).decode(errors="ignore")


def test_a_prompt_with_special_tokens_is_echoed_as_it_is() -> None:
    text = "a<|im_end|>é b"
    for prompt in (text, tokenizer()(text)["input_ids"]):
        request, engine_requests = completion({"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0})
        body = whole(assembler(request, engine_requests), [list(deltas_of(engine_requests[0], [[5]]))])
        [choice] = body["choices"]
        assert choice["text"] == text
        pieces = dict(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
        assert (pieces["<|im_end|>"], pieces[" b"]) == (1, 12)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [True, False])
def test_log_likelihoods_as_evaluations_compute_them(max_tokens: int, as_ids: bool) -> None:
    """Context and continuation are echoed with logprobs. Logprobs after the context are summed."""
    context, continuation = (tokenizer()(text)["input_ids"] for text in ("The sky is", " very blue"))
    ids, sunny = context + continuation, tokenizer()(" sunny")["input_ids"][:1]
    prompt = ids if as_ids else tokenizer().decode(ids)
    request, engine_requests = completion(
        {"prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1}
    )
    body = on_wire(whole(assembler(request, engine_requests), [list(deltas_of(engine_requests[0], [sunny]))]))
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The sky is very blue" + (" sunny" if max_tokens else "")
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == max_tokens == len(logprobs["tokens"]) - len(ids)
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    scored = slice(len(context), len(ids))
    expected = [scores(token, 1)[token].logprob for token in continuation]
    assert logprobs["token_logprobs"][scored] == [max(value, -9999.0) for value in expected]
    for token, value, top in zip(
        continuation, logprobs["token_logprobs"][scored], logprobs["top_logprobs"][scored], strict=True
    ):
        assert (value == max(top.values())) == (scores(token, 1)[token].rank == 1)
    continued = [at for at, begin in enumerate(logprobs["text_offset"]) if len("The sky is") <= begin]
    assert continued[: len(continuation)] == [*range(len(context), len(ids))]


def test_a_token_that_is_left_out_ends_nothing() -> None:
    request, engine_requests = completion({"prompt": "a", "max_tokens": 0, "logprobs": 0})
    logprobs = [scores(5, 0)]
    delta = Delta(id=0, choice=0, text="b", token_ids=[5], logprobs=logprobs, finish_reason="stop", stop_reason="b")
    [choice] = whole(assembler(request, engine_requests), [[delta]])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "length", None)
    assert choice["logprobs"]["tokens"] == []


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    request, engine_requests = chat({"n": 2, "stream": True})
    deltas = list(deltas_of(engine_requests[0], [tokenizer()(text)["input_ids"] for text in ("one two", "😀")]))
    parts = defaultdict(list)
    for chunk in stream(assembler(request, engine_requests), [deltas]):
        assert "usage" not in chunk
        [part] = chunk["choices"]
        parts[part["index"]].append(part)
    for of_choice in parts.values():
        assert of_choice[0]["delta"] == {"role": "assistant", "content": ""}
        assert [part["finish_reason"] for part in of_choice] == [None] * (len(of_choice) - 1) + ["length"]
        assert all("role" not in part["delta"] for part in of_choice[1:])
        assert all(part["delta"].get("content") or part["finish_reason"] for part in of_choice[1:])


def test_empty_chunks_are_not_sent() -> None:
    """A character of several tokens comes when it is whole."""
    request, engine_requests = completion({"prompt": "a", "stream": True})
    output = tokenizer()("😀")["input_ids"]
    assert len(output) > 1
    chunks = stream(assembler(request, engine_requests), [list(deltas_of(engine_requests[0], [output]))])
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["😀"]


def test_usage_in_every_chunk_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request, engine_requests = completion({"prompt": ["a b", "c"], "stream": True, "stream_options": options})
    output = tokenizer()(" one two three")["input_ids"]
    *chunks, last = stream(
        assembler(request, engine_requests),
        [list(deltas_of(engine_request, [output])) for engine_request in engine_requests],
    )
    counts = defaultdict(list)
    for chunk in chunks:
        counts[chunk["choices"][0]["index"]].append(chunk["usage"]["completion_tokens"])
    assert counts == {0: [1, 2, 3], 1: [1, 2, 3]}
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_the_role_of_a_chat_comes_before_any_token_counts() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request, engine_requests = chat({"stream": True, "stream_options": options})
    output = tokenizer()("one two")["input_ids"]
    chunks = stream(assembler(request, engine_requests), [list(deltas_of(engine_requests[0], [output]))])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*range(len(output) + 1), len(output)]


def test_logprobs_of_chats_have_the_bytes_of_parts_of_characters() -> None:
    request, engine_requests = chat({"logprobs": True, "top_logprobs": 2})
    output = tokenizer()("a 😀")["input_ids"]
    [choice] = whole(assembler(request, engine_requests), [list(deltas_of(engine_requests[0], [output]))])["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a 😀"
    for token, entry in zip(output, content, strict=True):
        best = sorted((found.logprob for found in scores(token, 2).values()), reverse=True)[:2]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [max(value, -9999.0) for value in best]


def test_without_a_tokenizer_tokens_go_by_their_ids() -> None:
    request, engine_requests = completion({"prompt": [1, 2], "echo": True, "logprobs": 0, "return_token_ids": True})
    plain = CompletionAssembler(request, engine_requests, None, NAMES)
    bare = [{token: Logprob(logprob=-1.0, rank=1)} for token in (2, 3)]
    delta = Delta(
        id=0,
        choice=0,
        text="",
        token_ids=[3],
        logprobs=[bare[1]],
        finish_reason="length",
        stop_reason=None,
        prompt_logprobs=[None, bare[0]],
    )
    [choice] = whole(plain, [[delta]])["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2", "token_id:3"]
    assert (choice["text"], choice["token_ids"]) == ("", [3])


def test_without_a_tokenizer_the_bytes_of_a_chats_tokens_are_not_known() -> None:
    request, engine_requests = chat({"logprobs": True, "top_logprobs": 1})
    delta = Delta(
        id=0,
        choice=0,
        text="",
        token_ids=[3],
        logprobs=[{3: Logprob(logprob=-1.0, rank=2), 4: Logprob(logprob=-0.5, rank=1)}],
        finish_reason="length",
        stop_reason=None,
    )
    [choice] = whole(ChatAssembler(request, engine_requests, None, NAMES), [[delta]])["choices"]
    [entry] = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:3", None)
    assert [(top["token"], top["bytes"]) for top in entry["top_logprobs"]] == [("token_id:4", None)]
