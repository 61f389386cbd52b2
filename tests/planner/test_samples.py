"""Samples of a workload, and the numbers of a simulated sample."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.planner.samples import outcome_of, window
from longspan.sim.run import Result, Served
from longspan.sim.spec import ServiceLevel, SloClass
from longspan.workload.arrivals import Arrival, Clients, Workload, as_conversations, text

_SERVICE_S = 2.0


def workload(num: int, *, turns: int = 1, clients: Clients | None = None) -> Workload:
    arrivals = [Arrival(due_s=float(n), prompt=text(n, 100), output_len=2) for n in range(num)]
    return Workload(arrivals=as_conversations(arrivals, turns=turns, think_s=0.0), shares=True, clients=clients)


@given(st.integers(1, 8), st.integers(1, 60), st.integers(0, 3), st.integers(1, 3))
def test_a_trace_that_repeats_has_no_prefix_of_an_earlier_lap(
    conversations: int, num: int, seed: int, turns: int
) -> None:
    chosen = window(workload(conversations * turns, turns=turns), seed, num, 1.0).arrivals
    assert len({(one.cache_salt, tuple(one.prompt)) for one in chosen}) == num
    assert len({one.cache_salt for one in chosen}) <= num // (conversations * turns) + 2
    assert all(chosen[one.follows].cache_salt == one.cache_salt for one in chosen if one.follows is not None)


def served(index: int, arrival_s: float, *, ttft_s: float = 1.0, prompt: int = 100, name: str = "") -> Served:
    return Served(
        index=index,
        arrival_s=arrival_s,
        ttft_s=ttft_s,
        tbt_s=array("d", [_SERVICE_S - 1.0]),
        finished_s=arrival_s + _SERVICE_S,
        num_prompt_tokens=prompt,
        num_output_tokens=2,
        num_cached_tokens=0,
        num_missing_tokens=0,
        slo_class=name,
    )


def result(every: list[Served]) -> Result:
    last_s = max(one.finished_s for one in every)
    return Result(served=tuple(every), refused={}, makespan_s=last_s, busy_s=(last_s,), max_queue=0, num_preemptions=0)


@given(st.integers(1, 64), st.integers(1, 6), st.booleans())
def test_the_goodput_of_a_closed_loop_is_its_clients_per_service_time(number: int, laps: int, together: bool) -> None:
    num, step_s = number * laps, 0.0 if together else _SERVICE_S / number
    every = [served(n, n // number * _SERVICE_S + n % number * step_s) for n in range(num)]
    loop = workload(num, clients=Clients(number=number, together=together))
    goodput = outcome_of(result(every), loop, ServiceLevel(slo_ttft=5.0), float("inf")).goodput_per_s
    assert 0 < goodput <= number / _SERVICE_S * 1.000001
    if together or laps > 4:  # else some requests are counted before all clients have one
        assert goodput == pytest.approx(number / _SERVICE_S)


def test_p99_times_are_relative_to_the_bounds_of_their_class() -> None:
    every = [served(n, n, ttft_s=1.0 + 2 * (n % 2), prompt=10 + 90 * (n % 2)) for n in range(9)]
    level = ServiceLevel(slo_ttft=2.0, classes=(SloClass(name="short", max_input_len=10, slo_ttft=4.0, slo_tbt=0.5),))
    outcome = outcome_of(result(every), workload(9), level, 1.0)
    assert outcome.bound_ratios == {"TTFT of short": 0.25, "TBT of short": 2.0, "TTFT": 1.5}
    assert not outcome_of(result(every), workload(9), ServiceLevel(), 1.0).bound_ratios
