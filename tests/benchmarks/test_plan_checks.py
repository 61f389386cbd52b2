"""The checks of plans against exhaustive simulation and against measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from plan_exhaustive import LAYOUTS, POLICIES, STEP_BUDGETS, Comparison
from plan_measured import KINDS, Kind, Measured, noise, report

from longspan.core.splits import ParallelSpec
from longspan.planner.candidates import Candidate

TWO = Candidate(hardware="cpu", spec=ParallelSpec(instances=2))
TP2 = Candidate(hardware="cpu", spec=ParallelSpec(tp=2), policy="auto")


@pytest.mark.parametrize(
    ("goodput", "num_planned", "passes"), [(0.98, 20, True), (0.97, 20, False), (1.0, 21, False), (1.0, 20, True)]
)
def test_a_plan_needs_the_goodput_and_few_requests(goodput: float, num_planned: int, passes: bool) -> None:
    goodputs = {TWO: goodput, TP2: 1.0}
    comparison = Comparison(goodputs=goodputs, chosen=TWO, num_requests=100, num_planned=num_planned)
    assert comparison.passes is passes


def test_no_goodput_at_all_does_not_pass() -> None:
    assert not Comparison(goodputs={TWO: 0.0, TP2: 0.0}, chosen=TWO, num_requests=100, num_planned=1).passes


def test_the_exhaustive_space_has_24_candidates() -> None:
    assert len(LAYOUTS) * len(POLICIES) * len(STEP_BUDGETS) == 24


def test_policies_for_groups_are_chunked_on_one_instance() -> None:
    assert Kind.of(TP2) == Kind(layout="tp2", policy="chunked")
    assert Kind.of(TWO) == Kind(layout="2", policy="chunked")
    assert len(set(KINDS)) == 6


def runs(*attainments: float) -> list[Measured]:
    return [Measured(attainment=one, ttft_s=1.0, tbt_s=0.1) for one in attainments]


@pytest.mark.parametrize(
    ("chosen", "best", "passes"),
    [
        ((0.9, 0.9), (0.9, 0.9), True),
        ((0.85, 0.85), (0.9, 0.9), True),  # two standard errors are 0.085
        ((0.7, 0.7), (0.9, 0.9), False),
        ((0.7, 0.7), (1.0, 0.7), True),  # the runs of the best differ by more
        ((1.0, 1.0), (0.9, 0.9), True),
        ((0.0, 0.0), (0.0, 0.0), False),
    ],
)
def test_a_choice_within_the_noise_of_the_best_passes(
    chosen: tuple[float, float], best: tuple[float, float], passes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {KINDS[0]: runs(*chosen), KINDS[1]: runs(*best)}
    assert report(measured, KINDS[0], 60) is passes
    assert ("pass" if passes else "FAIL") in capsys.readouterr().out


def test_noise_falls_with_the_number_of_requests() -> None:
    measured = {KINDS[0]: runs(0.8), KINDS[1]: runs(0.9)}
    few, many = (noise(measured, KINDS[0], KINDS[1], number) for number in (60, 6000))
    assert many == pytest.approx(few / 10)
