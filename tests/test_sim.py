"""The simulated executor: when steps complete, and what it invents."""

from __future__ import annotations

import pytest
from cluster import Cluster, Setup
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.runs import Run
from longspan.core.steps import BlockRef, Forward, Free, Part, Sample, Sampling
from longspan.sim.clock import VirtualClock
from longspan.sim.executor import LinearCost, SimExecutor

COST = LinearCost(base_s=1.0, per_token_s=0.5)


def forward(
    number: int,
    *instances: int,
    num_tokens: int = 2,
    sample: Sample | None = None,
    banned: tuple[int, ...] = (),
) -> Forward:
    runs = ((Run(0, num_tokens),),) + ((),) * (len(instances) - 1)
    part = Part(
        request_id=number,
        start=0,
        stop=num_tokens,
        tokens=(0,) * num_tokens,
        group=instances,
        runs=runs,
        exchange="local" if len(instances) == 1 else "ring_kv",
        first_block=0,
        blocks=(BlockRef(instances[0], 0),),
        sample=sample,
        sampling=Sampling(seed=0, banned=banned),
    )
    return Forward(number=number, parts=(part,))


def wish(position: int, *, below_minimum: bool = False) -> Sample:
    return Sample(instance=0, position=position, below_minimum=below_minimum)


def executor(vocab_size: int = 10) -> tuple[SimExecutor, VirtualClock]:
    clock = VirtualClock()
    return SimExecutor(clock=clock, vocab_size=vocab_size, cost=COST), clock


def test_the_cost_is_that_of_the_busiest_instance() -> None:
    dealt = Part(
        request_id=0,
        start=0,
        stop=8,
        tokens=(0,) * 8,
        group=(1, 0),
        runs=((Run(0, 1), Run(6, 8)), (Run(1, 6),)),
        exchange="ring_kv",
        first_block=0,
        blocks=(),
        sample=None,
    )
    (short,) = forward(0, 0, num_tokens=2).parts
    assert COST.seconds(Forward(number=1, parts=(dealt,))) == dict.fromkeys((0, 1), 1.0 + 0.5 * 5)
    assert COST.seconds(Forward(number=1, parts=(dealt, short))) == dict.fromkeys((0, 1), 1.0 + 0.5 * 7)


def test_an_instance_does_one_step_at_a_time_and_instances_work_side_by_side() -> None:
    sim, clock = executor()
    sim.submit(forward(1, 0))  # 0 .. 2
    sim.submit(forward(2, 1, num_tokens=6))  # 0 .. 4
    sim.submit(forward(3, 0))  # 2 .. 4
    sim.submit(Free(number=4, request_ids=(1,)))
    sim.submit(forward(5, 0, 1))  # 4 .. 6
    done = [([c.number for c in sim.poll(None)], clock.now()) for _ in range(3)]
    assert done == [([1], 2.0), ([2, 3], 4.0), ([5], 6.0)]
    assert sim.poll(None) == []


def test_a_poll_goes_no_further_than_its_timeout() -> None:
    sim, clock = executor()
    sim.submit(forward(1, 0))
    assert sim.poll(0.5) == []
    assert clock.now() == 0.5
    assert sim.poll(1.0) == []
    assert [c.number for c in sim.poll(1.0)] == [1]
    assert clock.now() == 2.0


def test_virtual_time_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.advance_to(2.0)
    with pytest.raises(AssertionError, match="does not go back"):
        clock.advance_to(1.0)


@given(st.integers(0, 1000), st.integers(1, 1000), st.sets(st.integers(0, 9), max_size=9))
def test_invented_tokens_depend_on_request_and_position_only(request: int, position: int, banned: set[int]) -> None:
    tokens = []
    for num_tokens in (1, 5):
        sim, _ = executor()
        asked = wish(position, below_minimum=bool(banned))
        sim.submit(forward(request, 0, num_tokens=num_tokens, sample=asked, banned=tuple(banned)))
        ((sampled,),) = [c.sampled for c in sim.poll(None)]
        assert sampled.request_id == request
        tokens.append(sampled.token)
    assert tokens[0] == tokens[1]
    assert 0 <= tokens[0] < 10
    assert tokens[0] not in banned


def test_a_span_inside_the_prompt_samples_nothing() -> None:
    sim, _ = executor()
    sim.submit(forward(1, 0))
    assert [c.sampled for c in sim.poll(None)] == [()]


def test_times_of_a_request_add_up() -> None:
    cluster = Cluster(Setup(max_num_batched_tokens=32))
    request = cluster.add(range(64), max_tokens=4)
    cluster.run()
    metrics = request.metrics
    assert metrics.ttft_s is not None and metrics.ttft_s == pytest.approx(
        2 * LinearCost().seconds(cluster.forwards[0])[0]
    )
    assert len(metrics.tbt_s) == 3
    assert metrics.last_token_s == metrics.finished_s == cluster.clock.now()
    assert metrics.ttft_s + sum(metrics.tbt_s) == pytest.approx(cluster.clock.now())
