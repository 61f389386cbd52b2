"""Estimates prune candidates with reasons, and never the best of a small space that is simulated exhaustively."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from statistics import fmean

import pytest

from longspan.core.splits import ParallelSpec
from longspan.cost.forward import Roofline
from longspan.cost.step_cost import RooflineCost
from longspan.plan_runs import Setup, experiment_of, run, sample_of
from longspan.planner.candidates import Candidate, Space, candidates
from longspan.planner.demand import Demand, Size, demand_of
from longspan.planner.pruning import Estimator, Kept, prune
from longspan.planner.samples import Work
from longspan.sim.spec import HardwareSpec, ServiceLevel, SloClass
from longspan.workload.arrivals import Arrival, Workload, text
from longspan.workload.spec import WorkloadSpec

HARDWARE = "a100-sxm-80g"


def kept_of(setup: Setup, space: Space, demand: Demand, attainment: float = 0.9) -> Kept:
    @cache
    def line(hardware: str, tp: int, pp: int) -> Roofline | str:
        one = Candidate(hardware=hardware, spec=ParallelSpec(tp=tp, pp=pp))
        try:
            cost = experiment_of(setup, one, num_gpu_blocks_override=1).cost
        except ValueError as error:
            return str(error)
        assert isinstance(cost, RooflineCost)
        return cost.lines[0]

    return prune(candidates(space), Estimator(line, demand, setup.level), attainment)


def question(
    rate: float, *, model: str = "llama-3-8b", ttft: float = 4.0, tbt: float = 0.1, level: ServiceLevel | None = None
) -> tuple[Setup, Demand]:
    spec = WorkloadSpec(workload="short", rate=rate)
    level = level or ServiceLevel(slo_ttft=ttft, slo_tbt=tbt)
    setup = Setup(model=model, devices=HardwareSpec(), gpus_per_host=8, profiles=(), workload=spec, level=level)
    return setup, demand_of(sample_of(spec, 0, 200, rate), rate)


def space(max_gpus: int, **options: object) -> Space:
    return Space(hardware=(HARDWARE,), max_gpus=max_gpus, num_layers=32, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "ttft", "tbt"), [(0.4, 4.0, 0.1), (1.2, 6.0, 0.2)])
def test_the_best_of_a_small_space_is_never_pruned(rate: float, ttft: float, tbt: float) -> None:
    setup, demand = question(rate, ttft=ttft, tbt=tbt)
    small = space(4, fewer=False, policies=("chunked",), step_budgets=(2048,))
    kept = kept_of(setup, small, demand)
    goodput = {
        one: fmean(run(setup, Work(candidate=one, seed=seed, num_requests=30)).goodput_per_s for seed in (0,))
        for one in candidates(small)
    }
    highest = max(goodput.values())
    assert max(goodput[one] for one in kept.forecasts) >= 0.98 * highest


def test_every_pruned_candidate_has_a_reason_with_a_number() -> None:
    setup, demand = question(4.0)
    kept = kept_of(setup, space(16), demand)
    assert len(kept.pruned) > 500 and kept.forecasts
    assert all(re.search(r"\d", one.reason) for one in kept.pruned)
    assert {one.candidate for one in kept.pruned}.isdisjoint(kept.forecasts)


@pytest.mark.parametrize(
    ("rate", "model", "ttft", "tbt", "words"),
    [
        (20.0, "llama-3-8b", 4.0, 0.1, "times the estimated capacity"),
        (0.2, "llama-3-70b", 100.0, 1.0, "GiB"),
        (0.1, "llama-3-8b", 0.7, 0.1, "s without load"),
        (0.1, "llama-3-8b", 100.0, 0.005, "a decode alone takes"),
    ],
)
def test_reasons(rate: float, model: str, ttft: float, tbt: float, words: str) -> None:
    setup, demand = question(rate, model=model, ttft=ttft, tbt=tbt)
    kept = kept_of(setup, space(128 if rate > 10 else 8, policies=("chunked",)), demand)
    assert any(words in one.reason for one in kept.pruned), {one.reason for one in kept.pruned}


@pytest.mark.parametrize("tbt", [None, 0.1])
def test_bounds_of_classes_prune_as_the_same_bounds_of_all_requests(tbt: float | None) -> None:
    whole = ServiceLevel(slo_ttft=4.0, slo_tbt=tbt)
    every = SloClass(name="all", slo_ttft=4.0, slo_tbt=tbt)
    halves = SloClass(name="short", max_input_len=8000, slo_ttft=4.0, slo_tbt=tbt)
    levels = [
        whole,
        ServiceLevel(classes=(every,)),
        ServiceLevel(slo_ttft=1e-6, slo_tbt=1e-6, classes=(every,)),
        ServiceLevel(slo_ttft=4.0, slo_tbt=tbt, classes=(halves,)),
    ]
    results = [kept_of(question(1.0, level=level)[0], space(4), question(1.0)[1]) for level in levels]
    assert all(one.forecasts.keys() == results[0].forecasts.keys() for one in results)
    assert all({row.reason for row in one.pruned} == {row.reason for row in results[0].pruned} for one in results[1:3])
    no_bound = ServiceLevel(classes=(SloClass(name="b", max_input_len=1, slo_ttft=1e-6),))
    assert kept_of(question(0.1, level=no_bound)[0], space(2), question(0.1)[1]).forecasts


def test_if_no_candidate_can_meet_the_level_the_nearest_are_kept() -> None:
    setup, demand = question(100.0)
    kept = kept_of(setup, space(2, policies=("chunked",)), demand)
    assert kept.forecasts and all(forecast.load > 1.25 for forecast in kept.forecasts.values())


def turns() -> Iterator[Arrival]:
    yield Arrival(due_s=0.0, prompt=text(1, 100), output_len=10)
    yield Arrival(due_s=1.0, prompt=text(2, 50), output_len=20, follows=0)
    yield Arrival(due_s=2.0, prompt=text(1, 100), output_len=30)


def test_cached_tokens_are_of_earlier_prompts_and_of_the_conversation() -> None:
    demand = demand_of(Workload(arrivals=list(turns()), shares=True), 1.0)
    assert set(demand.sizes) == {
        Size(prompt=100, cached=0, output=10),
        Size(prompt=160, cached=110, output=20),
        Size(prompt=100, cached=100, output=30),
    }
    assert min(size.new for size in demand.sizes) == 1
