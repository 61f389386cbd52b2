"""`longspan batch --parallel auto`: the candidates, the choice, and the engine that runs it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import ThreadLLM
from fake_llm import run
from hypothesis import given
from hypothesis import strategies as st
from invented_profiles import measure

import longspan
from longspan.args import EngineArgs
from longspan.core.sampling import SamplingParams
from longspan.core.splits import ParallelSpec
from longspan.errors import ParameterError
from longspan.machine import (
    DEFAULT_OUTPUT_TOKENS,
    Outcome,
    arrivals_of,
    best,
    check_options,
    explanation,
    name_of,
    options_of,
    sample_indices,
)
from longspan.planner.candidates import Candidate, offline_candidates, specs_of
from longspan.text.input_processor import EngineRequest

PP2, TP2, TWO = (ParallelSpec.parse(spec) for spec in ("pp2", "tp2", "2"))
NUM_REQUESTS = 12


@given(st.integers(1, 64), st.integers(1, 40))
def test_specs_take_all_ranks_and_layers_are_enough(num_ranks: int, num_layers: int) -> None:
    specs = specs_of(num_ranks, num_layers)
    every = {
        ParallelSpec(instances=instances, tp=tp, pp=pp)
        for instances in range(1, num_ranks + 1)
        for tp in range(1, num_ranks // instances + 1)
        for pp in range(1, num_ranks // instances // tp + 1)
        if instances * tp * pp == num_ranks and pp <= num_layers
    }
    assert set(specs) == every and len(specs) == len(every)
    pairs = offline_candidates(specs, hardware="cpu", policy="seesaw", with_pairs=True)
    assert all(one.decode not in (None, one.spec) for one in pairs)
    assert all(one.decode is not None and one.decode.instances == one.spec.instances for one in pairs)


def test_two_ranks() -> None:
    specs = specs_of(2, 30)
    assert specs == [TWO, PP2, TP2]
    every = list(map(name_of, offline_candidates(specs, hardware="cpu", policy="auto", with_pairs=True)))
    assert every == ["2", "pp2", "tp2", "seesaw pp2 to tp2", "seesaw tp2 to pp2"]
    assert list(map(name_of, offline_candidates(specs, hardware="cpu", policy="chunked", with_pairs=True))) == every[:3]
    assert list(map(name_of, offline_candidates(specs, hardware="cpu", policy="auto", with_pairs=False))) == every[:3]
    assert list(map(name_of, offline_candidates(specs, hardware="cpu", policy="seesaw", with_pairs=True))) == every[3:]
    assert specs_of(2, 1) == [TWO, TP2]


def test_a_candidate_holds_the_arguments_of_the_engine() -> None:
    given = EngineArgs(parallel="auto", host_kv_gib=1.0)
    static = options_of(Candidate(hardware="cpu", spec=PP2), given)
    assert static == replace(given, parallel="pp2", policy="chunked")
    pair = options_of(Candidate(hardware="cpu", spec=PP2, decode=TP2, policy="seesaw"), given).resolve()
    assert [one.spec for one in pair.phases] == [PP2, TP2]


def test_the_fastest_of_the_candidates_with_the_most_requests_is_chosen() -> None:
    slow, quick = (
        Outcome(candidate=Candidate(hardware="cpu", spec=PP2), requests_per_s=2.0),
        Candidate(hardware="cpu", spec=TP2),
    )
    assert best([slow, Outcome(candidate=quick, requests_per_s=3.0)]).candidate == quick
    assert best([slow, Outcome(candidate=quick, requests_per_s=3.0, num_refused=1)]) is slow
    assert best([Outcome(candidate=quick, problem="no room"), slow]) is slow
    assert best([slow, replace(slow, candidate=quick)]) is slow
    with pytest.raises(ParameterError, match=r"parallel auto finds no candidate that can run: tp2 cannot run: no room"):
        best([Outcome(candidate=quick, problem="no room")])
    with pytest.raises(ParameterError, match="finds no candidate"):
        best([])


def test_an_outcome_is_explained() -> None:
    pair = Outcome(
        candidate=Candidate(hardware="cpu", spec=PP2, decode=TP2, policy="seesaw"),
        num_transitions=3,
        prefill_share=0.25,
        num_refused=2,
    )
    assert explanation(pair) == "25% of step time is prefill, 3 transitions, 2 requests do not fit"
    assert explanation(replace(pair, problem="no room")) == "not simulated: no room"


@given(st.integers(0, 1000), st.integers(1, 64))
def test_requests_are_sampled_evenly(number: int, most: int) -> None:
    indices = list(sample_indices(number, most))
    assert len(indices) == min(number, most)
    gaps = {b - a for a, b in pairwise(indices)}
    assert not gaps or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)


def test_outputs_are_as_long_as_asked_for_or_as_is_usual() -> None:
    def asked(**params: Any) -> EngineRequest:
        return EngineRequest(text=None, token_ids=(5,) * 10, params=SamplingParams(**params), grammar="")

    found = arrivals_of([asked(max_tokens=7, n=2), asked(max_tokens=None), asked(max_tokens=None)], 1000)
    assert [one.output_len for one in found] == [7, 7, DEFAULT_OUTPUT_TOKENS, DEFAULT_OUTPUT_TOKENS]
    assert [one.output_len for one in arrivals_of([asked(max_tokens=None)], 100)] == [90]
    assert [one.cache_salt for one in arrivals_of([replace(asked(n=2), cache_salt="a"), asked()], 100)] == [
        "a",
        "a",
        "",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "context"}, "policy context is not simulated"),
        ({"policy": "seesaw"}, "host_kv_gib must be above 0"),
        ({"instances": 2}, "exclude each other"),
        ({"prefill_parallel": "2", "decode_parallel": "tp2"}, "exclude each other"),
    ],
)
def test_arguments_that_leave_no_choice_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        check_options(EngineArgs(parallel="auto", **options))


# ---------------------------------------------------------------- the verb


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, thread_llm: None) -> list[ThreadLLM]:
    """The engines that the command line starts, on a machine of two cores without a profile."""
    del thread_llm
    found: list[ThreadLLM] = []

    class Recorded(ThreadLLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            found.append(self)

    monkeypatch.setitem(vars(longspan), "LLM", Recorded)
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return found


@pytest.fixture
def batch(tiny: Path, tmp_path: Path) -> Callable[..., int]:
    body = {"prompt": [5] * 100, "max_tokens": 20, "ignore_eos": True}
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
        for index in range(NUM_REQUESTS)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def run_it(*options: str) -> int:
        files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
        return run("batch", str(tiny), *files, "--parallel", "auto", "--skip-tokenizer-init", *options)

    return run_it


def test_a_pair_is_taken_where_each_is_good_at_one_thing(
    batch: Callable[..., int], tiny: Path, started: list[ThreadLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.1)
    measure(tiny, tp=2, token_s=1e-2, decode_s=1e-3)
    assert batch("--host-kv-gib", "0.01", "--block-size", "16", "--num-gpu-blocks-override", "200") == 0
    [llm] = started
    assert [one.spec for one in llm.engine.config.phases] == [PP2, TP2]
    assert len(llm.engine.transitions) >= 1
    out, err = capsys.readouterr()
    assert out == ""
    rows = [line for line in err.splitlines() if re.search(r"│ +[0-9.]+ +│ +[0-9.]+ +│", line.replace("┃", "│"))]
    assert len(rows) == 5, err
    assert "seesaw pp2 to tp2" in rows[0] and "1.00" in rows[0]
    assert "longspan: uses seesaw pp2 to tp2: " in err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == NUM_REQUESTS


def test_without_memory_on_the_host_the_best_spec_is_taken(
    batch: Callable[..., int], tiny: Path, started: list[ThreadLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    measure(tiny, tp=2, token_s=1e-4, decode_s=1e-3)
    assert batch("--block-size", "16", "--num-gpu-blocks-override", "200") == 0
    [llm] = started
    assert (llm.engine.config.cluster.spec, llm.service.policy_settings.name) == (TP2, "chunked")
    _, err = capsys.readouterr()
    assert f"tp 1 have no profile, so they were not simulated: longspan profile {tiny} --parallel 2 " in err
    assert "pairs for Seesaw need --host-kv-gib" in err
    assert "longspan: uses tp2: " in err


def test_without_a_profile_the_message_names_the_command_that_makes_it(
    batch: Callable[..., int], tiny: Path, started: list[ThreadLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch("--attention-backend", "torch") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), started) == ("", 1, [])
    options = "--threads-per-rank 1 --dtype float32 --attention-backend torch"
    assert "--parallel auto" in err
    assert f"longspan profile {tiny} --parallel 2 {options} and longspan profile {tiny} --parallel tp2 {options}" in err


def test_other_policies_and_other_verbs_refuse_it(
    batch: Callable[..., int], tiny: Path, started: list[ThreadLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch("--policy", "context") == 2
    assert "--policy context is not simulated for parallel auto: choose auto, chunked" in capsys.readouterr().err
    assert run("generate", str(tiny), "--prompt", "x", "--parallel", "auto") == 2
    assert "--parallel auto is for longspan batch" in capsys.readouterr().err
    assert not started
