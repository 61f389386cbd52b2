"""Laws of events: each request arrives once and ends once, and resumes after it was preempted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import RANDOM_RUNS, add, jobs, setups_of

from longspan.core.options import SchedulingArgs
from longspan.core.policy import Policy
from longspan.core.regrouping import Change
from longspan.core.request import ContextLengthError, Request
from longspan.core.splits import ParallelSpec
from longspan.core.steps import Reshard
from longspan.core.view import RequestView
from longspan.policy.registry import make_policy
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

POLICIES: dict[str, dict[str, str]] = {
    "auto": {},
    "chunked": {},
    "context": {"threshold": "20"},
    "runahead": {"threshold": "20"},
    "tetris": {"improvement_rate": "0.1"},
    "fixed-sp": {"sp": "2"},
    "loongserve": {},
    "csps": {"threshold": "20"},
    "prefill-first": {},
    "decode-first": {},
    "seesaw": {},
    "loongserve-disagg": {},
}
TIERS = {"no tier": ((), ()), "host": ((30,), ()), "host and disk": ((20,), (40,))}
EVENTS = ("arrived", "preempted", "resumed", "ended")


class Events:
    """The events of each request, in order, as one policy was told of them."""

    def __init__(self, policy: Policy) -> None:
        self.of: dict[int, list[str]] = {}
        for name in EVENTS:
            setattr(policy, name, self._noting(name, getattr(policy, name)))

    def _noting(self, name: str, event: Callable[[RequestView], None]) -> Callable[[RequestView], None]:
        def note(request: RequestView) -> None:
            self.of.setdefault(request.id, []).append(name)
            if name in ("preempted", "resumed"):
                assert request.group, f"{name} is told while the request has its KV"
            event(request)

        return note

    def check(self, requests: list[Request]) -> None:
        """Check the laws for requests that have all ended."""
        assert sorted(self.of) == [request.id for request in requests]
        for request in requests:
            events = self.of[request.id]
            assert (events[0], events[-1]) == ("arrived", "ended"), events
            counts = Counter(events)
            assert counts["arrived"] == counts["ended"] == 1
            between = events[1:-1]
            assert between == [EVENTS[1 + place % 2] for place in range(len(between))], "they alternate"


@st.composite
def setups(draw: st.DrawFn, policy: str, tier: str) -> Setup:
    """A cluster on which the policy runs, with pools on hosts and disks as the tier says."""
    num_instances = 4 if policy in ("fixed-sp", "loongserve-disagg") else 2
    setup = draw(setups_of(policy, num_instances, POLICIES[policy]))
    host_blocks, disk_blocks = TIERS[tier]
    setup = replace(setup, pp=1, host_blocks=host_blocks, disk_blocks=disk_blocks)
    num_held = {"fixed-sp": 2, "seesaw": 1, "loongserve-disagg": 1}.get(policy)
    if policy == "seesaw":
        other = ParallelSpec.parse(draw(st.sampled_from(["1xtp2", "1xpp2", "2xtp2", "3xpp2"])))
        setup, num_held = replace(setup, phases=(ParallelSpec.parse("2"), other)), min(2, other.instances)
        setup = replace(setup, options=draw(st.sampled_from([{}, {"threshold": "20"}])))
    if num_held is not None:
        most = num_held * setup.num_blocks * setup.block_size
        setup = replace(setup, max_model_len=min(setup.max_model_len or most, most))
    if policy == "loongserve-disagg":
        setup = replace(setup, roles=Roles(num_prefill=2, num_decode=2, backends=draw(st.integers(1, 3))))
    return setup


@pytest.mark.parametrize(("policy", "tier"), [one for one in product(POLICIES, TIERS) if one != ("seesaw", "no tier")])
@settings(RANDOM_RUNS, max_examples=12)
@given(st.data())
def test_each_request_arrives_once_and_ends_once(policy: str, tier: str, data: st.DataObject) -> None:
    """With preemption, aborts, lost workers, re-shards and other policies at random turns.

    `seesaw` needs a host, and re-shards by itself. Instances with roles keep them.
    """
    setup = data.draw(setups(policy, tier))
    due = sorted(data.draw(st.lists(jobs(), min_size=1, max_size=8)), key=lambda job: job.turn)
    draw = random.Random(data.draw(st.integers(0, 999)))
    loses, change = data.draw(st.booleans()), data.draw(st.sampled_from(["none", "resolve", "re-shard"]))
    cluster = Cluster(setup)
    events = [Events(cluster.policy)]
    aborts: dict[int, list[Request]] = {}
    for turn in range(20_000):
        while due and due[0].turn <= turn:
            job = due.pop(0)
            try:
                request = add(cluster, job)
            except ContextLengthError:
                assert change == "re-shard", "fewer instances hold less"
                continue
            aborts.setdefault(job.abort_turn or -1, []).append(request)
        for request in aborts.pop(turn, []):
            cluster.engine.finish(request, "abort")
        if not (due or cluster.engine.has_unfinished):
            break
        if loses and draw.random() < 0.02:
            cluster.restart()
        if change == "resolve" and turn in (5, 11):
            events.append(_resolved_again(cluster))
        if change == "re-shard" and turn in (5, 11) and policy not in ("seesaw", "loongserve-disagg"):
            events += _re_sharded(cluster)
        cluster.step(0.0 if draw.random() < 0.3 else None)
    cluster.assert_at_rest()
    if len(events) == 1:
        events[0].check(cluster.requests)
    for one in events:  # a policy that was replaced is told of no ends
        assert all(Counter(names)["arrived"] == 1 and Counter(names)["ended"] <= 1 for names in one.of.values())
    ends = Counter(number for one in events for number, names in one.of.items() if "ended" in names)
    assert ends == Counter({request.id: 1 for request in cluster.requests})


def _resolved_again(cluster: Cluster) -> Events:
    """Start new workers and resolve the policy again, as after the loss of an instance."""
    setup = cluster.setup
    facts = replace(setup.facts, cluster=setup.cluster, phases=setup.clusters)
    policy = make_policy(setup.policy, num_instances=setup.num_instances, options=setup.options, facts=facts)
    events = Events(policy)
    cluster.restart(policy)
    return events


def _re_sharded(cluster: Cluster) -> list[Events]:
    """Re-shard to instances of twice or half as many ranks, unless the cluster changes already."""
    setup = cluster.setup
    whole, halves = ParallelSpec(instances=setup.num_instances), ParallelSpec(instances=setup.num_instances // 2, tp=2)
    other = setup.split(halves if cluster.engine.config.cluster.spec == whole else whole)
    facts, number = replace(setup.facts, cluster=other), other.num_instances
    policy = make_policy(setup.policy, num_instances=number, options=setup.options, facts=facts, is_resized=True)
    events = Events(policy)
    try:
        cluster.engine.reshard(Change(cluster=other, policy=policy))
    except RuntimeError:
        return []
    return [events]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("seesaw", "loongserve-disagg")])
def test_requests_end_once_although_a_cluster_is_re_sharded(policy: str, tier: str) -> None:
    host_blocks, disk_blocks = TIERS[tier]
    cluster = Cluster(
        Setup(
            num_instances=4,
            num_blocks=12,
            policy=policy,
            options=POLICIES[policy],
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
        )
    )
    requests, events = [cluster.add([number] * 40, max_tokens=30) for number in range(12)], [Events(cluster.policy)]
    for _ in range(6):
        cluster.step()
    events += _re_sharded(cluster)
    cluster.run()
    assert [step.cluster.num_instances for step in cluster.executor.steps if isinstance(step, Reshard)] == [2]
    assert len(cluster.engine.transitions) == 1
    assert all(request.output == cluster.expected_output(request) for request in requests)
    assert Counter(number for one in events for number, names in one.of.items() if "ended" in names) == Counter(
        {request.id: 1 for request in requests}
    )


@pytest.mark.parametrize("tier", ["host", "host and disk"])
@pytest.mark.parametrize("strict", ["true", "false"])
def test_phases_re_shard_the_cluster(strict: str, tier: str) -> None:
    """Prompts are prefilled on two instances and decoded on one."""
    host_blocks, disk_blocks = TIERS[tier]
    phases = ParallelSpec.parse("2"), ParallelSpec.parse("1xtp2")
    cluster = Cluster(
        Setup(
            num_instances=2,
            num_blocks=10,
            policy="seesaw",
            options={"strict": strict},
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            phases=phases,
        )
    )
    for number in range(8):
        cluster.add([number] * 40, max_tokens=6)
    cluster.run()
    specs = [step.cluster.spec for step in cluster.executor.steps if isinstance(step, Reshard)]
    assert specs and set(specs[::2]) == {phases[1]} and set(specs[1::2]) <= {phases[0]}
    assert all(request.output == cluster.expected_output(request) for request in cluster.requests)


@pytest.mark.parametrize("policy", ["tetris", "auto", "loongserve"])
def test_a_new_prompt_is_shared_although_a_host_has_its_beginning(policy: str) -> None:
    """Four idle instances. The host has 16 of the 176 tokens."""
    cluster = Cluster(Setup(num_instances=4, num_blocks=48, block_size=4, policy=policy, host_blocks=(900,)))
    shared = range(16)
    cluster.add([*shared, 1], max_tokens=2)
    cluster.run()
    for number in range(40):  # evicts the beginning from the devices
        cluster.add([40 + number] * 60, max_tokens=2)
    cluster.run()
    cluster.clock.advance_to(cluster.clock.now() + 1000)  # the rate of arrivals falls
    request = cluster.add([*shared, *(number % 7 for number in range(160))], max_tokens=2)
    cluster.run()
    assert request.metrics.num_cached_tokens == 16
    assert cluster.swaps[-1].way in ("in", "out")
    assert max(len(part.group) for part in cluster.parts_of(request)) > 1


@pytest.mark.parametrize(
    ("policy", "host_kv_gib"),
    [("auto", 0.0), ("chunked", 0.0), ("tetris", 64.0), ("auto", 64.0), ("context", 64.0), ("chunked", 64.0)],
)
def test_arrivals_are_requests_whatever_hosts_do(policy: str, host_kv_gib: float) -> None:
    """24 requests of conversations on 4 instances that have little memory for KV."""
    scheduling = SchedulingArgs(policy=policy, host_kv_gib=host_kv_gib, num_gpu_blocks_override=400)
    experiment = make_experiment("llama-3-8b", ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=4), scheduling)
    chosen = experiment.policy()
    events = Events(chosen)
    object.__setattr__(experiment, "policy", lambda: chosen)
    spec = WorkloadSpec(workload="short", rate=2.0, num_requests=24, turns=5, think_time=20.0)
    result = experiment.run(make_workload(spec))
    assert len(events.of) == 24 - len(result.refused)
    assert all(Counter(names)["arrived"] == Counter(names)["ended"] == 1 for names in events.of.values())
    assert (result.num_host_hits > 0) == (host_kv_gib > 0)


def test_the_first_prompt_of_an_idle_fleet_is_shared() -> None:
    """The prompt itself is no evidence of a load."""
    cluster = Cluster(Setup(num_instances=4, num_blocks=48, block_size=4, policy="auto"))
    request = cluster.add([number % 7 for number in range(160)], max_tokens=2)
    cluster.run()
    assert max(len(part.group) for part in cluster.parts_of(request)) > 1
