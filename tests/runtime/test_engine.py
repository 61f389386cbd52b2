"""The engine loop over a simulated cluster. `cluster.CheckedExecutor` checks every step."""

from __future__ import annotations

import pytest
from cluster import Cluster, Setup, invented_token
from hypothesis import strategies as st
from workloads import MACHINES, finishes_lawfully, repeats, setups_of

from longspan.core.sampling import SamplingParams
from longspan.policy.facts import Facts

SHARINGS: list[dict[str, str]] = [
    {},
    {"layout": "striped"},
    {"layout": "contiguous"},
    {"exchange": "alltoall", "decode": "alltoall"},
    {"exchange": "gather_kv", "dense": "true", "layout": "contiguous"},
    {"exchange": "ring_q", "decode": "ring_kv"},
    {"exchange": "chain"},
    {"exchange": "chain", "layout": "contiguous"},
    {"exchange": "chain", "home": "computed"},
]
CHAINS: list[dict[str, str]] = [{}, {"partition": "even"}, {"partition": "predicted", "home": "computed"}]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_instances = draw(st.integers(1, 4))
    policy = draw(st.sampled_from(["chunked", "context", "runahead", *["context"] * (num_instances > 1)]))
    return draw(setups_of(policy, num_instances, draw_sharing(draw, policy, num_instances)))


def draw_sharing(draw: st.DrawFn, policy: str, num_instances: int) -> dict[str, str]:
    """Options of `context` and `runahead`."""
    options = {
        "threshold": draw(st.sampled_from(["auto", *map(str, (0, 0, 5, 20, 40, 60))])),
        "long_share": str(draw(st.sampled_from([0.1, 0.5, 0.75, 1]))),
        "rotate": draw(st.sampled_from(["block", "token"])),
        **draw(st.sampled_from(CHAINS if policy == "runahead" else SHARINGS)),
    }
    if options.get("layout") == "contiguous" and draw(st.booleans()):
        weights = draw(st.lists(st.integers(1, 9), min_size=num_instances, max_size=num_instances))
        options["fractions"] = ",".join(str(weight / sum(weights)) for weight in weights)
    return options if policy != "chunked" else {}


test_any_workload_finishes_lawfully = finishes_lawfully(setups())
test_the_same_input_gives_the_same_steps = repeats(setups())


@pytest.mark.parametrize("num_instances", [1, 2, 3])
def test_preemption_changes_no_token(num_instances: int) -> None:
    """Few blocks: requests that grow at the same time are preempted."""
    cluster = Cluster(
        Setup(
            num_instances=num_instances,
            num_blocks=6,
            block_size=8,
            options={"threshold": "30"} if num_instances > 1 else {},
        )
    )
    requests = [cluster.add([number] * (8 + number % 3), max_tokens=24 + number) for number in range(6 * num_instances)]
    requests += [cluster.add(range(35), max_tokens=6)] if num_instances > 1 else []
    cluster.run()
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    assert all(request.output == cluster.expected_output(request) for request in requests)
    first = requests[0].metrics
    assert (first.num_preemptions, first.num_computed_tokens) == (0, 8 + 24 - 1), "the first request is not preempted"


def test_without_need_nothing_is_preempted_or_recomputed() -> None:
    cluster = Cluster(Setup(num_instances=2, options={"threshold": "64"}, max_num_batched_tokens=64))
    requests = [cluster.add([number] * (10 + 17 * number), max_tokens=20) for number in range(12)]
    cluster.run()
    for request in requests:
        assert request.metrics.num_preemptions == 0
        assert request.metrics.num_computed_tokens == request.num_tokens - 1


def test_a_request_that_outgrows_its_instance_is_dealt_over_all() -> None:
    """It holds all blocks of one instance when it gives them up, alone on the cluster."""
    cluster = Cluster(Setup(num_instances=2, num_blocks=4))
    request = cluster.add(range(40), max_tokens=80)
    cluster.run()
    assert request.output == cluster.expected_output(request)
    assert [part.group for part in cluster.parts_of(request)][::79] == [(0,), (0, 1)]


@pytest.mark.parametrize("rotate", ["block", "token"])
def test_a_request_that_outgrows_its_group_is_dealt_over_all(rotate: str) -> None:
    """Two of three instances were quickest for its prompt. No other request can be preempted."""
    facts = Facts(profile=MACHINES[3])
    cluster = Cluster(Setup(num_instances=3, num_blocks=4, options={"rotate": rotate}, facts=facts))
    request = cluster.add(range(40), max_tokens=130)
    cluster.run()
    assert request.output == cluster.expected_output(request)
    assert [sorted(part.group) for part in cluster.parts_of(request)][::129] == [[0, 1], [0, 1, 2]]


def test_a_request_continues_a_full_instances_prefix_on_its_peers() -> None:
    cluster = Cluster(Setup(num_instances=2, num_blocks=4, options={"threshold": "70"}))
    cluster.add(range(64), max_tokens=1)
    cluster.run()
    request = cluster.add(range(84), max_tokens=2)
    cluster.run()
    assert request.metrics.num_cached_tokens == 64
    assert request.metrics.kv_tokens_per_instance == [64, 20]


# ---------------------------------------------------------------- tokens computed once or again


@pytest.mark.parametrize("num_instances", [1, 2, 3])
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_second_turn_computes_new_tokens_only(num_instances: int, block_size: int) -> None:
    options = {"threshold": "50"} if num_instances > 1 else {}
    cluster = Cluster(Setup(num_instances=num_instances, block_size=block_size, options=options))
    first = cluster.add(range(60), max_tokens=9)
    cluster.run()
    second = cluster.add([*first.prompt, *first.output, 1, 2, 3], max_tokens=5)
    stranger = cluster.add([*range(13), 40, 41, 42], max_tokens=5)
    cluster.run()
    third = cluster.add([*second.prompt, *second.output], max_tokens=5)
    cluster.run()
    assert second.metrics.num_cached_tokens == 60 + 9 - 1
    assert second.metrics.num_computed_tokens == 1 + 3 + 5 - 1
    assert third.metrics.num_cached_tokens == second.num_tokens - 1
    assert stranger.metrics.num_cached_tokens <= 13


def test_two_that_continue_one_conversation_share_all_but_its_tail() -> None:
    cluster = Cluster(Setup())
    first = cluster.add(range(40), max_tokens=3)
    cluster.run()
    seconds = [cluster.add([*first.prompt, *first.output, number], max_tokens=3) for number in range(2)]
    cluster.run()
    assert [request.metrics.num_cached_tokens for request in seconds] == [42, 32]


def test_requests_of_one_prefix_share_its_blocks() -> None:
    cluster = Cluster(Setup(num_blocks=18))
    cluster.add(range(160), max_tokens=1)
    cluster.run()
    requests = [cluster.add([*range(160), 40 + number], max_tokens=3) for number in range(8)]
    cluster.step()
    pool = cluster.engine.kv.pool(0)
    assert pool.num_blocks - pool.num_free == 10 + 8
    cluster.run()
    assert all(request.metrics.num_cached_tokens == 160 for request in requests)


@pytest.mark.parametrize("num_instances", [1, 2])
def test_crossing_the_rotary_switch_recomputes_once(num_instances: int) -> None:
    options = {"threshold": "30"} if num_instances > 1 else {}
    cluster = Cluster(Setup(num_instances=num_instances, rope_switch_length=60, options=options))
    below, crossing = cluster.add(range(50), max_tokens=10), cluster.add(range(1, 51), max_tokens=30)
    above = cluster.add(range(2, 82), max_tokens=5)
    cluster.run()
    assert below.metrics.num_computed_tokens == 59
    assert above.metrics.num_computed_tokens == 84
    assert crossing.metrics.num_computed_tokens == 60 + 61 + 18, "60 below the switch; at 61 tokens all again; 18 more"
    lengths = [part.rope_length for part in cluster.parts_of(crossing)]
    assert lengths == sorted(lengths) and set(lengths) == {60, 61}
    assert all(part.stop <= 60 for part in cluster.parts_of(crossing) if part.rope_length == 60)
    assert crossing.output == cluster.expected_output(crossing)
    assert [r.metrics.num_preemptions for r in cluster.requests] == [0, 0, 0]


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    cluster = Cluster(Setup(rope_switch_length=60))
    cluster.add(range(50), max_tokens=1)
    cluster.run()
    request = cluster.add(range(50), max_tokens=20)
    cluster.run()
    assert request.metrics.num_cached_tokens == 49
    assert request.metrics.num_computed_tokens == 60 - 49 + 61 + 8


# ---------------------------------------------------------------- steps in flight


def test_the_next_step_is_there_before_the_present_one_ends() -> None:
    """With two steps in flight an instance never waits for the controller until the last token."""
    cluster = Cluster(Setup(max_num_batched_tokens=64))
    cluster.add(range(200), max_tokens=20)
    while cluster.engine.has_unfinished:
        cluster.step(0.0)
        assert len(cluster.executor.in_flight) == min(2, 23 - len(cluster.forwards) + len(cluster.executor.in_flight))
        cluster.step()
    assert len(cluster.forwards) == 4 + 19


def test_a_step_that_is_done_early_waits_for_the_one_before() -> None:
    """Instance 0 goes on to the short request's next token while instance 1 still works on a step of both."""
    for uneven in range(1, 40):
        cluster = Cluster(Setup(num_instances=2, num_blocks=64, options={"threshold": "50"}, uneven=uneven))
        short = cluster.add(tuple(range(10)), SamplingParams(max_tokens=6, ignore_eos=True))
        cluster.engine.step()
        cluster.add(tuple(range(100)), SamplingParams(max_tokens=1, ignore_eos=True))
        cluster.run()
        assert short.output == [invented_token(short, position, ()) for position in range(10, 16)]
