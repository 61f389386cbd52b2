"""LlamaIndex's models for servers with OpenAI's API. LlamaIndex reads the annotations of a tool as values."""

from typing import Any, Literal

from checks import BASE, FORECAST, KEY, MAX_TOKENS, MODEL, QUESTION, Weather, check_city, run
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"{city}: {FORECAST}"


def model(max_tokens: int = MAX_TOKENS, **options: Any) -> Any:
    common: Any = {"model": MODEL, "api_base": BASE, "api_key": KEY, "max_retries": 0, "context_window": 4096}
    common |= {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": max_tokens}
    return OpenAILike(**common | options)


MESSAGES = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content=QUESTION)]


def chat() -> None:
    answer = model().chat(MESSAGES)
    assert answer.message.content
    assert answer.raw.usage.completion_tokens > 0


def streamed_chat() -> None:
    assert "".join(piece.delta or "" for piece in model().stream_chat(MESSAGES))


def completion() -> None:
    assert model(is_chat_model=False).complete("Once upon a time").text


def tools() -> None:
    llm, tool = model(max_tokens=400), FunctionTool.from_defaults(weather)
    answer = llm.chat_with_tools([tool], chat_history=MESSAGES, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    for call in calls:
        check_city(call.tool_kwargs)
    results = [
        ChatMessage(role="tool", content=weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    assert results
    turns = [*MESSAGES, answer.message, *results]
    assert llm.chat(turns).message.content


def streamed_tools() -> None:
    llm, tool = model(max_tokens=400), FunctionTool.from_defaults(weather)
    *_, last = llm.stream_chat_with_tools([tool], chat_history=MESSAGES, tool_required=True)
    check_city(llm.get_tool_calls_from_response(last)[0].tool_kwargs)


def structured_output() -> None:
    llm = model(max_tokens=400)
    assert isinstance(llm.structured_predict(Weather, PromptTemplate(QUESTION)), Weather)
    llm = model(max_tokens=400, should_use_structured_outputs=True)
    assert isinstance(llm.structured_predict(Weather, PromptTemplate(QUESTION)), Weather)


run("llama-index-llms-openai-like", [chat, streamed_chat, completion, tools, streamed_tools, structured_output])
