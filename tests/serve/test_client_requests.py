"""Requests that unmodified clients have sent are served. `benchmarks/client_table.py --record` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from fake_server import client_of
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import Field, TypeAdapter
from speaking_server import SpeakingEngine, make_speaking_server
from starlette.testclient import TestClient
from tool_models import tool_vocabulary

from longspan.serve.apis.messages_requests import CountTokensAnswer, CountTokensRequest, MessagesAnswer, MessagesRequest
from longspan.serve.apis.responses_requests import ResponsesRequest
from longspan.serve.chat_requests import ChatCompletionRequest
from longspan.serve.requests import CompletionRequest
from longspan.serve.schemas import ModelCard, ModelList
from longspan.serve.server import Server

RECORDED = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "client_requests").glob("*.json"))
}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
}
WHOLE: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/messages": MessagesAnswer,
    "/v1/messages/count_tokens": CountTokensAnswer,
    "/v1/models": ModelList,
    "/v1/models/smollm2-135m": ModelCard,
    "/v1/responses": Response,
}
EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[ResponseStreamEvent, Field(discriminator="type")])
IGNORED = {"/v1/chat/completions": {"user"}, "/v1/responses": {"include"}}
"""Top-level fields that clients send, and that the server ignores, by path. All other fields are served."""
TEXT, JSON_TEXT = "It rains.", '{"city": "Rome", "rains": true}'


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[TestClient, Server, SpeakingEngine]]:
    server, engine = make_speaking_server("hermes", model_names=("smollm2-135m",))
    yield client_of(server), server, engine
    tool_vocabulary.cache_clear()


def path_of(request: dict[str, Any]) -> str:
    path: str = request["path"]
    return path.partition("?")[0]


def has_format(body: dict[str, Any]) -> bool:
    given = (body.get("response_format"), body.get("text"), body.get("output_config"))
    return any("json" in json.dumps(value) for value in given)


def output_for(body: dict[str, Any]) -> str:
    """Return an output as a grammar would enforce it: a call if the request needs one, or JSON."""
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if tools and kind not in (None, "auto", "none"):
        name = tools[0].get("function", tools[0])["name"]
        return f'<tool_call>\n{{"name": "{name}", "arguments": {JSON_TEXT}}}\n</tool_call>'
    return JSON_TEXT if has_format(body) else TEXT


def keep_references(server: Server, body: dict[str, Any]) -> None:
    """Keep the items of earlier responses that the request refers to."""
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if item.get("type") == "item_reference":
            content = [{"type": "output_text", "text": TEXT}]
            server.recent_items.add(
                "", [{"type": "message", "role": "assistant", "id": item["id"], "content": content}]
            )


def events_of(text: str) -> list[tuple[str, Any]]:
    """Return the names, which may be empty, and the data of the events of a stream."""
    events = []
    for event in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        data = lines["data"]
        events.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def check_stream(path: str, body: dict[str, Any], text: str) -> None:
    events = events_of(text)
    names = [name for name, _ in events]
    match path:
        case "/v1/chat/completions":
            assert events.pop() == ("", "[DONE]")
            chunks = [ChatCompletionChunk.model_validate(chunk) for _, chunk in events]
            assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] in {"stop", "tool_calls"}
            wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            assert (chunks[-1].usage is not None) == wants_usage
        case "/v1/responses":
            assert all(EVENT.validate_python(event).type == name for name, event in events)
            assert (names[0], names[-1]) == ("response.created", "response.completed")
            Response.model_validate(events[-1][1]["response"])
        case "/v1/messages":
            assert (names[0], names[-1]) == ("message_start", "message_stop")
        case _:
            raise AssertionError(f"no client streams {path}")


@pytest.mark.parametrize("name", RECORDED)
def test_requests_of_a_client_are_served(world: tuple[TestClient, Server, SpeakingEngine], name: str) -> None:
    http, server, engine = world
    assert RECORDED[name]["requests"]
    for request in RECORDED[name]["requests"]:
        body, path = request["body"] or {}, path_of(request)
        engine.text = output_for(body)
        keep_references(server, body)
        answer = http.request(request["method"], request["path"], json=request["body"], headers=request["headers"])
        assert answer.status_code == 200, (answer.text, request)
        if body.get("stream"):
            check_stream(path, body, answer.text)
        else:
            WHOLE[path].model_validate(answer.json())
            assert "<tool_call>" not in answer.text


def test_fields_of_clients_that_are_ignored_are_known() -> None:
    ignored: dict[str, set[str]] = {}
    for recorded in RECORDED.values():
        for request in recorded["requests"]:
            body, path = request["body"] or {}, path_of(request)
            given = {name for name, value in body.items() if value is not None}
            if path in BODIES and (unknown := given - BODIES[path].model_fields.keys()):
                ignored.setdefault(path, set()).update(unknown)
    assert ignored == IGNORED


def test_recordings_name_no_key_and_no_machine() -> None:
    for recorded in RECORDED.values():
        for request in recorded["requests"]:
            assert not request["headers"].keys() & {"authorization", "x-api-key", "host", "user-agent"}
            assert request["path"].startswith("/v1/")
