"""Claims of papers: the rules that decide, required ones, and the kept verdicts, which are those of the model today."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
import claims
import context_parallelism
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
def test_a_rule_tells_what_holds_from_what_fails(holding: Check, failing: Check) -> None:
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
        ("CSPS", claims.csps),
    ],
)
def test_kept_verdicts_are_those_of_today(paper: str, found: Callable[[], list[Claim]]) -> None:
    assert KEPT["papers"][paper] == [claim.row() for claim in found()], "run make claims"


def test_every_failing_claim_says_why_as_far_as_known() -> None:
    rows = [row for rows in KEPT["papers"].values() for row in rows]
    assert {row["verdict"] for row in rows} == set(VERDICTS) and KEPT["rules"] == RULES
    assert [row["says"] for row in rows if row["verdict"] != "holds" and not row["why"]] == []


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
    assert rows["8B: without chunks P50 of TTFT is up to so many times higher."]["ours"] == "short 3"
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
