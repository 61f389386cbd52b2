"""The official `openai` client calls tools of a real server, whose model is nonsense: grammars alone make the calls."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from jsonschema import validate
from openai import OpenAI
from pydantic import BaseModel
from server_process import MODEL, ServerProcess
from tool_models import tool, tool_tokenizer

CITIES = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [tool("weather", CITIES), tool("time")]
STRICT: Any = tool("f", {"properties": {"a": {"type": "strin"}}})
STRICT["function"]["strict"] = True
SCHEMAS = {"weather": CITIES, "time": EMPTY}
MESSAGES: Any = [{"role": "user", "content": "How is it in Rome?"}]
TALK: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300}
_TOKENIZER: Any = tool_tokenizer("hermes", with_markers=True)
BEGIN, END = (str(_TOKENIZER.convert_tokens_to_ids(token)) for token in ("<tool_call>", "<|im_end|>"))


@pytest.fixture(scope="module")
def client(tetris_server: ServerProcess) -> OpenAI:
    return tetris_server.client.openai()


def check_calls(calls: Any) -> list[str]:
    """Check that arguments follow their schemas. Return the names."""
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function"
        validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


def test_required_tools_are_called_by_their_schemas(client: OpenAI) -> None:
    names = set()
    for seed in range(4):
        answer = client.chat.completions.create(**TALK, tool_choice="required", parallel_tool_calls=False, seed=seed)
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls is not None
        assert len(choice.message.tool_calls) == 1
        names.update(check_calls(choice.message.tool_calls))
    assert names <= set(SCHEMAS)


def test_a_call_that_max_tokens_cuts_before_its_arguments_is_left_out(client: OpenAI) -> None:
    """Whole and streamed."""
    for max_tokens in (1, 2, 4, 7):
        talk: Any = {**TALK, "max_tokens": max_tokens, "tool_choice": "required", "seed": 1}
        [choice] = client.chat.completions.create(**talk).choices
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)
        *pieces, last = [chunk.choices[0] for chunk in client.chat.completions.create(**talk, stream=True)]
        assert last.finish_reason == "length"
        assert not any(piece.delta.content or piece.delta.tool_calls for piece in (*pieces, last))


def test_a_named_tool_is_called_and_its_answer_goes_into_the_next_turn(client: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    message = client.chat.completions.create(**TALK, tool_choice=named).choices[0].message
    assert check_calls(message.tool_calls) == ["weather"]
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sun."}
    talk = {**TALK, "messages": [*MESSAGES, message, result], "max_tokens": 4}
    answer = client.chat.completions.create(**talk, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 30


def test_a_model_calls_when_it_wants_to_and_follows_the_schema_from_there(client: OpenAI) -> None:
    quiet = client.chat.completions.create(**{**TALK, "max_tokens": 8}, temperature=0, logit_bias={BEGIN: -100})
    assert quiet.choices[0].message.tool_calls is None
    assert quiet.choices[0].finish_reason in ("stop", "length")
    free = client.chat.completions.create(**{**TALK, "max_tokens": 8, "tools": openai.omit}, temperature=0)
    assert free.choices[0].finish_reason == "length"
    eager: Any = {"logit_bias": {BEGIN: 100}, "n": 3, "parallel_tool_calls": False, "temperature": 1.0, "seed": 5}
    answer = client.chat.completions.create(**TALK, **eager)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 3
    for choice in answer.choices:
        assert len(check_calls(choice.message.tool_calls)) == 1


def test_calls_in_a_stream_are_those_of_the_whole_answer(client: OpenAI) -> None:
    options: Any = {**TALK, "tool_choice": "required", "temperature": 1.0, "seed": 3, "logit_bias": {BEGIN: 5}}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    expected, found = whole.choices[0].message.tool_calls, streamed.choices[0].message.tool_calls
    assert expected is not None
    assert found is not None
    names = check_calls(found)
    assert len(names) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert isinstance(one, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        assert isinstance(other, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_may_hold_several_calls(client: OpenAI) -> None:
    """The answer ends as soon as it may, but not before `min_tokens`."""
    options: Any = {**TALK, "tools": TOOLS[1:], "temperature": 0, "logit_bias": {END: 100}}
    one, several = (
        client.chat.completions.create(**options, tool_choice="required", extra_body={"min_tokens": least}).choices[0]
        for least in (0, 60)
    )
    assert len(check_calls(one.message.tool_calls)) == 1
    assert len(check_calls(several.message.tool_calls)) > 1
    assert one.finish_reason == several.finish_reason == "tool_calls"


class GetWeather(BaseModel):
    """A tool as the client describes it by itself."""

    city: Literal["Rome", "Oslo"]
    day: Literal[1, 2, 3]


def test_arguments_are_parsed_by_the_client(client: OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(GetWeather)]
    answer = client.chat.completions.parse(
        **{**TALK, "tools": tools, "max_tokens": 900}, tool_choice="required", parallel_tool_calls=False
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "date"}}}, "tool_choice"),
        ({"tools": [*TOOLS, STRICT]}, "tools[2].function.parameters"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[0].function.name"),
    ],
)
def test_bad_tools_are_bad_requests(client: OpenAI, fields: Any, param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**TALK, **fields, "stream": stream})
        assert caught.value.param == param
