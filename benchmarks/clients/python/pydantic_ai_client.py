"""Pydantic AI's models of OpenAI, with chats and with responses."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import BASE, KEY, MAX_TOKENS, MODEL, QUESTION, Weather, run
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def agent(form: Any, **options: Any) -> Any:
    settings = {"max_tokens": options.pop("max_tokens", MAX_TOKENS)}
    model = form(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    return Agent(model, instructions="Be short.", model_settings=settings, **options)


def _chat(form: Any) -> None:
    first = agent(form).run_sync(QUESTION)
    assert first.output
    assert first.usage.output_tokens > 0
    assert agent(form).run_sync("And in Oslo?", message_history=first.all_messages()).output


def _streamed(form: Any) -> None:
    async def read() -> str:
        async with agent(form).run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])

    assert asyncio.run(read())


def _tools(form: Any) -> None:
    """Return structured output by a tool, which the client requires. The next run has the call and its result."""
    first = agent(form, output_type=ToolOutput(Weather), max_tokens=400, retries=0).run_sync(QUESTION)
    assert isinstance(first.output, Weather)
    assert agent(form).run_sync("Thank you.", message_history=first.all_messages()).output


def _structured(form: Any) -> None:
    assert isinstance(agent(form, output_type=NativeOutput(Weather), max_tokens=400).run_sync(QUESTION).output, Weather)


def chat() -> None:
    _chat(OpenAIChatModel)


def streamed_chat() -> None:
    _streamed(OpenAIChatModel)


def tools() -> None:
    _tools(OpenAIChatModel)


def structured_output() -> None:
    _structured(OpenAIChatModel)


def responses() -> None:
    _chat(OpenAIResponsesModel)


def streamed_responses() -> None:
    _streamed(OpenAIResponsesModel)


def responses_with_tools() -> None:
    _tools(OpenAIResponsesModel)


def structured_responses() -> None:
    _structured(OpenAIResponsesModel)


run(
    "pydantic-ai-slim",
    [
        *(chat, streamed_chat, tools, structured_output),
        *(responses, streamed_responses, responses_with_tools, structured_responses),
    ],
)
