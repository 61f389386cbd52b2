"""Laws of events: each request arrives once and ends once, and resumes after it was preempted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import RANDOM_RUNS, add, jobs, setups_of

from longspan.core.options import SchedulingArgs
from longspan.core.policy import Policy
from longspan.core.request import Request
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


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", POLICIES)
@settings(RANDOM_RUNS, max_examples=12)
@given(st.data())
def test_each_request_arrives_once_and_ends_once(policy: str, tier: str, data: st.DataObject) -> None:
    """With preemption, aborts, lost workers and other policies at random turns."""
    num_instances = 4 if policy == "fixed-sp" else 2
    setup = data.draw(setups_of(policy, num_instances, POLICIES[policy]))
    host_blocks, disk_blocks = TIERS[tier]
    setup = replace(setup, pp=1, host_blocks=host_blocks, disk_blocks=disk_blocks)
    if policy == "fixed-sp":
        most = int(POLICIES[policy]["sp"]) * setup.num_blocks * setup.block_size
        setup = replace(setup, max_model_len=min(setup.max_model_len or most, most))
    due = sorted(data.draw(st.lists(jobs(), min_size=1, max_size=8)), key=lambda job: job.turn)
    draw = random.Random(data.draw(st.integers(0, 999)))
    loses, reshards = data.draw(st.booleans()), data.draw(st.booleans())
    cluster = Cluster(setup)
    events = [Events(cluster.policy)]
    aborts: dict[int, list[Request]] = {}
    for turn in range(20_000):
        while due and due[0].turn <= turn:
            job = due.pop(0)
            request = add(cluster, job)
            aborts.setdefault(job.abort_turn or -1, []).append(request)
        for request in aborts.pop(turn, []):
            cluster.engine.finish(request, "abort")
        if not (due or cluster.engine.has_unfinished):
            break
        if loses and draw.random() < 0.02:
            cluster.restart()
        if reshards and turn in (5, 11):
            events.append(_resolved_again(cluster))
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
    facts = replace(setup.facts, cluster=setup.cluster)
    policy = make_policy(setup.policy, num_instances=setup.num_instances, options=setup.options, facts=facts)
    events = Events(policy)
    cluster.restart(policy)
    return events


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
    request = cluster.add([*shared, *(number % 7 for number in range(160))], max_tokens=2)
    cluster.run()
    assert request.metrics.num_cached_tokens == 16
    assert cluster.swaps[-1].way in ("in", "out")
    assert max(len(part.group) for part in cluster.parts_of(request)) > 1


@pytest.mark.parametrize("policy", ["tetris", "auto", "context", "chunked"])
@pytest.mark.parametrize("host_kv_gib", [0.0, 64.0])
def test_arrivals_are_requests_whatever_hosts_do(policy: str, host_kv_gib: float) -> None:
    """150 requests of conversations on 4 instances that have little memory for KV."""
    scheduling = SchedulingArgs(policy=policy, host_kv_gib=host_kv_gib, num_gpu_blocks_override=400)
    experiment = make_experiment("llama-3-8b", ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=4), scheduling)
    chosen = experiment.policy()
    events = Events(chosen)
    object.__setattr__(experiment, "policy", lambda: chosen)
    spec = WorkloadSpec(workload="short", rate=2.0, num_requests=150, turns=5, think_time=20.0)
    result = experiment.run(make_workload(spec))
    assert len(events.of) == 150 - len(result.refused)
    assert all(Counter(names)["arrived"] == Counter(names)["ended"] == 1 for names in events.of.values())
    assert (result.num_host_hits > 0) == (host_kv_gib > 0)
