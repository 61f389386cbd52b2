"""Requests with tools: their text in the prompt, refusals, and calls in answers, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from chat_chunk import ChatCompletionChunk
from openai.types.chat import ChatCompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk
from tool_models import tool, tool_tokenizer
from wire_world import NAMES, deltas_of, read, stream, whole

from longspan.serve.chat_requests import ChatCompletionRequest, TokenizeRequest
from longspan.serve.convert import ServedModel, chat_request, grammar_kind, grammar_of, output_reader, tokenized
from longspan.serve.errors import WireError
from longspan.serve.requests import CompletionRequest
from longspan.serve.responses import ChatAssembler
from longspan.serve.schemas import ChatCompletionResponse
from longspan.serve.settings import ServerSettings
from longspan.text import reasoning
from longspan.text.call_formats import NAMES as FORMATS
from longspan.text.call_formats import variants
from longspan.text.input_processor import InputProcessor

ASK: list[dict[str, Any]] = [{"role": "user", "content": "How is it in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("weather", CITY), tool("time")]
TWO = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
NAMED = {"type": "function", "function": {"name": "time"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def strict_tool(parameters: dict[str, Any]) -> dict[str, Any]:
    made = tool("f", parameters)
    return {**made, "function": {**made["function"], "strict": True}}


@cache
def served(template: str | None = "hermes", **settings: Any) -> ServedModel:
    tokenizer = tool_tokenizer(template, with_markers=True)
    used = InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=512)
    return ServedModel(input_processor=used, settings=ServerSettings(model_names=("tiny",), **settings))


@pytest.fixture(scope="module", autouse=True)
def _freed() -> Iterator[None]:
    """Free the vocabularies, of 30 MB each."""
    yield
    served.cache_clear()


def request(**fields: Any) -> ChatCompletionRequest:
    return read(ChatCompletionRequest, {"messages": ASK, "tools": TOOLS, **fields})


def prompt(**fields: Any) -> str:
    text = chat_request(request(**fields), served()).text
    assert text is not None
    return text


def answers(
    *outputs: str, finish_reason: Any = "stop", template: str = "hermes", **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A whole answer whose choices are these texts, and the chunks of its stream."""
    asked = request(n=len(outputs), temperature=1, **fields)
    model = served(template)
    engine_request = chat_request(asked, model)
    tokenizer = model.input_processor.tokenizer
    token_ids = [model.input_processor.tokenize(text, add_special_tokens=False) for text in outputs]

    def made() -> tuple[ChatAssembler, list[list[Any]]]:
        deltas = deltas_of(engine_request, token_ids, (1, 2), finish_reason=finish_reason, by=tokenizer)
        return ChatAssembler(
            asked, [engine_request], tokenizer, NAMES, output_reader(asked, model, engine_request.text or "")
        ), [list(deltas)]

    body, chunks = json.loads(msgspec.json.encode(whole(*made()))), json.loads(msgspec.json.encode(stream(*made())))
    ChatCompletion.model_validate(body, strict=True)
    ChatCompletionResponse.model_validate(body)
    for chunk in chunks:
        OpenAIChunk.model_validate(chunk, strict=True)
        ChatCompletionChunk.model_validate(chunk)
    return body, chunks


def without_ids(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def joined(chunks: list[dict[str, Any]], index: int) -> tuple[str, list[tuple[str, str]], str | None]:
    """Return the content of a choice at the end of its stream."""
    text, calls, reason = "", list[dict[str, Any]](), None
    for part in (part for chunk in chunks for part in chunk["choices"] if part["index"] == index):
        assert reason is None, "the reason comes last"
        text, reason = text + part["delta"].get("content", ""), part["finish_reason"]
        for piece in part["delta"].get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({**piece, "function": {**piece["function"]}})
            else:
                assert piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return text, without_ids(calls), reason


def test_answers_have_text_and_calls_and_streams_bring_them_in_pieces() -> None:
    cut = TWO[: TWO.index("Rome") + 2]
    body, chunks = answers(TWO, "It rains.", TWO.partition("\n")[2], cut, stream_options={"include_usage": True})
    messages = [choice["message"] for choice in body["choices"]]
    both = [("weather", '{"city": "Rome"}'), ("time", "{}")]
    assert [message["content"] for message in messages] == ["Let me see.\n", "It rains.", None, "Let me see.\n"]
    found = [without_ids(message.get("tool_calls", [])) for message in messages]
    assert found == [both, [], both, [("weather", '{"city": "Ro')]]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", "stop", "tool_calls", "stop"]
    for choice, message, calls in zip(body["choices"], messages, found, strict=True):
        expected = (message["content"] or "", calls, choice["finish_reason"])
        assert joined(chunks, choice["index"]) == expected
    pieces = [
        part["delta"]["tool_calls"] for chunk in chunks for part in chunk["choices"] if "tool_calls" in part["delta"]
    ]
    assert len(pieces) > 8, "arguments come token by token"
    assert chunks[-1]["usage"] == body["usage"]


def test_an_answer_that_is_cut_off_says_so() -> None:
    body, chunks = answers(TWO, finish_reason="length")
    assert body["choices"][0]["finish_reason"] == joined(chunks, 0)[2] == "length"


ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
}


@pytest.mark.parametrize("form", ONE)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_answer_that_is_cut_off_after_any_token_shows_no_markup(form: str, choice: str) -> None:
    token_ids = served(form).input_processor.tokenize(ONE[form], add_special_tokens=False)
    tokenizer: Any = served(form).input_processor.tokenizer
    cuts = [tokenizer.decode(token_ids[:count]) for count in range(1, len(token_ids) + 1)]
    body, chunks = answers(*cuts, template=form, finish_reason="length", tool_choice=choice)
    begin = ONE[form].index('{"city')
    for cut, found in zip(cuts, body["choices"], strict=True):
        arguments = cut[begin : ONE[form].index("}") + 1]
        calls = [("weather", arguments)] if arguments else []
        assert without_ids(found["message"].get("tool_calls", [])) == calls, cut
        assert not found["message"]["content"], cut
        assert joined(chunks, found["index"]) == ("", calls, "length")


def test_a_text_in_json_that_looks_like_a_call_is_no_call() -> None:
    text = '{"a": "<tool_call>", "b": {"name": "weather", "arguments": {}}}'
    body, chunks = answers(text, text[:40], response_format={"type": "json_object"})
    assert [choice["message"]["content"] for choice in body["choices"]] == [text, text[:40]]
    assert [joined(chunks, index) for index in (0, 1)] == [(text, [], "stop"), (text[:40], [], "stop")]


def test_tagged_values_are_read_by_the_schema_of_their_grammar() -> None:
    output = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    for properties, value in (
        ({"a": {"type": ["string"]}}, "5"),
        ({"a": {"type": "string", "enum": []}}, "5"),
        ({"a": {"enum": 5}}, 5),
        ({"a": {"type": "integer"}}, 5),
        ([], 5),
    ):
        tools = [tool("f", {"type": "object", "properties": properties})]
        body, _ = answers(output, template="qwen3_coder", tools=tools)
        [call] = body["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": value}


def test_logprobs_and_token_ids_are_those_of_all_tokens() -> None:
    body, chunks = answers(TWO, logprobs=True, top_logprobs=1, return_token_ids=True)
    token_ids = served().input_processor.tokenize(TWO, add_special_tokens=False)
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert body["choices"][0]["token_ids"] == token_ids == [one for part in parts for one in part.get("token_ids", [])]
    logprobs = body["choices"][0]["logprobs"]["content"]
    assert len(logprobs) == len(token_ids) == body["usage"]["completion_tokens"]
    assert [one for part in parts for one in (part["logprobs"] or {"content": []})["content"]] == logprobs


def test_tools_are_in_the_prompt_unless_none_may_be_called() -> None:
    assert "The weather." in prompt() and '"city"' in prompt()
    assert prompt(tool_choice=NAMED) == prompt(tool_choice="required") == prompt()
    assert prompt(tool_choice="none") == prompt(tools=None) == prompt(tools=[])
    assert "strict" not in prompt(tools=[{"type": "function", "function": {"name": "time", "strict": True}}])
    body = {"messages": ASK, "tools": TOOLS}
    told = tokenized(read(TokenizeRequest, body), served())["tokens"]
    assert tuple(told) == chat_request(request(), served()).token_ids


def test_calls_and_their_answers_go_into_the_next_prompt() -> None:
    body, _ = answers(TWO)
    message = body["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in message["tool_calls"]]
    text = prompt(messages=[*ASK, message, *results])
    assert f"<|im_start|>assistant\n{TWO.replace(chr(10), chr(10) * 2, 1)}<|im_end|>" in text
    assert text.count("<|im_start|>tool\nfine<|im_end|>") == 2
    tokenizer: Any = served().input_processor.tokenizer
    for call in message["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    full = [TOOLS[0], tool("time", {"type": "object", "properties": {}})]
    options: Any = {"tools": full, "tokenize": False, "add_generation_prompt": True}
    assert text == tokenizer.apply_chat_template([*ASK, message, *results], **options)


def test_a_template_that_joins_arguments_to_texts_gets_json() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    asked = request(messages=[*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}])
    text = chat_request(asked, served("functionary-text")).text
    assert text is not None
    assert '<function=weather>{"city": "Rome"}</function>' in text


def test_a_template_learns_which_function_has_answered() -> None:
    template = "{{ tools }}{% for message in messages %}{{ message.name }},{% endfor %}"
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    results = [{"role": "tool", "tool_call_id": id_, "content": "fine"} for id_ in ("a", "b")]
    named = {**results[0], "name": "mine"}
    asking = request(messages=[*ASK, asked, *results, named], tool_choice="none")
    assert chat_request(asking, served(template)).text == "None,,time,,mine,"


def test_the_grammar_allows_exactly_the_callable_tools() -> None:
    assert grammar_kind(request()) == grammar_kind(request(tool_choice="required")) == "tools"
    assert grammar_kind(request(tool_choice="none")) == grammar_kind(request(tools=[])) == "text"
    assert grammar_of(request(tool_choice="none"), served()) == ""
    grammars = [
        grammar_of(request(**fields), served())
        for fields in (
            {},
            {"parallel_tool_calls": False},
            {"tool_choice": "required"},
            {"tool_choice": NAMED},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}},
        )
    ]
    assert len(set(grammars)) == len(grammars)
    assert ["weather" in grammar for grammar in grammars] == [True, True, True, False, True, True]
    assert grammar_of(request(tool_choice="auto"), served()) == grammars[0]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [*TOOLS, tool("time")]}, "tools[1].function.name", "2 tools named 'time'"),
        ({"tool_choice": {"type": "function", "function": {"name": "date"}}}, "tool_choice", "no tool named 'date'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type", "'function'"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs", "tools"),
        (
            {"tools": [*TOOLS, strict_tool({"properties": {"a": {"propertyNames": {"maxLength": 3}}}})]},
            "tools[2].function.parameters",
            "propertyNames",
        ),
        (
            {"tool_choice": allowed("auto", "time", "date")},
            "tool_choice",
            "no tool named 'date'",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [tool("")]}, "tools[0].function.name", "must not be empty"),
    ],
)
def test_bad_tools_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(WireError) as caught:
        chat_request(request(**fields), served())
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert words in str(caught.value)


def test_completions_have_no_tools() -> None:
    with pytest.raises(WireError, match="only chats have tools") as caught:
        read(CompletionRequest, {"prompt": "a", "tools": TOOLS})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED])
def test_a_template_that_knows_no_tools_says_so(choice: Any) -> None:
    with pytest.raises(WireError, match="the model's chat template describes no tools") as caught:
        chat_request(request(tool_choice=choice), served(None))
    assert caught.value.param == "tools"
    assert chat_request(request(tool_choice="none"), served(None)).grammar == ""


def test_allowed_tools_are_in_the_prompt_with_all_tools_and_alone_in_the_grammar() -> None:
    choice = allowed("required", "time")
    assert prompt(tool_choice=choice) == prompt()
    assert grammar_of(request(tool_choice=choice), served()) == grammar_of(
        request(tools=[TOOLS[1]], tool_choice="required"), served()
    )
    some = grammar_of(request(tool_choice=allowed("auto", "time")), served())
    assert some == grammar_of(request(tools=[TOOLS[1]]), served())


def test_calls_in_an_unknown_format_are_text_unless_a_call_is_required() -> None:
    unknown = served("{{ tools }}{{ messages[0].content }}")
    assert chat_request(request(), unknown).grammar == ""
    json_only: dict[str, Any] = {"response_format": {"type": "json_object"}}
    assert grammar_of(request(**json_only), unknown) == grammar_of(request(tools=[], **json_only), unknown) != ""
    assert output_reader(request(), unknown, "") is None
    assert chat_request(request(tool_choice="required"), unknown).grammar
    assert served("{{ tools }}", tool_call_parser="mistral").call_format is variants("mistral")[0]
    assert served("mistral").call_format is variants("mistral")[0]


def test_a_server_may_disable_the_models_choice() -> None:
    with pytest.raises(WireError, match="--enable-auto-tool-choice") as caught:
        chat_request(request(), served(enable_auto_tool_choice=False))
    assert caught.value.param == "tool_choice"
    assert chat_request(request(tool_choice="required"), served(enable_auto_tool_choice=False)).grammar


def test_flags_name_the_forms_that_there_are() -> None:
    hints = get_type_hints(ServerSettings)
    assert get_args(hints["tool_call_parser"]) == ("auto", *FORMATS)
    assert get_args(hints["reasoning_parser"]) == ("auto", *reasoning.FORMATS)
