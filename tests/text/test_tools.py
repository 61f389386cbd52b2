"""Calls of tools: their form is found in templates, grammars allow it and nothing near it, readers find them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from engines import Row, pairwise
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from refusals import refused
from tool_models import TEMPLATES, tool, tool_tokenizer

from longspan.errors import ParameterError
from longspan.text.call_formats import variants
from longspan.text.call_formats.base import NO_PARAMETERS, Function
from longspan.text.call_grammar import calls_grammar, detect_format
from longspan.text.call_reader import CallReader
from longspan.text.grammar_check import LIMITS
from longspan.text.input_processor import InputProcessor
from longspan.text.tokenizer import Detokenizer, grammar_vocabulary

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = (
    Function("weather", WEATHER, "tools[0].function.parameters"),
    Function('odd "name"\\\n', NO_PARAMETERS, "tools[1].function.parameters"),
)
ROME = {"city": 'Rome "}]<{', "days": 3}
ODD = FUNCTIONS[1].name
FORMATS: dict[str, Any] = {name: variants(name)[0] for name in ("hermes", "llama3_json", "mistral")}
FORMS = tuple(FORMATS)


@cache
def processor(template: str | None, *, with_markers: bool = False) -> InputProcessor:
    tokenizer = tool_tokenizer(template, with_markers=with_markers)
    return InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=4096)


@pytest.fixture(scope="module", autouse=True)
def _freed() -> Iterator[None]:
    """Free the vocabularies, of 30 MB each."""
    yield
    for made in (processor, vocabulary):
        made.cache_clear()


def written(form: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """These calls as a model of the family writes them."""
    key = FORMATS[form].key
    texts = [f'{{"name": {json.dumps(name)}, "{key}": {json.dumps(arguments)}}}' for name, arguments in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return texts[0] if form == "llama3_json" else f"[TOOL_CALLS] [{', '.join(texts)}]"


@cache
def grammar(form: str, with_markers: bool, required: bool = False, parallel: bool = True, content: str = "") -> str:
    return calls_grammar(
        FORMATS[form],
        FUNCTIONS,
        processor(form, with_markers=with_markers),
        required=required,
        parallel=parallel,
        content=json.loads(content) if content else None,
    )


def follows(text: str, form: str, with_markers: bool, **options: Any) -> bool:
    """Whether the grammar lets a model write this text, token by token, and end there."""
    used = processor(form, with_markers=with_markers)
    matcher = LLMatcher(vocabulary(with_markers), grammar(form, with_markers, **options), log_level=0, limits=LIMITS)
    token_ids = used.tokenize(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@cache
def vocabulary(with_markers: bool) -> LLTokenizer:
    """Return the vocabulary of all templates."""
    tokenizer = tool_tokenizer(None, with_markers=with_markers)
    return grammar_vocabulary(tokenizer, vocab_size=len(tokenizer))


def read(
    form: str, pieces: list[str], finish_reason: Any = "stop", stop_reason: str | None = None, **options: bool
) -> tuple[str, list[tuple[str | None, str]], bool]:
    """Text, names and arguments that come of these pieces, and whether there are whole calls only."""
    reader = CallReader(FORMATS[form], **options)
    text, calls = "", list[list[Any]]()
    for index, piece in enumerate(pieces):
        end = {"finish_reason": finish_reason, "stop_reason": stop_reason} if index == len(pieces) - 1 else {}
        _, new, deltas = reader.add(piece, **end)
        text += new
        for delta in deltas:
            assert (delta.id is None) == (delta.index < len(calls)), "a call has its id when it begins, and only then"
            if delta.id is not None:
                assert len(delta.id) == 9 and delta.id.isalnum(), "Mistral's templates require it"
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return text, [(name, arguments) for name, arguments in calls], reader.has_called


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_markers", [False, True])
def test_the_form_of_calls_is_found_in_the_template(form: str, with_markers: bool) -> None:
    assert detect_format(processor(form, with_markers=with_markers)) is FORMATS[form]


def test_a_template_may_take_the_arguments_as_json() -> None:
    assert detect_format(processor("functionary-text")) is variants("functionary")[0]


def test_a_template_may_write_the_arguments_first() -> None:
    name = '"name": "{{ call.function.name }}"'
    template = TEMPLATES["hermes"].replace(name + ", ", " ").replace("| tojson }}}", "| tojson }}, " + name + "}")
    assert '{{ call.function.arguments | tojson }}, "name"' in template
    assert detect_format(processor(template)) is FORMATS["hermes"]


@pytest.mark.parametrize(
    "template",
    [
        None,  # it knows no tools
        "{{ raise_exception('no') }}{{ tools }}",
        TEMPLATES["hermes"].replace('"arguments"', '"args"'),
        TEMPLATES["hermes"].replace('{"name": "{{ call.function.name }}", ', "<function={{ call.function.name }}> {"),
        TEMPLATES["llama3_json"].replace('{"name"', '<|other|>{"name"'),
        "{{ tools }}{% for message in messages %}{{ message.content + 1 }}{% endfor %}",
    ],
)
def test_a_form_that_is_not_sure_is_none(template: str | None) -> None:
    assert detect_format(processor(template)) is None


@pytest.mark.parametrize("row", pairwise({"form": FORMS, "with_markers": (False, True), "required": (False, True)}))
def test_a_grammar_allows_calls_and_texts_where_they_may_be(row: Row) -> None:
    form, with_markers, required = row["form"], row["with_markers"], row["required"]
    one = written(form, ("weather", ROME))
    assert follows(one, form, with_markers, required=required)
    assert follows(written(form, (ODD, {})), form, with_markers, required=required)
    assert not follows(one[:-1], form, with_markers, required=required), "it is not whole"
    assert not follows(one + " and", form, with_markers, required=required)
    for wrong in (("weather", {"city": 5}), ("weather", {}), (ODD, {"x": 1})):
        assert not follows(written(form, wrong), form, with_markers, required=required)
    is_text = form == "llama3_json" and not required
    assert follows(written(form, ("other", ROME)), form, with_markers, required=required) == is_text
    for text in ("", "Hello!\n", "\n a {brace} ", "<repo_name> a token without text"):
        assert follows(text, form, with_markers, required=required) == (not required)
    assert follows("So:\n" + one, form, with_markers, required=required) == (not required)
    if form != "llama3_json":
        two = written(form, ("weather", ROME), (ODD, {}))
        assert follows(two, form, with_markers, required=required)
        assert not follows(two, form, with_markers, required=required, parallel=False)
        assert follows(one, form, with_markers, required=required, parallel=False)
        assert not follows(f"{FORMATS[form].begin} is a word", form, with_markers, required=required)


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_an_output_without_calls_can_have_a_form_too(form: str) -> None:
    content = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert follows('{"a": 1}', form, True, content=content)
    assert follows(written(form, ("weather", ROME)), form, True, content=content)
    assert not follows("Hello", form, True, content=content)
    assert not follows('{"a": "b"}', form, True, content=content)
    for text in (
        '{"a": {"name": [1]}}',
        f'{{"a": "{FORMATS[form].begin}", "b": {{"name": "weather", "arguments": {{}}}}}}',
        f'["{FORMATS[form].begin}", {{"name": "weather", "arguments": {{}}}}]',
    ):
        for pieces in ([text], list(text)):
            assert read(form, pieces, at_start=True) == (text, [], False)
            assert read(form, pieces, "length", at_start=True) == (text, [], False)


def test_json_and_calls_that_cannot_be_told_apart_are_refused() -> None:
    with refused("response_format"):
        grammar("llama3_json", True, content="{}")
    assert grammar("llama3_json", True, content="{}", required=True) == grammar("llama3_json", True, required=True)


def test_blanks_in_arguments_are_bounded() -> None:
    for num_blanks, fits in ((64, True), (65, False)):
        text = written("hermes", ("weather", {"city": ""})).replace('": ""', '":' + " " * num_blanks + '""')
        assert follows(text, "hermes", True) == fits


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, r"it has \$ref \(properties.a.\$ref\)"),
        ({"not": {"required": ["a"]}}, r"it has not \(not\)"),
        ({"type": "array"}, r"a type other than object"),
        ({"properties": {"a": {"type": "strin"}}}, r"it has type \(properties.a.type\)"),
        ({"required": ["a"], "properties": {"a": {"enum": []}}}, "it has enum"),
        ({"required": ["a"], "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}}}, "Unsatisfiable"),
    ],
)
def test_a_strict_schema_that_cannot_be_followed_is_named(parameters: dict[str, Any], words: str) -> None:
    def made(*, strict: bool) -> str:
        functions = (*FUNCTIONS, Function("bad", parameters, "tools[2].function.parameters", strict))
        return calls_grammar(FORMATS["hermes"], functions, processor("hermes"), required=False, parallel=True)

    assert made(strict=False)
    with pytest.raises(ParameterError, match=words) as caught:
        made(strict=True)
    assert caught.value.parameter == "tools[2].function.parameters"


def test_annotations_do_not_count_to_the_length_of_schemas() -> None:
    functions = [Function(f"f{n}", {"description": "x" * 9000}, f"tools[{n}].function.parameters") for n in range(400)]
    made = calls_grammar(FORMATS["hermes"], functions, processor("hermes"), required=False, parallel=True)
    assert len(made) < 10**5


Q: dict[str, Any] = {"properties": {"q": {"type": "integer"}}, "required": ["q"]}


@pytest.mark.parametrize(
    ("parameters", "fits_more"),
    [
        (Q, False),
        ({"$ref": "#/$defs/X", "$defs": {"X": Q}}, True),
        ({"additionalProperties": {"type": "integer"}, **Q}, True),
        ({"anyOf": [Q, {"properties": {"r": {"type": "integer"}}, "required": ["r"]}]}, True),
    ],
)
def test_arguments_are_an_object_and_none_are_made_up(parameters: dict[str, Any], fits_more: bool) -> None:
    used = processor("hermes", with_markers=True)
    functions = (Function("f", parameters, ""),)
    made = calls_grammar(FORMATS["hermes"], functions, used, required=True, parallel=True)
    cases: list[tuple[Any, bool]] = [({"q": 1}, True), ({"q": "a"}, False), ({}, False), ([1], False)]
    for arguments, fits in (*cases, ({"q": 1, "r": 2}, fits_more)):
        matcher = LLMatcher(vocabulary(True), made, log_level=0)
        token_ids = used.tokenize(written("hermes", ("f", arguments)), add_special_tokens=False)
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids)) == fits, arguments


ARGUMENTS = st.dictionaries(st.text(max_size=3), st.recursive(st.text('a"\\{[]}', max_size=5), st.lists, max_leaves=4))
CALLS = st.lists(st.tuples(st.sampled_from([function.name for function in FUNCTIONS]), ARGUMENTS), max_size=3)


@given(st.sampled_from(FORMS), CALLS, st.sampled_from(["", "Hi <tool", "Hi\n\n", "[TOOL {"]), st.randoms())
def test_calls_are_read_whatever_the_pieces(form: str, calls: list[Any], text: str, random: Any) -> None:
    if form == "llama3_json":
        calls, text = calls[:1], "" if calls else text
    output = text + (written(form, *calls) if calls else "")
    cuts = sorted(random.choices(range(len(output) + 1), k=random.randrange(6)))
    pieces = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    found, read_calls, has_called = read(form, pieces)
    assert found == text
    assert [(name, json.loads(arguments)) for name, arguments in read_calls] == calls
    assert has_called == bool(calls)
    assert read(form, list(output) or [""]) == (found, read_calls, has_called)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", ["", "Let me see: a > b.\n"])
@pytest.mark.parametrize("end", [("length", None), ("abort", None), ("stop", "a stop string")])
@pytest.mark.parametrize("name", ["weather", ODD])
def test_an_output_that_is_cut_anywhere_shows_no_part_of_the_form_of_calls(
    form: str, text: str, end: tuple[Any, str | None], name: str
) -> None:
    """Text comes before the first call. Calls are sent once their arguments have begun, up to the last token."""
    text = "" if form == "llama3_json" else text
    first, second = {"city": 'Ro"}]<{'}, {"days": [1]}
    calls = [(name, first), ("time", second)][: 1 if form == "llama3_json" else 2]
    output = text + written(form, *calls)
    starts, begin = list[int](), len(text)
    for called, arguments in calls:
        begin = output.index(json.dumps(called), begin)
        begin = output.index(json.dumps(arguments), begin + len(json.dumps(called)))
        starts.append(begin)
    for cut in range(len(output) + 1):
        begun = [
            (called, output[start : min(cut, start + len(json.dumps(arguments)))])
            for start, (called, arguments) in zip(starts, calls, strict=True)
            if cut > start
        ]
        shown = output[: min(cut, len(text))]
        if end[0] == "stop" and len(text) < cut < len(text + FORMATS[form].begin):
            shown = output[:cut]  # nothing says that this is the beginning of a marker
        for pieces in ([output[:cut]], list(output[:cut]) or [""]):
            found, read_calls, has_called = read(form, pieces, *end)
            assert (found, read_calls) == (shown, begun), cut
            is_whole = [
                arguments == json.dumps(given) for (_, arguments), (_, given) in zip(begun, calls, strict=False)
            ]
            assert has_called == (bool(begun) and all(is_whole))


@pytest.mark.parametrize("form", ["hermes", "mistral"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_text_that_resembles_the_beginning_of_a_call_is_text(form: str, reason: str) -> None:
    begin = FORMATS[form].begin
    for text in (
        f"Write {begin} before it.",
        f'{begin}{{"names": []}}',
        f'{begin}\n{{"name": 5, "arguments": {{}}}}',
        "a < b",
    ):
        assert read(form, [text], reason) == read(form, list(text), reason) == (text, [], False)
    for text in ("a <", "a [", f"{begin[:-1]}", f"{begin}", f'{begin}{{"name": "weather", "'):
        assert read(form, list(text), "stop") == (text, [], False), "the model has ended it there"
    for text in ("a <", "a [", begin[:-1]):
        assert read(form, list(text), "length", marker_is_token=True) == (text, [], False)


def test_text_is_not_held_back_for_long() -> None:
    reader = CallReader(FORMATS["hermes"])
    pieces = [reader.add(piece).content for piece in ("Look: <tool", "_call> is", " a <t", "ag", "<tool_call>\n{")]
    assert pieces == ["Look: ", "<tool_call> is", " a ", "<tag", ""]


def test_markers_that_are_special_tokens_are_shown_and_other_markers_are_not() -> None:
    used = processor("hermes", with_markers=True)
    tokenizer: Any = used.tokenizer
    text = "So <repo_name>: " + written("hermes", ("weather", ROME)) + "<|im_end|>"
    token_ids = used.tokenize(text, add_special_tokens=False)
    assert used.special_tokens["<tool_call>"] in token_ids
    shown = [used.special_tokens[marker] for marker in FORMATS["hermes"].markers]
    expected = text.replace("<repo_name>", "").removesuffix("<|im_end|>")
    for step in (1, 7):
        detokenizer = Detokenizer(tokenizer, used.tokenize("Go on."), shown_token_ids=shown)
        pieces = [detokenizer.add(token_ids[at : at + step]) for at in range(0, len(token_ids), step)]
        assert "".join(pieces) + detokenizer.add((), finished=True) == expected


def test_a_template_that_knows_no_tools_says_so() -> None:
    messages = [{"role": "user", "content": "Go."}]
    with refused("tools"):
        processor(None).render_chat(messages, tools=[tool("weather", WEATHER)])
    assert "weather" in processor("hermes").render_chat(messages, tools=[tool("weather", WEATHER)])
    assert processor("hermes").render_chat(messages) == processor("hermes").render_chat(messages, tools=[])
