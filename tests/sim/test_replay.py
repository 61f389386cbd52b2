"""`longspan simulate --replay`: a recorded run alongside simulations of the same requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import ThreadLLM
from fake_llm import run

from longspan import SamplingParams
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

SHARED = [7 + place % 90 for place in range(1030)]
PROMPTS = [SHARED, [*SHARED, 5, 6], [1, 2, 3], list(range(100, 140))]
OUTPUTS = [3, 4, 5, 6]
CLUSTER = ("--hardware", "l4", "--gpus-per-host", "2", "--policy")


@pytest.fixture(scope="module")
def recorded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = tmp_path_factory.mktemp("recorded") / "run.json"
    params = [SamplingParams(max_tokens=number, temperature=0.0, ignore_eos=True) for number in OUTPUTS]
    sizes: dict[str, Any] = {"max_model_len": 1200, "block_size": 16, "num_gpu_blocks_override": 400}
    with ThreadLLM(
        str(tiny), trace=str(trace), parallel="2", policy="chunked", skip_tokenizer_init=True, **sizes
    ) as llm:
        for prompt, param in zip(PROMPTS, params, strict=True):
            llm.generate(prompt, param, use_tqdm=False)
    return trace


def test_the_workload_of_a_recording_has_its_times_lengths_and_prefixes(recorded: Path) -> None:
    arrivals = make_workload(WorkloadSpec(workload=str(recorded))).arrivals
    assert [len(arrival.prompt) for arrival in arrivals] == list(map(len, PROMPTS))
    assert [arrival.output_len for arrival in arrivals] == OUTPUTS
    assert arrivals[0].due_s == 0.0 and all(arrival.due_s > 0 for arrival in arrivals[1:])
    assert list(arrivals[0].prompt[:1024]) == list(arrivals[1].prompt[:1024])
    assert arrivals[0].prompt[1025] != arrivals[1].prompt[1025]


def test_the_numbers_of_both_runs_are_side_by_side(
    recorded: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "both.json"
    files = ("--report", str(page), "--trace", str(trace))
    command = ("simulate", str(tiny), *CLUSTER, "chunked,context", "--replay", str(recorded), *files)
    assert run(*command, "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert list(numbers) == ["recorded chunked", "chunked", "context"]
    for counts in numbers.values():
        assert (counts["num_completed"], counts["num_output_tokens"]) == (4, sum(OUTPUTS))
        assert counts["num_prompt_tokens"] == sum(map(len, PROMPTS))
        assert counts["ttft_p99_s"] > 0 and counts["tbt_p50_s"] > 0
    assert numbers["recorded chunked"]["num_cached_tokens"] >= 1024 == numbers["chunked"]["num_cached_tokens"]
    assert "cluster" in numbers["chunked"] and "cluster" not in numbers["recorded chunked"]
    text = page.read_text()
    assert "<th>recorded chunked</th><th>chunked</th><th>context</th>" in text
    for name in ("recorded chunked", "chunked", "context"):
        assert f"<h3>Instances, {name}</h3>" in text
    kinds = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert {"recorded chunked: instances", "chunked: instances", "context: instances"} <= kinds
    assert run(*command) == 0
    assert "recorded chunked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rate", "2"), "leave out --rate"),
        (("--workload", "short"), "none"),
        (("--num-requests", "2"), "leave out --num-requests"),
    ],
)
def test_other_requests_are_refused(
    recorded: Path, tiny: Path, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run("simulate", str(tiny), *CLUSTER, "chunked", "--replay", str(recorded), *options, "--json")
    assert status == (0 if words == "none" else 2)
    assert words == "none" or words in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "{}", '{"traceEvents": []}', '{"otherData": {"runs": [{}, {}]}, "traceEvents": []}']
)
def test_a_file_that_is_no_recording_is_refused(
    content: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    assert run("simulate", str(tiny), *CLUSTER, "chunked", "--replay", str(file)) == 2
    error = capsys.readouterr().err
    assert "--replay" in error and "cannot be read" in error and error.count("\n") == 1
