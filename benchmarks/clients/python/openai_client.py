"""The official client of OpenAI, with chats, responses and completions."""

from __future__ import annotations

from typing import Any

import openai
from checks import BASE, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, TOOLS, Weather, check_city, run

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
FLAT_TOOLS: Any = [{"type": "function", **TOOLS[0]["function"], "strict": True}]


def models() -> None:
    assert MODEL in [card.id for card in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=MAX_TOKENS)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def streamed_chat() -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=MAX_TOKENS, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None


def tools() -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_completion_tokens": 400}
    message = (
        client.chat.completions.create(**fields, tool_choice="required", parallel_tool_calls=False).choices[0].message
    )
    call: Any = (message.tool_calls or [])[0]
    check_city(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": FORECAST}
    fields |= {"messages": [*MESSAGES, message, result], "max_completion_tokens": MAX_TOKENS, "tool_choice": "none"}
    assert client.chat.completions.create(**fields).choices[0].message.content


def streamed_tools() -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=named) as stream:
        assert "tool_calls.function.arguments.done" in [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    check_city((message.tool_calls or [])[0].function.arguments)


def structured_output() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


def responses() -> None:
    answer = client.responses.create(
        model=MODEL, input=QUESTION, instructions="Be short.", max_output_tokens=MAX_TOKENS
    )
    assert answer.output_text
    assert answer.usage is not None and answer.usage.output_tokens > 0


def streamed_responses() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Weather) as stream:
        assert "response.output_text.delta" in [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Weather)


def responses_with_tools() -> None:
    given: Any = [{"role": "user", "content": QUESTION}]
    fields: Any = {"model": MODEL, "tools": FLAT_TOOLS, "max_output_tokens": 400}
    answer = client.responses.create(**fields, input=given, tool_choice="required", parallel_tool_calls=False)
    [call] = [item for item in answer.output if item.type == "function_call"]
    check_city(call.arguments)
    given += answer.output
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": FORECAST})
    assert client.responses.create(**fields, input=given, tool_choice="none").output_text


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, logprobs=1)
    assert answer.choices[0].text


def errors() -> None:
    try:
        client.chat.completions.create(model="unknown", messages=MESSAGES)
    except openai.NotFoundError:
        return
    raise AssertionError("an unknown model is found")


run(
    "openai",
    [
        *(models, chat, streamed_chat, tools, streamed_tools, structured_output),
        *(responses, streamed_responses, responses_with_tools, completions, errors),
    ],
)
