"""Recordings of real runs: each step, group and exchange once, with the counts of the engine."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import ThreadLLM

from longspan import SamplingParams
from longspan.errors import ParameterError
from longspan.extras.trace import chrome_trace, read_record

Events = list[dict[str, Any]]
PROMPTS = [list(range(1 + length % 5, 1 + length % 5 + length)) for length in (128, 64, 32)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def recorded(tiny: Path, trace: Path, **given: Any) -> tuple[Events, ThreadLLM, list[Any]]:
    """Return the events of a run, its engine after the end, and its outputs."""
    sizes = {"block_size": 16, "max_num_batched_tokens": 96, "skip_tokenizer_init": True}
    with ThreadLLM(str(tiny), trace=str(trace), **{**sizes, **given}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not llm.engine.has_unfinished
    text = trace.read_text()
    assert chrome_trace([read_record(text)]) == chrome_trace([read_record(chrome_trace([read_record(text)]))])
    return json.loads(text)["traceEvents"], llm, outputs


def of_kind(events: Events, phase: str, category: str) -> Events:
    return [event for event in events if event["ph"] == phase and event.get("cat") == category]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"parallel": "2", "policy": "context", "policy_options": {"threshold": "32"}, "max_num_batched_tokens": 512},
        {"parallel": "2xpp2", "policy": "chunked"},
    ],
    ids=["one", "groups", "stages"],
)
def test_a_trace_has_each_chunk_once_on_each_stage_of_its_group(
    tiny: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    events, llm, outputs = recorded(tiny, tmp_path / "run.json", **given)
    chunks = of_kind(events, "X", "prefill")
    num_stages = llm.engine.config.cluster.pp(0)
    tokens: Counter[str] = Counter()
    seen = Counter((event["args"]["step"], event["name"], event["tid"]) for event in chunks)
    assert set(seen.values()) == {1}
    for event in chunks:
        if event["tid"] == event["args"]["group"][0] * num_stages:
            tokens[event["name"]] += event["args"]["stop"] - event["args"]["start"]
    served = of_kind(events, "b", "request")
    assert sorted(tokens.values()) == sorted(map(len, PROMPTS))
    assert {event["name"] for event in served} == set(tokens)
    by_length = {event["args"]["prompt_tokens"]: event["args"] for event in served}
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        about, metrics = by_length[len(prompt)], output.metrics
        assert about["output_tokens"] == 6 and about["cached_tokens"] == metrics.num_cached_tokens
        assert about["ttft_s"] == metrics.ttft_s
        assert about["tbt_us"] == [round(1e6 * tbt_s) for tbt_s in metrics.tbt_s]


@pytest.mark.parametrize("policy", ["context", "fixed-sp"])
def test_steps_exchanges_and_bytes_are_those_of_the_metrics(tiny: Path, tmp_path: Path, policy: str) -> None:
    options = {"threshold": "32"} if policy == "context" else {"sp": "2"}
    events, llm, outputs = recorded(tiny, tmp_path / "run.json", parallel="2", policy=policy, policy_options=options)
    counted: Counter[str] = Counter()
    for output in outputs:
        for exchanges in output.metrics.exchanges.values():
            counted.update(exchanges)
    seen: Counter[str] = Counter()
    parts: dict[tuple[Any, ...], dict[str, Any]] = {}  # members without tokens of a part have no block of it
    for event in of_kind(events, "X", "prefill") + of_kind(events, "X", "decode"):
        parts[event["args"]["step"], event["name"], *event["args"]["group"]] = event["args"]
    for about in parts.values():
        seen[about["exchange"]] += about.get("decodes", 1)
    assert seen == counted
    sent = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "bytes sent"]
    total = {name: number for name, number in llm.bytes_exchanged.items() if number and name != "total"}
    assert sent[-1] == total and sum(total.values()) > 0


def test_steps_of_a_stage_do_not_overlap_and_lie_within_requests(tiny: Path, tmp_path: Path) -> None:
    events, _, _ = recorded(tiny, tmp_path / "run.json", parallel="2", policy="chunked")
    ends = {event["id"]: event["ts"] for event in of_kind(events, "e", "request")}
    for row in (0, 1):
        blocks = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == row)
        assert all(later[0] >= earlier[1] - 1 for earlier, later in pairwise(blocks))
        assert all(0 <= begin <= end <= max(ends.values()) + 1e6 for begin, end in blocks)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"instance 0", "instance 1"}
    for event in of_kind(events, "b", "request"):
        parts = ("queue_s", "compute_s", "transfer_s", "decode_s")
        assert sum(event["args"][part] for part in parts) == pytest.approx(event["args"]["e2e_s"])


def test_transfers_and_tiers_are_recorded(tiny: Path, tmp_path: Path) -> None:
    roles = {"prefill_parallel": "1", "decode_parallel": "1", "policy": "tetris"}
    events, _, _ = recorded(tiny, tmp_path / "run.json", **roles)
    moved = of_kind(events, "b", "transfer")
    assert {event["args"]["way"] for event in moved} == {"across"}
    assert len({event["name"] for event in moved}) == len(PROMPTS)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"KV prefill", "KV decode", "waiting"} <= counters


def test_a_run_without_a_recording_imports_none(tiny: Path) -> None:
    with ThreadLLM(str(tiny), skip_tokenizer_init=True) as llm:
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        assert llm.service.recorder is None


@pytest.mark.parametrize("name", ["trace", "report"])
def test_a_file_that_cannot_be_written_is_reported_before_the_start(tiny: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ParameterError) as caught:
        ThreadLLM(str(tiny), **{name: str(tmp_path / "nowhere" / "file")})
    assert caught.value.parameter == name and "cannot be written" in str(caught.value)


def test_the_page_of_a_real_run_has_its_plots_and_no_accuracy(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "run.html"
    recorded(tiny, tmp_path / "run.json", report=str(page), parallel="2", policy="context")
    text = page.read_text()
    assert all(f'id="{name}"' in text for name in ("instances", "ttft-by-length", "ttft", "tbt"))
    assert "Error of these predictions" not in text
    assert "<td>parallel</td><td>2</td>" in text.replace(' class="text"', "")
