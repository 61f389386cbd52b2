"""Numbers of a run: percentiles, goodput, throughput, the JSON, the tables, the picture."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from longspan.loadgen.metrics import Slo, Spread, summarise
from longspan.loadgen.plot import check_plot, running_over_time, save_plot, tokens_over_time
from longspan.loadgen.report import as_json, tables
from longspan.loadgen.results import Answered, Failure, Result, Run


def answered(ttft_s: float, *tbt_s: float) -> Answered:
    return Answered(
        ttft_s=ttft_s,
        e2el_s=ttft_s + sum(tbt_s),
        tbt_s=tbt_s,
        num_prompt_tokens=10,
        num_output_tokens=1 + len(tbt_s),
        finish_reason="length",
    )


def run_of(
    *outcomes: Answered | Failure, duration_s: float = 4.0, num_asked: int | None = None, late_s: float = 0.0
) -> Run:
    results = tuple(
        Result(index=index, input_len=9, output_len=8, due_s=0.5 * index, sent_s=0.5 * index + late_s, outcome=outcome)
        for index, outcome in enumerate(outcomes)
    )
    return Run(
        results=results, num_asked=num_asked or len(results), duration_s=duration_s, max_concurrent=2, interrupted=False
    )


RUN = run_of(
    answered(0.2, 0.1, 0.1),
    Failure(kind="HTTP 503", message="full [bold]"),
    answered(0.4, 0.1, 0.3),
    answered(0.3),
    Failure(kind="HTTP 503", message="full"),
    Failure(kind="ReadError", message="reset"),
    num_asked=8,
)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=60))
def test_spreads_are_those_of_numpy(times_s: list[float]) -> None:
    spread = Spread.of(times_s)
    assert spread is not None
    times_ms = 1e3 * np.array(times_s)
    expected = [np.mean(times_ms), np.median(times_ms), np.std(times_ms), *np.percentile(times_ms, [50, 90, 99])]
    assert [spread.mean, spread.median, spread.std, *spread.percentiles] == pytest.approx(expected)


def test_counts_and_rates() -> None:
    summary = summarise(RUN, Slo())
    assert (summary.completed, summary.failed, summary.unfinished) == (3, 3, 2)
    assert summary.failures == {"HTTP 503": 2, "ReadError": 1}
    assert (summary.num_input_tokens, summary.num_output_tokens) == (30, 7)
    assert summary.per_s(summary.num_output_tokens) == pytest.approx(7 / 4)
    assert summary.goodput is None, "without limits there is none"


def test_a_request_without_a_second_token_is_in_ttft_and_e2el_only() -> None:
    spreads = summarise(RUN, Slo()).spreads
    assert spreads["ttft"] == Spread.of([0.2, 0.4, 0.3])
    assert spreads["itl"] == Spread.of([0.1, 0.1, 0.1, 0.3]), "all tokens count the same"
    assert spreads["tpot"] == Spread.of([0.1, 0.2]), "all requests count the same"
    assert spreads["e2el"] == Spread.of([0.2 + 0.1 + 0.1, 0.4 + 0.1 + 0.3, 0.3])


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=300), 2),
        (Slo(ttft_ms=199.9), 0),
        (Slo(tbt_ms=101), 2),
        (Slo(tbt_ms=200.1), 3),
        (Slo(ttft_ms=250, tbt_ms=101), 1),
        (Slo(ttft_ms=1e6, tbt_ms=1e6), 3),
    ],
)
def test_goodput_counts_answers_within_all_limits(slo: Slo, good: int) -> None:
    """The limit of TBT is on the mean of a request: 0.1 and 0.3 s are within 200 ms."""
    summary = summarise(RUN, slo)
    assert summary.good == good
    assert summary.goodput == pytest.approx(good / 4.0)


@pytest.mark.parametrize(("limits", "flag"), [({"ttft_ms": 0.0}, "--slo-ttft"), ({"tbt_ms": -1.0}, "--slo-tbt")])
def test_limits_are_above_0(limits: dict[str, float], flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} must be above 0 ms"):
        Slo(**limits)


SPREADS = {
    f"{kind}_{name}_ms"
    for kind in ("mean", "median", "std", "p50", "p90", "p99")
    for name in ("ttft", "tpot", "itl", "e2el", "client_queue_time")
}


def test_json_has_the_fields_of_vllm() -> None:
    found = as_json(RUN, summarise(RUN, Slo(ttft_ms=300)), {"model_id": "m"})
    assert found.keys() >= SPREADS | {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls",
        "latencies", "start_times", "queue_times", "errors", "max_concurrent_requests",
    }  # fmt: skip
    assert found["model_id"] == "m"
    assert found["p99_itl_ms"] == pytest.approx(np.percentile([100, 100, 100, 300], 99))
    assert found["total_token_throughput"] == pytest.approx(37 / 4)
    assert (found["request_goodput"], found["goodput_ratio"]) == (0.5, 2 / 6)
    assert found["output_lens"] == [3, 0, 2 + 1, 1, 0, 0]
    assert found["ttfts"] == [0.2, None, 0.4, 0.3, None, None]
    assert found["errors"] == ["", "HTTP 503: full [bold]", "", "", "HTTP 503: full", "ReadError: reset"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_json_of_a_run_in_which_nothing_succeeded_has_nulls_and_no_nan() -> None:
    run = run_of(duration_s=0.0, num_asked=3)
    found = as_json(run, summarise(run, Slo(ttft_ms=1)), {})
    assert {found[name] for name in SPREADS} == {None}
    assert (found["request_throughput"], found["request_goodput"], found["goodput_ratio"]) == (0.0, 0.0, None)
    json.dumps(found, allow_nan=False)


def printed(run: Run, slo: Slo, max_concurrency: int | None = None) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tables(run, summarise(run, slo), slo, max_concurrency=max_concurrency))
    return console.export_text()


def test_tables_say_what_there_is() -> None:
    text = printed(RUN, Slo(ttft_ms=300, tbt_ms=150))
    for words in ("successful requests", "unfinished when interrupted", "goodput (TTFT ≤ 300 ms, mean TBT ≤ 150 ms)"):
        assert words in text
    assert "0.50 /s, 2 of 6" in text
    assert "full [bold]" in text, "a server's words are no markup"
    assert "2 times" in text
    assert "was late" not in text


def test_many_failures_are_listed_in_part() -> None:
    text = printed(run_of(*[Failure(kind="HTTP 500", message="x")] * 25), Slo())
    assert "15 more" in text


def test_a_late_load_generator_says_so_unless_slots_are_the_reason() -> None:
    late = run_of(answered(0.5), late_s=0.2)
    assert "The load generator itself was late" in printed(late, Slo())
    assert "The load generator itself was late" not in printed(late, Slo(), max_concurrency=1)


def test_what_happens_over_time() -> None:
    pairs = [(result, result.outcome) for result in RUN.results if isinstance(result.outcome, Answered)]
    times, counts = running_over_time(pairs)
    assert times == pytest.approx([0.0, 0.4, 1.0, 1.5, 1.8, 1.8])
    assert counts == [1, 0, 1, 2, 1, 0]
    tokens = tokens_over_time(pairs, RUN.duration_s)
    assert tokens == [3, 4, 0, 0, 0], "at 0.2, 0.3, 0.4 s and at 1.4, 1.5, 1.8, 1.8 s"


@pytest.mark.parametrize("run", [RUN, run_of(num_asked=1)])
def test_the_picture_is_a_png(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    check_plot(path)
    save_plot(path, run)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Any:
        assert name == "matplotlib"

    monkeypatch.setattr("longspan.loadgen.plot.find_spec", none)
    with pytest.raises(ValueError, match=r"pip install 'longspan\[plot\]'"):
        check_plot(tmp_path / "a.png")


def test_no_picture_without_a_folder_or_of_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder .* is not there"):
        check_plot(tmp_path / "nowhere" / "a.png")
    with pytest.raises(ValueError, match="not supported"):
        check_plot(tmp_path / "a.docx")
