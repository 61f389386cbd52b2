"""Claims of papers: the rules that decide, required ones, and the kept verdicts, which are those of the model today."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
import claims
import context_parallelism
import csps
import csps_serving
import kv_runahead
import seesaw
import seesaw_serving
import tetris
import tetris_serving
import tetris_serving_claims
from cells import Cell
from verdicts import RULES, VERDICTS, Check, Claim, bound, choice, in_range, numbers, order, report_claims, table

KEPT = json.loads(claims.STORED.read_text(encoding="utf-8"))


def cell(ours: float) -> Cell:
    return Cell(name="x", paper=1.0, ours=ours, tolerance=0.15)


@pytest.mark.parametrize(
    ("holding", "failing"),
    [
        (numbers({"a": (2.0, 2.19), "b": (2.0, 1.81)}), numbers({"a": (2.0, 2.0), "b": (2.0, 1.79)})),
        (table([cell(1.24), cell(1.0), cell(0.97)]), table([cell(1.26), cell(1.0), cell(1.0)])),
        (table([cell(1.09)]), table([cell(1.11), cell(0.89)])),
        (in_range(1.0, 2.0, {"a": 0.91, "b": 2.19}), in_range(1.0, 2.0, {"a": 1.5, "b": 2.21})),
        (order({"": {"a": 1.0, "b": 2.0, "c": 3.0}}), order({"x": {"a": 1.0, "b": 2.0}, "y": {"a": 1.0, "b": 1.0}})),
        (bound({"a": 1.0, "b": 2.0}, least=1.0, most=2.0), bound({"a": 2.01}, most=2.0)),
        (choice({"a": (True, True)}), choice({"a": (4, 4), "b": (8, 16)})),
    ],
)
def test_a_rule_separates_true_claims_from_false_ones(holding: Check, failing: Check) -> None:
    assert holding.rule == failing.rule and holding.rule in RULES
    assert Claim("1", "So it is.", holding).verdict == "holds"
    assert Claim("1", "So it is.", failing).verdict == "fails"


def test_only_required_claims_that_do_not_hold_make_a_script_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, holds = numbers({"": (1.0, 2.0)}), numbers({"": (1.0, 1.0)})
    harmless = [Claim("1", "a", holds, required=True), Claim("2", "b", fails), Claim("3", "c", "7", "nothing runs")]
    assert report_claims("paper", harmless)
    assert "1 holds, 1 fails, 1 not modelled" in capsys.readouterr().out
    required = Claim("4", "It is d.", fails, required=True)
    assert not report_claims("paper", [*harmless, required])
    assert "FAIL, and is required: 4: It is d." in capsys.readouterr().out
    monkeypatch.setattr(context_parallelism, "claims", lambda: harmless)
    assert context_parallelism.main()
    monkeypatch.setattr(context_parallelism, "claims", lambda: [required])
    assert not context_parallelism.main()


@pytest.mark.parametrize(
    ("paper", "found"),
    [
        ("Context Parallelism", context_parallelism.claims),
        pytest.param("KV-Runahead", kv_runahead.claims, marks=pytest.mark.full),
        ("Tetris", tetris.claims),
        ("Seesaw", seesaw.claims),
        ("CSPS", csps.claims),
    ],
)
def test_recorded_verdicts_equal_new_ones(paper: str, found: Callable[[], list[Claim]]) -> None:
    assert KEPT["papers"][paper] == [claim.row() for claim in found()], "run make claims"


def test_every_failing_or_weak_claim_states_its_reason() -> None:
    rows = [row for rows in KEPT["papers"].values() for row in rows]
    assert {row["verdict"] for row in rows} == set(VERDICTS) and KEPT["rules"] == RULES
    assert [row["says"] for row in rows if (row["verdict"] != "holds" or row["weak"]) and not row["why"]] == []


def test_a_claim_that_is_not_modelled_has_a_reason_beyond_missing_work() -> None:
    rows = [row for rows in KEPT["papers"].values() for row in rows if row["verdict"] == "not modelled"]
    undone = re.compile(r"did not keep|missing|not (?:yet|done|implemented|simulated)|needs? a run", re.IGNORECASE)
    assert [row["why"] for row in rows if undone.search(row["why"])] == []


def test_a_weak_claim_says_so_with_any_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    fails, holds = numbers({"": (1.0, 2.0)}), numbers({"": (1.0, 1.0)})
    weak = [Claim("1", "a", check, why="a cause", weak="far bounds") for check in (holds, fails)]
    assert [(claim.verdict, claim.row()["why"]) for claim in weak] == [
        ("holds", "far bounds"),
        ("fails", "a cause far bounds"),
    ]
    assert report_claims("paper", [*weak, Claim("2", "b", holds)])
    printed = capsys.readouterr().out
    assert "holds, weak" in printed and "2 holds, 1 fails, 0 not modelled (2 weak)" in printed
    said = {row["says"]: row["weak"] for row in KEPT["papers"]["CSPS"]}
    assert {text for text, is_weak in said.items() if is_weak} >= {
        text for text in said if text.startswith(("Queries of a token travel", "SP-NTP has 1.32"))
    }


@pytest.mark.parametrize("paper", [*claims.PAPERS])
def test_recorded_tables_and_panels_equal_new_ones(paper: str) -> None:
    """The pages of policies and the pictures show them."""
    if paper == "KV-Runahead":
        pytest.skip("its searches take minutes: the next test compares its tables")
    made = claims.PAPERS[paper].tables()
    assert {name: json.loads(json.dumps(table._asdict())) for name, table in made.items()}.items() <= KEPT[
        "tables"
    ].items(), "run make claims"
    if paper == "Seesaw" and not seesaw_serving.ARXIV.exists():
        pytest.skip("its lengths of arxiv are not on this machine")
    panels = [json.loads(json.dumps(panel.stored())) for panel in claims.PAPERS[paper].panels()]
    assert json.loads(claims.FIGURES.read_text(encoding="utf-8"))[paper] == panels, "run make figures"


@pytest.mark.full
def test_recorded_tables_of_kv_runahead_equal_new_ones() -> None:
    made = {name: json.loads(json.dumps(table._asdict())) for name, table in kv_runahead.tables().items()}
    assert made.items() <= KEPT["tables"].items(), "run make claims"


def test_claims_on_serving_go_by_all_figures_of_a_study() -> None:
    """As `tetris.py --serving --json` keeps them."""
    systems = {"tetris": 4.0, "fixed-sp 8": 3.0, "loongserve": 2.5, "loongserve-disagg": 2.0, "fixed-sp 16": 1.0}
    point = {
        "ttft_mean_s": 1.0,
        "computing": 0.5,
        "throughput_tokens_per_s": 100.0,
        "tbt_p50_s": 0.02,
        "tbt_p99_s": 0.1,
    }
    one = tetris_serving.Study(
        model="llama-3-8b",
        workload="short",
        num_requests=200,
        light_s=1.0,
        table="",
        max_rates=systems,
        at_limit={
            name: tetris_serving.Point(ttft_p50_s=8 / rate, ttft_p99_s=8 / rate, **point)
            for name, rate in systems.items()
        },
        fixed_rates={load: {0.1: (1.0, 1.1), 0.7: (1.2, 1.3)} for load in (0.3, 0.9)},
        single_chunk={0.9: (3.0, 2.0, 0.9, 0.8)},
    )
    found = tetris_serving_claims.claims(tetris_serving.figures([one]))
    verdicts = {(claim.where, claim.says.split(":")[1][:12]): claim.verdict for claim in found}
    assert "not modelled" not in verdicts.values()
    rows = {claim.says: claim.row() for claim in found}
    assert rows["8B: the order of all systems by load."]["verdict"] == "holds"
    assert rows["8B: near saturation 0.7 is better than 0.1 (P50)."]["verdict"] == "fails"
    assert rows["8B: the largest factor of P50 of TTFT without chunks."]["ours"] == "short 3"
    kept = tetris_serving_claims.claims(tetris_serving.stored())
    assert "not modelled" not in {claim.verdict for claim in kept}


def test_claims_of_seesaw_go_by_all_points_of_its_figures() -> None:
    """As `seesaw.py --serving --json` keeps them, and with the pairs that re-sharding adds."""
    rate = partial(seesaw_serving.Rate, pass_tokens=512)
    winners = {
        (12, "34B, 4 a10"): "tp2pp2",
        (13, "1"): "pp8",
        (13, "1000"): "tp4pp2",
        (14, "0.1"): "pp8",
        (14, "50"): "tp8",
    }
    points = [
        seesaw_serving.Point(
            figure=case.figure,
            name=case.name,
            static={
                winners.get((case.figure, case.name), "tp4"): rate(requests_per_s=0.6 if "pcie" in case.name else 1.0),
                "other": rate(requests_per_s=0.5),
            },
            pairs={"pp8 → tp8": rate(requests_per_s=1.45 if "a10" in case.name else 1.3)},
        )
        for case in seesaw_serving.cases(seesaw_serving.FIGURES, seesaw_serving.ARXIV)
    ]
    found = {claim.where + claim.says[:20]: claim for claim in seesaw.claims(points)}
    assert "not modelled" not in {claim.verdict for claim in found.values()}
    failing = {claim.says[:20] for claim in found.values() if claim.verdict == "fails"}
    assert failing == {"Decoding on 4 of 8 G", "On A10 throughput is", "On L4 throughput is "}, (
        "no ratio is the largest"
    )
    without = [replace(point, pairs={}) for point in points]
    verdicts = {claim.says[:20]: claim.verdict for claim in seesaw.claims(without)}
    assert verdicts["It is the best at ev"] == "not modelled" and verdicts["Of single ones, PP8 "] == "holds"


def made_case(model: str, data_set: csps_serving.DataSet, *, gpus: list[int]) -> csps_serving.Case:
    """A short prompt and a long one, of which CSPS is seven times as quick as Sarathi-Serve at all rates."""
    slow = csps_serving.Times(gpus=[8, 8], ttft_s=[7.0, 70.0], tbt_s=[0.1, 0.1], response_s=[9.0, 90.0])
    quick = csps_serving.Times(gpus=gpus, ttft_s=[1.0, 10.0], tbt_s=[0.02, 0.02], response_s=[1.0, 10.0])
    systems = {csps_serving.SARATHI: slow, csps_serving.TUNED: slow}
    systems |= dict.fromkeys((csps_serving.NTP, csps_serving.CSA, csps_serving.TP), quick)

    def served(name: str, rate: float) -> csps_serving.Means:
        factor = 1.0 if name in {csps_serving.SARATHI, csps_serving.TUNED} else 1 / 7
        per_s = 100.0 / factor
        return csps_serving.Means(
            gpus=8,
            ttft_s=100 * rate * factor,
            tbt_s=0.1 * factor,
            response_s=100 * rate * factor,
            prefill_tokens_per_s=per_s,
            decode_tokens_per_s=per_s,
        )

    return csps_serving.Case(
        model=model,
        data_set=data_set.name,
        input_lens=[50_000, 200_000],
        output_lens=[100, 100],
        tuned=2048,
        alone=systems,
        served={rate: {name: served(name, rate) for name in systems} for rate in (0.1, 1.0, 10.0)},
    )


def test_claims_of_csps_go_by_all_cases_that_were_kept() -> None:
    """As `csps.py --serving --json` keeps them."""
    cases = [
        made_case(model, data_set, gpus=[1, 4]) for model in csps_serving.MODELS for data_set in csps_serving.DATA_SETS
    ]
    found = {claim.where + claim.says[:10]: claim for claim in csps.claims(cases)}
    oracle = "5.3, Fig. 15TBT is at "  # no setting changes decodes
    assert [name for name, claim in found.items() if claim.verdict == "not modelled"] == [oracle]
    ttft, prefill = found["5.3, Fig. 14TTFT of Sa"], found["5.3, Table 4Throughput"]
    assert ttft.verdict == "holds" and "GLM-4, NeedleBench, alone (2.5 : 8 GPUs) 7" in str(ttft.row()["ours"])
    assert prefill.row()["paper"] == "4.3 to 5.2", "decode comes last"
    assert found["5.3, Fig. 171.6 to 2.5"].verdict == "fails", "seven times the rate is more than the paper has"
    without = {claim.where + claim.says[:10]: claim.verdict for claim in csps.claims([])}
    assert without["5.3, Fig. 14TTFT of Sa"] == "not modelled" and without["4.1, Table 3Queries of"] == "holds"


def test_a_row_of_csps_that_does_not_say_its_gpus_makes_the_script_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """With different numbers of them the comparison says nothing."""
    data_set = csps_serving.DATA_SETS[0]
    good, bad = (made_case("internlm2.5-7b", data_set, gpus=gpus) for gpus in ([1, 4], []))
    assert csps.rows_are_complete(csps.rows(good))
    assert {(row.gpus, row.baseline_gpus) for row in csps.rows(good)} == {(2.5, 8.0), (8, 8)}
    assert not csps.rows_are_complete(csps.rows(replace(bad, alone=bad.alone | {csps_serving.TP: good.alone["tp"]})))
    assert "lacks the number of GPUs per request: alone: ntp / sarathi 256" in capsys.readouterr().out
    assert csps.rows_are_complete([row for case in csps_serving.stored() for row in csps.rows(case)])


def test_lengths_of_csps_have_the_medians_of_table_2() -> None:
    for data_set in csps_serving.DATA_SETS:
        inputs, outputs = csps_serving.lengths(data_set, 1001)
        assert (inputs[500], sorted(outputs)[500]) == (data_set.input_len[0], data_set.output_len[0])
        assert inputs[990] == pytest.approx(data_set.input_len[1], rel=0.05) and inputs == sorted(inputs)


def test_a_rate_lies_between_simulated_rates() -> None:
    response_s = {0.5: 10.0, 1.0: 20.0, 2.0: 80.0}
    assert csps.rate_at(10.0, response_s) == pytest.approx(0.5)
    assert csps.rate_at(40.0, response_s) == pytest.approx(2**0.5)
    assert csps.rate_at(100.0, response_s) is csps.rate_at(5.0, response_s) is None
