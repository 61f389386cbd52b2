"""Outputs of real workers have the form that was asked for, however steps are scheduled and instances share work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engines import ThreadLLM, num_free_blocks
from refusals import refused

from longspan import LLM, SamplingParams, StructuredOutputsParams
from longspan.outputs import CompletionOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
COLOURS = ("red", "dark red", "blue")
SUM = 'start: NUMBER (" + " NUMBER)~1..2\nNUMBER: /[1-9][0-9]{0,2}/'
Check = Callable[[str], object]


def form(**wishes: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**wishes)


def matches(regex: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(regex, text), text

    return check


def is_person(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


def is_colour(text: str) -> None:
    assert text in COLOURS


def anything(_: str) -> None:
    """No form was asked for."""


FORMS: list[tuple[str, StructuredOutputsParams | None, Check]] = [
    ("Ann, 7 years old, as JSON: ", form(json=PERSON), is_person),
    ("Call me: ", form(regex=r"\+[0-9]{2} [0-9]{3}-[0-9]{4}"), matches(r"\+\d{2} \d{3}-\d{4}")),
    ("The sky is", form(choice=COLOURS), is_colour),
    ("A sum: ", form(grammar=SUM), matches(r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,2}")),
    ("The capital of France is", None, anything),
]
JOBS = [(*one, temperature) for one in FORMS for temperature in (0.0, 1.0)]


def params(structured: StructuredOutputsParams | None, temperature: float, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(
        structured_outputs=structured,
        temperature=temperature,
        n=2 if temperature else 1,
        seed=4,
        max_tokens=max_tokens,
        repetition_penalty=1.0 if structured or not temperature else 1.2,
    )


@pytest.fixture(scope="module")
def llm(speaking: LLM) -> LLM:
    return speaking


def outputs_of(llm: LLM) -> list[list[CompletionOutput]]:
    """Return the outputs of all jobs in one batch, guided and free."""
    prompts = [prompt for prompt, *_ in JOBS]
    wishes = [params(structured, temperature) for _, structured, _, temperature in JOBS]
    outputs = llm.generate(prompts, wishes, use_tqdm=False)
    if llm.engine.config.cluster.num_blocks[0] < 100:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if llm.engine.config.cluster.num_instances > 1:
        assert llm.bytes_exchanged["total"] > 0
    return [output.outputs for output in outputs]


def assert_forms(llm: LLM, forms: Sequence[tuple[str, StructuredOutputsParams | None, Check]], max_tokens: int) -> None:
    wishes = [params(structured, 1.0, max_tokens if structured else 24) for _, structured, _ in forms]
    found = llm.generate([prompt for prompt, *_ in forms], wishes, use_tqdm=False)
    for (_, structured, check), output in zip(forms, found, strict=True):
        assert len(output.outputs) == 2
        for choice in output.outputs:
            assert structured is None or choice.finish_reason == "stop", choice
            check(choice.text)


def test_every_output_has_its_form(llm: LLM) -> None:
    """Each form is bounded. JSON has at most 64 blanks at each of 17 places, and the model of this test writes many."""
    assert_forms(llm, FORMS, max_tokens=1200)


@pytest.mark.full
def test_every_output_of_a_trained_model_has_its_form() -> None:
    with ThreadLLM(threads_per_rank=1) as llm:
        assert_forms(llm, FORMS, max_tokens=40)


OTHERS: dict[str, dict[str, Any]] = {
    "one step at a time": {"async_scheduling": False},
    "preempted": {"block_size": 4, "num_gpu_blocks_override": 16, "max_model_len": 60},
    "2 instances": {"instances": 2, "policy": "context", "policy_options": {"threshold": "0"}, "block_size": 8},
}


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[CompletionOutput]]:
    return outputs_of(llm)


@pytest.mark.parametrize("arguments", OTHERS.values(), ids=OTHERS.keys())
def test_outputs_do_not_depend_on_how_they_are_computed(
    arguments: dict[str, Any], expected: list[list[CompletionOutput]], speaking_model: Path
) -> None:
    with ThreadLLM(str(speaking_model), threads_per_rank=1, **arguments) as llm:
        found = outputs_of(llm)
    for one, other in zip(found, expected, strict=True):
        assert [output.token_ids for output in one] == [output.token_ids for output in other]


def only(llm: LLM, prompt: str = "The sky is", **wishes: Any) -> CompletionOutput:
    [output] = llm.generate(prompt, SamplingParams(temperature=0, **wishes))
    return output.outputs[0]


def test_the_form_counts_before_min_tokens(llm: LLM) -> None:
    """An output that can continue does, and ends otherwise."""
    short = only(llm, structured_outputs=form(choice=["red"]), min_tokens=9, max_tokens=20)
    assert (short.text, short.finish_reason) == ("red", "stop")
    long = only(llm, structured_outputs=form(regex="(red )+"), min_tokens=9, max_tokens=12)
    assert ("red " * 12).startswith(long.text) and len(long.token_ids) > 9


def test_with_ignore_eos_ends_follow_the_end(llm: LLM) -> None:
    output = only(llm, structured_outputs=form(choice=["red"]), ignore_eos=True, max_tokens=8)
    num_text = len(llm.tokenize("red"))
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("red", "length", 8)
    assert set(output.token_ids[num_text:]) <= set(llm.info.eos_token_ids)


def test_stop_conditions_end_incomplete_output(llm: LLM) -> None:
    by_text = only(llm, structured_outputs=form(choice=["dark red"]), stop=" r")
    assert (by_text.text, by_text.finish_reason, by_text.stop_reason) == ("dark", "stop", " r")
    [red] = llm.tokenize(" red")
    by_token = only(llm, structured_outputs=form(choice=["dark red"]), stop_token_ids=[red])
    assert (by_token.text, by_token.stop_reason) == ("dark", red)
    short = only(llm, structured_outputs=form(json=PERSON), max_tokens=3)
    assert (short.finish_reason, len(short.token_ids)) == ("length", 3)


def test_bias_and_penalties_choose_among_allowed_tokens(llm: LLM) -> None:
    [red, blue, the] = (llm.tokenize(text)[0] for text in ("red", "blue", "the"))
    for favoured, text in ((red, "red"), (blue, "blue")):
        output = only(llm, structured_outputs=form(choice=["red", "blue"]), logit_bias={favoured: 60.0, the: 100.0})
        assert output.text == text
    penalised = only(llm, structured_outputs=form(regex="[a-z ]{30}"), repetition_penalty=1.5, max_tokens=40)
    assert re.fullmatch("[a-z ]{30}", penalised.text)


def test_a_grammar_that_gets_stuck_ends_its_own_request_alone(llm: LLM) -> None:
    endless = form(grammar='start: a\na: "x" a')
    stuck, free = llm.generate(["x", "The sky is"], [params(endless, 0), params(None, 0)], use_tqdm=False)
    assert stuck.finished and stuck.outputs[0].finish_reason == "error"
    assert "too many items" in str(stuck.outputs[0].stop_reason).lower()
    assert free.outputs[0].finish_reason == "length"
    assert only(llm, structured_outputs=form(choice=["red"])).text == "red"
    assert num_free_blocks(llm) == [llm.engine.config.cluster.num_blocks[0]]


def test_streams_and_chats_have_a_form_too(llm: LLM) -> None:
    *_, last = llm.stream("The sky is", params(form(choice=COLOURS), 1.0))
    assert all(output.text in COLOURS for output in last.outputs)
    [answer] = llm.chat([{"role": "user", "content": "Name a colour."}], params(form(choice=COLOURS), 0))
    assert answer.outputs[0].text in COLOURS


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """So a forced token can be unlikely."""
    output = only(llm, structured_outputs=form(choice=["zebra"]), logprobs=1)
    assert output.logprobs is not None
    first = output.logprobs[0][output.token_ids[0]]
    assert first.rank is not None and first.rank > 1 and first.logprob < -1


def test_a_bad_form_is_refused_and_nothing_is_generated(llm: LLM) -> None:
    with refused("structured_outputs"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(structured_outputs=form(regex="(a"))])
    assert not llm.engine.has_unfinished
