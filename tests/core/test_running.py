"""What the engine keeps of waiting and running requests is what a look at all requests would find."""

from __future__ import annotations

from typing import Any

from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.core.blocks import coupled_instances
from longspan.core.queues import Running

OPTIONS = [{}, {"threshold": "20"}, {"threshold": "20", "exchange": "chain"}, {"threshold": "20", "rotate": "token"}]


@given(st.data(), st.sampled_from(OPTIONS), st.sampled_from([1, 2]), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_is_what_is_there(data: st.DataObject, options: dict[str, str], most: int, uneven: int) -> None:
    cluster = Cluster(
        Setup(
            num_instances=3,
            policy="context",
            options=options,
            num_blocks=12,
            block_size=8,
            max_num_batched_tokens=32,
            max_num_seqs=4,
            max_steps_in_flight=most,
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
        check(cluster)
    cluster.run()
    check(cluster)


def test_output_that_is_computed_anew_is_due_until_it_is() -> None:
    """In parts that end in the middle of a block."""
    setup = Setup(
        num_instances=3,
        num_blocks=12,
        block_size=16,
        max_num_batched_tokens=5,
        max_steps_in_flight=1,
        prefix_caching=False,
    )
    cluster = Cluster(setup)
    request = cluster.add([1] * 16, max_tokens=40)
    while len(request.output) < 30:
        cluster.step(None)
    cluster.engine._lifecycle.retract(request)
    num_scheduled = []
    while len(request.output) < 31:
        cluster.step(None)
        num_scheduled.append(request.num_scheduled)
        check(cluster)
    assert num_scheduled == [*range(5, 46, 5), 46]
    cluster.run()


def check(cluster: Cluster) -> None:
    engine: Any = cluster.engine
    live = [request for request in engine._queues.requests.values() if request.finish_reason is None]
    running = sorted((request for request in live if request.group), key=lambda request: request.admission)
    view = engine._view()
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
    steps = list(engine._queues.steps._sent.values())
    num_in_flight = [sum(instance in forward.instances for forward in steps) for instance in range(3)]
    assert view.busy == {instance for instance in range(3) if num_in_flight[instance]}
    assert view.full == {i for i in range(3) if num_in_flight[i] >= engine.config.max_steps_in_flight}
