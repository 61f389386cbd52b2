"""Arrivals, lengths, prompts and traces: what they are, and that a seed says all about them."""

from __future__ import annotations

import gzip
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longspan.loadgen.arrivals import arrival_times
from longspan.loadgen.prompts import WORDS, PromptMaker
from longspan.loadgen.traces import BLOCK_LEN, read_trace
from longspan.loadgen.workload import Arrivals, Ask, random_asks


def times(num: int, rate: float, burstiness: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array(arrival_times(num, request_rate=rate, burstiness=burstiness, rng=rng))


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


@pytest.mark.parametrize(("rate", "burstiness", "flag"), [(0, 1, "--request-rate"), (1, -1, "--burstiness")])
def test_rates_and_shapes_are_above_0(rate: float, burstiness: float, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} must be above 0"):
        times(3, rate, burstiness)


def test_no_number_is_no_rate() -> None:
    with pytest.raises(ValueError, match="but nan given"):
        times(3, float("nan"), 1)


def test_lengths_are_uniform_over_the_range() -> None:
    asks = random_asks(4000, input_len=100, output_len=9, range_ratio=0.25, prefix_len=7, seed=1)
    inputs = np.array([ask.input_len for ask in asks]) - 7
    outputs = [ask.output_len for ask in asks]
    assert (inputs.min(), inputs.max()) == (75, 125)
    assert inputs.mean() == pytest.approx(100, abs=1)
    assert set(outputs) == set(range(6, 13)), "rounded outwards"


def test_without_a_range_all_lengths_are_the_same() -> None:
    asks = random_asks(5, input_len=100, output_len=1, range_ratio=0, prefix_len=0, seed=1)
    assert {(ask.input_len, ask.output_len) for ask in asks} == {(100, 1)}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num": 0}, "--num-prompts must be at least 1, but 0 given"),
        ({"input_len": 0}, "--random-input-len must be at least 1"),
        ({"output_len": -2}, "--random-output-len must be at least 1, but -2 given"),
        ({"prefix_len": -1}, "--random-prefix-len must be at least 0"),
        ({"range_ratio": 1.0}, "--random-range-ratio must be from 0 to below 1, but 1.0 given"),
    ],
)
def test_lengths_out_of_range(wrong: dict[str, float], words: str) -> None:
    given = {"num": 3, "input_len": 4, "output_len": 4, "range_ratio": 0.0, "prefix_len": 0, "seed": 0} | wrong
    num = int(given.pop("num"))
    with pytest.raises(ValueError, match=words):
        random_asks(num, **given)  # type: ignore[arg-type]


def test_arrivals_do_not_depend_on_lengths() -> None:
    """So that two runs that differ in lengths have the same arrivals."""
    arrivals = Arrivals(request_rate=3.0, burstiness=1.0, closed_loop=False)
    short, long = ([Ask(input_len=n, output_len=1)] * 6 for n in (1, 100))
    assert [ask.due_s for ask in arrivals.timed(short, 5)] == [ask.due_s for ask in arrivals.timed(long, 5)]
    assert [ask.due_s for ask in arrivals.timed(short, 5)] != [ask.due_s for ask in arrivals.timed(short, 6)]


MAKER = PromptMaker(seed=1, vocab_size=500, prefix_len=10)


def test_prompts_have_their_length_and_their_prefix_and_nothing_else_in_common() -> None:
    asks = [Ask(input_len=length, output_len=1) for length in (10, 40, 40)]
    none, one, two = (MAKER.token_ids(index, ask) for index, ask in enumerate(asks))
    assert [len(none), len(one), len(two)] == [10, 40, 40]
    assert none == one[:10] == two[:10]
    assert sum(a == b for a, b in zip(one[10:], two[10:], strict=True)) < 5
    assert all(0 <= token < 500 for token in one)
    assert MAKER.token_ids(1, asks[1]) == one, "the same whenever asked for"
    assert replace(MAKER, seed=2).token_ids(1, asks[1]) != one


def test_words_are_as_many_as_tokens() -> None:
    text = MAKER.words(3, Ask(input_len=25, output_len=1))
    assert len(text.split(" ")) == 25
    assert set(text.split(" ")) <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS), "each is as likely as any other"


def test_blocks_of_the_same_name_are_the_same_tokens() -> None:
    maker = PromptMaker(seed=0, vocab_size=1000)
    one = maker.token_ids(0, Ask(input_len=2 * BLOCK_LEN + 5, output_len=1, block_ids=(7, 8, 9)))
    two = maker.token_ids(1, Ask(input_len=2 * BLOCK_LEN + 9, output_len=1, block_ids=(7, 5, 9)))
    assert one[:BLOCK_LEN] == two[:BLOCK_LEN]
    assert one[BLOCK_LEN : 2 * BLOCK_LEN] != two[BLOCK_LEN : 2 * BLOCK_LEN]
    assert one[2 * BLOCK_LEN :] == two[2 * BLOCK_LEN : 2 * BLOCK_LEN + 5]


def test_a_vocabulary_has_tokens() -> None:
    with pytest.raises(ValueError, match="--random-vocab-size must be at least 1"):
        PromptMaker(seed=0, vocab_size=0)


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
    asks = read_trace(path)
    assert [(ask.input_len, ask.output_len) for ask in asks] == [(600, 50), (512, 2)]
    expected = [None, None] if name == "lengths.csv" else pytest.approx([0.0, 0.5])
    assert [ask.due_s for ask in asks] == expected
    assert [ask.block_ids for ask in asks] == ([(4, 5), (4,)] if name == "mooncake.jsonl" else [(), ()])


@pytest.fixture
def trace(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


Write = Callable[[str, str], Path]


def test_speed_divides_times_and_num_takes_the_first(trace: Write) -> None:
    path = trace("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n4,1,1\n2,2,1\n8,3,1\n")
    assert [(ask.due_s, ask.input_len) for ask in read_trace(path, speed=2)] == [(0.0, 2), (1.0, 1), (3.0, 3)]
    assert [(ask.due_s, ask.input_len) for ask in read_trace(path, num=1)] == [(0.0, 1)]


def test_lines_of_failed_requests_are_left_out_and_counted(trace: Write, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="longspan"):
        assert len(read_trace(trace("b.csv", TRACES["burstgpt.csv"]))) == 2
    assert "1 lines of the trace have no input or no output" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "x", "must end in .csv, .csv.gz, .jsonl or .jsonl.gz"),
        ("a.csv", "a,b\n1,2\n", "has the columns a, b, which is no known format"),
        ("a.csv", "", "holds 0 requests, but at least 1 needed"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n1,2\n3\n", "line 3 of trace .* TypeError"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n1,2\n3,x\n", "line 3 of trace .* could not convert"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n1.5,2\n", "a whole number is needed, but '1.5' given"),
        ("a.jsonl", MOONCAKE + "{", "line 3 of trace .* is no JSON"),
        ("a.jsonl", "[1]", r"line 1 of trace .* is no JSON object: \[1\]"),
        ("a.jsonl", MOONCAKE + '{"timestamp": 1}', "line 3 of trace .* is not of the format 'Mooncake': KeyError"),
        ("a.jsonl.gz", MOONCAKE, "cannot be read: Not a gzipped file"),
    ],
)
def test_bad_traces(name: str, text: str, words: str, trace: Write) -> None:
    with pytest.raises(ValueError, match=words):
        read_trace(trace(name, text))


def test_more_bad_traces(tmp_path: Path, trace: Write) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(ValueError, match=r"holds 2 requests, but 3 \(--num-prompts\) needed"):
        read_trace(trace("m.jsonl", MOONCAKE), num=3)
    with pytest.raises(ValueError, match="--trace-speed must be above 0, but 0 given"):
        read_trace(trace("m.jsonl", MOONCAKE), speed=0)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(MOONCAKE.encode() * 1000)[:60])
    with pytest.raises(ValueError, match="cannot be read: Compressed file ended"):
        read_trace(cut)
