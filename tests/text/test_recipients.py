"""The format of Functionary 3.2, whose outputs are messages to recipients: in templates, grammars and readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tool_models import grammar_accepts, tool, tool_tokenizer, tool_vocabulary

from longspan.serve.chat_requests import ChatCompletionRequest
from longspan.serve.convert import ServedModel, chat_request, output_reader
from longspan.serve.settings import ServerSettings
from longspan.text.call_formats import variants
from longspan.text.call_formats.base import Pieces
from longspan.text.call_formats.recipients import RecipientReader
from longspan.text.call_grammar import detect_format
from longspan.text.input_processor import InputProcessor

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("weather", CITY), tool("time")]
ASK = [{"role": "user", "content": "How is it in Rome?"}]
ONE = 'weather\n{"city": "Rome"}'
TWO = ONE + ">>>time\n{}"
TEMPLATE = "functionary-v3.2"


@cache
def served() -> ServedModel:
    tokenizer = tool_tokenizer(TEMPLATE, with_markers=True)
    used = InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=2048)
    return ServedModel(input_processor=used, settings=ServerSettings(model_names=("tiny",)))


@pytest.fixture(scope="module", autouse=True)
def _freed() -> Iterator[None]:
    """Free the vocabularies, of 30 MB each."""
    yield
    served.cache_clear()
    tool_vocabulary.cache_clear()


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": ASK, **fields})


def read(pieces: list[str], end: Any = "stop") -> tuple[str, list[tuple[str, str]], bool]:
    """The content and the calls of an output."""
    reader, content, calls = RecipientReader(), "", list[list[str]]()
    for index, piece in enumerate(pieces):
        found = reader.add(piece, finish_reason=end if index == len(pieces) - 1 else None)
        assert isinstance(found, Pieces)
        assert not found.reasoning
        content += found.content
        for delta in found.calls:
            if delta.id is not None:
                assert delta.index == len(calls) and delta.name
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls], reader.has_called


def test_the_template_decides_between_the_variants() -> None:
    assert detect_format(served().input_processor) is variants("functionary")[1]
    assert detect_format(served().input_processor, "functionary") is variants("functionary")[1]


def test_calls_go_into_the_next_prompt_and_it_ends_before_the_recipient() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    talk = [*ASK, {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}]
    text = chat_request(request(messages=talk, tools=TOOLS), served()).text
    assert text is not None
    assert f">>>all\nLet me see.>>>{ONE}<|im_end|>" in text
    assert text.endswith("assistant\n>>>")


@pytest.mark.parametrize(
    ("output", "content", "calls"),
    [
        ("all\nIt rains.", "It rains.", []),
        (">>>all\nIt rains.", "It rains.", []),
        ("It rains.", "It rains.", []),
        ("Yes", "Yes", []),
        ("Yes\n", "Yes\n", []),
        ("Yes\nit does", "Yes\nit does", []),
        ("all\na >> b >>> c\n>>> d >", "a >> b >>> c\n>>> d >", []),
        ("all\n>>>time\nflies", ">>>time\nflies", []),
        (ONE, "", [("weather", '{"city": "Rome"}')]),
        (TWO, "", [("weather", '{"city": "Rome"}'), ("time", "{}")]),
        (TWO.replace(">>>", "\n>>>"), "", [("weather", '{"city": "Rome"}'), ("time", "{}")]),
        (f"all\nLet me see.>>>{TWO}", "Let me see.", [("weather", '{"city": "Rome"}'), ("time", "{}")]),
        ("all\nOne.>>>all\nTwo.", "One.Two.", []),
    ],
)
def test_outputs_are_read_in_whatever_pieces(output: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([output], list(output), [output[:5], output[5:12], output[12:]]):
        assert read([*pieces, ""]) == (content, calls, bool(calls))
        assert read(pieces) == (content, calls, bool(calls))


def test_an_output_that_is_cut_shows_no_part_of_the_form() -> None:
    text = f"all\nSee.>>>{TWO}"
    for cut in range(1, len(text)):
        content, calls, has_called = read(list(text[:cut]), "length")
        assert "See.".startswith(content)
        assert all(
            whole.startswith(cut_off) for (_, cut_off), whole in zip(calls, ('{"city": "Rome"}', "{}"), strict=False)
        )
        assert not has_called or all(json.loads(arguments) is not None for _, arguments in calls)


def test_grammars_begin_with_a_recipient() -> None:
    def follows(text: str, **fields: Any) -> bool:
        return grammar_accepts(chat_request(request(**fields), served()).grammar, text)

    for choice in ("auto", "required"):
        fields = {"tools": TOOLS, "tool_choice": choice}
        assert follows(ONE, **fields)
        assert follows(TWO, **fields)
        assert not follows('weather\n{"city": 5}', **fields)
        assert not follows("It rains.", **fields)
        assert follows("all\nIt rains.", **fields) == (choice == "auto")
        assert follows(f"all\nLet me see.>>>{TWO}", **fields) == (choice == "auto")
    assert not follows(TWO, tools=TOOLS, parallel_tool_calls=False)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    for fields in ({"response_format": form}, {"response_format": form, "tools": TOOLS}):
        assert follows('all\n{"city": "Rome"}', **fields)
        assert not follows('{"city": "Rome"}', **fields)
        assert not follows('all\n{"city": 1}', **fields)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}])
def test_the_recipient_is_no_content_without_tools_either(fields: dict[str, Any]) -> None:
    asked = request(**fields)
    make = output_reader(asked, served(), chat_request(asked, served()).text or "")
    assert make is not None
    assert make().add("all\nIt rains.", finish_reason="stop") == Pieces(content="It rains.", calls=[])
