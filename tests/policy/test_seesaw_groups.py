"""Seesaw on simulated clusters whose instances share requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import RANDOM_RUNS, Job, finishes_lawfully, jobs, play, repeats, setups_of

from longspan.core.locations import Location
from longspan.core.request import ContextLengthError, Request
from longspan.core.splits import ParallelSpec
from longspan.core.steps import Reshard
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy

PREFILL, DECODE = ("2", "2xpp2", "3", "4"), ("2xtp2", "3xpp2", "tp2", "4xtp2")
OPTIONS: list[dict[str, str]] = [
    {},
    {"threshold": "20"},
    {"threshold": "30", "exchange": "ring_q", "layout": "striped", "decode": "ring_kv"},
    {"exchange": "chain", "strict": "true"},
    {"threshold": "10", "exchange": "chain", "long_share": "0.5"},
]


def phases_of(prefill: str, decode: str) -> tuple[ParallelSpec, ParallelSpec]:
    return ParallelSpec.parse(prefill), ParallelSpec.parse(decode)


@st.composite
def setups(draw: st.DrawFn, num_hosts: int = 1) -> Setup:
    """Two clusters on the same ranks. The pool of each host holds any request."""
    prefill, decode = phases_of(draw(st.sampled_from(PREFILL)), draw(st.sampled_from(DECODE)))
    locations: tuple[Location, ...] = ()
    if num_hosts > 1:
        prefill, decode = phases_of(*draw(st.sampled_from([("2xpp2", "2xtp2"), ("4xtp2", "4xpp2")])))
        num_instances = prefill.instances
        locations = tuple(Location(host=num_hosts * i // num_instances, device=i) for i in range(num_instances))
    setup = draw(setups_of("seesaw", prefill.instances, dict(draw(st.sampled_from(OPTIONS)))))
    most = min(prefill.instances, decode.instances) * setup.num_blocks
    assert setup.max_model_len is not None
    return replace(
        setup,
        phases=(prefill, decode),
        pp=1,
        locations=locations,
        host_blocks=(draw(st.integers(most, 4 * most)),) * num_hosts,
        prefix_caching=True,
        max_model_len=min(setup.max_model_len, most * setup.block_size),
    )


test_any_workload_finishes_lawfully = finishes_lawfully(setups())
test_the_same_input_gives_the_same_steps = repeats(setups())


@settings(RANDOM_RUNS, max_examples=60)
@given(setups(num_hosts=2), st.lists(jobs(), min_size=1, max_size=10))
def test_any_workload_on_two_hosts_has_the_expected_outputs(setup: Setup, work: list[Job]) -> None:
    cluster = play(setup, work)
    for request in cluster.requests:
        expected = cluster.expected_output(request)
        assert request.output == expected[: len(request.output)]
        assert request.finish_reason == "abort" or request.output == expected


def cluster_of(prefill: str, decode: str, **given: object) -> Cluster:
    """Return two clusters with pools of 10 blocks of 16 tokens, and a host pool of 60 blocks."""
    phases = phases_of(prefill, decode)
    setup = Setup(num_instances=phases[0].instances, num_blocks=10, policy="seesaw", phases=phases, host_blocks=(60,))
    return Cluster(replace(setup, **given))  # type: ignore[arg-type]


def groups_by_phase(cluster: Cluster, request: Request) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Return the groups of the parts of a request, in its prefill and its decode."""
    parts = cluster.parts_of(request)
    return (
        {part.group for part in parts if part.start < request.num_prompt},
        {part.group for part in parts if part.start >= request.num_prompt},
    )


@pytest.mark.parametrize(
    ("lengths", "options", "shared"),
    [
        ([40, 300, 20, 250], {}, [False, True, False, True]),
        ([40, 300, 20, 60], {"threshold": "50"}, [False, True, False, True]),
        ([40, 150, 20, 60], {}, [False] * 4),
    ],
)
def test_requests_larger_than_one_pool_are_shared_in_both_phases(
    lengths: list[int], options: dict[str, str], shared: list[bool]
) -> None:
    """A prompt beyond the threshold alone is decoded on one instance."""
    cluster = cluster_of("3", "2xtp2", options=options)
    requests = [cluster.add([number] * length, max_tokens=8) for number, length in enumerate(lengths)]
    cluster.run()
    for request, is_shared in zip(requests, shared, strict=True):
        prefill, decode = groups_by_phase(cluster, request)
        assert {len(group) for group in prefill} == {3 if is_shared else 1}
        assert {len(group) for group in decode} == {2 if request.num_prompt > 160 else 1}
        assert request.metrics.num_computed_tokens == request.num_prompt + 7
        assert request.output == cluster.expected_output(request)


def test_a_request_that_outgrows_one_pool_while_it_decodes_continues_on_all_instances() -> None:
    cluster = cluster_of("2", "2xtp2")
    request = cluster.add([5] * 150, max_tokens=100)
    cluster.run()
    _, decode = groups_by_phase(cluster, request)
    assert {len(group) for group in decode} == {1, 2}
    assert request.metrics.num_computed_tokens == 150 + 99, "its KV was offloaded and loaded"


def test_kv_on_two_hosts_is_decoded_by_a_group_on_both() -> None:
    locations = (Location(host=0, device=0), Location(host=1, device=1))
    options = {"threshold": "50", "strict": "true"}
    cluster = cluster_of("2xpp2", "2xtp2", locations=locations, host_blocks=(30, 30), options=options)
    long, short = cluster.add([5] * 100, max_tokens=6), cluster.add([6] * 40, max_tokens=6)
    cluster.run()
    assert [step.cluster.spec for step in cluster.executor.steps if isinstance(step, Reshard)]
    assert all(len(group) == 2 for groups in groups_by_phase(cluster, long) for group in groups)
    assert all(len(group) == 1 for groups in groups_by_phase(cluster, short) for group in groups)
    assert [request.metrics.num_computed_tokens for request in (long, short)] == [105, 45]


@pytest.mark.parametrize(
    ("prefill", "decode", "host_blocks", "limit"),
    [("3", "2xtp2", 60, 20), ("2", "tp2", 60, 10), ("pp2", "2", 60, 10), ("4", "4xtp2", 33, 33), ("4", "3", 60, 30)],
)
def test_the_limit_is_the_capacity_of_both_phases_and_of_a_host(
    prefill: str, decode: str, host_blocks: int, limit: int
) -> None:
    cluster = cluster_of(prefill, decode, host_blocks=(host_blocks,))
    with pytest.raises(ContextLengthError, match=f"maximum context length is {limit * 16} tokens"):
        cluster.add([5] * (limit * 16))
    request = cluster.add([5] * (limit * 16 - 8), max_tokens=8)
    cluster.run()
    assert request.output == cluster.expected_output(request)


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": "-1"},
        {"long_share": "0"},
        {"exchange": "nothing"},
        {"exchange": "chain", "layout": "zigzag"},
        {"exchange": "ring_kv", "weights": "host"},
        {"decode": "chain"},
        {"rotate": "token"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, str]) -> None:
    setup = cluster_of("2", "tp2").setup
    facts = Facts(cluster=setup.cluster, phases=setup.clusters)
    with pytest.raises(ValueError, match=next(iter(options))):
        make_policy("seesaw", num_instances=2, options=options, facts=facts)
