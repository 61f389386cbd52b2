"""Arrivals, lengths and traces: their distributions, and that a seed determines them."""

from __future__ import annotations

import gzip
import json
import logging
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longspan.workload.arrivals import arrival_times, prompt_of, text
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec
from longspan.workload.traces import read_trace


def times(num: int, rate: float, burstiness: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array(arrival_times(num, rate=rate, burstiness=burstiness, rng=rng))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_of_a_gamma_distribution(burstiness: float) -> None:
    """For 20,000 gaps the coefficient of variation is within 3 % (a Poisson process has 1)."""
    gaps = np.diff(times(20_000, 8.0, burstiness), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 8)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)
    assert (gaps >= 0).all()


def test_gaps_of_a_poisson_process_are_memoryless() -> None:
    gaps = np.diff(times(20_000, 1.0, 1.0), prepend=0.0)
    for later in (0.5, 1.0, 2.0):
        assert (gaps > later).mean() == pytest.approx(np.exp(-later), abs=0.01)
    assert np.corrcoef(gaps[:-1], gaps[1:])[0, 1] == pytest.approx(0, abs=0.02)


def test_the_last_arrival_is_where_the_rate_says() -> None:
    assert {round(times(50, 4.0, 1.0, seed)[-1], 9) for seed in range(5)} == {12.5}
    assert times(3, float("inf"), 1.0).tolist() == [0, 0, 0]
    assert times(4, 2.0, float("inf")).tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(("rate", "burstiness", "flag"), [(0, 1, "rate"), (1, -1, "burstiness")])
def test_rates_and_shapes_are_above_0(rate: float, burstiness: float, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} must be above 0"):
        WorkloadSpec(rate=rate, burstiness=burstiness)


def test_a_shape_so_small_that_all_gaps_are_0_is_refused() -> None:
    with pytest.raises(ValueError, match="burstiness 1e-300 is too small: every gap between requests is 0"):
        times(3, 1.0, 1e-300)


def test_no_number_is_no_rate() -> None:
    with pytest.raises(ValueError, match="but nan given"):
        WorkloadSpec(rate=float("nan"))


def test_times_do_not_depend_on_lengths() -> None:
    """So that two runs that differ in lengths have the same arrivals."""
    spec = WorkloadSpec(rate=3.0, num_requests=6, seed=5)

    def due(spec: WorkloadSpec) -> list[float]:
        return [one.due_s for one in make_workload(spec).arrivals]

    assert due(spec) == due(replace(spec, workload="long", output_len=9))
    assert due(spec) != due(replace(spec, seed=6))


Write = Callable[[str, str], Path]
MOONCAKE = """\
{"timestamp": 3000, "input_length": 600, "output_length": 50, "hash_ids": [4, 5]}
{"timestamp": 3500, "input_length": 512, "output_length": 2, "hash_ids": [4]}
"""
TRACES = {
    "mooncake.jsonl": MOONCAKE,
    "toolagent.jsonl": MOONCAKE.replace(', "hash_ids": [4, 5]', "").replace(', "hash_ids": [4]', ""),
    "azure.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,600,50\n"
        "2023-11-16 18:15:47.1805900,512,2\n"
    ),
    "azure_2024.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,600,50\n"
        "2024-05-10 00:00:00.509930+00:00,512,2\n"
    ),
    "vidur.csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,600,50\n2.0,512,2\n",
    "burstgpt.csv": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,600,50,650,Conversation log\n"
        "5.2,GPT-4,7,0,7,Conversation log\n"
        "5.5,GPT-4,512,2,514,API log\n"
    ),
    "lengths.csv": "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n600,50,650,12\n512,2,514,256\n",
}


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("zipped", [False, True])
def test_formats_of_traces(name: str, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / (name + ".gz" if zipped else name)
    data = TRACES[name].encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    requests = read_trace(path)
    assert [(request.input_len, request.output_len) for request in requests] == [(600, 50), (512, 2)]
    expected = [None, None] if name == "lengths.csv" else pytest.approx([0.0, 0.5])
    assert [request.due_s for request in requests] == expected
    assert [request.block_ids for request in requests] == ([(0, 1), (0,)] if name == "mooncake.jsonl" else [(), ()])


def test_ids_of_any_size_are_tokens_of_64_bits_and_equal_ids_equal_tokens(tmp_path: Path) -> None:
    path, large = tmp_path / "a.jsonl", 2**62 - 1
    rows = [[large, 2**22], [large, 2**22 + 1], [large - 1, 2**22], [0, 1]]
    lines = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids} for ids in rows]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, *others = [arrival.prompt for arrival in make_workload(WorkloadSpec(workload=str(path))).arrivals]
    assert list(first[:512]) == list(second[:512]) and first[512] != second[512]
    assert {*first}.isdisjoint(others[0][:512]) and list(others[0][512:]) == list(first[512:])
    assert {*first, *second}.isdisjoint(others[1])
    for prompt in (first, second, *others):
        array("q", prompt)


def test_texts_up_to_the_last_have_tokens_of_64_bits() -> None:
    array("q", text(2**31 - 1, 2**20)[-2:])
    array("q", prompt_of(2**29, 3, blocks=[2**29], block_len=1))


def test_a_trace_of_several_runs_is_no_workload(trace: Write) -> None:
    run = {"traceEvents": [], "otherData": {"runs": [{}, {}]}}
    path = trace("both.json", json.dumps(run))
    with pytest.raises(ValueError, match="no trace of one run"):
        make_workload(WorkloadSpec(workload=str(path), rate=1.0))


@pytest.fixture
def trace(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_times_count_from_the_first_arrival_and_num_takes_the_first(trace: Write) -> None:
    path = trace("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n4,1,1\n2,2,1\n8,3,1\n")
    assert [(request.due_s, request.input_len) for request in read_trace(path)] == [(0.0, 2), (2.0, 1), (6.0, 3)]
    assert [(request.due_s, request.input_len) for request in read_trace(path, num=1)] == [(0.0, 1)]


def test_lines_of_failed_requests_are_left_out_and_counted(trace: Write, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="longspan"):
        assert len(read_trace(trace("b.csv", TRACES["burstgpt.csv"]))) == 2
    assert "1 lines of the trace have no input or no output" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "x", "must end in .csv, .csv.gz, .jsonl, .jsonl.gz, or be recorded"),
        ("a.csv", "a,b\n1,2\n", "has the columns a, b, which is no known format"),
        ("a.csv", "", "holds 0 requests, but at least 1 is needed"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n1,2\n3\n", "line 3 of trace .* TypeError"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n1,2\n3,x\n", "line 3 of trace .* could not convert"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n1.5,2\n", "a whole number .* is needed, but '1.5' given"),
        ("a.jsonl", MOONCAKE + "{", "line 3 of trace .* is not JSON"),
        ("a.jsonl", "[1]", r"line 1 of trace .* must be a JSON object, but is \[1\]"),
        ("a.jsonl", MOONCAKE + '{"timestamp": 1}', "line 3 of trace .* is not of the format 'Mooncake': KeyError"),
        ("a.jsonl", MOONCAKE.replace("600", "6000000000"), "line 1 of trace .* up to 4294967296"),
        ("a.jsonl.gz", MOONCAKE, "cannot be read .Not a gzipped file"),
    ],
)
def test_bad_traces(name: str, text: str, words: str, trace: Write) -> None:
    with pytest.raises(ValueError, match=words):
        read_trace(trace(name, text))


def test_more_bad_traces(tmp_path: Path, trace: Write) -> None:
    with pytest.raises(ValueError, match=r"cannot be read \(No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="holds 2 requests, but `num_requests` is 3"):
        read_trace(trace("m.jsonl", MOONCAKE), num=3)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(MOONCAKE.encode() * 1000)[:60])
    with pytest.raises(ValueError, match=r"cannot be read \(Compressed file ended"):
        read_trace(cut)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read .Expecting property name"),
        ("[1]", "must be an object with input_len and output_len, each an object of quantiles"),
        ('{"input_len": {"0": 1, "1": 2}}', "must be an object with input_len and output_len"),
    ],
)
def test_bad_quantiles(text: str, words: str, trace: Write) -> None:
    path = trace("lengths.json", text)
    with pytest.raises(ValueError, match=f"workload .*lengths.json' {words}"):
        make_workload(WorkloadSpec(workload=str(path), rate=1.0))


def test_a_trace_with_times_of_its_own_has_no_burstiness(trace: Write) -> None:
    spec = WorkloadSpec(workload=str(trace("m.jsonl", MOONCAKE)), rate=1.0)
    assert [one.due_s for one in make_workload(spec).arrivals] == [0, 2]
    with pytest.raises(ValueError, match=r"burstiness 2\.0 contradicts a trace with arrival times"):
        make_workload(replace(spec, burstiness=2.0))
