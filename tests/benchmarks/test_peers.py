"""The comparison with peers: requirements, the peers of each column, and the reading of answers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import ceilings
import peers
from columns import Load, Shape, decode_column, disturbed_tbts_s, mixed_columns, percentile_99, ttft_column
from contestants.child import ContestantError
from contestants.contest import Contest
from contestants.roster import Entry, one_by_one, roster
from contestants.serving import Answer, Submission, Timeline, is_due
from required import compare, missed_lines, parse_required
from tables import best_of, medians_of

from longspan.cost.architecture import from_config

BENCHMARKS = Path(peers.__file__).parent
TTFT, DECODE = ttft_column(1024), decode_column(8, 512, 64)
MIXED = mixed_columns(8000)


def timeline(submitted_s: float, *arrivals_s: float) -> Timeline:
    return Timeline(submitted_s=submitted_s, arrivals_s=[*arrivals_s])


def test_ratios_are_of_the_best_of_both_sides() -> None:
    medians = {
        "one": {TTFT.title: 2.0, DECODE.title: 90.0},
        "two": {TTFT.title: 1.0, DECODE.title: 60.0},
        "eager": {TTFT.title: 1.5, DECODE.title: 45.0},
        "compiled": {TTFT.title: 4.0},
    }
    sides = (["one", "two"], ["eager", "compiled", "failed"])
    required = {TTFT.key: 1.5, DECODE.key: 2.1}
    ttft, decode, mixed = compare([TTFT, DECODE, MIXED[0]], medians, *sides, required)
    assert (ttft.ours, ttft.theirs, ttft.ratio) == (("two", 1.0), ("eager", 1.5), 1.5)
    assert (decode.ours, decode.theirs, decode.ratio) == (("one", 90.0), ("eager", 45.0), 2.0)
    assert mixed.ratio is None
    assert [one.is_missed for one in (ttft, decode, mixed)] == [False, True, False]
    assert [*missed_lines([ttft, decode, mixed])] == ["missed: decode-8 is 2.00, required 2.1"]
    [unmeasured] = compare([MIXED[0]], medians, *sides, {MIXED[0].key: 1.0})
    assert [*missed_lines([unmeasured])] == ["missed: mixed-tbt is not measured, required 1"]


def test_requirements_are_numbers_of_columns_that_there_are() -> None:
    assert parse_required("ttft-1024=1.3, decode-8=2", [TTFT.key, DECODE.key]) == {"ttft-1024": 1.3, "decode-8": 2.0}
    with pytest.raises(ValueError, match="no column 'ttft-9'; there are ttft-1024, decode-8"):
        parse_required("ttft-9=1", [TTFT.key, DECODE.key])
    with pytest.raises(ValueError, match=r"needs a number, such as decode-8=1\.5"):
        parse_required("decode-8", [TTFT.key, DECODE.key])


def test_an_unknown_column_is_a_usage_error_that_names_the_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--lengths", "1024", "--batches", "1", "--require", "ttft-4096=1"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    with pytest.raises(SystemExit) as raised:
        peers.main()
    assert raised.value.code == 2
    assert "there are ttft-1024, decode-1, mixed-tbt, mixed-ttft" in " ".join(capsys.readouterr().err.split())


def test_contestants_take_the_jobs_that_they_can_do() -> None:
    alone, tokens, batch, mixed = (
        load.submissions("x") for load in (TTFT.load, decode_column(1, 9, 4).load, DECODE.load, MIXED[0].load)
    )
    takes = {
        name: [entry.takes(job) for job in (alone, tokens, batch, mixed)] for name, entry in roster(Path()).items()
    }
    assert takes["longspan-1core"] == [True, False, False, False]
    assert takes["llama-cpp"] == [True, True, False, False]
    assert takes["transformers"] == [True, True, True, False]
    assert all(all(takes[name]) for name in ("longspan-1", "longspan-2", "vllm-eager", "vllm-compiled"))


def test_skipped_and_failed_peers_have_no_median() -> None:
    samples = {"a": {"x": [3.0, 1.0, 2.0], TTFT.title: []}, "b": {TTFT.title: [5.0]}, "c": {TTFT.title: [1.0]}}
    medians = medians_of(samples, {"c": "died"})
    assert medians == {"a": {"x": 2.0}, "b": {TTFT.title: 5.0}}
    assert best_of(TTFT, medians, ["a", "b", "c"]) == ("b", 5.0)
    assert best_of(TTFT, medians, ["a"]) is None


def test_prompts_are_the_same_for_all_and_new_in_every_round() -> None:
    load = MIXED[0].load
    *chats, document = load.submissions("round 1")
    assert load.submissions("round 1") == [*chats, document]
    assert load.submissions("round 2")[-1].prompt[:9] != document.prompt[:9]
    assert [(len(one.prompt), one.new_tokens, one.after_tokens) for one in chats] == [(100, 128, 0)] * 16
    assert (len(document.prompt), document.new_tokens, document.after_tokens) == (8000, 1, 16)


def test_a_document_is_due_when_every_chat_has_its_tokens_or_has_ended() -> None:
    chats = [Submission(prompt=[1], new_tokens=5), Submission(prompt=[2], new_tokens=2)]
    document = Submission(prompt=[3], new_tokens=1, after_tokens=3)
    assert not is_due(document, chats, [timeline(0, 1, 2), timeline(0, 1, 2)])
    assert not is_due(document, chats, [timeline(0, 1, 2, 3), timeline(0, 1)])
    assert is_due(document, chats, [timeline(0, 1, 2, 3), timeline(0, 1, 2)])
    assert is_due(chats[0], [], [])


def test_tbt_counts_only_while_the_document_is_computed() -> None:
    chat = timeline(0, 1.0, 1.1, 2.0, 2.1, 5.0, 5.25)
    document = timeline(1.5, 4.0)
    assert [*disturbed_tbts_s([chat, document])] == pytest.approx([0.9, 0.1, 2.9])
    tbt, ttft = (column.read(Answer(seconds=6.0, timelines=[chat, document])) for column in MIXED)
    assert tbt == pytest.approx(1e3 * (2.9 - 0.02 * 2.0))
    assert ttft == pytest.approx(2.5)
    assert percentile_99([0.5] * 9) == 0.5


def test_a_prompt_counts_two_operations_per_weight_and_half_of_all_scores() -> None:
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "head_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 100,
    }
    weights = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    assert from_config(config, name="tiny").prefill_flops(10) == 2 * weights * 10 + 4 * 2 * 2 * 4 * 10 * 10 / 2


def test_the_report_sets_a_prompt_against_the_peak_and_two_instances_against_two_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    samples = {ceilings.PEAK: [2e12], ceilings.ONE_CORE: [1e12], ceilings.TWO_CORES: [1.6e12], ceilings.READ: [2e10]}
    times = {"longspan-2": 4.0, "longspan-1core": 6.0}
    machine, two, one, gain = ceilings.report(samples, times, 8000, 4e12)
    assert "2.00 bfloat16 TFLOPS" in machine
    assert "1.60 times" in machine
    assert "50 % of the peak" in two
    assert "33 % of the peak" in one
    assert "1.50 times as fast" in gain
    assert "94 %" in gain
    assert ceilings.report({}, times, 8000, 4e12) == []


ECHO = """
import sys
sys.path.insert(0, {benchmarks!r})
from contestants.serving import Started, Timeline, serve
serve(lambda options: Started(
    versions={{"echo": options["version"]}},
    generate=lambda jobs: [Timeline(submitted_s=0.0, arrivals_s=[*range(1, one.new_tokens + {more})]) for one in jobs],
))
"""


def echo(folder: Path, name: str, more: int = 1) -> Entry:
    """Return a contestant that takes a second per token. With another `more` it answers wrongly."""
    python = folder / name
    python.write_text(f"#!{sys.executable}\n{ECHO.format(benchmarks=str(BENCHMARKS), more=more)}")
    python.chmod(0o755)
    return Entry(name=name, module="", python=python)


def test_a_contest_runs_able_peers_and_continues_after_failures(tmp_path: Path) -> None:
    able, wrong = echo(tmp_path, "able"), echo(tmp_path, "wrong", more=2)
    single, missing = replace(echo(tmp_path, "single"), takes=one_by_one), replace(able, name="x", python=Path("none"))
    pair = Load(title="pair", shapes=(Shape(length=3, new_tokens=2),) * 2).submissions("x")
    with Contest({"version": "1"}, lambda _: None) as contest:
        contest.start([able, wrong, single, missing])
        answers = contest.ask("both", pair)
        assert [*answers] == ["able"]
        assert answers["able"].timelines == [timeline(0.0, 1, 2)] * 2
        assert [*contest.ask("one", pair[:1])] == ["able", "single"]
    assert contest.versions["able"] == {"echo": "1"}
    assert contest.failures.keys() == {"wrong", "x"}
    assert "[2, 2] tokens asked for, but [3, 3] generated" in contest.failures["wrong"]


class Probe:
    """Answers with a rate of its own. A broken one does not answer."""

    def __init__(self, *, is_broken: bool) -> None:
        self._is_broken = is_broken

    def send(self, message: dict[str, str]) -> None:
        self.work = message["work"]

    def receive(self, _limit_s: float) -> dict[str, float]:
        if self._is_broken:
            raise ContestantError("no such product")
        return {"per_s": {"product": 3.0, "read": 7.0}[self.work]}

    def kill(self) -> None:
        pass


def test_a_machine_is_measured_by_one_process_and_by_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_probe", lambda _core: Probe(is_broken=False))
    with ceilings.Machine() as machine:
        machine.measure()
        machine.measure()
    found = {ceilings.PEAK: 3.0, ceilings.READ: 7.0, ceilings.ONE_CORE: 3.0, ceilings.TWO_CORES: 6.0}
    assert machine.samples == {name: [rate] * 2 for name, rate in found.items()}
    monkeypatch.setattr(ceilings, "_probe", lambda _core: Probe(is_broken=True))
    with ceilings.Machine() as broken:
        broken.measure()
    assert (broken.samples, broken.failures) == ({}, {"machine": "no such product"})
