"""`/v1/messages` over a fake engine: answers, streams in the documented order, counts of tokens, errors and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import client_of
from speaking_server import SpeakingEngine, make_speaking_server
from starlette.testclient import TestClient
from tool_models import tool_vocabulary

from longspan.serve.apis.messages_requests import MessagesAnswer
from longspan.serve.errors import EngineLostError, QueueFullError
from longspan.serve.schemas import MessagesErrorBody

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "weather", "description": "Tells it.", "input_schema": CITY},
    {"type": "custom", "name": "time", "input_schema": {"type": "object", "properties": {}}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER_CALL = '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
TALK: list[dict[str, Any]] = [{"role": "user", "content": "How is it in Rome?"}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": TALK}
CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "It rains.", ["text"]),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "<think>\nHm.\n</think>\n\nIt.", ["thinking", "text"]),
    ({"tools": TOOLS}, f"Let me see.\n{CALL}{OTHER_CALL}", ["text", "tool_use", "tool_use"]),
    ({"tools": TOOLS, "tool_choice": {"type": "any"}}, CALL, ["tool_use"]),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}, CALL, ["tool_use"]),
    ({"output_config": {"format": {"type": "json_schema", "schema": CITY}}}, '{"city": "Rome"}', ["text"]),
    ({"tools": TOOLS, "tool_choice": {"type": "none"}}, "It rains.", ["text"]),
]
"""Fields of a request, an output and the types of its blocks."""
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
"""Marks the end of a prefix to cache."""
THINKING = {"type": "enabled", "budget_tokens": 1024}
GROWING = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[TestClient, SpeakingEngine]]:
    server, engine = make_speaking_server()
    yield client_of(server), engine
    tool_vocabulary.cache_clear()


@pytest.fixture
def http(world: tuple[TestClient, SpeakingEngine]) -> TestClient:
    return world[0]


@pytest.fixture
def engine(world: tuple[TestClient, SpeakingEngine]) -> SpeakingEngine:
    engine = world[1]
    engine.text, engine.reasons, engine.error = "It rains.", ("stop", None), None
    return engine


def answer_of(http: TestClient, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/messages", json={**ASK, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    MessagesAnswer.model_validate(body)
    return body


def events_of(http: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream. The name of each is its type."""
    answer = http.post("/v1/messages", json={**ASK, **fields, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in answer.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, put together as Anthropic's clients do, which need the documented order."""
    start, *rest, end, stop = events
    assert (start["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = start["message"]
    assert message["content"] == []
    is_open, growing = False, ""
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                is_open, growing = True, ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                delta, block = event["delta"], message["content"][-1]
                piece = delta[GROWING[delta["type"]]]
                if delta["type"] == "input_json_delta":
                    growing += piece
                else:
                    block[GROWING[delta["type"]]] += piece
            case "content_block_stop":
                assert is_open
                is_open = False
                if growing:
                    assert message["content"][-1]["input"] == {}
                    message["content"][-1]["input"] = json.loads(growing)
            case other:
                pytest.fail(other)
    assert not is_open
    return {**message, **end["delta"], "usage": {**message["usage"], **end["usage"]}}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    assert message["id"].startswith("msg_")
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


@pytest.mark.parametrize(("fields", "output", "types"), CASES)
def test_a_stream_joins_to_the_answer_that_is_not_streamed(
    http: TestClient, engine: SpeakingEngine, fields: dict[str, Any], output: str, types: list[str]
) -> None:
    engine.text = output
    whole = answer_of(http, **fields)
    assert [block["type"] for block in whole["content"]] == types
    assert whole["stop_reason"] == ("tool_use" if types[-1] == "tool_use" else "end_turn")
    assert without_ids(joined(events_of(http, **fields))) == without_ids(whole)


def test_blocks_and_usage_are_those_of_the_output(http: TestClient, engine: SpeakingEngine) -> None:
    engine.text = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
    body = answer_of(http, tools=TOOLS, thinking=THINKING)
    thinking, text, call = body["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see.\n"}
    assert (call["name"], call["input"]) == ("weather", {"city": "Rome"})
    assert body["usage"] == {
        "input_tokens": len(engine.engine_requests[-1].token_ids) - 1,
        "cache_read_input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(engine.tokenizer.encode(engine.text)),
    }


@pytest.mark.parametrize(
    ("reasons", "stop_reason", "stop_sequence"),
    [
        (("stop", None), "end_turn", None),
        (("stop", "END"), "stop_sequence", "END"),
        (("stop", 7), "end_turn", None),
        (("length", None), "max_tokens", None),
    ],
)
def test_the_reason_of_the_end_is_named(
    http: TestClient, engine: SpeakingEngine, reasons: Any, stop_reason: str, stop_sequence: str | None
) -> None:
    engine.reasons = reasons
    whole = answer_of(http, stop_sequences=["END"], temperature=0.5, top_p=0.5, top_k=3)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, stop_sequence)
    params = engine.engine_requests[-1].params
    assert (params.max_tokens, params.stop_strings) == (100, ("END",))
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.5, 3)
    assert without_ids(joined(events_of(http))) == without_ids({**whole, "usage": joined(events_of(http))["usage"]})


def test_a_call_that_max_tokens_cuts_has_an_empty_input(http: TestClient, engine: SpeakingEngine) -> None:
    engine.text, engine.reasons = CALL[:-18], ("length", None)
    body = answer_of(http, tools=TOOLS)
    assert (body["stop_reason"], body["content"][0]["input"]) == ("max_tokens", {})


@pytest.mark.parametrize("number", [str(2**64), "9" * 40, "9" * 5000])
def test_integers_of_any_length_are_in_the_input_of_a_call(
    http: TestClient, engine: SpeakingEngine, number: str
) -> None:
    engine.text = CALL.replace('"Rome"', number)
    answer = http.post("/v1/messages", json={**ASK, "tools": TOOLS})
    assert answer.status_code == 200
    text = answer.text.replace(" ", "")
    assert ('"input":{}' if len(number) > 4300 else f'"input":{{"city":{number}}}') in text
    assert events_of(http, tools=TOOLS)[-1]["type"] == "message_stop"


def test_blocks_become_the_messages_of_a_chat(http: TestClient, engine: SpeakingEngine) -> None:
    engine.text = f"<think>\nHm.\n</think>\n\nLet me see.{CALL}"
    first = answer_of(http, tools=TOOLS, thinking=THINKING)
    [call] = [block for block in first["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "Rain."}]}
    talk = [
        *TALK,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [{"type": "text", "text": "And Oslo?"}, result]},
    ]
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    answer_of(http, tools=TOOLS, messages=talk, system=system, thinking=THINKING)
    _, prompt = engine.prompt.split(".\n", 1)
    assert prompt == (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\nHow is it in Rome?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nLet me see."
        '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nRain.<|im_end|>\n"
        "<|im_start|>user\nAnd Oslo?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    count = http.post("/v1/messages/count_tokens", json={"messages": talk, "tools": TOOLS, "system": system}).json()
    closed = len(engine.tokenizer.encode("<think>\n\n</think>\n\n"))
    assert count == {"input_tokens": len(engine.engine_requests[-1].token_ids) + closed}


def test_all_that_the_official_client_sends_is_taken(http: TestClient, engine: SpeakingEngine) -> None:
    """`?beta=true`, headers, and fields without an effect here: caching, `metadata`, `is_error`, hints for tools."""
    called = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}, "caller": {"type": "direct"}}
    failed = {**RESULT, "is_error": True, "content": [{"type": "text", "text": "No such city.", **CACHED}], **CACHED}
    silent = {**RESULT, "tool_use_id": "b", "is_error": False}
    body = {
        "system": [{"type": "text", "text": "Be short."}, {"type": "text", "text": "Be kind.", **CACHED}],
        "messages": [
            *TALK,
            {"role": "assistant", "content": [called, {**called, "id": "b"}]},
            {"role": "user", "content": [failed, silent, {"type": "text", "text": "Go on.", "citations": None}]},
        ],
        "tools": [{**TOOLS[0], **CACHED, "strict": True, "defer_loading": False, "input_examples": [{"city": "Oslo"}]}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive", "display": "summarized"},
    }
    ignored = {
        "metadata": {"user_id": "someone"},
        "service_tier": "auto",
        "output_config": {"effort": "high"},
        **CACHED,
        "context_management": {"edits": []},
        "container": None,
        "mcp_servers": [],
        "stop_sequences": [],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    answer = http.post("/v1/messages?beta=true", json={**ASK, **body, **ignored}, headers=headers)
    assert answer.status_code == 200, answer.text
    _, prompt = engine.prompt.split(".\n", 1)
    call = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert prompt == (
        "<|im_start|>system\nBe short.\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHow is it in Rome?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}{call}<|im_end|>\n"
        "<|im_start|>tool\nNo such city.<|im_end|>\n<|im_start|>tool\n<|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    count = http.post("/v1/messages/count_tokens?beta=true", json=body, headers=headers)
    assert count.json() == {"input_tokens": len(engine.engine_requests[-1].token_ids)}


def test_the_count_of_tokens_follows_the_tools_and_the_choice(http: TestClient, engine: SpeakingEngine) -> None:
    del engine

    def count(**fields: Any) -> int:
        answer = http.post("/v1/messages/count_tokens", json={"messages": TALK, **fields})
        assert answer.status_code == 200, answer.text
        num_tokens: int = answer.json()["input_tokens"]
        return num_tokens

    assert count(tools=TOOLS) > count(tools=TOOLS[:1]) > count() == count(tools=[])
    assert count(tools=TOOLS, tool_choice={"type": "none"}) == count()
    assert count(tools=TOOLS, tool_choice={"type": "any"}) == count(tools=TOOLS)


def test_the_model_continues_a_last_message_of_the_assistant(http: TestClient, engine: SpeakingEngine) -> None:
    answer_of(http, messages=[*TALK, {"role": "assistant", "content": "It is"}])
    assert engine.prompt.endswith("assistant\nIt is")


def test_thinking_decides_whether_the_template_closes_the_section(http: TestClient, engine: SpeakingEngine) -> None:
    for fields, is_closed in (({}, True), ({"thinking": {"type": "disabled"}}, True), (CASES[1][0], False)):
        answer_of(http, **fields)
        assert engine.prompt.endswith("</think>\n\n") == is_closed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"max_tokens": 5000}, ["max_tokens", "2048"]),
        ({"messages": []}, ["messages", "empty"]),
        ({"messages": [{"role": "system", "content": "x"}]}, ["messages[0].role", "assistant"]),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, ["content[0]", "image", "Only text is served"]),
        ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, ["content[0]", "document", "Only text is served"]),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
            ["messages[0].content[0].content[0].type", "'image'", "Only text is served"],
        ),
        ({"mcp_servers": [{"type": "url", "name": "x", "url": "http://x"}]}, ["mcp_servers", "runs no tools"]),
        ({"thinking": {"type": "on"}}, ["thinking.type", "adaptive", "'on'"]),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, ["content[0]", "user"]),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ["tools[0].type", "web_search"]),
        ({"tools": [*TOOLS, *TOOLS]}, ["tools[0].name", "weather"]),
        ({"tool_choice": {"type": "any"}}, ["tool_choice", "tools"]),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, ["tool_choice", "'x'"]),
        ({"stop_sequences": [""]}, ["stop_sequences[0]", "empty"]),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
            ["output_config.format", "strin"],
        ),
        ({"output_format": {"type": "json_schema"}}, ["output_format", "output_config.format"]),
    ],
)
def test_mistakes_are_invalid_requests_that_name_the_field(
    http: TestClient, engine: SpeakingEngine, fields: Any, words: list[str]
) -> None:
    del engine
    for stream in (False, True):
        answer = http.post("/v1/messages", json={**ASK, **fields, "stream": stream})
        error = MessagesErrorBody.model_validate(answer.json())
        assert (answer.status_code, error.error.type) == (400, "invalid_request_error")
        assert error.request_id == answer.headers["x-request-id"]
        assert all(word in error.error.message for word in words), error.error.message


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_refused_by_the_code_that_lets_clients_send_whole_conversations(
    http: TestClient, path: str, thread: Any
) -> None:
    answer = http.post(path, json={**ASK, "thread": thread})
    error = MessagesErrorBody.model_validate(answer.json()).error
    assert answer.status_code == 400
    assert "thread" in error.message
    assert error.details is not None
    assert (error.details.error_code, error.details.unsupported) == ("thread_unsupported_request", ["thread"])


def test_other_errors_have_the_form_of_the_path_too() -> None:
    server, engine = make_speaking_server(api_keys=("sesame",))
    http = client_of(server)
    key = {"x-api-key": "sesame"}
    engine.error = EngineLostError("rank 1 is gone")

    def kind(answer: Any) -> tuple[int, str]:
        assert int(answer.headers["content-length"]) == len(answer.content)
        return answer.status_code, MessagesErrorBody.model_validate(answer.json()).error.type

    assert kind(http.post("/v1/messages", json=ASK)) == (401, "authentication_error")
    assert kind(http.get("/v1/messages", headers=key)) == (405, "invalid_request_error")
    assert kind(http.post("/v1/messages/x", headers=key)) == (404, "not_found_error")
    assert kind(http.post("/v1/messages", json={**ASK, "model": "x"}, headers=key)) == (404, "not_found_error")
    assert kind(http.post("/v1/messages", json=ASK, headers=key)) == (500, "api_error")
    engine.error = QueueFullError("2 wait")
    assert kind(http.post("/v1/messages", json=ASK, headers=key)) == (503, "overloaded_error")
    assert http.post("/v1/chat/completions", json={}, headers=key).json()["error"]["code"] == "400"


def test_a_failure_in_a_stream_is_an_event(http: TestClient, engine: SpeakingEngine) -> None:
    engine.error = EngineLostError("rank 1 is gone")
    first, *_, last = events_of(http)
    assert first["type"] == "message_start"
    assert MessagesErrorBody.model_validate(last).error.message == "rank 1 is gone"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "one"}, 200),
        ({"x-api-key": "two"}, 200),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "Bearer three", "x-api-key": "one"}, 200),
        ({"x-api-key": "three"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "Bearer one"}, 401),
        ({}, 401),
    ],
)
def test_a_key_may_be_in_either_header(headers: dict[str, str], status: int) -> None:
    server, _ = make_speaking_server(api_keys=("one", "two"))
    assert client_of(server).post("/v1/messages", json=ASK, headers=headers).status_code == status
