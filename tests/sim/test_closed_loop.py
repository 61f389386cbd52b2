"""Closed loops and static batches: requests start when earlier requests end."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cost import LinearCost

from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.policy.registry import make_policy
from longspan.sim.run import Observers, Result, simulate
from longspan.sim.spec import Faults
from longspan.workload.arrivals import Arrival, Clients, as_conversations, prompt_of
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

COST = LinearCost(base_s=0.01, per_token_s=0.001)
MAX_LEN = 1024


def run(arrivals: Sequence[Arrival], clients: Clients | None, **how: Any) -> Result:
    cluster = Cluster.of("2", num_blocks=[512, 512])
    config = EngineConfig(cluster=cluster, block_size=16, max_model_len=MAX_LEN, max_num_batched_tokens=128)
    policy = make_policy("chunked", num_instances=2, options={})
    return simulate(arrivals, config, policy, COST, clients=clients, **how)


@st.composite
def requests(draw: st.DrawFn) -> list[Arrival]:
    """Draw requests. Some are too long to be served. Their times have no meaning in a closed loop."""
    lengths = st.integers(1, 300) | st.just(2 * MAX_LEN)
    sizes = draw(st.lists(st.tuples(lengths, st.integers(1, 12)), min_size=1, max_size=15))
    return [
        Arrival(due_s=0.0, prompt=prompt_of(place, length), output_len=output)
        for place, (length, output) in enumerate(sizes)
    ]


def served_times(result: Result) -> tuple[list[float], list[float]]:
    """Return all arrivals and all ends, ascending."""
    return sorted(one.arrival_s for one in result.served), sorted(one.finished_s for one in result.served)


@given(requests(), st.integers(1, 6), st.floats(0, 2), st.lists(st.floats(0, 3), max_size=1).map(tuple))
@settings(max_examples=60, deadline=None)
def test_each_client_sends_its_next_request_when_the_one_before_has_ended(
    asked: list[Arrival], number: int, think_s: float, lost_at_s: tuple[float, ...]
) -> None:
    faults = Faults(lost_at_s=lost_at_s, restart_s=0.5)
    result = run(asked, Clients(number=number, think_s=think_s), faults=faults)
    assert len(result.served) + len(result.refused) == len(asked)
    if think_s and result.refused:  # a client thinks after a refusal, too
        return
    arrivals_s, ends_s = served_times(result)
    assert arrivals_s[:number] == [0.0] * min(number, len(arrivals_s))
    assert arrivals_s[number:] == pytest.approx([end_s + think_s for end_s in ends_s[: max(0, len(ends_s) - number)]])
    assert [one.arrival_s for one in result.served] == arrivals_s, "requests start in order"


def test_all_clients_have_a_request_until_none_is_left() -> None:
    asked = [
        Arrival(due_s=0.0, prompt=prompt_of(place, 20 + 7 * place), output_len=1 + place % 5) for place in range(40)
    ]
    counts: list[int] = []

    def moment(_: float, engine: Engine) -> None:
        load = engine.load()
        counts.append(load.num_running + load.num_waiting)

    assert len(run(asked, Clients(number=7), watch=Observers(moment=moment)).served) == 40
    assert max(counts) == 7 and 0 in counts


@given(requests(), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_a_static_batch_starts_when_all_requests_of_the_batch_before_have_ended(
    asked: list[Arrival], size: int
) -> None:
    result = run(asked, Clients(number=size, together=True))
    ends_s = {one.index: one.finished_s for one in result.served}
    for one in result.served:
        first = one.index - one.index % size
        before = [ends_s[index] for index in range(first) if index in ends_s]
        assert one.arrival_s == pytest.approx(max(before, default=0.0))


@given(requests(), st.integers(1, 4), st.integers(2, 3), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_a_client_has_one_request_of_one_conversation_at_a_time(
    asked: list[Arrival], number: int, turns: int, think_s: float
) -> None:
    talks = as_conversations(asked, turns=turns, think_s=think_s)
    result = run(talks, Clients(number=number, think_s=think_s))
    assert len(result.served) + len(result.refused) == len(asked)
    served = {one.index: one for one in result.served}
    for one in result.served:
        if (before := talks[one.index].follows) is not None:
            assert one.arrival_s == pytest.approx(served[before].finished_s + think_s)
        running = [other for other in result.served if other.arrival_s <= one.arrival_s < other.finished_s]
        assert len(running) <= number
        assert len({other.index // turns for other in running}) == len(running)


def test_a_single_client_finds_the_times_of_requests_alone() -> None:
    asked = [Arrival(due_s=0.0, prompt=prompt_of(place, 30 + 40 * place), output_len=4) for place in range(6)]
    alone = run([replace(one, due_s=100.0 * place) for place, one in enumerate(asked)], None)
    looped = run(asked, Clients(number=1))
    assert looped.ttfts_s == pytest.approx(alone.ttfts_s) and looped.tbts_s == pytest.approx(alone.tbts_s)


def test_more_clients_raise_throughput_and_latency() -> None:
    asked = [Arrival(due_s=0.0, prompt=prompt_of(place, 100), output_len=20) for place in range(64)]
    few, many = (run(asked, Clients(number=number)) for number in (2, 16))
    assert many.makespan_s < few.makespan_s
    assert sum(many.tbts_s) > sum(few.tbts_s)


def test_a_trace_in_a_closed_loop_keeps_lengths_order_and_prefixes_but_no_times(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 90_000 * place, "input_length": 600 + place, "output_length": 3, "hash_ids": [7, place]}
        for place in range(5)
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    workload = make_workload(WorkloadSpec(workload=str(path), concurrency=2, think_time=0.25))
    assert workload.clients == Clients(number=2, think_s=0.25) and workload.shares
    assert [(one.due_s, len(one.prompt), one.output_len) for one in workload.arrivals] == [
        (0.0, 600 + place, 3) for place in range(5)
    ]
    assert len({tuple(one.prompt[:512]) for one in workload.arrivals}) == 1
    batches = make_workload(WorkloadSpec(workload=str(path), batch_size=3))
    assert batches.clients == Clients(number=3, together=True)


def test_turns_of_clients_follow_after_the_think_time() -> None:
    spec = WorkloadSpec(concurrency=2, turns=3, num_requests=9)
    assert {one.due_s for one in make_workload(spec).arrivals} == {0.0}
    slow = make_workload(replace(spec, think_time=4.0))
    assert {one.due_s for one in slow.arrivals if one.follows is not None} == {4.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 2, "rate": 1.0}, "rate 1.0 excludes `concurrency`"),
        ({"concurrency": 2, "offline": True}, "offline True excludes `concurrency`"),
        ({"concurrency": 2, "burstiness": 0.5}, "burstiness 0.5 excludes `concurrency`"),
        ({"concurrency": 2, "batch_size": 2}, "batch_size 2 excludes `concurrency`"),
        ({"batch_size": 2, "rate": 1.0}, "rate 1.0 excludes `batch_size`"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"rate": 1.0, "think_time": 1.0}, "give turns or concurrency"),
    ],
)
def test_two_ways_to_give_times_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WorkloadSpec(**options)


def test_a_closed_loop_has_no_rate_to_scale() -> None:
    with pytest.raises(ValueError, match="a closed loop has none"):
        make_workload(WorkloadSpec(concurrency=2, num_requests=4)).at_rate(1.0)
