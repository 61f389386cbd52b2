"""Tokens, logprobs and reasons of the engine as they appear in outputs, with a scripted engine and a real tokenizer."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longspan.core.request import RequestMetrics
from longspan.core.sampling import SamplingParams
from longspan.core.steps import TokenLogprobs
from longspan.llm import Progress, count_tokens
from longspan.model.source import smollm2_folder
from longspan.outputs import CompletionOutput, Logprob
from longspan.running_requests import RunningRequests
from longspan.text.output_processor import EngineRequest, RequestState, by_token

EOS = 2


@dataclass
class ScriptedRequest:
    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    choice: int
    leader: ScriptedRequest | None
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    attention: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_s=0.0))


class ScriptedEngine:
    """Keeps requests. The test gives them tokens."""

    def __init__(self) -> None:
        self.requests: list[ScriptedRequest] = []
        self.grammars: list[str] = []
        self.stepped: list[ScriptedRequest] = []

    def add(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        choice: int = 0,
        leader: Any = None,
        grammar: str = "",
        cache_salt: str = "",
    ) -> ScriptedRequest:
        del cache_salt
        request = ScriptedRequest(len(self.requests), prompt, params, choice, leader)
        self.requests.append(request)
        self.grammars.append(grammar)
        return request

    def step(self, timeout_s: float | None) -> list[ScriptedRequest]:
        del timeout_s
        return self.stepped

    def finish(self, request: ScriptedRequest, reason: str) -> None:
        """As in the engine: an ended request keeps its reason, except for a stop string in the last token."""
        if request.finish_reason is None or (request.finish_reason, reason) == ("length", "stop"):
            request.finish_reason = reason


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder())


class Run:
    """One job on a scripted engine."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt: Sequence[int] = (5, 6),
        *,
        grammar: str = "",
        **wishes: Any,
    ) -> None:
        self.engine: Any = ScriptedEngine()
        self.engine_request = EngineRequest(
            text=None, token_ids=tuple(prompt), params=SamplingParams(**wishes), grammar=grammar
        )
        self.tracked = RequestState(self.engine_request, tokenizer)
        self.running: RunningRequests[Run] = RunningRequests(self.engine)
        self.running.start(self)

    @property
    def state(self) -> RequestState:
        return self.tracked

    def give(self, *tokens: int, choice: int = 0, finish: str | None = None, stop_reason: int | None = None) -> None:
        request = self.engine.requests[choice]
        for token in tokens:
            request.output.append(token)
            if request.params.logprobs is not None:
                request.logprobs.append(report(token))
        request.finish_reason, request.stop_reason = finish, stop_reason
        self.engine.stepped = [request]
        self.running.step()

    @property
    def only(self) -> CompletionOutput:
        [completion] = self.tracked.output().outputs
        return completion


def report(token: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-float(token), rank=9, top_ids=(3, 4), top_logprobs=(-0.1, -0.2))


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def test_the_chosen_token_comes_first_even_if_it_is_none_of_the_best() -> None:
    assert by_token(7, report(7), str) == {
        7: Logprob(logprob=-7.0, rank=9, decoded_token="7"),
        3: Logprob(logprob=-0.1, rank=1, decoded_token="3"),
        4: Logprob(logprob=-0.2, rank=2, decoded_token="4"),
    }
    best = TokenLogprobs(logprob=-0.2, rank=2, top_ids=(3, 4), top_logprobs=(-0.1, -0.2))
    assert list(by_token(4, best, str)) == [4, 3]
    none_asked = TokenLogprobs(logprob=-0.2, rank=2)
    assert by_token(4, none_asked, str) == {4: Logprob(logprob=-0.2, rank=2, decoded_token="4")}


def test_logprobs_are_there_per_token_when_asked(tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tokenizer, logprobs=2)
    run.give(10)
    run.give(11, EOS, finish="stop")
    assert run.only.logprobs is not None
    assert [next(iter(token)) for token in run.only.logprobs] == run.only.token_ids == [10, 11, EOS]
    assert run.only.cumulative_logprob == -23.0
    assert run.only.logprobs[2][EOS].decoded_token == "<|im_end|>"
    unasked = Run(tokenizer)
    unasked.give(10)
    assert (unasked.only.logprobs, unasked.only.cumulative_logprob) == (None, None)


def test_without_a_tokenizer_logprobs_have_no_texts() -> None:
    run = Run(None, logprobs=0)
    run.give(10)
    assert run.only.text == ""
    assert run.only.logprobs is not None
    assert run.only.logprobs[0][10].decoded_token is None


def test_prompt_logprobs_have_an_entry_per_prompt_token(tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tokenizer, prompt=(5, 6, 7), prompt_logprobs=2)
    assert run.tracked.output().prompt_logprobs is None, "not known before the first token"
    run.engine.requests[0].prompt_logprobs = [None, report(6), report(7)]
    run.give(10)
    found = run.tracked.output().prompt_logprobs
    assert found is not None
    assert [token and next(iter(token)) for token in found] == [None, 6, 7]


@pytest.mark.parametrize("stop_reason", [None, 28])
def test_a_stop_token_is_kept_and_has_no_text(tokenizer: PreTrainedTokenizerBase, stop_reason: int | None) -> None:
    """Also if it is an ordinary one (28 is a comma)."""
    last = EOS if stop_reason is None else stop_reason
    run = Run(tokenizer)
    run.give(*ids(tokenizer, " one"))
    run.give(last, finish="stop", stop_reason=stop_reason)
    assert (run.only.text, run.only.token_ids[-1]) == (" one", last)
    assert (run.only.finish_reason, run.only.stop_reason) == ("stop", stop_reason)


def test_a_token_that_stops_nothing_has_its_text(tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tokenizer)
    run.give(*ids(tokenizer, " one,"), finish="length")
    assert (run.only.text, run.only.stop_reason) == (" one,", None)


@pytest.mark.parametrize("finish", [None, "length"])
def test_a_stop_string_ends_the_request_and_is_the_reason(
    tokenizer: PreTrainedTokenizerBase, finish: str | None
) -> None:
    run = Run(tokenizer, stop=["two", "xyz"])
    run.give(*ids(tokenizer, " one two three"), finish=finish)
    assert (run.only.text, run.only.finish_reason, run.only.stop_reason) == (" one ", "stop", "two")


def test_an_abort_releases_text_that_was_held_back(tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tokenizer, stop="two three")
    run.give(*ids(tokenizer, " one two"))
    assert run.only.text == " one "
    assert run.running.abort(run) is None
    assert (run.only.text, run.only.finish_reason) == (" one two", "abort")
    assert run.running.abort(run) is None
    assert run.only.text == " one two"


def test_n_choices_follow_the_first_and_end_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    run = Run(tokenizer, n=3)
    leader = run.engine.requests[0]
    assert [(r.choice, r.leader) for r in run.engine.requests] == [(0, None), (1, leader), (2, leader)]
    run.give(10, 11, choice=1, finish="length")
    run.give(12, choice=0)
    output = run.tracked.output()
    assert [(c.index, c.token_ids, c.finish_reason) for c in output.outputs] == [
        (0, [12], None),
        (1, [10, 11], "length"),
        (2, [], None),
    ]
    assert (output.finished, run.tracked.num_taken) == (False, 3)
    run.give(choice=0, finish="abort")
    run.give(choice=2, finish="abort")
    assert run.tracked.output().finished


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("number", "is_shown", "stderr", "shown"),
    [
        (2, True, Terminal(), True),
        (1, True, Terminal(), False),
        (2, False, Terminal(), False),
        (2, True, io.StringIO(), False),
    ],
)
def test_a_bar_is_drawn_for_several_prompts_on_a_terminal(
    number: int, is_shown: bool, stderr: io.StringIO, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    runs = [Run(None) for _ in range(number)]
    with Progress([run.tracked for run in runs], is_shown=is_shown) as progress:
        runs[0].give(10, 11, 12, finish="length")
        assert count_tokens([run.tracked for run in runs]) == (2, 3)
        progress.update()
    assert bool(stderr.getvalue()) == shown
    if shown:
        assert "1/2" in stderr.getvalue()
        assert "output" in stderr.getvalue()


def test_every_choice_of_a_job_follows_its_grammar() -> None:
    run = Run(None, (5,), grammar="one", n=3)
    assert run.engine.grammars == ["one"] * 3
