"""Reasoning sections: found in templates and prompts, read in whatever pieces, and passed before any grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tool_models import TEMPLATES, grammar_accepts, tool_tokenizer, tool_vocabulary

from longspan.core.sampling import StructuredOutputsParams
from longspan.text.input_processor import InputProcessor
from longspan.text.reasoning import FORMATS, ReasoningReader, after_reasoning, reasoning_format

QWEN, R1 = FORMATS["qwen3"], FORMATS["deepseek_r1"]
assert QWEN is not None and R1 is not None
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@cache
def processor(*, with_markers: bool) -> InputProcessor:
    tokenizer = tool_tokenizer("qwen3", with_markers=with_markers)
    return InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=4096)


@pytest.fixture(scope="module", autouse=True)
def _freed() -> Iterator[None]:
    """Free the vocabularies, of 30 MB each."""
    yield
    processor.cache_clear()
    tool_vocabulary.cache_clear()


def read(text: str, start: Any, *, size: int = 1, form: Any = QWEN) -> tuple[str, str]:
    reader = ReasoningReader(form, start)
    pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
    found = [reader.add(piece, ended=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    return "".join(reasoning for reasoning, _ in found), "".join(content for _, content in found)


def test_a_template_has_its_format_unless_the_flag_names_one() -> None:
    assert reasoning_format("auto", TEMPLATES["qwen3"]) is QWEN
    assert reasoning_format("auto", TEMPLATES["hermes"]) is None
    assert reasoning_format("auto", "[THINK]..[/THINK]") is FORMATS["mistral"]
    assert reasoning_format("auto", TEMPLATES["openai"]) is FORMATS["openai_gptoss"]
    assert reasoning_format("deepseek_r1", TEMPLATES["hermes"]) is R1
    assert reasoning_format("none", TEMPLATES["qwen3"]) is None


def test_the_end_of_a_prompt_says_where_its_output_begins() -> None:
    assert QWEN.start("What is <think>?\nassistant\n") == "maybe"
    assert QWEN.start("assistant\n<think>\n") == "inside"
    assert QWEN.start("assistant\n<think>\n\n</think>\n\n") == "closed"
    assert R1.start("assistant\n") == "inside"
    assert R1.start("assistant\n<think>\n\n</think>\n\n") == "closed"
    assert QWEN.start("...<think>I", "<think>I") == "inside"
    assert QWEN.start("...", "<think>I</think>So") == R1.start("...", "So") == "closed"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_sections_are_read_in_whatever_pieces(size: int) -> None:
    section = "<think>\nIs a < b?\n\nYes </thin.\n</think>\n\nIt is.\n"
    expected = ("Is a < b?\n\nYes </thin.", "It is.\n")
    assert read(section, "maybe", size=size) == read("\n" + section, "inside", size=size) == expected
    assert read(section.removeprefix("<think>"), "inside", size=size, form=R1) == expected
    for text in ("It is.", "<thin", " <b>", ""):
        assert read(text, "maybe", size=size) == ("", text)
    assert read("a</think>b", "closed", size=size) == ("", "a</think>b")
    assert read("<think>Cut </thi", "maybe", size=size) == ("Cut </thi", "")
    assert read("<think>Cut\n", "maybe", size=size) == ("Cut", "")
    assert read("<think>a</think>", "maybe", size=size) == ("a", "")


@pytest.mark.parametrize("with_markers", [False, True])
@pytest.mark.parametrize(
    ("params", "answer", "wrong"),
    [
        (StructuredOutputsParams(json=json.dumps(SCHEMA)), '{"a": 1}', '{"a": "b"}'),
        (StructuredOutputsParams(regex="[a-z]+"), "abc", "1"),
        (StructuredOutputsParams(choice=("yes", "no")), "no", "maybe"),
        (StructuredOutputsParams(grammar='start: "x" Y\nY: /y+/'), "xyy", "y"),
    ],
)
def test_a_grammar_begins_after_the_section(
    params: StructuredOutputsParams, answer: str, wrong: str, with_markers: bool
) -> None:
    used = processor(with_markers=with_markers)
    plain, special = used.grammar(params), used.special_tokens
    assert ("</think>" in special) == with_markers
    inside = after_reasoning(plain, QWEN, is_inside=True, special=special)
    maybe = after_reasoning(plain, QWEN, is_inside=False, special=special)
    for blanks in ("", "\n\n"):
        thought = f"Hm, {wrong} <repo_name> or {answer}?\n</think>{blanks}"
        assert grammar_accepts(inside, thought + answer, with_markers=with_markers)
        assert grammar_accepts(maybe, f"<think>{thought}{answer}", with_markers=with_markers)
        assert not grammar_accepts(inside, thought + wrong, with_markers=with_markers)
        assert not grammar_accepts(maybe, f"<think>{thought}{wrong}", with_markers=with_markers)
    assert grammar_accepts(maybe, answer, with_markers=with_markers)
    assert not grammar_accepts(inside, answer, with_markers=with_markers)
    assert not grammar_accepts(maybe, "<think>" + answer, with_markers=with_markers)
    assert not grammar_accepts(maybe, "\n" + answer, with_markers=with_markers), "readers expect calls at the start"
