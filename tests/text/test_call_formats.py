"""Formats of calls beyond JSON objects: their templates, their grammars, and their readers, whole and in pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from tool_models import grammar_accepts, tool, tool_tokenizer, tool_vocabulary

from longspan.errors import ParameterError
from longspan.text.call_formats import NAMES, variants
from longspan.text.call_formats.base import CallFormat, Function, Pieces
from longspan.text.call_grammar import calls_grammar, detect_format
from longspan.text.call_reader import CallReader
from longspan.text.input_processor import InputProcessor

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "near": {"type": "boolean"},
    },
    "required": ["city"],
}
FREE = {"anyOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {}}}]}
FUNCTIONS = (
    Function("weather", SCHEMA, "tools[0].function.parameters"),
    Function("note", FREE, "tools[1].function.parameters"),
)
SCHEMAS = {function.name: function.parameters for function in FUNCTIONS}
ROME = {"city": "Rome <b>\n2", "unit": "C", "days": [1, 2], "near": True}
TEMPLATES = ("mistral-v11", "granite", "functionary", "qwen3_coder", "glm45", "openai")


@cache
def processor(template: str) -> InputProcessor:
    tokenizer = tool_tokenizer(template, with_markers=True)
    return InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=4096)


@pytest.fixture(scope="module", autouse=True)
def _freed() -> Iterator[None]:
    """Free the vocabularies, of 30 MB each."""
    yield
    for made in (processor, grammar, tool_vocabulary):
        made.cache_clear()


def form_of(template: str) -> CallFormat:
    form = detect_format(processor(template))
    assert form is not None
    return form


def written(template: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """These calls as the template writes them in a message."""
    made = [
        {"id": "a1b2c3d4e", "type": "function", "function": {"name": name, "arguments": value}} for name, value in calls
    ]
    user = {"role": "user", "content": "Go."}
    shown = [user, {"role": "assistant", "content": "", "tool_calls": made}]
    text = processor(template).render_chat(shown, tools=[tool("weather", SCHEMA)], add_generation_prompt=False)
    begin = "<|start|>assistant" if template == "openai" else "<|im_start|>assistant\n"
    return text.rpartition(begin)[2].removesuffix("<|im_end|>\n").lstrip("\n")


@cache
def grammar(template: str, *, required: bool, parallel: bool = True) -> str:
    return calls_grammar(form_of(template), FUNCTIONS, processor(template), required=required, parallel=parallel)


def follows(template: str, text: str, **options: bool) -> bool:
    return grammar_accepts(grammar(template, **options), text)


def read(form: CallFormat, pieces: list[str], end: Any = "stop", **options: bool) -> tuple[Pieces, list[Any], bool]:
    reader = form.output_reader() or CallReader(form, SCHEMAS, **options)
    reasoning, content, calls = "", "", list[list[str]]()
    for index, piece in enumerate(pieces):
        found = reader.add(piece, finish_reason=end if index == len(pieces) - 1 else None)
        reasoning, content = reasoning + found.reasoning, content + found.content
        for delta in found.calls:
            if delta.id is not None:
                assert delta.index == len(calls) and delta.name
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return Pieces(reasoning, content), calls, reader.has_called


def test_each_template_has_its_format() -> None:
    expected = ("mistral", "granite", "functionary", "qwen3_coder", "glm45", "openai")
    for template, name in zip(TEMPLATES, expected, strict=True):
        assert form_of(template) in variants(name)
        assert detect_format(processor(template), name) is form_of(template)
        assert detect_format(processor("hermes"), name) is variants(name)[0], "the flag decides"
    assert form_of("mistral-v11") is variants("mistral")[1]
    assert {form for name in NAMES for form in variants(name)} >= {form_of(template) for template in TEMPLATES}


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_are_read_in_whatever_pieces(template: str) -> None:
    calls = [("weather", ROME), ("note", {"a": "b", "n": 5})]
    calls = calls[:1] if template == "openai" else calls
    text = written(template, *calls)
    for pieces in ([text], list(text), [text[:9], text[9:40], text[40:]]):
        _, found, has_called = read(form_of(template), pieces)
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls
        assert has_called
    assert read(form_of(template), list("Just a <b> text [x].")) == (Pieces("", "Just a <b> text [x]."), [], False)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_cut_call_is_no_text_and_its_arguments_are_a_beginning_of_json(template: str) -> None:
    text = written(template, ("weather", ROME))
    _, [[_, whole]], _ = read(form_of(template), [text])
    for cut in range(1, len(text)):
        parts, found, has_called = read(form_of(template), list(text[:cut]), "length")
        assert not parts.content, text[:cut]
        assert [whole.startswith(arguments) for _, arguments in found] in ([], [True])
        assert not has_called or json.loads(found[0][1]) == ROME


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_grammar_allows_the_calls_of_the_template(template: str) -> None:
    if template == "openai":
        head = "<|channel|>commentary to=functions."
        one = head + 'weather <|constrain|>json<|message|>{"city": "Rome"}'
        wrong = head + 'weather <|constrain|>json<|message|>{"city": 5}'
    else:
        calls = dict(ROME) if template != "granite" else {}
        one = (
            written(template, ("weather", calls))
            if calls
            else '<|tool_call|>[{"name": "weather", "arguments": {"city": "a"}}]'
        )
        wrong = one.replace("near", "far").replace("city", "town")
    for required in (False, True):
        assert follows(template, one, required=required), one
        assert not follows(template, wrong, required=required)
        assert follows(template, "Just text.", required=required) == (not required)
        assert follows(template, "Well: " + one, required=required) == (not required)


def test_values_have_the_types_of_the_schema() -> None:
    for template in ("qwen3_coder", "glm45"):
        values = {"city": "5", "unit": "F", "days": [3], "near": False}
        _, [[_, arguments]], _ = read(form_of(template), [written(template, ("weather", values))])
        assert json.loads(arguments) == values
        _, [[_, arguments]], _ = read(form_of(template), [written(template, ("other", {"a": "x", "b": [1]}))])
        assert json.loads(arguments) == {"a": "x", "b": [1]}


def test_tags_may_be_on_one_line() -> None:
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
    [form] = variants("glm45")
    for pieces in ([text], list(text)):
        assert read(form, pieces)[1] == [["weather", '{"city": "Rome"}']]
    assert read(form, list("<tool_call>weather</tool_call>"))[1] == [["weather", "{}"]]


ODD_VALUES = ("1" * 5000, "NaN", "-Infinity", "1e999", '"\\ud800"', "[" * 100_000)
"""Values in JSON or like it that few parsers of JSON read."""


@pytest.mark.parametrize("value", ODD_VALUES)
def test_arguments_are_json_that_clients_can_read(value: str) -> None:
    texts = [f"<function=weather>\n<parameter={name}>\n{value}\n</parameter>\n</function>" for name in ("days", "x")]
    for text in texts:
        _, [[_, arguments]], _ = read(variants("qwen3_coder")[0], [f"<tool_call>\n{text}\n</tool_call>"])
        assert list(msgspec.json.decode(arguments).values()) == [value]
    for given in (f'{{"a": {value}}}', json.dumps(f'{{"a": {value}}}')):
        text = f'{{"parameters": {given}, "name": "weather"}}'
        parts, calls, _ = read(variants("llama3_json")[0], [text])
        assert (parts.content, calls) == (text, [])


@pytest.mark.parametrize("name", [r"get\_weather", "get\nweather", r"\ud800", ""])
def test_an_object_with_a_malformed_name_is_text(name: str) -> None:
    text = f'{{"name": "{name}", "parameters": {{}}}}'
    for pieces in ([text], list(text)):
        assert read(variants("llama3_json")[0], pieces)[:2] == (Pieces("", text), [])


@pytest.mark.parametrize("piece", ["abcd", "    ", "{", ">", "[", '\\"'])
@pytest.mark.parametrize("form", [form for name in NAMES for form in variants(name)])
def test_a_long_beginning_of_a_call_is_not_read_again_for_each_piece(form: CallFormat, piece: str) -> None:
    for begin in (form.begin, form.begin + '{"name": "'):
        reader = form.output_reader() or CallReader(form, SCHEMAS)
        reader.add(begin)
        start_s = time.process_time()
        for _ in range(5000):
            reader.add(piece)
        assert time.process_time() - start_s < 3, "it is 0.1 s, and 20 s if each piece costs as much as all before it"


def test_empty_arguments_are_an_object() -> None:
    text = '{"parameters": "", "name": "weather"}'
    assert read(variants("llama3_json")[0], [text])[1] == [["weather", "{}"]]


@pytest.mark.parametrize("name", ["weather", "a.b-c_d", "get weather", "a:b", "a/b", "a<b", "a>b"])
@pytest.mark.parametrize("template", ["hermes", "llama3_json", "mistral", *TEMPLATES])
def test_a_name_is_refused_if_no_reader_recognises_it(template: str, name: str) -> None:
    form, function = form_of(template), Function(name, SCHEMA, "tools[3].function.parameters")
    if form.can_call(name):
        assert calls_grammar(form, [function], processor(template), required=True, parallel=True)
        reader = form.output_reader() or CallReader(form, {name: SCHEMA})
        [call] = reader.add(written(template, (name, {"city": "Rome"})), finish_reason="stop").calls
        assert (call.name, json.loads(call.arguments)) == (name, {"city": "Rome"})
    else:
        assert name not in {"weather", "a.b-c_d"}
        with pytest.raises(ParameterError, match=r"letters, digits") as caught:
            calls_grammar(form, [function], processor(template), required=True, parallel=True)
        assert caught.value.parameter == "tools[3].function.name"


CALL = {"name": "weather", "arguments": {"city": "Rome"}}
LENIENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"arguments": {"city": "Rome"}, "name": "weather"}, {"city": "Rome"}),
    ({"name": "weather", "parameters": {"city": "Rome"}}, {"city": "Rome"}),
    ({"name": "weather", "arguments": json.dumps({"city": "Rome"})}, {"city": "Rome"}),
    ({"name": "weather"}, {}),
    ({"name": "weather", "arguments": None}, {}),
    ({"type": "function", "name": "weather", "parameters": {"city": "Rome"}}, {"city": "Rome"}),
    ({"type": "function", "function": CALL}, {"city": "Rome"}),
    ({"function": "weather", "arguments": {"city": "Rome"}}, {"city": "Rome"}),
    ({"id": "1", **CALL}, {"city": "Rome"}),
]


@pytest.mark.parametrize(("call", "arguments"), LENIENT)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "granite"])
def test_objects_that_peers_read_as_calls_are_calls(name: str, call: dict[str, Any], arguments: dict[str, Any]) -> None:
    form = variants(name)[0]
    text = "So: " + form.begin + json.dumps(call)
    for pieces in ([text], list(text)):
        parts, [[called, found]], has_called = read(form, pieces)
        assert (parts.content, called, json.loads(found), has_called) == ("So: ", "weather", arguments, True)
    parts, found, _ = read(form, list(text[:-3]), "length")
    assert parts.content == "So: " and len(found) <= 1


def test_a_text_may_begin_with_a_brace_where_calls_do() -> None:
    form = variants("llama3_json")[0]
    for text in (
        '{"name": "Rome", "days": 3}',
        '{"a": {"name": "x"}}',
        '{"name": "x", "parameters": {}}',
        "{",
        '{"name": 5}',
    ):
        for pieces in ([text], list(text)):
            assert read(form, pieces)[0].content == text
    for text in ('{"a": 1}', '{"name": "Rome", "days": 3}', "{ nothing", 'The set {"name": "x"}'):
        used = processor("llama3_json")
        made = calls_grammar(form, FUNCTIONS, used, required=False, parallel=True)
        assert grammar_accepts(made, text)


def test_the_channels_of_gpt_oss_are_reasoning_content_and_calls() -> None:
    form = variants("openai")[0]
    text = (
        "<|channel|>analysis<|message|>Let me <think>.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "R"}'
    )
    for pieces in ([text], list(text)):
        parts, calls, has_called = read(form, pieces)
        assert (parts, calls) == (Pieces("Let me <think>.", "Wait."), [["weather", '{"city": "R"}']]) and has_called
        assert not read(form, pieces, "length")[2]
    final = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>Hi <|"
    assert read(form, list(final))[0] == Pieces("a", "Hi <|")
    assert read(form, list("Plain <b>"))[0] == Pieces("", "Plain <b>")
