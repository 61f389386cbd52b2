"""LangChain's chat model of OpenAI, with chats and with responses."""

from __future__ import annotations

from typing import Any, Literal

from checks import BASE, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, Weather, check_city, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"{city}: {FORECAST}"


def model(max_tokens: int = MAX_TOKENS, **options: Any) -> Any:
    common: Any = {"base_url": BASE, "api_key": KEY, "model": MODEL, "max_retries": 0}
    return ChatOpenAI(**common, max_tokens=max_tokens, **options)


def chat() -> None:
    answer = model().invoke([("system", "Be short."), ("user", QUESTION)])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}


def streamed_chat() -> None:
    chunks = list(model(stream_usage=True).stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)


def _tools(bound: Any, after: Any) -> None:
    turns: list[Any] = [HumanMessage(QUESTION)]
    answer = bound.invoke(turns)
    for call in answer.tool_calls:
        check_city(call["args"])
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert results
    assert after.invoke([*turns, answer, *results]).content


def tools() -> None:
    bound = model(max_tokens=400)
    _tools(bound.bind_tools([weather], tool_choice="any"), model().bind_tools([weather], tool_choice="none"))


def streamed_tools() -> None:
    whole: Any = None
    for chunk in model(max_tokens=400).bind_tools([weather], tool_choice="weather").stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    check_city(whole.tool_calls[0]["args"])


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(
            model(max_tokens=400).with_structured_output(Weather, method=method).invoke(QUESTION), Weather
        )


def responses() -> None:
    answer = model(use_responses_api=True).invoke([("user", QUESTION)])
    assert answer.text
    assert model(use_responses_api=True).invoke([("user", QUESTION), answer, ("user", "And in Oslo?")]).text


def streamed_responses() -> None:
    assert "".join(chunk.text for chunk in model(use_responses_api=True).stream(QUESTION))


def responses_with_tools() -> None:
    bound = model(max_tokens=400, use_responses_api=True)
    after = model(use_responses_api=True).bind_tools([weather], tool_choice="none")
    _tools(bound.bind_tools([weather], tool_choice="any"), after)


run(
    "langchain-openai",
    [
        *(chat, streamed_chat, tools, streamed_tools, structured_output),
        *(responses, streamed_responses, responses_with_tools),
    ],
)
