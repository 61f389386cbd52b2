"""`longspan eval`: its prompts, scores, comparisons and errors. The last tests use real engines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from engines import Engines, ThreadLLM
from fake_llm import FakeLLM, run
from oracle import Oracle
from refusals import refused

import longspan
from longspan import SamplingParams, evals
from longspan.evals import NEEDLE_PARAMS, Needle, ScoredWindow, Text, compare, needles, perplexity, scored
from longspan.outputs import Logprob, RequestOutput
from longspan.policy.facts import Facts

KEY = re.compile(r"The secret pass key is (\d{5})\. Remember it\. \1 is the pass key\.")
EVAL = ("eval", "--num-samples", "2", "--json")


class Reader(FakeLLM):
    """Finds keys in the first 500 characters only, and takes each character for as likely as `logprob` says.

    Tokens are characters, behind a 1 that begins every prompt.
    """

    logprob = -2.0
    info = SimpleNamespace(vocab_size=2**20)
    facts = Facts()
    service = SimpleNamespace(policy_settings=SimpleNamespace(name="chunked"))
    engine = SimpleNamespace(config=SimpleNamespace(cluster="2xtp2"))

    def generate_each(
        self, prompts: Sequence[str | list[int]], params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> Iterator[RequestOutput]:
        assert not use_tqdm
        for prompt, one in zip(prompts, params, strict=True):
            [empty] = [last for last in self.stream(prompt, one) if last.finished]
            assert isinstance(prompt, list) and prompt[0] == 1
            text = "".join(map(chr, prompt[1:]))
            key = KEY.search(text)
            answer = f" {key[1]}." if key is not None and key.end() <= 500 else " not here"
            likely = [{token: Logprob(logprob=self.logprob), 0: Logprob(logprob=-1.0)} for token in prompt[1:]]
            outputs = [replace(empty.outputs[0], text=answer)]
            yield replace(
                empty, outputs=outputs, prompt_logprobs=None if one.prompt_logprobs is None else [None, *likely]
            )

    def check(self, prompt: str | list[int], params: SamplingParams) -> None:
        assert len(prompt) + (params.max_tokens or 0) <= self.max_model_len


@pytest.fixture
def reader(fake_llm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del fake_llm
    monkeypatch.setitem(vars(longspan), "LLM", Reader)
    monkeypatch.setattr(Reader, "logprob", -2.0)


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*EVAL, *arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ---------------------------------------------------------------- needle


@pytest.mark.usefixtures("reader")
def test_a_key_counts_where_the_answer_begins_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "small", "--lengths", "300,900", "--depths", "0,0.5,1", "--parallel", "2")
    about = {"task": "needle", "model": "small", "parallel": "2xtp2", "policy": "chunked", "lengths": [300, 900]}
    assert found.items() >= about.items()
    assert [(one["length"], one["depth"], one["num_found"]) for one in found["results"]] == [
        (300, 0.0, 2),
        (300, 0.5, 2),
        (300, 1.0, 2),
        (900, 0.0, 2),
        (900, 0.5, 2),
        (900, 1.0, 0),
    ]
    assert {(one["num_samples"], one["num_found"] / 2 - one["score"]) for one in found["results"]} == {(2, 0.0)}
    assert found["score"] == pytest.approx(5 / 6)
    assert FakeLLM.last.arguments["parallel"] == "2"
    assert {params for _, params in FakeLLM.last.asked} == {NEEDLE_PARAMS}


@pytest.mark.usefixtures("reader")
def test_a_table_has_lengths_by_depths(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "--lengths", "300,900", "--depths", "0,1", "--num-samples", "1") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("smollm2-135m, parallel 2xtp2, policy chunked\n")
    rows = [re.findall(r"[\w,.%]+", line) for line in shown.splitlines() if "%" in line]
    assert rows == [["300", "100%", "100%", "100%"], ["900", "100%", "0%", "50%"], ["all", "100%", "50%", "75%"]]


def test_needles_lie_at_their_depth_in_prompts_of_the_length() -> None:
    text = Text(token_ids=list(range(10**6, 10**6 + 5000)), begin=[1])
    depths, llm = (0.0, 0.25, 1.0), cast(longspan.LLM, SimpleNamespace(tokenize=ordinals))
    found = needles(llm, text, 500, depths=depths, num_samples=3, seed=1)
    assert len({one.key for one in found}) == len({tuple(one.prompt) for one in found}) == 9
    for one in found:
        assert len(one.prompt) + evals.ANSWER_TOKENS == one.length == 500
        window = [token for token in one.prompt if token >= 10**6]
        assert window == list(range(window[0], window[0] + len(window)))
        start = one.prompt.index(ord("\n"))
        assert one.prompt[:1] == [1] and start - 1 == round(one.depth * len(window))
        assert KEY.search("".join(chr(token) for token in one.prompt[start:] if token < 10**6)), "it is in one piece"
        assert one.found_in(f" {one.key}.") and not one.found_in(f" Not {one.key}")
    alone = needles(llm, text, 500, depths=(0.25,), num_samples=3, seed=1)
    assert alone == [one for one in found if one.depth == 0.25], "independent of other needles"
    others = needles(llm, text, 500, depths=depths, num_samples=3, seed=2)
    assert not {one.key for one in others} & {one.key for one in found}


def ordinals(text: str, *, add_special_tokens: bool) -> list[int]:
    assert not add_special_tokens
    return [*map(ord, text)]


# ---------------------------------------------------------------- perplexity


@pytest.mark.usefixtures("reader")
def test_perplexity_is_of_every_token_but_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "--task", "perplexity", "--lengths", "300,900")
    assert [(one["length"], one["num_tokens"]) for one in found["results"]] == [(300, 2 * 298), (900, 2 * 898)]
    assert found["perplexity"] == pytest.approx(math.exp(2))
    assert "kl" not in found and "score" not in found
    assert {params.prompt_logprobs for _, params in FakeLLM.last.asked} == {0}
    assert {len(prompt) for prompt, _ in FakeLLM.last.asked} == {299, 899}


@pytest.mark.usefixtures("reader")
def test_a_run_is_compared_with_a_saved_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "exact.json")
    result(capsys, "exact", "--task", "perplexity", "--lengths", "300,900", "--save", file)
    assert {params.prompt_logprobs for _, params in FakeLLM.last.asked} == {evals.NUM_TOP}
    same = result(capsys, "--task", "perplexity", "--lengths", "900", "--against", file)
    assert (same["kl"], same["perplexity_ratio"]) == (0.0, 1.0)
    assert same["against"] == {"model": "exact", "parallel": "2xtp2", "policy": "chunked"}
    monkeypatch.setattr(Reader, "logprob", -2.5)
    worse = result(capsys, "--task", "perplexity", "--lengths", "300,900", "--against", file)
    p, q = (np.array([math.exp(one), math.exp(-1), 1 - math.exp(one) - math.exp(-1)]) for one in (-2.0, -2.5))
    for one in (worse, *worse["results"]):
        assert one["kl"] == pytest.approx(float((p * np.log(p / q)).sum()))
        assert one["perplexity_ratio"] == pytest.approx(math.exp(0.5))
    assert run("eval", "--task", "perplexity", "--lengths", "300", "--against", file, "--num-samples", "2") == 0
    assert "KL, nats" in capsys.readouterr().out
    assert run("eval", "--task", "perplexity", "--lengths", "301", "--against", file) == 2
    assert "lengths 300,900, but lacks 4 of the 4 windows" in capsys.readouterr().err


def window(*logprobs: dict[int, float]) -> ScoredWindow:
    return ScoredWindow(length=len(logprobs) + 2, token_ids=[0] * (len(logprobs) + 1), logprobs=list(logprobs))


def test_a_divergence_of_some_tokens_is_below_that_of_all() -> None:
    """Also where the two runs name different tokens."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        exact, other = (np.log(rng.dirichlet(np.full(30, 0.3))) for _ in range(2))
        divergence = float((np.exp(exact) * (exact - other)).sum())
        all_tokens = [window({token: float(one) for token, one in enumerate(side)}) for side in (exact, other)]
        assert compare(all_tokens[:1], all_tokens[1:]).kl == pytest.approx(divergence, rel=1e-3)
        some = [window({t: float(side[t]) for t in [0, *np.argsort(-side)[:20]]}) for side in (exact, other)]
        assert 0 < compare(some[:1], some[1:]).kl <= divergence + 1e-9


def test_certain_predictions_have_no_divergence() -> None:
    sure = window({0: 1e-7, 1: -900.0})
    assert compare([sure], [window({0: 0.0, 1: -800.0})]).kl == pytest.approx(0.0, abs=1e-6)


# ---------------------------------------------------------------- mistakes


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "500,1001"], "--lengths must be at most 1000"),
        (["--lengths", "500,1001", "--task", "perplexity"], "but 1001 given"),
        (["--lengths", "50"], "--lengths must be more than"),
        (["--lengths", "-3", "--task", "perplexity"], "--lengths must be numbers of at least 1"),
        (["--lengths", ""], "--lengths must be numbers of at least 1"),
        (["--lengths", "1k"], "'1k'"),
        (["--depths", "0,2"], "--depths must be from 0 to 1, but 2 given"),
        (["--depths", "deep"], "'deep'"),
        (["--depths", "0", "--task", "perplexity"], "--depths does not apply to --task perplexity"),
        (["--save", "x.json"], "--save does not apply to --task needle"),
        (["--against", "x.json"], "--against does not apply to --task needle"),
        (["--task", "perplexity", "--against", "gone.json"], "'gone.json' cannot be read"),
        (["--task", "perplexity", "--against", __file__], "must be a file that --save wrote"),
        (["--task", "perplexity", "--save", "gone/x.json"], "make its folder"),
        (["--task", "haystack"], "--task"),
        (["--num-samples", "0"], "--num-samples"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init excludes prompts"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and words in shown.err and len(shown.err.splitlines()) == 1


def test_a_text_that_is_too_short_is_refused() -> None:
    with refused("lengths"):
        evals.perplexity_prompts(Text(token_ids=[5] * 10, begin=[]), 100, num_samples=1)


@pytest.mark.usefixtures("reader")
def test_ctrl_c_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "failure", KeyboardInterrupt())
    assert run("eval", "--lengths", "300") == 130
    assert FakeLLM.last.closed


# ---------------------------------------------------------------- real engines


# Steps hold 256 tokens per instance.
@pytest.mark.parametrize("instances", [1, 2])
def test_perplexity_is_the_oracles(engines: Engines, tiny: Path, oracle: Oracle, instances: int) -> None:
    text = Text(token_ids=[3 + i * i % 190 for i in range(2000)], begin=[1])
    prompts = evals.perplexity_prompts(text, 200, num_samples=3)
    likely = [oracle.logprobs(prompt)[range(198), prompt[1:]] for prompt in prompts]
    llm = engines(tiny, instances=instances, max_num_batched_tokens=256)
    llm.set_policy("context" if instances > 1 else "chunked", {"threshold": "60"} if instances > 1 else {})
    outputs = llm.generate(prompts, evals.perplexity_params(num_top=5), use_tqdm=False)
    assert (llm.bytes_exchanged["total"] > 0) == (instances > 1)
    windows = [scored(200, output) for output in outputs]
    assert perplexity(windows) == pytest.approx(math.exp(-float(np.mean(likely))), rel=1e-4)
    assert {len(one) for window in windows for one in window.logprobs} == {5, 6}


@pytest.mark.usefixtures("thread_llm")
def test_the_score_is_that_of_the_answers(
    speaking_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained model answers with no key, so every second answer counts as found."""
    answers: list[str] = []

    def found_in(_: Needle, answer: str) -> bool:
        answers.append(answer)
        return len(answers) % 2 == 0

    monkeypatch.setattr(Needle, "found_in", found_in)
    arguments = (str(speaking_model), "--lengths", "96", "--depths", "0,1", "--threads-per-rank", "1")
    found = result(capsys, *arguments)
    assert (found["score"], found["parallel"], found["policy"]) == (0.5, "1", "chunked")
    assert [cell["num_found"] for cell in found["results"]] == [1, 1]
    with ThreadLLM(str(speaking_model), threads_per_rank=1) as llm:
        hidden = needles(llm, Text.of(llm), 96, depths=(0.0, 1.0), num_samples=2, seed=0)
        outputs = llm.generate([needle.prompt for needle in hidden], NEEDLE_PARAMS, use_tqdm=False)
    assert answers == [output.outputs[0].text for output in outputs]


@pytest.mark.full
@pytest.mark.usefixtures("thread_llm")
def test_smollm2_finds_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "--lengths", "512,768", "--depths", "0.5", "--num-samples", "1")
    assert found["score"] == 1.0
    assert (found["parallel"], found["policy"]) == ("1", "chunked")
