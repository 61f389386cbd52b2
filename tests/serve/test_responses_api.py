"""`/v1/responses` over a fake engine, read by the official client: answers, streams, the order of events, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from fake_server import client_of
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter
from speaking_server import SpeakingEngine, make_speaking_server
from starlette.testclient import TestClient
from tool_models import tool_vocabulary

from longspan.serve.apis.responses_requests import ResponsesAnswer
from longspan.serve.errors import EngineLostError
from longspan.serve.recent_items import RecentItems

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Tells it.", "parameters": CITY, "strict": False},
    {"type": "function", "name": "time", "parameters": None, "strict": None},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER_CALL = '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
SCHEMA: Any = {
    "format": {
        "type": "json_schema",
        "name": "a",
        "strict": True,
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
}
ASK: Any = {"model": "tiny", "input": "How is it in Rome?"}
EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[ResponseStreamEvent, Field(discriminator="type")])
CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "It rains.", ["message"]),
    ({}, "<think>\nHm.\n</think>\n\nIt rains.", ["reasoning", "message"]),
    ({"tools": TOOLS}, f"Let me see.\n{CALL}{OTHER_CALL}", ["message", "function_call", "function_call"]),
    ({"tools": TOOLS, "tool_choice": "required"}, f"<think>\nHm.\n</think>\n\n{CALL}", ["reasoning", "function_call"]),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}}, CALL, ["function_call"]),
    ({"text": SCHEMA}, '{"a": 1}', ["message"]),
    ({"text": {"format": {"type": "json_object"}}}, '{"a": 1}', ["message"]),
]
"""Fields of a request, an output and the types of its items."""


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


@pytest.fixture
def client(http: TestClient) -> OpenAI:
    options: Any = {"base_url": "http://testserver/v1", "api_key": "x", "http_client": http}
    return OpenAI(**options, max_retries=0)


def same(response: Response) -> dict[str, Any]:
    """The response without ids and times."""
    text = response.model_dump_json(exclude={"id", "created_at"})
    body: dict[str, Any] = json.loads(text)
    for item in body["output"]:
        del item["id"]
        item.pop("call_id", None)
    return body


def events_of(http: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each valid for the official client, with its name before its data."""
    answer = http.post("/v1/responses", json={**ASK, **fields, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in answer.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize(("fields", "output", "types"), CASES)
def test_a_stream_ends_with_the_response_that_is_not_streamed(
    client: OpenAI, http: TestClient, engine: SpeakingEngine, fields: dict[str, Any], output: str, types: list[str]
) -> None:
    engine.text = output
    whole = client.responses.create(**ASK, **fields)
    assert [item.type for item in whole.output] == types
    assert whole.status == "completed"
    with client.responses.stream(**ASK, **fields) as stream:
        for _ in stream:
            pass
        assert same(stream.get_final_response())["output"][-1]["type"] == types[-1]
    [*_, last] = events_of(http, **fields)
    assert last["type"] == "response.completed"
    assert same(Response.model_validate(last["response"])) == same(whole)
    ResponsesAnswer.model_validate(last["response"])


@pytest.mark.parametrize(("fields", "output", "types"), CASES)
def test_each_item_is_added_grows_and_is_done_before_the_next(
    http: TestClient, engine: SpeakingEngine, fields: dict[str, Any], output: str, types: list[str]
) -> None:
    engine.text = output
    events = events_of(http, **fields)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    position = 2
    for index, kind in enumerate(types):
        end = kinds.index("response.output_item.done", position)
        own = events[position : end + 1]
        position = end + 1
        assert own[0]["type"] == "response.output_item.added"
        assert {event["output_index"] for event in own} == {index}
        assert len({event.get("item_id") or event["item"]["id"] for event in own}) == 1
        name = {
            "message": "response.output_text",
            "reasoning": "response.reasoning_text",
            "function_call": "response.function_call_arguments",
        }[kind]
        deltas = [event["delta"] for event in own if event["type"] == f"{name}.delta"]
        [done] = [event for event in own if event["type"] == f"{name}.done"]
        assert "".join(deltas) == done["arguments" if kind == "function_call" else "text"]
        num_parts = sum(event["type"].startswith("response.content_part") for event in own)
        assert num_parts == (0 if kind == "function_call" else 2)
        assert len(own) == 3 + len(deltas) + num_parts
        assert own[-1]["item"] == events[-1]["response"]["output"][index]
        assert own[-1]["item"]["status"] == "completed"
    assert position == len(events) - 1


def test_texts_reasoning_calls_and_usage_are_those_of_the_output(client: OpenAI, engine: SpeakingEngine) -> None:
    engine.text = f"<think>\nHm. Well.\n</think>\n\nLet me see.\n{CALL}"
    answer = client.responses.create(**ASK, tools=TOOLS, metadata={"a": "b"}, temperature=0.5, store=False)
    reasoning, message, call = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm. Well."
    assert message.type == "message"
    assert answer.output_text == "Let me see.\n"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(engine.engine_requests[-1].token_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    num_tokens = len(engine.tokenizer.encode(engine.text))
    assert answer.usage.output_tokens == num_tokens == answer.usage.total_tokens - answer.usage.input_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == len(engine.tokenizer.encode("Hm. Well."))
    assert (answer.metadata, answer.temperature, answer.top_p, answer.tool_choice) == ({"a": "b"}, 0.5, 1.0, "auto")


def test_an_answer_cut_by_max_output_tokens_is_incomplete(
    client: OpenAI, http: TestClient, engine: SpeakingEngine
) -> None:
    for text, kind in (("It ra", "message"), ("<think>\nHm", "reasoning"), (CALL[:-16], "function_call")):
        engine.text, engine.reasons = text, ("length", None)
        answer = client.responses.create(**ASK, tools=TOOLS, max_output_tokens=50)
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        [item] = answer.output
        assert (item.type, item.to_dict()["status"]) == (kind, "incomplete")
        assert events_of(http, tools=TOOLS)[-1]["type"] == "response.incomplete"
    assert engine.engine_requests[-2].params.max_tokens == 50


def test_a_failure_in_a_stream_is_an_event(http: TestClient, engine: SpeakingEngine) -> None:
    engine.error = EngineLostError("rank 1 is gone")
    *_, last = events_of(http)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "rank 1 is gone"}
    answer = http.post("/v1/responses", json=ASK)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "rank 1 is gone")


def test_items_become_the_messages_of_a_chat(client: OpenAI, engine: SpeakingEngine) -> None:
    engine.text = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
    first = client.responses.create(**ASK, tools=TOOLS, instructions="Be short.")
    [call] = [item for item in first.output if item.type == "function_call"]
    items: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "In English."}]},
        {"role": "user", "content": "How is it in Rome?"},
        *(item.to_dict() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."},
    ]
    engine.text = "It rains."
    client.responses.create(model="tiny", input=items, tools=TOOLS, instructions="Be short.")
    _, prompt = engine.prompt.split(".\n", 1)
    assert prompt == (
        "<|im_start|>system\nBe short.\n\nIn English.<|im_end|>\n"
        "<|im_start|>user\nHow is it in Rome?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nLet me see.\n"
        '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nRain.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_options_reach_the_chat(client: OpenAI, engine: SpeakingEngine) -> None:
    client.responses.create(**ASK, reasoning={"effort": "none"}, top_p=0.5, temperature=0)
    assert engine.prompt.endswith("<think>\n\n</think>\n\n")
    assert (engine.engine_requests[-1].params.top_p, engine.engine_requests[-1].params.temperature) == (0.5, 0)
    grammars = []
    for options in (
        {},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "time"}},
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
        },
        {"text": SCHEMA},
    ):
        client.responses.create(**ASK, **options)
        grammars.append(engine.engine_requests[-1].grammar)
    assert not grammars[0]
    assert len(set(grammars)) == len(grammars)
    client.responses.create(**ASK, tools=TOOLS, tool_choice="none")
    assert "Tools:" not in engine.prompt


class Rain(BaseModel):
    """A form of answers as the client describes it by itself."""

    city: Literal["Rome", "Oslo"]


def test_texts_are_parsed_by_the_client(client: OpenAI, engine: SpeakingEngine) -> None:
    engine.text = '{"city": "Rome"}'
    assert client.responses.parse(**ASK, text_format=Rain).output_parsed == Rain(city="Rome")
    with client.responses.stream(**ASK, text_format=Rain) as stream:
        assert stream.get_final_response().output_parsed == Rain(city="Rome")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"store": True}, "store", "stateless"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stateless"),
        ({"conversation": "conv_1"}, "conversation", "stateless"),
        ({"background": True}, "background", "stateless"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "msg_1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "input_image"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[0].name", "weather"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"not": {}}, "strict": True}]},
            "tools[0].parameters",
            "not",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "2048"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "much"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "given"),
        ({"input": "word " * 4200}, "input", "2048"),
    ],
)
def test_mistakes_are_bad_requests_that_name_the_field(
    client: OpenAI, engine: SpeakingEngine, fields: Any, param: str, words: str
) -> None:
    del engine
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{**ASK, **fields, "stream": stream})
        assert caught.value.param == param
        assert words in caught.value.message
        assert "messages" not in caught.value.message


def test_items_of_recent_responses_may_be_given_by_their_ids(client: OpenAI, engine: SpeakingEngine) -> None:
    """As the AI SDK sends them. The prompt is the same as with whole items, of an answer that was streamed or not."""
    engine.text = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
    question = {"role": "user", "content": ASK["input"]}
    whole = client.responses.create(**{**ASK, "input": [question]}, tools=TOOLS)
    with client.responses.stream(**{**ASK, "input": [question]}, tools=TOOLS) as stream:
        streamed = stream.get_final_response()
    prompts = []
    for output in (whole.output, streamed.output):
        calls = [item for item in output if item.type == "function_call"]
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sun."} for call in calls]
        for items in (output, [{"type": "item_reference", "id": item.id} for item in output]):
            client.responses.create(**{**ASK, "input": [question, *items, *results]}, tools=TOOLS)
            prompts.append(engine.prompt)
    assert len(set(prompts)) == 1
    assert "Let me see." in prompts[0]


def test_responses_with_one_request_id_have_different_items(client: OpenAI, engine: SpeakingEngine) -> None:
    """A proxy may give all requests of a conversation one `x-request-id`."""
    outputs = []
    for engine.text in ("First.", "Second."):
        answer = client.responses.create(**ASK, extra_headers={"x-request-id": "conversation-1"})
        outputs += answer.output
    references: Any = [{"type": "item_reference", "id": item.id} for item in outputs]
    client.responses.create(**{**ASK, "input": [*references, {"role": "user", "content": "Go on."}]})
    assert "First." in engine.prompt and "Second." in engine.prompt


def test_items_of_a_response_that_is_not_stored_have_no_name(client: OpenAI, engine: SpeakingEngine) -> None:
    engine.text = "First."
    [item] = client.responses.create(**ASK, store=False).output
    with pytest.raises(openai.BadRequestError, match=str(item.id)):
        client.responses.create(**{**ASK, "input": [{"type": "item_reference", "id": item.id}]})


def test_an_item_is_given_once(client: OpenAI, engine: SpeakingEngine) -> None:
    engine.text = "First."
    [item] = client.responses.create(**ASK).output
    references: Any = [{"type": "item_reference", "id": item.id}] * 2
    with pytest.raises(openai.BadRequestError, match="twice") as caught:
        client.responses.create(**{**ASK, "input": references})
    assert caught.value.param == "input[1]"


def test_items_are_kept_for_their_client_up_to_a_number_of_bytes() -> None:
    item = {"id": "msg_1", "type": "message", "text": "x" * 100}
    items = RecentItems(max_bytes=400)
    items.add("one", [item])
    assert items.get("one", "msg_1") == item
    assert items.get("two", "msg_1") is None
    items.add("one", [item])  # under the same id: it counts once
    items.add("one", [{**item, "id": "msg_2"}])
    assert items.get("one", "msg_1") == item
    items.add("one", [{**item, "id": "msg_3"}])
    assert items.get("one", "msg_2") is None
    assert items.get("one", "msg_1") == item
    items.add("one", [{**item, "id": "msg_4", "text": "x" * 500}])
    assert items.get("one", "msg_4") is None


@pytest.mark.parametrize("number", [2**64, 10**30, -(2**70)])
def test_integers_of_schemas_return_in_the_response(http: TestClient, engine: SpeakingEngine, number: int) -> None:
    engine.text = "It rains."
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": number, "default": None}}}
    tools = [{**TOOLS[0], "parameters": schema}]
    answer = http.post("/v1/responses", json={**ASK, "tools": tools})
    assert (answer.status_code, answer.json()["tools"]) == (200, tools)
    [*_, last] = events_of(http, tools=tools)
    assert last["response"]["tools"] == tools
