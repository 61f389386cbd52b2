"""Simulations: the engine on a virtual clock, with any arrivals and faults. Equal inputs give equal numbers."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cost import LinearCost
from one_part import part_of

import longspan.sim.run as sim_run
from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.exchange import CHAIN, RING_KV, Exchange
from longspan.core.layouts import shard_span
from longspan.core.runs import Run, SpanShards
from longspan.core.steps import Forward, Part
from longspan.extras import timeline
from longspan.extras.timeline import Record, Timeline
from longspan.extras.trace import chrome_trace
from longspan.policy.registry import make_policy
from longspan.sim.executor import StepTiming, apply_slowdown
from longspan.sim.run import Observers, Result, simulate
from longspan.sim.spec import Faults
from longspan.workload.arrivals import Arrival, as_conversations, prompt_of

COST = LinearCost(base_s=0.01, per_token_s=0.001)


def config(num_instances: int = 1, **others: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"block_size": 16, "max_model_len": 1024, "max_num_batched_tokens": 128}
    cluster = Cluster.of(str(num_instances), num_blocks=[others.pop("num_blocks", 64)] * num_instances)
    return EngineConfig(cluster=cluster, **(sizes | others))


def run(arrivals: list[Arrival], num_instances: int = 1, options: dict[str, str] | None = None, **how: Any) -> Result:
    usual = "context" if num_instances > 1 else "chunked"
    policy = make_policy(how.pop("policy", usual), num_instances=num_instances, options=options or {})
    others = {name: how.pop(name) for name in ("prefix_caching", "num_blocks", "max_model_len") if name in how}
    return simulate(arrivals, config(num_instances, **others), policy, how.pop("cost", COST), **how)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    lengths = draw(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=15))
    times = sorted(draw(st.lists(st.floats(0, 3), min_size=len(lengths), max_size=len(lengths))))
    shared = draw(st.integers(0, 40))
    found = [
        Arrival(due_s=time, prompt=prompt_of(place, length, shared_len=shared), output_len=output)
        for place, (time, (length, output)) in enumerate(zip(times, lengths, strict=True))
    ]
    return as_conversations(found, turns=draw(st.integers(1, 3)), think_s=draw(st.floats(0, 1)))


faults = st.builds(
    Faults,
    slow=st.dictionaries(st.integers(0, 1), st.floats(1, 3), max_size=2),
    lost_at_s=st.lists(st.floats(0, 3), max_size=2).map(tuple),
    restart_s=st.floats(0, 1),
)


@given(arrivals(), faults, st.sampled_from(["20", "100000"]))
@settings(max_examples=60, deadline=None)
def test_all_requests_finish_and_the_same_input_gives_the_same_result(
    asked: list[Arrival], broken: Faults, threshold: str
) -> None:
    ran: list[tuple[int, float]] = []
    clock: list[float] = []
    watch = Observers(
        ran=lambda one: ran.append((one.forward.number, one.start_s)), moment=lambda at, _: clock.append(at)
    )
    first = run(asked, 2, {"threshold": threshold}, faults=broken, watch=watch)
    assert clock == sorted(clock), "the clock does not go back"
    assert [one.index for one in first.served] == list(range(len(asked)))
    for one, arrival in zip(first.served, asked, strict=True):
        assert one.num_output_tokens == arrival.output_len == len(one.tbt_s) + 1
        assert one.arrival_s <= one.arrival_s + one.ttft_s <= one.finished_s
        assert one.ttft_s + sum(one.tbt_s) == pytest.approx(one.e2e_s)
        if arrival.follows is not None:
            before = first.served[arrival.follows]
            assert one.arrival_s >= before.finished_s + arrival.due_s - 1e-9
            assert one.num_prompt_tokens == before.num_prompt_tokens + before.num_output_tokens + len(arrival.prompt)
    again: list[tuple[int, float]] = []
    second = run(
        asked,
        2,
        {"threshold": threshold},
        faults=broken,
        watch=Observers(ran=lambda one: again.append((one.forward.number, one.start_s))),
    )
    assert (second, again) == (first, ran)


@given(arrivals(), faults, st.sampled_from(["20", "100000"]))
@settings(max_examples=40, deadline=None)
def test_the_time_of_a_request_is_split_by_cause(asked: list[Arrival], broken: Faults, threshold: str) -> None:
    seen = Timeline()
    for one in run(asked, 2, {"threshold": threshold}, faults=broken, watch=seen.observers(COST)).served:
        split = seen.split(one)
        assert split.exposed_communication_s is None, "this cost knows of none"
        parts = (split.queue_s, split.compute_s, split.transfer_s, split.decode_s)
        assert min(parts) > -1e-9 and sum(parts) == pytest.approx(one.e2e_s)
        assert split.queue_s + split.compute_s == pytest.approx(one.ttft_s) and split.compute_s > 0


def test_outputs_are_those_of_the_engine() -> None:
    """Tokens depend on request and position only, through losses too."""
    seen: dict[int, list[int]] = {}

    def moment(_: float, engine: Engine) -> None:
        for request in engine._queues.requests.values():
            seen[request.id] = list(request.output)
            assert request.output == [
                invented(request.id, len(request.prompt) + place) for place in range(len(request.output))
            ]

    asked = [Arrival(due_s=0.0, prompt=prompt_of(place, 50), output_len=20) for place in range(3)]
    result = run(asked, faults=Faults(lost_at_s=(0.3,), restart_s=0.5), watch=Observers(moment=moment))
    assert len(result.served) == 3 and all(len(output) >= 19 for output in seen.values())


def invented(request_id: int, position: int) -> int:
    import zlib

    return zlib.crc32(f"{request_id} {position}".encode()) % 2**15


@given(arrivals(), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_more_instances_are_never_later_when_requests_never_meet(asked: list[Arrival], num_instances: int) -> None:
    """Each request runs alone, so no other placement is faster. Idle instances cost nothing."""
    alone = [
        Arrival(due_s=1000.0 * place, prompt=one.prompt, output_len=one.output_len) for place, one in enumerate(asked)
    ]
    few = run(alone, num_instances, policy="context", prefix_caching=False, options={"threshold": "100000"})
    more = run(alone, num_instances + 1, policy="context", prefix_caching=False, options={"threshold": "100000"})
    assert [one.finished_s for one in more.served] == pytest.approx([one.finished_s for one in few.served])


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_more_instances_end_no_later_with_equal_work(lengths: list[int], num_instances: int) -> None:
    """One token out, equal prompts: the least loaded instance gets the next."""
    asked = [Arrival(due_s=0.0, prompt=prompt_of(place, lengths[0]), output_len=1) for place, _ in enumerate(lengths)]
    options = {"threshold": "100000"}
    few = run(asked, num_instances, options, policy="context", prefix_caching=False)
    more = run(asked, num_instances + 1, options, policy="context", prefix_caching=False)
    assert more.makespan_s <= few.makespan_s + 1e-9


# ---------------------------------------------------------------- simultaneous events, and times per instance


@dataclass(frozen=True)
class OwnTimes:
    """Instance i takes i + 1 seconds."""

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float]]:
        return {instance: (instance + 1.0,) for instance in forward.instances}


def test_instances_start_together_and_end_by_their_own_times() -> None:
    steps: list[StepTiming] = []
    asked = [
        Arrival(due_s=0.0, prompt=prompt_of(0, 64), output_len=1),
        Arrival(due_s=0.0, prompt=prompt_of(1, 8), output_len=3),
    ]
    result = run(asked, 2, {"threshold": "32"}, cost=OwnTimes(), watch=Observers(ran=steps.append))
    sharded = next(one for one in steps if len(one.forward.instances) == 2)
    assert sharded.ends_s == {0: sharded.start_s + 1, 1: sharded.start_s + 2}
    assert result.served[0].ttft_s == 2.0, "a step is complete when its last instance is done"
    single = [one for one in steps if one.forward.instances == (0,)]
    free = [max(one.ends_s.get(0, 0.0) for one in steps[: steps.index(this)]) for this in single]
    assert [one.start_s for one in single] == pytest.approx(free), "an instance that ended early continues"


def test_completions_come_before_losses_and_these_before_arrivals() -> None:
    """At 1.0 s the first request has finished, the running request is recomputed, and the third waits for it."""
    cost = LinearCost(base_s=1.0, per_token_s=0.0)
    asked = [
        Arrival(due_s=0.0, prompt=prompt_of(0, 8), output_len=1),
        Arrival(due_s=0.0, prompt=prompt_of(1, 8), output_len=2),
        Arrival(due_s=1.0, prompt=prompt_of(2, 8), output_len=1),
    ]
    result = run(asked, cost=cost, faults=Faults(lost_at_s=(1.0,), restart_s=5.0))
    assert [one.finished_s for one in result.served] == [1.0, 7.0, 7.0]
    assert result.makespan_s == 7.0


def test_a_straggler_takes_its_factor_longer() -> None:
    asked = [Arrival(due_s=0.0, prompt=prompt_of(0, 100), output_len=3)]
    one, other = run(asked), run(asked, faults=Faults(slow={0: 2.5}))
    assert other.makespan_s == pytest.approx(2.5 * one.makespan_s)


def chunk(request_id: int, group: tuple[int, ...], runs: SpanShards, exchange: Exchange = RING_KV) -> Part:
    """The first tokens of a prompt, of which each member of the group has these."""
    num_tokens = max(run.stop for shards in runs for run in shards)
    return part_of(group, request_id=request_id, stop=num_tokens, runs=runs, exchange=exchange)


def test_members_of_a_group_wait_for_its_straggler() -> None:
    """Members of a ring end together, also with a straggler. Members of a chain before the straggler do not wait."""

    def seconds(exchange: Exchange, slow: dict[int, float]) -> dict[int, float]:
        part = chunk(0, (0, 1, 2), shard_span("contiguous", 0, 6, 3), exchange)
        return apply_slowdown(Forward(number=1, parts=(part,)), dict.fromkeys(range(3), 1.0), slow)

    assert seconds(RING_KV, {1: 1.5}) == {0: 1.5, 1: 1.5, 2: 1.5}
    assert seconds(CHAIN, {1: 1.5}) == {0: 1.0, 1: 1.5, 2: 1.5}
    assert seconds(CHAIN, {1: 1.5, 2: 3.0}) == {0: 1.0, 1: 1.5, 2: 3.0}
    quick = {0: 0.5, 1: 0.5, 2: 0.5}
    assert seconds(RING_KV, quick) == seconds(CHAIN, quick) == quick
    assert seconds(RING_KV, {0: 0.5}) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_the_time_of_an_instance_is_shared_among_its_parts() -> None:
    """The share follows the tokens. A part without tokens of its own, or of other instances, has no share."""
    seen = Timeline()
    watch = seen.observers(LinearCost())
    assert watch.ran is not None
    parts = (
        chunk(0, (0, 1), ((Run(0, 6),), (Run(6, 8),))),
        chunk(1, (0, 1), ((), (Run(0, 6),))),
        chunk(2, (0,), ((Run(0, 2),),)),
    )
    stages = {(0, 0): (1.0, 9.0), (1, 0): (1.0, 5.0)}
    watch.ran(StepTiming(forward=Forward(number=1, parts=parts), stages=stages))
    assert [(one.instance, one.index, one.start_s, one.end_s) for one in seen.blocks] == [
        (0, 0, 1.0, 7.0),
        (0, 2, 7.0, 9.0),
        (1, 0, 1.0, 2.0),
        (1, 1, 2.0, 5.0),
    ]


def test_the_queue_ends_when_the_first_step_starts() -> None:
    """Not when that is planned, while the step before still runs."""
    seen = Timeline()
    asked = [Arrival(due_s=0.05 * place, prompt=prompt_of(place, 100), output_len=1) for place in range(2)]
    result = run(asked, 1, watch=seen.observers(COST))
    starts_s = [min(one.start_s for one in seen.blocks if one.index == index) for index in range(2)]
    assert starts_s == [0.0, pytest.approx(0.11)]
    record = Record(policy="context", cluster=Cluster.of("1"), result=result, timeline=seen)
    events = json.loads(chrome_trace([record]))["traceEvents"]
    queues_s = [one["args"]["queue_s"] for one in events if one["ph"] == "b" and one["cat"] == "request"]
    assert queues_s == [0.0, pytest.approx(0.06)]


def test_moments_of_a_long_run_are_few_and_go_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MAX_MOMENTS", 10)
    seen = Timeline()
    asked = [Arrival(due_s=0.5 * place, prompt=prompt_of(place, 100), output_len=20) for place in range(30)]
    result = run(asked, watch=seen.observers(LinearCost()))
    times = [one.at_s for one in seen.moments]
    assert 5 <= len(times) < 10 and times == sorted(times)
    gaps = [later - earlier for earlier, later in pairwise([*times, result.makespan_s])]
    assert max(gaps) < result.makespan_s / 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"slow": {0: 0.0}}, "must be above 0"),
        ({"slow": {0: float("nan")}}, "must be above 0"),
        ({"slow": {-1: 2.0}}, "instance -1"),
        ({"lost_at_s": (-1.0,)}, "-1.0 seconds"),
        ({"restart_s": float("inf")}, "inf seconds"),
    ],
)
def test_faults_that_cannot_be_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Faults(**wrong)


def test_an_instance_that_is_not_there_cannot_be_slow() -> None:
    with pytest.raises(ValueError, match="instance 2 does not exist, there are 2"):
        run([Arrival(due_s=0.0, prompt=prompt_of(0, 8), output_len=1)], 2, faults=Faults(slow={2: 2.0}))


# ---------------------------------------------------------------- requests


def test_a_request_beyond_capacity_is_refused_with_its_later_turns() -> None:
    asked = as_conversations(
        [
            Arrival(due_s=1.0 * place, prompt=prompt_of(place, 2000 if place == 2 else 9), output_len=2)
            for place in range(6)
        ],
        turns=2,
        think_s=0.0,
    )
    result = run(asked, num_blocks=64, max_model_len=1024)
    assert sorted(result.refused) == [2, 3] and "2000 tokens" in result.refused[2].reason
    assert [one.index for one in result.served] == [0, 1, 4, 5]


def test_a_shared_prefix_is_computed_once() -> None:
    asked = [
        Arrival(due_s=10.0 * place, prompt=prompt_of(place, 100, shared_len=64), output_len=1) for place in range(3)
    ]
    assert [one.num_cached_tokens for one in run(asked).served] == [0, 64, 64]
    salted = [replace(one, cache_salt=salt) for one, salt in zip(asked, ("a", "b", "a"), strict=True)]
    assert [one.num_cached_tokens for one in run(salted).served] == [0, 0, 64]
    blocks = [(1, 2), (1, 3), (2, 1), (1, 2)]
    asked = [
        Arrival(due_s=10.0 * place, prompt=prompt_of(place, 100, blocks=names, block_len=32), output_len=1)
        for place, names in enumerate(blocks)
    ]
    assert [one.num_cached_tokens for one in run(asked).served] == [0, 32, 0, 64]


def test_a_turn_finds_all_that_was_said_before() -> None:
    asked = as_conversations(
        [Arrival(due_s=0.0, prompt=prompt_of(place, 40), output_len=7) for place in range(3)], turns=3, think_s=1.0
    )
    first, second, third = run(asked).served
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 46, 93)


def test_the_numbers_are_those_of_the_requests() -> None:
    cost = LinearCost(base_s=1.0, per_token_s=0.0)
    asked = [Arrival(due_s=2.0 * place, prompt=prompt_of(place, 10), output_len=place + 1) for place in range(2)]
    result = run(asked, cost=cost)
    assert result.summary() == {
        "ttft_mean_s": 1.0,
        "ttft_p50_s": 1.0,
        "ttft_p99_s": 1.0,
        "tpot_mean_s": 1.0,
        "tpot_p50_s": 1.0,
        "tpot_p99_s": 1.0,
        "tbt_p50_s": 1.0,
        "tbt_p99_s": 1.0,
        "e2e_p50_s": 1.5,
        "throughput_requests_per_s": 2 / 4,
        "throughput_output_tokens_per_s": 3 / 4,
        "throughput_tokens_per_s": 23 / 4,
        "max_queue": 0,
        "utilisation": 3 / 4,
        "num_completed": 2,
        "makespan_s": 4.0,
        "num_refused": 0,
        "num_truncated": 0,
        "num_preemptions": 0,
        "num_prompt_tokens": 20,
        "num_output_tokens": 3,
        "num_cached_tokens": 0,
    }


def test_tpot_is_a_mean_of_each_request_and_tbt_is_of_all_tokens() -> None:
    """As vLLM's benchmark: (E2E - TTFT) / (output tokens - 1), and requests with a single token have no TPOT."""
    asked = [
        Arrival(due_s=0.0, prompt=prompt_of(place, 100 * (place + 1)), output_len=[1, 2, 30][place])
        for place in range(3)
    ]
    result = run(asked)
    expected = [(one.e2e_s - one.ttft_s) / (one.num_output_tokens - 1) for one in result.served[1:]]
    summary = result.summary()
    assert len(set(expected)) == 2 and len(result.tbts_s) == 30
    assert result.tpots_s == pytest.approx(expected)
    assert summary["tpot_mean_s"] == pytest.approx(sum(expected) / 2)
    assert summary["tpot_p99_s"] == pytest.approx(min(expected) + 0.99 * (max(expected) - min(expected)))
    low_s, high_s = sorted(result.tbts_s)[14:16]
    assert summary["tbt_p50_s"] == pytest.approx((low_s + high_s) / 2)
    assert run(asked[:1]).summary()["tpot_mean_s"] is None


def test_the_longest_queue_is_told() -> None:
    asked = [Arrival(due_s=0.0, prompt=prompt_of(place, 128), output_len=1) for place in range(5)]
    assert run(asked).max_queue == 3, "with a step in flight and one behind it"


def test_only_a_simulation_that_runs_keeps_garbage_from_being_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(_: int) -> None:
        assert gc.get_freeze_count() > before
        raise KeyboardInterrupt

    before = gc.get_freeze_count()
    monkeypatch.setattr(sim_run, "_MANY", 1)
    asked = [Arrival(due_s=0.0, prompt=prompt_of(0, 20), output_len=2)]
    with pytest.raises(KeyboardInterrupt):
        run(asked, watch=Observers(finished=finished))
    assert gc.get_freeze_count() <= before
