"""The official client of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from anthropic import beta_tool
from checks import CITY, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, URL, Weather, check_city, run

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"name": "weather", "description": "Tells it.", "input_schema": CITY}]


def chat() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=MESSAGES, system="Be short.")
    assert answer.content[0].type == "text"
    assert answer.stop_reason in {"end_turn", "max_tokens"}
    assert answer.usage.output_tokens > 0


def streamed_chat() -> None:
    with client.messages.stream(model=MODEL, max_tokens=MAX_TOKENS, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens > 0


def tools() -> None:
    fields: Any = {"model": MODEL, "max_tokens": 400, "tools": TOOLS}
    answer = client.messages.create(**fields, messages=MESSAGES, tool_choice={"type": "any"})
    calls = [block for block in answer.content if block.type == "tool_use"]
    check_city(calls[0].input)
    assert answer.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": FORECAST} for call in calls]
    turns = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    assert client.messages.create(**fields, messages=turns, tool_choice={"type": "none"}).content


def streamed_tools() -> None:
    named: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=MODEL, max_tokens=400, messages=MESSAGES, tools=TOOLS, tool_choice=named
    ) as stream:
        [call] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    check_city(call.input)


def tool_runner() -> None:
    asked = []

    @beta_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Tell the weather.

        Args:
            city: The city.
        """
        asked.append(city)
        return FORECAST

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=400, messages=MESSAGES, tools=[weather], tool_choice={"type": "any"}, max_iterations=2
    )
    assert len(list(runner)) == 2
    assert asked


def structured_output() -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=400, messages=MESSAGES, output_format=Weather)
    assert isinstance(answer.parsed_output, Weather)


def thinking() -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=1100, messages=MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert answer.content


def cached_system() -> None:
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=MESSAGES, system=system)
    assert answer.content


def count_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=TOOLS).input_tokens > 0


def models() -> None:
    assert MODEL in [card.id for card in client.models.list()]


def errors() -> None:
    try:
        client.messages.create(model="unknown", max_tokens=1, messages=MESSAGES)
    except anthropic.NotFoundError:
        return
    raise AssertionError("an unknown model is found")


run(
    "anthropic",
    [
        *(models, chat, streamed_chat, tools, streamed_tools, tool_runner, structured_output, thinking),
        *(cached_system, count_tokens, errors),
    ],
)
