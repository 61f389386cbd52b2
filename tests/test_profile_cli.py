"""`longspan profile`: what it asks of the engine, keeps, goes on with and prints; at the end with a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_llm import FakeLLM, run
from test_profile import SUBJECT
from tiny_models import make_tiny

import longspan
from longspan.cost.profile import SHARED, Profile
from longspan.llm import LLM
from longspan.model.profiles import load_profile, profile_file, save_profile

LENGTHS = ("--lengths", "8,100")
NUM_PROMPTS = 6  # 8, 100; behind 8: 1, 2; behind 100: 3, 25


class Machine(FakeLLM):
    """Takes 1 ms per token, on n instances 1/n of that, and 2 ms for every token with ring_q."""

    started: list[Machine]
    failure_after: int | None = None
    cached = True
    info = SimpleNamespace(vocab_size=50)
    subject = SUBJECT

    def __init__(self, model: str, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        Machine.started.append(self)
        self.policy: dict[str, str] = {}
        self.prompts: list[list[int]] = []

    def set_policy(self, policy: str, options: dict[str, str]) -> None:
        assert policy == "context"
        self.policy = options

    def generate(self, prompt: list[int], params: object, *, use_tqdm: bool) -> list[object]:
        del params, use_tqdm
        if self.failure_after == sum(len(one.prompts) for one in self.started):
            raise KeyboardInterrupt
        cached = max((len(p) for p in self.prompts if self.cached and prompt[: len(p)] == p), default=0)
        self.prompts.append(prompt)
        per_token = 2e-3 if self.policy.get("exchange") == "ring_q" else 1e-3
        ttft_s = per_token * (len(prompt) - cached) / int(self.arguments["parallel"].partition("x")[0])
        return [SimpleNamespace(metrics=SimpleNamespace(ttft_s=ttft_s, num_cached_tokens=cached))]


@pytest.fixture(autouse=True)
def machine(fake_llm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    del fake_llm
    monkeypatch.setitem(vars(longspan), "LLM", Machine)
    monkeypatch.setattr(Machine, "started", [], raising=False)
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))


def stored() -> Profile:
    found = load_profile(SUBJECT)
    assert found is not None
    return found


def test_groups_are_measured_with_every_exchange_and_one_instance_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "m", "--parallel", "3", "--repeats", "2", "--threads-per-rank", "1", "--json", *LENGTHS) == 0
    assert [one.arguments["parallel"] for one in Machine.started] == ["3", "2", "1"]
    assert {one.arguments["threads_per_rank"] for one in Machine.started} == {1}
    assert all(one.closed for one in Machine.started)
    profile = stored()
    assert profile.num_times == 2 * NUM_PROMPTS * (2 * len(SHARED) + 1)
    shown = json.loads(capsys.readouterr().out)
    assert shown["subject"]["model"] == "m" and len(shown["prefills"]) == len(profile.prefills)
    for fit in shown["fits"]:
        expected = (2e-3 if fit["exchange"] == "ring_q" else 1e-3) / fit["members"]
        assert fit["token_s"] == pytest.approx(expected)
        assert fit["max_error"] < 1e-6
    assert [(rule["members"], rule["num_missed"]) for rule in shown["ring_rules"]] == [(2, 0), (3, 0)]


def test_it_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Machine, "failure_after", 14)
    assert run("profile", "m", "--parallel", "2", "--repeats", "1", *LENGTHS) == 130
    assert Machine.started[-1].closed
    before = stored()
    assert 0 < before.num_times < NUM_PROMPTS * len(SHARED)
    monkeypatch.setattr(Machine, "failure_after", None)
    assert run("profile", "m", "--parallel", "2", "--repeats", "1", *LENGTHS) == 0
    assert {len(prefill.seconds) for prefill in stored().prefills} == {1}
    assert stored().num_times == NUM_PROMPTS * (len(SHARED) + 1)
    num_prompts = [len(one.prompts) for one in Machine.started]
    assert run("profile", "m", "--parallel", "2", "--repeats", "1", *LENGTHS) == 0
    assert [len(one.prompts) for one in Machine.started] == [*num_prompts, 0], "nothing is measured again"
    assert "2 gather_kv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exchange", "ring_q"], "leave out"),
        (["--policy", "context"], "leave out"),
        (["-o", "threshold=3"], "leave out -o threshold=3"),
        (["--no-enable-prefix-caching"], "leave out"),
        (["--lengths", "8,1000"], "from 1 to 999 tokens with this model, but 8,1000 given"),
        (["--lengths", "0"], "from 1 to 999"),
        (["--lengths", "x"], "whole numbers"),
        (["--repeats", "0"], "repeats"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "m", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_cached_tokens_that_did_not_stay_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "cached", False)
    assert run("profile", "m", *LENGTHS) == 2
    assert "of 8 tokens only 0 stayed cached" in capsys.readouterr().err
    assert all(prefill.cached_tokens == 0 for prefill in stored().prefills)


def test_a_file_that_is_no_profile_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(Profile(subject=SUBJECT))
    profile_file(SUBJECT).write_text("{}")
    assert run("profile", "m", *LENGTHS) == 2
    assert "remove it" in capsys.readouterr().err


def test_a_real_engine_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(vars(longspan), "LLM", LLM)
    folder = make_tiny("llama", tmp_path / "tiny")
    engine = ("--parallel", "2", "--block-size", "16", "--max-model-len", "300")
    assert run("profile", str(folder), *engine, "--lengths", "64,128", "--repeats", "1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["subject"]["model"] == str(folder.resolve())
    assert len(shown["prefills"]) == NUM_PROMPTS * (len(SHARED) + 1)
    assert [(fit["members"], fit["exchange"]) for fit in shown["fits"]] == [
        (1, "local"),
        *((2, name) for name in sorted(SHARED)),
    ]
