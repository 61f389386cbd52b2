"""Prefill steps of Seesaw copy the KV that they fill to hosts. Every step is checked by `CheckedExecutor`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from test_seesaw_groups import cluster_of, phases_of, setups
from workloads import RANDOM_RUNS, Job, assert_lawful, jobs, play

from longspan.core.options import SchedulingArgs
from longspan.core.request import Request
from longspan.core.steps import MoveKV, Reshard
from longspan.core.view import ClusterView, Plan
from longspan.policy.seesaw import Seesaw
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload, text

SPECS = [("pp2", "tp2"), ("2", "2xtp2"), ("3", "2xpp2"), ("2xpp2", "tp4")]
LENGTHS = (40, 7, 100, 64, 33, 90)


def add(cluster: Cluster, lengths: tuple[int, ...] = LENGTHS, max_tokens: int = 6) -> list[Request]:
    return [cluster.add([10 + number] * length, max_tokens=max_tokens) for number, length in enumerate(lengths)]


def streams_of(cluster: Cluster) -> list[MoveKV]:
    """Return the copies to hosts that steps made, in order."""
    return [move for forward in cluster.forwards for move in forward.streams]


def copies_alone(cluster: Cluster) -> list[MoveKV]:
    """Return the copies to hosts that followed a step of the prefill phase."""
    phase, found, prefill = cluster.setup.cluster.spec, list[MoveKV](), cluster.setup.cluster.spec
    for step in cluster.executor.steps:
        if isinstance(step, Reshard):
            phase = step.cluster.spec
        elif isinstance(step, MoveKV) and step.way == "out" and phase == prefill:
            found.append(step)
    return found


def run_until(cluster: Cluster, is_reached: Callable[[], bool]) -> None:
    while not is_reached():
        assert cluster.engine.has_unfinished
        cluster.step()


def is_streaming(cluster: Cluster) -> bool:
    return any(moving.move.way == "out" for moving in cluster.executor.moving.values())


@pytest.mark.parametrize(("prefill", "decode"), SPECS)
@pytest.mark.parametrize("tokens", [24, 200])
def test_each_block_of_a_prompt_is_copied_once_by_the_step_that_fills_it(
    prefill: str, decode: str, tokens: int
) -> None:
    cluster = cluster_of(prefill, decode, max_num_batched_tokens=tokens)
    requests = add(cluster)
    cluster.run()
    copied = Counter({request.id: 0 for request in requests})
    for move in streams_of(cluster):
        copied[move.request_id] += len(move.copies)
    assert copied == {request.id: request.blocks_for(request.num_prompt) for request in requests}
    assert not copies_alone(cluster), "nothing is left to copy when a request is parked"
    for request in requests:
        assert request.output == cluster.expected_output(request)
        assert request.metrics.num_computed_tokens == request.num_prompt + 5


def test_a_prompt_shared_by_a_group_is_copied_by_each_member() -> None:
    cluster = cluster_of("3", "2xtp2")
    [request] = add(cluster, (300,))
    cluster.run()
    assert {source for move in streams_of(cluster) for source in move.sources} == {0, 1, 2}
    assert not copies_alone(cluster)
    assert request.metrics.num_computed_tokens == 305
    assert request.output == cluster.expected_output(request)


def test_a_shutdown_waits_for_the_copies_of_steps() -> None:
    cluster = cluster_of("pp2", "tp2", max_num_batched_tokens=24)
    requests = add(cluster)
    run_until(cluster, lambda: is_streaming(cluster))
    for request in requests:
        cluster.engine.finish(request, "abort")
    assert cluster.engine.settle(100.0)


def test_a_prompt_does_not_wait_for_a_prefix_that_a_step_computes() -> None:
    cluster = cluster_of("2", "2xtp2", max_num_batched_tokens=200)
    first = cluster.add([9] * 150, max_tokens=2)
    cluster.engine.emit()
    assert first.num_scheduled == 150 and is_streaming(cluster)
    second = cluster.add([9] * 100 + [7] * 20, max_tokens=2)
    cluster.engine.emit()
    assert second.num_scheduled == 120 and not second.num_computed
    cluster.run()
    assert second.output == cluster.expected_output(second)


def test_the_decode_phase_copies_nothing_in_its_steps() -> None:
    cluster = cluster_of("pp2", "tp2", host_blocks=(12,))
    add(cluster)
    cluster.run()
    assert len(cluster.engine.transitions) > 2
    for forward in cluster.forwards:
        is_prefill = all(part.start < cluster.executor.requests[part.request_id].num_prompt for part in forward.parts)
        assert is_prefill or not forward.streams


@pytest.mark.parametrize("policy_options", [{}, {"strict": "true"}])
def test_running_prompts_reserve_host_blocks_once(policy_options: dict[str, str]) -> None:
    """Blocks that were copied already count as reserved no second time. So one phase fills the host pool."""
    cluster = cluster_of("pp2", "tp2", host_blocks=(24,), max_num_batched_tokens=32, options=policy_options)
    add(cluster, (60,) * 12)
    run_until(cluster, lambda: bool(cluster.engine.transitions))
    num_streamed = sum(len(move.copies) for move in streams_of(cluster))
    assert num_streamed == 24, "6 prompts of 4 blocks"
    cluster.run()


def test_prompts_with_a_common_prefix_copy_it_once() -> None:
    cluster = cluster_of("pp2", "tp2", max_num_batched_tokens=48)
    requests = [cluster.add([*[5] * 48, *[20 + number] * 20], max_tokens=4) for number in range(4)]
    cluster.run()
    targets = [target for move in streams_of(cluster) for _, target in move.copies]
    assert len(targets) < sum(request.blocks_for(request.num_prompt) for request in requests)
    assert all(request.output == cluster.expected_output(request) for request in requests)


@pytest.mark.parametrize(("prefill", "decode"), SPECS)
def test_a_request_is_aborted_while_its_blocks_are_copied(prefill: str, decode: str) -> None:
    cluster = cluster_of(prefill, decode, max_num_batched_tokens=32)
    requests = add(cluster)
    run_until(cluster, lambda: is_streaming(cluster))
    [named, *_] = [moving.move.request_id for moving in cluster.executor.moving.values()]
    aborted = cluster.executor.requests[named]
    cluster.engine.finish(aborted, "abort")
    cluster.run()
    for request in requests:
        assert request is aborted or request.output == cluster.expected_output(request)


@pytest.mark.parametrize(("prefill", "decode"), SPECS)
def test_workers_are_lost_while_blocks_are_copied(prefill: str, decode: str) -> None:
    """Complete blocks stay on the host, so that fewer tokens are computed twice than were computed before the loss."""
    cluster = cluster_of(prefill, decode, max_num_batched_tokens=32)
    requests = add(cluster)
    run_until(cluster, lambda: len(streams_of(cluster)) > 3 and is_streaming(cluster))
    num_computed = sum(request.metrics.num_computed_tokens for request in requests)
    cluster.restart()
    cluster.run()
    assert all(request.output == cluster.expected_output(request) for request in requests)
    assert num_computed, "some were computed before the loss"
    again = sum(request.metrics.num_computed_tokens - request.num_prompt - 5 for request in requests)
    assert again <= num_computed


def test_a_full_host_pool_ends_the_copies_and_the_rest_is_computed_again() -> None:
    """The policy admits prompts as if the host had a block for each."""
    cluster = cluster_of("pp2", "tp2", host_blocks=(14,), num_blocks=60)
    requests = add(cluster)
    with (
        patch("longspan.policy.seesaw._HostBudget.fits", return_value=True),
        patch("longspan.policy.seesaw._HostBudget.reserve", return_value=True),
        patch("longspan.policy.seesaw._HostBudget.instances", lambda _, __, instances: list(instances)),
    ):
        cluster.run()
    assert all(request.output == cluster.expected_output(request) for request in requests)
    assert sum(request.metrics.num_computed_tokens - request.num_prompt - 5 for request in requests) > 0


# ---------------------------------------------------------------- KV that is not finite


@settings(RANDOM_RUNS, max_examples=80)
@given(setups(), st.lists(jobs(), min_size=1, max_size=10), st.sets(st.integers(0, 63), max_size=4), st.integers(0, 99))
def test_poison_reaches_no_other_request_by_hosts(setup: Setup, work: list[Job], poison: set[int], seed: int) -> None:
    """Copies of a step may arrive before the engine knows that the step is finite."""
    assert_lawful(play(setup, work, random.Random(seed), poison=poison))


def test_copies_that_arrive_before_their_step_is_known_to_be_finite_are_not_published() -> None:
    """A step of instance 0 completes later than the step of instance 1, which the engine takes afterwards."""
    setup = Setup(num_instances=2, num_blocks=20, policy="seesaw", phases=phases_of("2", "tp2"), host_blocks=(60,))
    cluster = Cluster(replace(setup, max_num_batched_tokens=200))
    cluster.executor.poison = [60]
    slow, dirty = cluster.add([5] * 190, max_tokens=4), cluster.add([60] * 20, max_tokens=4)
    cluster.run()
    assert slow.output == cluster.expected_output(slow)
    assert (dirty.error, dirty.output) == ("non_finite", [])
    again = cluster.add([60] * 20, max_tokens=4)
    cluster.run()
    assert again.metrics.num_cached_tokens == 0 and again.error == "non_finite"


# ---------------------------------------------------------------- the price


SEESAW_PLAN, STRICT = Seesaw.plan, {"strict": "true"}


def late_plan(policy: Seesaw, view: ClusterView) -> Plan:
    """Plan as `seesaw`, but copy blocks after the step that samples the first token."""
    plan = SEESAW_PLAN(policy, view)
    plan.offloads = False
    return plan


@pytest.mark.parametrize(("prefill", "decode"), [("pp4", "tp4"), ("tp4", "pp4"), ("2xpp2", "2xtp2")])
def test_copies_of_the_last_prompt_are_hidden_up_to_a_layer(prefill: str, decode: str) -> None:
    """After the last step, only the KV of one of 32 layers is left to copy."""
    cluster = ClusterSpec(hardware="a10", gpus_per_host=4, prefill_parallel=prefill, decode_parallel=decode)
    arguments = SchedulingArgs(
        policy="seesaw", max_num_batched_tokens=8192, block_size=16, host_kv_gib=100.0, policy_options=STRICT
    )
    arrivals = [Arrival(due_s=0.0, prompt=text(3 * i + 2, 3000), output_len=300) for i in range(12)]
    exposed_s = []
    for plan in (SEESAW_PLAN, late_plan):
        experiment = make_experiment("llama-7b", cluster, arguments)
        with patch.object(Seesaw, "plan", plan):
            result = experiment.run(Workload(arrivals=arrivals, shares=False))
        assert len(result.served) == 12 and result.transitions
        exposed_s.append(result.transitions[0].swap_s)
    streamed_s, late_s = exposed_s
    assert streamed_s < late_s / 20
