"""Allowed tokens of a grammar against plain string arithmetic, errors, and messages with grammars."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from draws import cases, changed, logits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cost import LinearCost
from llguidance import LLMatcher, LLParserLimits
from refusals import refused
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longspan.cli.generate import FormOptions
from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.core.steps import Completion, Sampled, Sampling
from longspan.model.files import ModelError, ModelFiles
from longspan.model.source import smollm2_folder
from longspan.policy.registry import make_policy
from longspan.runtime.grammar import GrammarMatcher, Vocabulary
from longspan.runtime.logit_changes import adjusted, forbid
from longspan.runtime.sampling import Draw
from longspan.sim.executor import SimExecutor, VirtualClock
from longspan.text.input_processor import EngineRequest, InputProcessor
from longspan.text.structured import MAX_CHARS
from longspan.text.tokenizer import grammar_vocabulary

VOCAB = 49_152
EOS = (2, 0)
"""As the model's and, the second, as another of its kind would have it."""


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder())


@cache
def vocabulary(size: int = VOCAB) -> Vocabulary:
    folder = smollm2_folder()
    files = ModelFiles(name="", config_dir=folder, weights=folder, tokenizer_dir=folder, dtype="float32")
    return Vocabulary(files, size=size, eos_token_ids=EOS)


@cache
def input_processor() -> InputProcessor:
    return InputProcessor(tokenizer=tokenizer(), vocab_size=VOCAB, max_model_len=8192)


@cache
def ids_by_bytes() -> dict[bytes, list[int]]:
    """The tokens that have bytes of their own."""
    found = defaultdict(list)
    special = set(tokenizer().all_special_ids)
    for token in range(VOCAB):
        if token not in special:
            found[vocabulary().tokens.decode_bytes([token])].append(token)
    return found


def grammar(**form: Any) -> str:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    return input_processor().checked(None, (5,), params).grammar


def guide(size: int = VOCAB, **form: Any) -> GrammarMatcher:
    return GrammarMatcher(grammar(**form), vocabulary(size))


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


def tokens_in(bits: torch.Tensor | None) -> set[int]:
    assert bits is not None
    return set(np.flatnonzero(np.unpackbits(bits.numpy(), bitorder="little")).tolist())


words = st.text('abc é"\\\n😀{', min_size=1, max_size=6)


@given(st.lists(words, min_size=1, max_size=5), st.data())
@settings(deadline=None, max_examples=50)
def test_a_choice_allows_only_tokens_that_lead_to_one_and_cuts_none_off(
    choices: list[str], data: st.DataObject
) -> None:
    """And ends of sequence exactly where one is complete. (Where one text is all that is left, few tokens spell it.)"""
    found, wanted, told = guide(choice=choices), [choice.encode() for choice in choices], b""
    while True:
        rest = [text[len(told) :] for text in wanted if text.startswith(told)]
        leading = [
            {token for n in range(1, len(text) + 1) for token in ids_by_bytes().get(text[:n], ())}
            for text in rest
            if text
        ]
        allowed = tokens_in(found.allowed())
        assert allowed <= set(EOS).union(*leading)
        assert all(allowed & tokens for tokens in leading)
        assert allowed & set(EOS) == (set(EOS) if told in wanted else set())
        if len({text[:1] for text in rest}) > 1:
            assert allowed >= set().union(*leading)
        token = data.draw(st.sampled_from(sorted(allowed)))
        found.add((token,))
        if token in EOS:
            assert told in wanted
            return
        told += vocabulary().tokens.decode_bytes([token])


@given(st.sampled_from(["a|bc*", "(ab|c){2,3}", "[0-9]{2}-[0-9]", "[^x]{3}", "a?b?c?", "é+"]), st.data())
@settings(deadline=None, max_examples=60)
def test_a_regex_may_end_exactly_where_it_matches(regex: str, data: st.DataObject) -> None:
    found, output = guide(regex=regex), []
    while len(output) < 12:
        allowed = tokens_in(found.allowed())
        complete = _matches(regex, vocabulary().tokens.decode_bytes(output))
        assert (EOS[0] in allowed) == (EOS[1] in allowed) == complete
        output.append(data.draw(st.sampled_from(sorted(allowed))))
        if output[-1] in EOS:
            return
        found.add(output[-1:])


def _matches(regex: str, output: bytes) -> bool:
    try:
        return re.fullmatch(regex, output.decode()) is not None
    except UnicodeDecodeError:  # within a character
        return False


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_the_grouping_of_tokens_does_not_matter(data: st.DataObject) -> None:
    output = ids('{"name": "Ann", "age": 7}')
    pieces, whole = guide(json_object=True), guide(json_object=True)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(output)))))
    for start, stop in zip([0, *cuts], [*cuts, len(output)], strict=True):
        pieces.add(output[start:stop])
        if data.draw(st.booleans()):
            assert pieces.allowed() is not None
    whole.add(output)
    assert tokens_in(pieces.allowed()) == tokens_in(whole.allowed()) == set(EOS)


def test_after_the_end_there_are_only_ends() -> None:
    for form in ({"choice": ["yes"]}, {"regex": "yes+"}):
        ended = guide(**form)
        ended.add([*ids("yes"), EOS[0]])
        for _ in range(3):
            assert tokens_in(ended.allowed()) == set(EOS)
            ended.add([EOS[1]])
        ended.add(ids("no"))  # sampled before the end was known
        assert tokens_in(ended.allowed()) == set(EOS) and not ended.error


def test_requests_with_equal_grammars_compile_one_and_have_their_own_states(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = mock.Mock(wraps=LLMatcher)
    monkeypatch.setattr("longspan.runtime.grammar.LLMatcher", compiled)
    form = {"choice": ["one", "other", "together"]}
    first, second, third = (guide(**form) for _ in range(3))
    begin = tokens_in(first.allowed())
    assert tokens_in(second.allowed()) == begin
    assert compiled.call_count == 1
    first.add(ids("other"))
    second.add(ids("no"))
    assert tokens_in(first.allowed()) == set(EOS)
    assert second.allowed() is None and second.error
    assert tokens_in(third.allowed()) == begin and not third.error


def test_lexer_states_of_other_requests_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["".join(random.Random(seed).choices("abcdefgh", k=30)) for seed in range(40)]
    monkeypatch.setattr("longspan.runtime.grammar.LIMITS", LLParserLimits(max_lexer_states=400))
    form, rank = grammar(choice=words), vocabulary.__wrapped__()
    for seed in range(len(words)):
        request, drawn = GrammarMatcher(form, rank), random.Random(seed)
        while not (allowed := tokens_in(request.allowed())) <= set(EOS):
            request.add([drawn.choice(sorted(allowed))])


def test_bans_count_unless_nothing_else_is_left() -> None:
    found, [a] = guide(regex="a{1,9}"), ids("a")
    found.add([a])
    assert tokens_in(found.allowed()) > set(EOS)
    assert not tokens_in(found.allowed(EOS)) & set(EOS)
    found.add([a] * 8)
    assert tokens_in(found.allowed(EOS)) == set(EOS)


def test_a_grammar_error_is_permanent() -> None:
    broken = guide(choice=["yes"])
    broken.add(ids("no"))
    assert broken.allowed() is None and broken.error
    broken.add(ids("yes"))
    assert broken.allowed() is None and "\n" not in broken.error


@pytest.mark.parametrize("size", [VOCAB + 77, VOCAB + 128])
def test_logits_without_a_token_are_never_allowed(size: int) -> None:
    allowed = guide(size, regex="(?s:.*)").allowed()
    assert allowed is not None and len(allowed) * 8 >= size
    assert max(tokens_in(allowed)) < VOCAB


def test_tokens_without_a_logit_are_never_allowed() -> None:
    [token] = ids("a")
    assert tokens_in(guide(token + 1, regex="[ -~]+").allowed()) <= set(range(token + 1))
    stuck = guide(token, regex="a")
    assert stuck.allowed() is None and "no token of this model" in stuck.error


@given(st.integers(0, 10**6), st.lists(st.none() | st.sets(st.integers(0, 15)), min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_forbidden_logits_equal_dense_numpy(seed: int, sets: list[set[int] | None], data: st.DataObject) -> None:
    """Together with bias, bans and penalties, and rows without a grammar. Bits beyond the vocabulary are ignored."""
    asked, logits = [data.draw(cases) for _ in sets], logits_of(seed, len(sets))
    before, draws = logits.clone(), []
    for one, allowed in zip(asked, sets, strict=True):
        draw = one.draw()
        draws.append(
            Draw(
                sampling=draw.sampling,
                position=draw.position,
                banned=draw.banned,
                history=draw.history,
                allowed=None if allowed is None else _bits([*allowed, 20, 31]),
            )
        )
    found = adjusted(logits, draws)
    assert torch.equal(logits, before)
    for row, (one, allowed) in enumerate(zip(asked, sets, strict=True)):
        expected = changed(logits[row], replace(one, below_minimum=one.below_minimum and allowed is None))
        if allowed is not None:
            expected[[token for token in range(16) if token not in allowed]] = -np.inf
        np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)


def test_a_grammar_has_taken_bans_into_account() -> None:
    """So that an end which is all that is left can be chosen below the minimum."""
    draw = Draw(sampling=Sampling(seed=0, banned=(1,)), position=3, banned=(1,), allowed=_bits([1]))
    assert adjusted(torch.zeros(1, 3), [draw]).tolist() == [[-torch.inf, 0.0, -torch.inf]]


def test_forbid_leaves_other_rows_alone() -> None:
    logits = torch.ones(3, 5)
    forbid(logits, [2, 0], [_bits([4]), _bits([0, 1])])
    assert torch.isfinite(logits).tolist() == [[True, True, False, False, False], [True] * 5, [False] * 4 + [True]]


def _bits(tokens: Sequence[int], words: int = 1) -> torch.Tensor:
    chosen = np.isin(np.arange(32 * words), list(tokens))
    return torch.from_numpy(np.packbits(chosen, bitorder="little"))


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "string"}


def chained(length: int) -> dict[str, Any]:
    links = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {}}}


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"json_object": 1},
        {"json": 7},
        {"json": {"enum": [{1, 2}]}},
        {"json": {"maximum": float("nan")}},
        {"regex": ""},
        {"choice": "yes"},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": ["a", 7]},
        {"json": "{"},
        {"json": "true"},
        {"json": "[" * 60_000},
        {"json": {"type": "strin"}},
        {"json": {"not": {"type": "string"}}},
        {"json": {"if": {"type": "string"}, "then": {"minLength": 3}}},
        {"json": {"$ref": "http://example.com/x"}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json": {"$ref": "#"}},
        {"regex": r"a[^\s\S]"},
        {"json": nested(200)},
        {"json": {"enum": ["x" * MAX_CHARS]}},
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"regex": "(" * 3000 + "a" + ")" * 3000},
        {"choice": ["x" * 1000] * 66},
        {"grammar": "start: foo"},
        {"grammar": "hello"},
    ],
    ids=lambda value: str(value)[:50],
)
def test_invalid_values_are_refused(form: dict[str, Any]) -> None:
    with refused("structured_outputs") as caught:
        grammar(**form)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "form",
    [
        {"json": json.dumps(chained(1500), separators=(",", ":"))},  # overflows the stack
        {"json": {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(60)]}},  # exponential time
    ],
    ids=["stack", "time"],
)
def test_grammars_that_would_crash_a_process_are_refused(form: dict[str, Any]) -> None:
    with refused("structured_outputs"):
        grammar(**form)


def test_a_large_valid_schema_is_allowed() -> None:
    many = {f"key{i}": {"type": "string", "maxLength": 10**6} for i in range(300)}
    for form in (
        {"json": {"type": "object", "properties": many, "required": list(many)}},
        {"json": nested(40)},
        {"json": chained(50)},
        {"choice": [f"choice {i}" for i in range(4000)]},
        {"regex": "(a|b)*a(a|b){20}"},
    ):
        assert guide(**form).allowed() is not None
    many_choices = guide(choice=[f"choice {i}" for i in range(4000)])
    many_choices.add(ids("choice 39"))
    assert many_choices.allowed() is not None


def test_annotations_neither_count_nor_constrain() -> None:
    plain = grammar(json={"type": "object", "properties": {"a": {"type": "string"}}})
    noted = {"type": "string", "format": "banana", "description": "x" * MAX_CHARS, "default": "b", "examples": ["c"]}
    assert grammar(json={"title": "T", "$comment": "c", "type": "object", "properties": {"a": noted}}) == plain
    named = {"type": "object", "properties": {"title": {"type": "string"}, "format": {}}, "required": ["title"]}
    assert json.loads(grammar(json=named))["grammars"][0]["json_schema"].items() >= named.items()


def test_json_may_not_go_on_with_blanks_for_ever() -> None:
    [blanks] = ids(" " * 8)
    blank = guide(json_object=True)
    blank.add(ids("{"))
    for _ in range(9):
        assert tokens_in(blank.allowed()), blank.error
        blank.add([blanks])
    assert blank.allowed() is None


def test_without_a_tokenizer_nothing_can_be_structured() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    maker = InputProcessor(tokenizer=None, vocab_size=VOCAB, max_model_len=8192)
    with refused("structured_outputs"):
        maker.process([5], params)
    nothing_ends = AutoTokenizer.from_pretrained(smollm2_folder(), eos_token=None)
    with pytest.raises(ModelError, match="need an end-of-sequence token"):
        grammar_vocabulary(nothing_ends, vocab_size=VOCAB)


def test_params_are_values_and_travel() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    form = StructuredOutputsParams(json=schema)
    same = StructuredOutputsParams(json=json.dumps(schema))
    params = SamplingParams(structured_outputs=form)
    assert form == same and hash(params) == hash(SamplingParams(structured_outputs=same))
    assert StructuredOutputsParams(choice=["a", "b"]) == StructuredOutputsParams(choice=("a", "b"))
    engine_request = input_processor().checked(None, (5,), params)
    assert (
        engine_request.grammar
        and msgspec.msgpack.decode(msgspec.msgpack.encode(engine_request), type=EngineRequest) == engine_request
    )
    assert input_processor().checked(None, (5,), SamplingParams()).grammar == ""
    with refused("structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


class _Stuck(SimExecutor):
    """The grammar of request 0 cannot go on at its third token, and says so from then on."""

    num_sampled = 0

    def poll(self, timeout_s: float | None) -> list[Completion]:
        return [replace(done, sampled=tuple(map(self._spoil, done.sampled))) for done in super().poll(timeout_s)]

    def _spoil(self, one: Sampled) -> Sampled:
        self.num_sampled += one.request_id == 0
        return replace(one, error="stuck") if one.request_id == 0 and self.num_sampled >= 3 else one


def test_a_request_that_cannot_continue_ends_with_its_cause_and_harms_no_other_request() -> None:
    clock = VirtualClock()
    engine = Engine(
        policy=make_policy("chunked", num_instances=1, options={}),
        executor=_Stuck(clock=clock, vocab_size=64, cost=LinearCost()),
        clock=clock,
        config=EngineConfig(cluster=Cluster.of("1", num_blocks=[20]), block_size=4, max_model_len=80),
    )
    stuck, other = (engine.add((1, 2, 3), SamplingParams(max_tokens=9), grammar=text) for text in ("grammar", ""))
    while engine.has_unfinished:
        engine.step()
    assert (stuck.finish_reason, stuck.stop_reason, len(stuck.output)) == ("error", "stuck", 2)
    assert (other.finish_reason, len(other.output)) == ("length", 9)
    assert engine.kv.pool(0).num_free == 20


def test_the_command_line_takes_files_and_texts(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}', encoding="utf-8")
    lark = tmp_path / "yes.lark"
    lark.write_text('start: "yes"', encoding="utf-8")
    for options, form in [
        (FormOptions(json_schema=str(file)), {"json": '{"type": "object"}'}),
        (FormOptions(json_schema='{"type": "array"}'), {"json": '{"type": "array"}'}),
        (FormOptions(json_schema='{"title": "' + "x" * 5000 + '"}'), {"json": '{"title": "' + "x" * 5000 + '"}'}),
        (FormOptions(grammar=str(lark)), {"grammar": 'start: "yes"'}),
        (FormOptions(grammar='start: "no"'), {"grammar": 'start: "no"'}),
        (FormOptions(regex="a+"), {"regex": "a+"}),
        (FormOptions(choice=["a", "b"]), {"choice": ("a", "b")}),
    ]:
        assert options.params() == StructuredOutputsParams(**form)
    assert FormOptions().params() is None
    with refused("json_schema"):
        FormOptions(json_schema="no.json").params()
    with refused("json_schema"):
        FormOptions(json_schema=str(file), regex="a").params()
    file.write_bytes(b"\xff")
    with refused("json_schema"):
        FormOptions(json_schema=str(file)).params()
