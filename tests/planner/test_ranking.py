"""Successive halving with simulations from a formula, so that the best candidate is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.splits import ParallelSpec
from longspan.planner.answer import ranked_of
from longspan.planner.candidates import Candidate
from longspan.planner.pruning import Forecast
from longspan.planner.ranking import Search, interval, max_rate
from longspan.planner.samples import Outcome, Work
from longspan.planner.values import Question
from longspan.sim.spec import ServiceLevel

LEVEL = ServiceLevel(slo_ttft=1.0)
QUESTION = Question(
    model="m", hardware=("x",), num_gpus=16, workload="short", rate=10.0, level=LEVEL, attainment=0.9, prices={}
)


def candidate(num_gpus: int, budget: int = 2048, policy: str = "chunked") -> Candidate:
    return Candidate(hardware="x", spec=ParallelSpec(instances=num_gpus), policy=policy, max_num_batched_tokens=budget)


class Formula:
    """Simulations whose attainment is a number of the candidate, with noise that seeds have in common."""

    def __init__(self, attainments: dict[Candidate, float], *, rate: float = 10.0) -> None:
        self.attainments, self.rate, self.num_requests = attainments, rate, 0

    def __call__(self, work: Sequence[Work]) -> dict[Work, Outcome]:
        self.num_requests += sum(one.num_requests for one in work)
        return {one: self._outcome(one) for one in work}

    def _outcome(self, work: Work) -> Outcome:
        rate = work.rate or self.rate
        mean = min(1.0, self.attainments[work.candidate] * self.rate / rate)
        share = min(1.0, max(0.0, mean + 0.002 * (work.seed - 1.5)))
        return Outcome(
            attainment=share,
            headroom=share,
            goodput_per_s=share * rate,
            tokens_per_s=100.0,
            ttft_p99_s=2 - share,
            bound_ratios={"TTFT": 2 - share},
            tbt_p99_s=0.01,
            num_requests=work.num_requests,
        )


def search(attainments: dict[Candidate, float], *, forecast: dict[Candidate, float] | None = None) -> Search:
    simulate = Formula(attainments)
    found = Search(
        simulate=simulate,
        level=LEVEL,
        attainment=0.9,
        num_seeds=4,
        num_requests=400,
        costs={one: float(one.num_gpus) for one in attainments},
    )
    tightness = forecast or {one: 2 - attainment for one, attainment in attainments.items()}
    found.run({one: replace(Forecast.unknown(), tightness=tightness[one]) for one in attainments})
    return found


def winner_of(found: Search) -> Candidate:
    _, winner, _, _ = ranked_of(found.sorted(), QUESTION, str)
    assert winner is not None
    return winner.candidate


@given(st.integers(1, 16), st.integers(2, 16))
def test_the_fewest_devices_that_meet_the_level_win(least: int, num_gpus: int) -> None:
    attainments = {candidate(n): 0.97 if n >= least else 0.5 for n in range(1, num_gpus + 1)}
    assert winner_of(search(attainments)).num_gpus == min(least, num_gpus)


def test_more_goodput_wins_where_no_candidate_meets_the_level() -> None:
    attainments = {candidate(8, policy=policy): 0.3 + n / 10 for n, policy in enumerate(("chunked", "auto", "context"))}
    assert winner_of(search(attainments)).policy == "context"


@pytest.mark.parametrize("best", [2048, 4096, 8192, 16384])
def test_another_step_budget_than_the_forecast_has_is_found(best: int) -> None:
    attainments = {candidate(8, budget): 0.95 if budget == best else 0.8 for budget in (2048, 4096, 8192, 16384)}
    found = search(attainments, forecast=dict.fromkeys(attainments, 1.0))
    assert winner_of(found).max_num_batched_tokens == best


def test_few_of_many_candidates_get_all_requests() -> None:
    attainments = {candidate(8, 2048 + n): 0.5 + n / 100 for n in range(24)}
    families = {replace(one, policy=f"p{n}"): value for n, (one, value) in enumerate(attainments.items())}
    found = search(families)
    assert isinstance(found.simulate, Formula)
    assert found.simulate.num_requests < 0.3 * len(families) * 4 * 400
    assert winner_of(found).policy == "p23"


def test_every_candidate_is_ranked_or_left_out_with_a_number() -> None:
    attainments = {candidate(n, budget): 0.97 if n > 5 else 0.4 for n in range(1, 17) for budget in (2048, 4096)}
    found = search(attainments)
    forecasts = {one: replace(Forecast.unknown(), tightness=2 - value) for one, value in attainments.items()}
    assert isinstance(found.simulate, Formula)
    current = candidate(16, 99, policy="auto")
    found.simulate.attainments = {**attainments, current: 1.0}
    found.include(current, 16.0)
    left_out = found.unsimulated(forecasts)
    assert {one.candidate for one in left_out} | found.scored.keys() == {*attainments, current}
    assert all(any(letter.isdigit() for letter in one.reason) for one in left_out)
    ranked, winner, baseline, notes = ranked_of(found.sorted(), QUESTION, str)
    assert winner is ranked[0] and winner.on_front and winner.meets and not winner.lost_because
    assert all(any(letter.isdigit() for letter in row.lost_because) for row in ranked[1:])
    assert baseline is not None and baseline.candidate == winner.candidate and "no other policy beats it" in notes[0]


def test_the_front_has_no_candidate_that_another_beats_in_everything() -> None:
    found = search({candidate(4): 0.7, candidate(8): 0.95, candidate(16): 0.99})
    ranked, _, _, _ = ranked_of(found.sorted(), QUESTION, str)
    front = [row for row in ranked if row.on_front]
    for one in front:
        assert not any(
            other is not one
            and other.num_gpus <= one.num_gpus
            and other.goodput_per_s.mean >= one.goodput_per_s.mean
            and (other.ttft_p99_s or one.ttft_p99_s) is not None
            and other.num_requests == one.num_requests
            for other in front
        )


def test_a_winner_that_gains_nothing_is_said_not_to_beat_the_baseline() -> None:
    static, auto = candidate(8), candidate(8, policy="auto")
    _, _, _, notes = ranked_of(search({static: 0.8, auto: 0.8}).sorted(), QUESTION, str)
    assert "does not beat" in notes[0] or "no other policy beats it" in notes[0]
    _, _, _, notes = ranked_of(search({static: 0.7, auto: 0.8}).sorted(), QUESTION, str)
    assert "The winner beats" in notes[0] and "+1" in notes[0]


@pytest.mark.parametrize("meets", [True, False])
def test_a_layout_with_more_devices_than_the_question_has_is_no_winner(meets: bool) -> None:
    attainments = {candidate(8): 0.95 if meets else 0.7, candidate(16): 0.99}
    ordered = search(attainments).sorted()
    ranked, winner, baseline, _ = ranked_of(ordered, replace(QUESTION, num_gpus=8), str)
    assert winner is not None and baseline is not None and winner.num_gpus == baseline.num_gpus == 8
    assert [row.lost_because for row in ranked if row.num_gpus == 16] == [
        "takes 16 devices, more than the 8 of the question"
    ]
    assert ranked_of(ordered, replace(QUESTION, num_gpus=4), str)[1] is None


def test_no_round_has_fewer_requests_than_the_minimum() -> None:
    sizes: set[int] = set()
    formula = Formula({candidate(n): 0.97 for n in range(1, 9)})

    def simulate(work: Sequence[Work]) -> dict[Work, Outcome]:
        sizes.update(one.num_requests for one in work)
        return formula(work)

    costs = {one: float(one.num_gpus) for one in formula.attainments}
    options = {"level": LEVEL, "attainment": 0.9, "num_seeds": 4, "num_requests": 240, "costs": costs}
    Search(simulate=simulate, min_requests=192, **options).run(dict.fromkeys(costs, Forecast.unknown()))
    assert sizes == {192, 240}


@given(st.floats(0.05, 0.89))
def test_the_highest_rate_is_found_to_5_percent(attainment: float) -> None:
    one = candidate(8)
    rate = max_rate(Formula({one: attainment}), one, 10.0, num_requests=100, seeds=4, attainment=0.9)
    assert rate is not None
    assert rate <= 10 * attainment / 0.9 * 1.01 and rate * 1.06 >= 10 * attainment / 0.9


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=14))
def test_an_interval_contains_its_mean_and_grows_with_the_spread(values: list[float]) -> None:
    found = interval(values)
    assert found.low <= found.mean <= found.high
    wider = interval([found.mean + 2 * (value - found.mean) for value in values])
    assert wider.high - wider.low >= found.high - found.low - 1e-6


def test_an_interval_of_fractions_stays_within_0_and_1() -> None:
    found = interval([0.6, 0.95], low=0.0, high=1.0)
    assert (found.low, found.high) == (0.0, 1.0) and found.low < found.mean < found.high


def test_an_interval_of_three_values_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert math.isclose(found.high - found.mean, 4.303 / math.sqrt(3), rel_tol=1e-4)
