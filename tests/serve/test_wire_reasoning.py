"""Chats with a template like Qwen3's: reasoning apart from content and calls, in answers and in streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from chat_chunk import ChatCompletionChunk
from tool_models import grammar_accepts, tool, tool_tokenizer, tool_vocabulary
from wire_world import NAMES, deltas_of, read, stream, whole

from longspan.serve.chat_requests import ChatCompletionRequest
from longspan.serve.convert import ServedModel, chat_request, output_reader
from longspan.serve.responses import ChatAssembler, prepared
from longspan.serve.schemas import ChatCompletionResponse
from longspan.serve.settings import ServerSettings
from longspan.text.input_processor import InputProcessor

ASK: list[dict[str, Any]] = [{"role": "user", "content": "How is it in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("weather", CITY)]
THOUGHT = "\nIs it <tool_call>\n{cold}?\n\nYes.\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = '{"a": 1}'
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "a",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "It rains. <think>", ""),
    ({"tools": TOOLS}, "It rains.", ""),
    ({"tools": TOOLS}, "Let me see.\n", CALL),
    ({"tools": TOOLS, "tool_choice": "required"}, "", CALL),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "", CALL),
    ({"response_format": FORMAT}, ANSWER, ""),
    ({"response_format": FORMAT, "tools": TOOLS}, ANSWER, ""),
    ({"response_format": {"type": "json_object"}}, ANSWER, ""),
]
"""Fields of a request, and the content and the call of an answer."""


@cache
def served(template: str = "qwen3", **settings: Any) -> ServedModel:
    tokenizer = tool_tokenizer(template, with_markers=True)
    used = InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=512)
    return ServedModel(input_processor=used, settings=ServerSettings(model_names=("tiny",), **settings))


@pytest.fixture(scope="module", autouse=True)
def _freed() -> Iterator[None]:
    """Free the vocabularies, of 30 MB each."""
    yield
    served.cache_clear()
    tool_vocabulary.cache_clear()


def request(**fields: Any) -> ChatCompletionRequest:
    return read(ChatCompletionRequest, {"messages": ASK, **fields})


def answers(
    output: str, model: ServedModel, *, finish_reason: Any = "stop", **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The only choice of a whole answer, and the deltas of its stream."""
    asked = request(**fields)
    engine_request = chat_request(asked, model)
    tokenizer: Any = model.input_processor.tokenizer
    token_ids = model.input_processor.tokenize(output, add_special_tokens=False)

    def made() -> tuple[ChatAssembler, list[list[Any]]]:
        deltas = deltas_of(engine_request, [token_ids], (1, 2), finish_reason=finish_reason, by=tokenizer)
        reader = output_reader(asked, model, engine_request.text or "")
        return ChatAssembler(asked, [engine_request], tokenizer, NAMES, reader), [list(deltas)]

    body, chunks = json.loads(msgspec.json.encode(whole(*made()))), json.loads(msgspec.json.encode(stream(*made())))
    ChatCompletionResponse.model_validate(body)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return body["choices"][0], [part for chunk in chunks for part in chunk["choices"]]


def joined(parts: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Reasoning, content and arguments of a stream."""
    deltas = [part["delta"] for part in parts]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    calls = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", ())]
    texts = ("".join(delta.get(key, "") for delta in deltas) for key in ("reasoning_content", "content"))
    return (*texts, "".join(calls))


@pytest.mark.parametrize(("fields", "content", "call"), CASES)
@pytest.mark.parametrize("template", ["qwen3", "qwq"])
def test_reasoning_is_apart_from_content_and_calls(
    fields: dict[str, Any], content: str, call: str, template: str
) -> None:
    begin = "<think>" if template == "qwen3" else ""
    thought = THOUGHT if "tools" in fields else THOUGHT.replace("<tool_call>", "")  # it is a token, shown with tools
    choice, parts = answers(f"{begin}{thought}</think>\n\n{content}{call}", served(template), **fields)
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == thought.strip()
    assert message["content"] == (content or None)
    arguments = "".join(made["function"]["arguments"] for made in message.get("tool_calls", ()))
    assert arguments == ('{"city": "Rome"}' if call else "")
    assert joined(parts) == (thought.strip(), content, arguments)
    assert choice["finish_reason"] == parts[-1]["finish_reason"] == ("tool_calls" if call else "stop")


@pytest.mark.parametrize(("fields", "content", "call"), [case for case in CASES if case[0]])
@pytest.mark.parametrize("template", ["qwen3", "qwq"])
def test_grammars_begin_after_the_reasoning(fields: dict[str, Any], content: str, call: str, template: str) -> None:
    begin = "<think>" if template == "qwen3" else ""
    grammar = chat_request(request(**fields), served(template)).grammar
    thought = f"{begin}{THOUGHT}</think>\n\n"

    def fits(text: str) -> bool:
        return grammar_accepts(grammar, text)

    assert fits(thought + content + call)
    if content != "It rains.":
        assert not fits(thought + (call or content).replace("city", "town").replace("1", "one"))
    assert not fits(begin + THOUGHT), "the section has no end"
    assert fits(content + call) == (template == "qwen3"), "Qwen3 may leave the section out"
    closed = chat_request(request(**fields, reasoning_effort="none"), served(template)).grammar
    assert (closed == grammar) == (template == "qwq"), "only Qwen3's template closes the section"


def test_an_answer_that_is_cut_in_its_reasoning_has_no_content() -> None:
    for fields, _, _ in CASES:
        choice, parts = answers("<think>\nWell <too", served(), finish_reason="length", **fields)
        assert choice["message"]["content"] is None
        assert choice["message"]["reasoning_content"] == "Well <too"
        assert joined(parts) == ("Well <too", "", "")


def test_an_answer_without_reasoning_has_no_field_of_it() -> None:
    choice, parts = answers("It rains.", served())
    assert choice["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert joined(parts) == ("", "It rains.", "")
    text = "<think>a"
    assert answers(text, served("hermes"))[0]["message"]["content"] == text
    assert answers(text, served(reasoning_parser="none"))[0]["message"]["content"] == text
    assert answers("a</think>b", served("hermes", reasoning_parser="deepseek_r1"))[0]["message"]["content"] == "b"


def test_variables_reach_the_template_and_so_does_earlier_reasoning() -> None:
    def prompt(template: str = "qwen3", **fields: Any) -> str:
        return chat_request(request(**fields), served(template)).text or ""

    assert prompt().endswith("assistant\n")
    closed = "<think>\n\n</think>\n\n"
    assert prompt(reasoning_effort="none").endswith(closed)
    assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith(closed)
    assert not prompt(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).endswith(closed)
    assert prompt("{{ reasoning_effort }}!{{ messages[0].content }}", reasoning_effort="high").startswith("high!")
    for name in ("reasoning", "reasoning_content"):
        earlier = [*ASK, {"role": "assistant", "content": "Hot.", name: "Hm."}, *ASK]
        assert "<think>\nHm.\n</think>\n\nHot." in prompt(messages=earlier)


@pytest.mark.parametrize("n", [1, 2])
def test_usage_counts_the_tokens_of_reasoning_without_markers(n: int) -> None:
    model, options = served(), {"include_usage": True, "continuous_usage_stats": True}
    tokenizer: Any = model.input_processor.tokenizer
    for output, reasoning in (("It rains.", ""), ("<think>\nHm. Is it?\n</think>\n\nIt rains.", "Hm. Is it?")):
        token_ids = model.input_processor.tokenize(output, add_special_tokens=False)
        asked = request(stream_options=options, stream=True, n=n)
        counts = []
        for is_streamed in (False, True):
            assembler = prepared(asked, model, request_id="1", model="tiny")
            outputs = [token_ids] * n
            deltas = list(deltas_of(assembler.engine_requests[0], outputs, (1, 2), by=tokenizer))
            if is_streamed:
                *chunks, last = stream(assembler, [deltas])
                assert not any("completion_tokens_details" in chunk["usage"] for chunk in chunks)
            else:
                last = whole(assembler, [deltas])
            counts.append(last["usage"]["completion_tokens_details"])
        num_tokens = len(tokenizer.encode(reasoning, add_special_tokens=False)) * n
        assert counts == [{"reasoning_tokens": num_tokens}] * 2


def test_bodies_have_a_fingerprint_and_the_tier() -> None:
    asked = request(service_tier="auto", stream_options={"include_usage": True})
    [last] = prepared(asked, served(), request_id="1", model="tiny").last_chunks()
    assert last["service_tier"] == "default"
    assert last["system_fingerprint"].startswith("longspan-")
