"""A policy sees the requests, demands and busy instances that follow from all requests and steps."""

from __future__ import annotations

from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.core.blocks import coupled_instances
from longspan.core.queues import Running
from longspan.core.view import ClusterView, Plan

OPTIONS = [{}, {"threshold": "20"}, {"threshold": "20", "exchange": "chain"}, {"threshold": "20", "rotate": "token"}]


@given(st.data(), st.sampled_from(OPTIONS), st.sampled_from([1, 2]), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_each_view_follows_from_all_requests(
    data: st.DataObject, options: dict[str, str], max_steps: int, uneven: int
) -> None:
    cluster = checked(
        Setup(
            num_instances=3,
            policy="context",
            options=options,
            num_blocks=12,
            block_size=8,
            max_num_batched_tokens=32,
            max_num_seqs=4,
            max_steps_in_flight=max_steps,
            uneven=uneven,
        )
    )
    actions = st.lists(st.sampled_from(["add", "follow", "step", "step", "step", "abort"]), max_size=30)
    for place, action in enumerate(data.draw(actions)):
        requests = cluster.requests
        if action == "add":
            cluster.add([place] * data.draw(st.integers(1, 60)), max_tokens=data.draw(st.integers(1, 6)))
        elif action == "follow" and requests and requests[-1].leader is None:
            cluster.follow(requests[-1], 1)
        elif action == "step" and cluster.engine.has_unfinished:
            cluster.step(data.draw(st.sampled_from([0.0, None])))
        elif action == "abort" and requests:
            cluster.engine.finish(data.draw(st.sampled_from(requests)), "abort")
    cluster.run()


def test_output_is_due_again_after_a_restart() -> None:
    """It is computed in parts that end in the middle of a block."""
    setup = Setup(
        num_instances=3,
        num_blocks=12,
        block_size=16,
        max_num_batched_tokens=5,
        max_steps_in_flight=1,
        prefix_caching=False,
    )
    cluster = checked(setup)
    request = cluster.add([1] * 16, max_tokens=40)
    while len(request.output) < 30:
        cluster.step(None)
    cluster.restart()
    num_scheduled = []
    while len(request.output) < 31:
        cluster.step(None)
        num_scheduled.append(request.num_scheduled)
    assert num_scheduled == [*range(5, 46, 5), 46]
    cluster.run()


def checked(setup: Setup) -> Cluster:
    """Return a cluster whose policy checks each view before it plans."""
    cluster = Cluster(setup)
    plan = cluster.policy.plan

    def check_and_plan(view: ClusterView) -> Plan:
        check(cluster, view)
        return plan(view)

    cluster.policy.plan = check_and_plan  # type: ignore[method-assign]
    return cluster


def check(cluster: Cluster, view: ClusterView) -> None:
    live = [request for request in cluster.requests if request.finish_reason is None]
    running = sorted((request for request in live if request.group), key=lambda request: request.admission)
    assert list(view.running) == running and len(view.running) == len(running)
    assert list(view.waiting) == [request for request in live if not request.group and not request.must_wait]
    assert set(view.running.shared) == {request for request in running if len(request.group) > 1}
    assert list(view.running.coupled_sets) == coupled_instances(
        request.group for request in running if len(request.group) > 1
    )
    for group in ({0}, {1, 2}, {0, 1, 2}):
        assert set(view.running.within(group)) == {request for request in running if group.issuperset(request.group)}
    fresh = Running(3)
    for request in running:
        fresh.add(request)
    for instance in range(3):
        assert set(view.running.on(instance)) == {request for request in running if instance in request.group}
    assert view.running.due_tokens == fresh.due_tokens
    assert view.running.due_blocks == fresh.due_blocks
    assert set(view.running.occupied) == {instance for request in running for instance in request.group}
    steps = cluster.executor.in_flight.values()
    num_in_flight = [sum(instance in forward.instances for forward in steps) for instance in range(3)]
    busy = {instance for instance in range(3) if num_in_flight[instance]}
    full = {i for i in range(3) if num_in_flight[i] >= cluster.engine.config.max_steps_in_flight}
    assert view.busy >= busy and view.full >= full
    if not cluster.engine.has_ready:  # else completions are there that the engine has not taken
        assert (view.busy, view.full) == (busy, full)
