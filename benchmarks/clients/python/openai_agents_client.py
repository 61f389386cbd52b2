"""The OpenAI Agents SDK, with responses, its default, and with chats."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, Weather, run
from openai import AsyncOpenAI

set_tracing_disabled(True)
SETTINGS = ModelSettings(max_tokens=600, temperature=0)
"""The SDK raises an error for a response that `max_tokens` cuts off."""
MODELS = {"responses": OpenAIResponsesModel, "chats": OpenAIChatCompletionsModel}


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"{city}: {FORECAST}"


def agent(**options: Any) -> Any:
    client = AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0)
    model = MODELS[options.pop("api")](MODEL, client)
    return Agent(name="Forecaster", instructions="Be short.", model=model, **options)


def _chat(api: str) -> None:
    result = Runner.run_sync(agent(api=api, model_settings=SETTINGS), QUESTION)
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 0
    turns: Any = [*result.to_input_list(), {"role": "user", "content": "And in Oslo?"}]
    assert Runner.run_sync(agent(api=api, model_settings=SETTINGS), turns).final_output


def _streamed(api: str) -> None:
    async def read() -> int:
        result = Runner.run_streamed(agent(api=api, model_settings=SETTINGS), QUESTION)
        return len([event async for event in result.stream_events()])

    assert asyncio.run(read()) > 2


def _tools(api: str) -> None:
    """Call a tool because it is required. The SDK then resets the choice, and the loop ends at the tool's result."""
    settings = ModelSettings(max_tokens=400, tool_choice="required", parallel_tool_calls=False)
    forecaster = agent(api=api, model_settings=settings, tools=[weather], tool_use_behavior="stop_on_first_tool")
    result = Runner.run_sync(forecaster, QUESTION)
    assert FORECAST in result.final_output
    turns: Any = [*result.to_input_list(), {"role": "user", "content": "Thank you."}]
    settings = ModelSettings(max_tokens=MAX_TOKENS, tool_choice="none")
    assert Runner.run_sync(agent(api=api, model_settings=settings, tools=[weather]), turns).final_output


def _structured(api: str) -> None:
    result = Runner.run_sync(agent(api=api, output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)


def chat() -> None:
    _chat("responses")


def streamed_chat() -> None:
    _streamed("responses")


def tools() -> None:
    _tools("responses")


def structured_output() -> None:
    _structured("responses")


def chat_by_chats() -> None:
    _chat("chats")


def streamed_chat_by_chats() -> None:
    _streamed("chats")


def tools_by_chats() -> None:
    _tools("chats")


def structured_output_by_chats() -> None:
    _structured("chats")


run(
    "openai-agents",
    [
        *(chat, streamed_chat, tools, structured_output),
        *(chat_by_chats, streamed_chat_by_chats, tools_by_chats, structured_output_by_chats),
    ],
)
