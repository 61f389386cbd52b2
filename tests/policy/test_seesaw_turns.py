"""Seesaw's estimate of the tokens that remain to be decoded, and the fill of its passes."""

from __future__ import annotations

import pytest
from cluster import Cluster, Setup
from hypothesis import given
from hypothesis import strategies as st

from longspan import SamplingParams
from longspan.core.options import SchedulingArgs
from longspan.core.splits import ParallelSpec
from longspan.policy.seesaw import drain
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload, text


def test_requests_alike_end_at_once() -> None:
    assert drain([7] * 5) == [(5, 7)]


def test_few_long_answers_decode_in_a_small_batch_at_the_end() -> None:
    assert drain([10] * 7 + [1000]) == [(8, 10), (1, 990)]


@given(st.lists(st.integers(min_value=0, max_value=4000), max_size=200))
def test_pieces_last_until_the_longest_answer_and_decode_every_token(left: list[int]) -> None:
    pieces = drain(left)
    duration = sum(num_tokens for _, num_tokens in pieces)
    assert duration == max(left, default=0)
    assert [number for number, _ in pieces] == sorted((number for number, _ in pieces), reverse=True)
    assert sum(number * num_tokens for number, num_tokens in pieces) == pytest.approx(sum(left), abs=duration / 2)


def test_passes_are_full_while_prompts_wait_for_blocks() -> None:
    """Prompts alone take as long as on the same stages without hosts."""
    arrivals = [Arrival(due_s=0.0, prompt=text(3 * i + 2, 3000), output_len=1) for i in range(40)]
    stages = ClusterSpec(hardware="a10", gpus_per_host=8, parallel="pp8")
    phases = ClusterSpec(hardware="a10", gpus_per_host=8, prefill_parallel="pp8", decode_parallel="tp2pp4")
    chunked_s, seesaw_s = (
        make_experiment(
            "llama-2-70b",
            cluster,
            SchedulingArgs(policy=policy, max_num_batched_tokens=16384, block_size=16, host_kv_gib=host_kv_gib),
        )
        .run(Workload(arrivals=arrivals, shares=False))
        .makespan_s
        for policy, cluster, host_kv_gib in (("chunked", stages, 0.0), ("seesaw", phases, 640.0))
    )
    assert seesaw_s == pytest.approx(chunked_s, rel=0.002)


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_prompt_is_assigned_to_a_host_with_free_blocks(strict: str) -> None:
    """One host is full of the first request's KV."""
    phases = ClusterSpec(hardware="a10", hosts=2, gpus_per_host=2, prefill_parallel="2xpp2", decode_parallel="2xtp2")
    options = {"strict": strict}
    scheduling = SchedulingArgs(policy="seesaw", block_size=16, host_kv_gib=0.3, policy_options=options)
    arrivals = [
        Arrival(due_s=0.0, prompt=text(2, 400), output_len=150),
        Arrival(due_s=1.0, prompt=text(5, 300), output_len=20),
    ]
    result = make_experiment("llama-7b", phases, scheduling).run(Workload(arrivals=arrivals, shares=False))
    assert len(result.served) == 2


@pytest.mark.parametrize("host_blocks", range(10, 24))
def test_further_outputs_of_a_prompt_are_loaded_before_the_cluster_changes(host_blocks: int) -> None:
    """A host pool that holds few prompts. Both outputs of a prompt use the same blocks."""
    phases = ParallelSpec.parse("pp2"), ParallelSpec.parse("tp2")
    setup = Setup(num_blocks=12, policy="seesaw", phases=phases, host_blocks=(host_blocks,), max_num_batched_tokens=48)
    cluster, params = Cluster(setup), SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    for number, length in enumerate((20, 100, 45, 7, 90)):
        leader = cluster.add([number] * length, params)
        cluster.follow(leader, 1)
    cluster.run(max_steps=1000)
    assert len(cluster.engine.transitions) < 30
    assert all(request.output == cluster.expected_output(request) for request in cluster.requests)
