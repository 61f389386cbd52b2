"""Improvement rates that follow the requests, and the traffic from which policies start."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import accumulate
from random import Random
from unittest.mock import patch

import numpy as np
import pytest

from longspan.core.exchange import of_any_layout
from longspan.core.options import SchedulingArgs
from longspan.core.policy import Policy
from longspan.cost.profile import PrefillTime
from longspan.policy.auto.estimates import Estimates
from longspan.policy.auto.history import History
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.policy.tetris import Tetris
from longspan.policy.tetris.execution import QueueTimes
from longspan.policy.tetris.learning import Learner
from longspan.policy.tetris.planner import Planner, Prompt
from longspan.policy.tetris.rates import IMPROVEMENT_RATES, RateTable
from longspan.policy.traffic import NUM_LENGTHS, Traffic
from longspan.sim.experiment import Experiment
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Workload
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

NEAR = 0.1
"""Difference of improvement rates with nearly the same TTFT."""


def planner(num_instances: int = 4) -> Planner:
    """A token takes 0.1 ms on one instance. Larger groups are quicker, but not in proportion."""
    sizes = [1 << bit for bit in range(num_instances.bit_length())]
    times = {
        size: PrefillTime(start_s=0.02 * size, token_s=1e-4 / size**0.8, cached_s=2e-9 / size, square_s=1e-9 / size)
        for size in sizes
    }
    return Planner(times, [0] * num_instances, min_chunk_tokens=256)


def lengths(number: int, seed: int = 0) -> list[int]:
    return [int(Random(f"{seed} {place}").uniform(2000, 20_000)) for place in range(number)]


def learn(learner: Learner, requests_per_s: float, prompts: list[int]) -> RateTable:
    """Add prompts, and let the learner search until it has a table."""
    for number in prompts:
        learner.add(Prompt(new_tokens=number))
    for _ in range(10_000):
        if (table := learner.advance(requests_per_s, 0.0)) is not None:
            return table
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("requests_per_s", [0.25, 1.0, 2.0, 4.0])
def test_the_rate_has_the_lowest_mean_ttft_of_simulated_prompts(requests_per_s: float) -> None:
    prompts = lengths(64)
    [(at, found)] = learn(Learner(planner()), requests_per_s, prompts).entries
    assert at == pytest.approx(requests_per_s)

    def mean_s(rate: float) -> float:
        draw, queue, ttfts_s = Random(0), QueueTimes(4), []
        arrivals_s = list(accumulate(draw.expovariate(at) for _ in range(256)))
        for at_s, number in zip(arrivals_s, draw.choices(prompts, k=256), strict=True):
            plan = planner().plan(Prompt(new_tokens=number, improvement_rate=rate), queue.waits_s(at_s))
            assert plan is not None
            queue.book(plan.chunks[-1].group, at_s + plan.ttft_s)
            ttfts_s.append(plan.ttft_s)
        return statistics.fmean(ttfts_s)

    assert found == min(IMPROVEMENT_RATES, key=mean_s)


def test_higher_load_needs_larger_savings() -> None:
    learner = Learner(planner())
    learn(learner, 0.1, lengths(40))
    table = learn(learner, 4.0, [])
    assert [rate for _, rate in table.entries] == sorted({rate for _, rate in table.entries}), table


def test_a_search_begins_with_32_prompts_and_is_repeated_when_their_number_has_doubled() -> None:
    learner, begun = Learner(planner()), []
    for number, tokens in enumerate(lengths(2300), start=1):
        learner.add(Prompt(new_tokens=tokens))
        was_searching = learner.is_searching
        learner.advance(1.0, 0.0)
        if learner.is_searching and not was_searching:
            begun.append(number)
        while learner.is_searching:
            learner.advance(1.0, 0.0)
    assert begun == [32, 64, 128, 256, 512, 1024, 2048]
    assert learner.traffic is not None and learner.traffic.lengths == tuple(lengths(2048)[-NUM_LENGTHS:])


@pytest.mark.parametrize(("seconds_between_plans", "per_plan"), [(0.0, 16), (0.5, 150), (60.0, 512)])
def test_a_plan_simulates_few_prompts_and_more_after_a_long_step(seconds_between_plans: float, per_plan: int) -> None:
    learner, now_s = Learner(planner()), 0.0
    for tokens in lengths(32):
        learner.add(Prompt(new_tokens=tokens))
    counts = []
    with patch.object(Planner, "plan", autospec=True, side_effect=Planner.plan) as plan:
        while learner.advance(1.0, now_s := now_s + seconds_between_plans) is None:
            counts.append(plan.call_count)
            plan.reset_mock()
    assert max(counts) == per_plan and sum(counts) > 1000


@pytest.mark.parametrize("requests_per_s", [0.0, 1.0])
def test_nothing_is_searched_without_arrivals_or_prompts(requests_per_s: float) -> None:
    learner = Learner(planner(), Traffic(lengths=tuple(lengths(100))))
    assert learner.advance(requests_per_s, 0.0) is None and not learner.is_searching


# ---------------------------------------------------------------- policies


def policy(name: str = "tetris", traffic: Traffic | None = None, **options: str) -> Policy:
    return make_policy(name, num_instances=4, options=options, facts=Facts(traffic=traffic))


KNOWN = Traffic(lengths=tuple(lengths(50)), answer_tokens=30.0, improvement_rates="0.5:0.1,2:0.6")


def test_a_policy_starts_with_the_rates_of_an_earlier_server() -> None:
    assert policy().traffic is None and "until rates for the requests are found" in str(policy().hint)
    known = policy(traffic=KNOWN)
    assert known.traffic == KNOWN and known.hint is None
    assert isinstance(known, Tetris) and str(known.rate_table) == KNOWN.improvement_rates


@pytest.mark.parametrize("options", [{"improvement_rate": "0.2"}, {"improvement_rates": "1:0.2"}])
def test_given_rates_are_not_learned_but_the_record_stays(options: dict[str, str]) -> None:
    made = policy(traffic=KNOWN, **options)
    assert isinstance(made, Tetris) and made.traffic is KNOWN and made.hint is None
    assert [rate for _, rate in made.rate_table.entries] == [0.2]
    made.update(dict.fromkeys(options))
    assert str(made.rate_table) == KNOWN.improvement_rates, "learning goes on"
    made.update(options)
    assert [rate for _, rate in made.rate_table.entries] == [0.2]


@pytest.mark.parametrize("wrong", ["1:2", "x", "2:0.1,1:0.1"])
def test_a_record_with_wrong_rates_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"improvement|request rates"):
        Traffic.from_json(Traffic.to_json(KNOWN).replace(KNOWN.improvement_rates, wrong))


def test_auto_expects_the_prompts_and_answers_of_an_earlier_server() -> None:
    facts = Facts(traffic=KNOWN)
    assert policy("auto").traffic is None and policy("auto", KNOWN).traffic is KNOWN
    estimates, history = Estimates(facts, of_any_layout(), 4, None), History(0.02, KNOWN)
    history.expect(estimates.whole_prompt_s)
    singles, fastest = zip(*map(estimates.whole_prompt_s, KNOWN.lengths), strict=True)
    assert (history.usual_s, history.usual_fastest_s) == (statistics.median(singles), statistics.median(fastest))
    assert history.usual_fastest_s < history.usual_s and history.answer_tokens == KNOWN.answer_tokens
    assert history.rates(100.0) == (0.0, 0.0), "its rate is that of this server"


def test_auto_keeps_a_record_of_prompts_and_answers() -> None:
    history = History(0.02, KNOWN)
    for number in range(1, 130):
        history.add_prompt(float(number), 1.0, 0.5, 100 + number)
        history.add_answer(50)
    assert history.traffic is not None and history.traffic.lengths == (*KNOWN.lengths, *range(101, 229))
    assert history.traffic.answer_tokens == pytest.approx(50, abs=0.5)
    assert history.traffic.improvement_rates == KNOWN.improvement_rates, "they are of another policy, and stay"


# ---------------------------------------------------------------- simulated servers

CLUSTER = ClusterSpec(hardware="a100-sxm-80g", hosts=2, gpus_per_host=8, prefill_parallel="8", decode_parallel="tp8")
RATE = 1.0


def experiment(**options: str) -> Experiment:
    scheduling = SchedulingArgs(policy="tetris", policy_options=options, max_num_batched_tokens=32_768)
    return make_experiment("llama-3-8b", CLUSTER, scheduling)


def requests(num: int, *, seed: int = 0, rate: float = RATE, workload: str = "medium") -> Workload:
    return make_workload(WorkloadSpec(workload=workload, rate=rate, num_requests=num, output_len=1, seed=seed))


def run_of(made: Experiment, asked: Workload) -> tuple[Tetris, list[float]]:
    """Return the policy after a run, and the mean TTFT of each half."""
    policy = made.policy()
    with patch.object(Experiment, "policy", return_value=policy):
        ttfts_s = made.run(asked).ttfts_s
    assert isinstance(policy, Tetris)
    return policy, [statistics.fmean(half) for half in np.split(ttfts_s, 2)]


@pytest.mark.parametrize(("workload", "rate"), [("medium", 1.0), ("short", 2.5)])
def test_a_run_without_a_table_comes_near_one_with_offline_rates(workload: str, rate: float) -> None:
    """As of `benchmarks/papers/tetris.py`, which profiles other requests by simulating the whole cluster."""
    with patch("longspan.sim.experiment.request_rates", return_value=(rate,)):  # the other rates are not needed
        offline, _ = experiment().improvement_rates(requests(100, seed=1, rate=rate, workload=workload), rate)
    asked = requests(300, rate=rate, workload=workload)
    policy, (_, learned_s) = run_of(experiment(), asked)
    _, (_, offline_s) = run_of(experiment(improvement_rates=str(offline)), asked)
    assert abs(policy.rate_table.nearest(rate) - offline.nearest(rate)) <= NEAR
    assert learned_s < 1.05 * offline_s
    _, (_, start_s) = run_of(experiment(improvement_rate="0.3"), asked)
    assert learned_s < 0.9 * start_s, "the rate of the start is worse"


def test_learned_rates_are_deterministic() -> None:
    asked = requests(200)
    one, other = (experiment().run(asked) for _ in range(2))
    assert one.summary() == other.summary() and list(one.ttfts_s) == list(other.ttfts_s)


def test_a_record_of_all_prompts_is_kept() -> None:
    made = experiment()
    policy, _ = run_of(made, requests(150))
    traffic = policy.traffic
    assert traffic is not None and len(traffic.lengths) >= 64
    assert set(traffic.lengths) <= {len(arrival.prompt) for arrival in requests(150).arrivals}
    table = RateTable.parse(traffic.improvement_rates)
    nearest = min((rate for rate, _ in table.entries), key=lambda rate: abs(rate - RATE))
    assert nearest == pytest.approx(RATE, rel=0.4)
    started = replace(made, facts=replace(made.facts, traffic=traffic)).policy()
    assert started.traffic is traffic and started.hint is None
