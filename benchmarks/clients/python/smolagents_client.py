"""smolagents: its model of OpenAI's API, and an agent with a tool."""

from __future__ import annotations

from typing import Any, Literal

from checks import BASE, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, check_city, run
from smolagents import ChatMessage, CodeAgent, LogLevel, MessageRole, OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city.

    Args:
        city: The city.
    """
    return f"{city}: {FORECAST}"


def model(max_tokens: int = MAX_TOKENS) -> Any:
    return OpenAIServerModel(MODEL, api_base=BASE, api_key=KEY, max_tokens=max_tokens, client_kwargs={"max_retries": 0})


MESSAGES = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]


def chat() -> None:
    answer = model().generate(MESSAGES, stop_sequences=["Observation:"])
    assert answer.content
    assert answer.token_usage.output_tokens > 0


def streamed_chat() -> None:
    assert "".join(delta.content or "" for delta in model().generate_stream(MESSAGES))


def tools() -> None:
    answer = model(400).generate(MESSAGES, tools_to_call_from=[weather])
    check_city(answer.tool_calls[0].function.arguments)


def structured_output() -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    check_city(model(400).generate(MESSAGES, response_format=form).content)


def agent() -> None:
    """Take steps of an agent, whose history has calls and their results. A small model may find no final answer."""
    caller = ToolCallingAgent(tools=[weather], model=model(400), max_steps=2, verbosity_level=LogLevel.OFF)
    state = caller.run(QUESTION, return_full_result=True)
    assert not [
        step["error"]
        for step in state.steps
        if step.get("error", {}) and "Error while generating" in str(step["error"])
    ]


def code_agent() -> None:
    coder = CodeAgent(tools=[weather], model=model(), max_steps=1, verbosity_level=LogLevel.OFF)
    state = coder.run(QUESTION, return_full_result=True)
    assert not [
        step["error"]
        for step in state.steps
        if step.get("error", {}) and "Error while generating" in str(step["error"])
    ]


run("smolagents", [chat, streamed_chat, tools, structured_output, agent, code_agent])
