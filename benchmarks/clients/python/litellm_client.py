"""LiteLLM as a library, with chats, responses and Anthropic's messages."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from checks import BASE, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, TOOLS, URL, Weather, check_city, run

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
COMMON: Any = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY, "num_retries": 0}
ANTHROPIC: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}


def chat() -> None:
    answer: Any = litellm.completion(**COMMON, messages=MESSAGES, max_tokens=MAX_TOKENS)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.completion_tokens > 0


def streamed_chat() -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks: Any = list(litellm.completion(**COMMON, messages=MESSAGES, max_tokens=MAX_TOKENS, **options))
    whole: Any = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


def _tools(common: Any) -> None:
    fields: Any = {**common, "tools": TOOLS, "max_tokens": 400}
    message: Any = litellm.completion(**fields, messages=MESSAGES, tool_choice="required").choices[0].message
    results = []
    for call in message.tool_calls:
        check_city(call.function.arguments)
        results.append({"role": "tool", "tool_call_id": call.id, "content": FORECAST})
    turns = [*MESSAGES, message, *results]
    after: Any = litellm.completion(**fields, messages=turns, tool_choice="none")
    assert after.choices[0].message.content


def tools() -> None:
    _tools(COMMON)


def structured_output() -> None:
    answer: Any = litellm.completion(**COMMON, messages=MESSAGES, max_tokens=400, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


def responses() -> None:
    answer: Any = litellm.responses(**COMMON, input=QUESTION, max_output_tokens=MAX_TOKENS)
    assert answer.output[0].content[0].text


def messages() -> None:
    answer: Any = litellm.completion(**ANTHROPIC, messages=MESSAGES, max_tokens=MAX_TOKENS)
    assert answer.choices[0].message.content


def messages_with_tools() -> None:
    _tools(ANTHROPIC)


def native_messages() -> None:
    answer: Any = asyncio.run(litellm.anthropic.messages.acreate(**ANTHROPIC, messages=MESSAGES, max_tokens=MAX_TOKENS))
    assert answer["content"][0]["text"]


run(
    "litellm",
    [chat, streamed_chat, tools, structured_output, responses, messages, messages_with_tools, native_messages],
)
