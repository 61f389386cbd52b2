"""The baselines of Tetris: one answer at a time per instance, whose KV has moved there, and greedy groups."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy


def setup(**wishes: object) -> Setup:
    defaults: dict[str, object] = {"num_instances": 8, "policy": "loongserve", "num_blocks": 64}
    return Setup(**{**defaults, **wishes})  # type: ignore[arg-type]


def test_kv_moves_to_one_instance_which_decodes_alone() -> None:
    cluster = Cluster(setup(options={"sp_sizes": "4"}))
    request = cluster.add(range(1000), max_tokens=12)
    cluster.run()
    parts = cluster.parts_of(request)
    decodes = [part for part in parts if part.start >= 1000]
    assert len(parts[0].group) == 4
    assert [len(part.group) for part in decodes] == [4] + [1] * 10, "the first takes the KV along"
    [balance] = [move for forward in cluster.forwards for move in forward.rebalances]
    assert len(balance.sources) == 3
    assert balance.targets == decodes[-1].group
    assert request.output == cluster.expected_output(request)


def test_no_prompt_is_computed_on_a_decoding_instance() -> None:
    cluster = Cluster(setup(options={"sp_sizes": "1,2"}))
    requests = [cluster.add(range(start, start + 400), max_tokens=30) for start in range(0, 20_000, 1000)]
    cluster.run()
    for request in requests:
        *_, last = cluster.parts_of(request)
        alone = [part for part in cluster.parts_of(request) if part.group == last.group and part.start > 400]
        assert len(alone) == 28, "all decodes except the decode that moved the KV"
        first, final = (next(f.number for f in cluster.forwards if part in f.parts) for part in (alone[0], alone[-1]))
        there = [f for f in cluster.forwards if first <= f.number <= final and last.group[0] in f.instances]
        assert all(len(forward.parts) == 1 for forward in there)


def test_prompts_begin_in_order_of_arrival() -> None:
    cluster = Cluster(setup(num_instances=4, options={"sp_sizes": "4"}))
    requests = [cluster.add(range(start, start + 500), max_tokens=3) for start in range(0, 6000, 1000)]
    cluster.run()
    begun = [part.request_id for forward in cluster.forwards for part in forward.parts if part.start == 0]
    assert begun == [request.id for request in requests]


def test_a_request_that_outgrows_its_instance_gets_another_one() -> None:
    cluster = Cluster(setup(num_blocks=8, options={"sp_sizes": "1"}))
    request = cluster.add(range(100), max_tokens=27)
    cluster.run()
    assert {part.group for part in cluster.parts_of(request)} == {(0,)}
    cluster = Cluster(setup(num_blocks=8, options={"sp_sizes": "2"}, max_model_len=256))
    request = cluster.add(range(100), max_tokens=100)
    cluster.run()
    groups = [part.group for part in cluster.parts_of(request)]
    assert len(groups[2]) == 1
    assert len(groups[-1]) == 2
    assert request.output == cluster.expected_output(request)


def test_no_group_grows_to_an_instance_without_a_request_slot() -> None:
    """A one-token prompt decodes on it, in stages."""
    small = {"num_instances": 4, "num_blocks": 9, "block_size": 2, "prefix_caching": False}
    bounds = {"max_model_len": 45, "max_num_batched_tokens": 35, "max_num_seqs": 1, "max_steps_in_flight": 1}
    cluster = Cluster(setup(**small, **bounds, uneven=1, pp=2))
    requests = [cluster.add(range(36), max_tokens=9), cluster.add([1], max_tokens=44)]
    cluster.run()
    assert all(request.output == cluster.expected_output(request) for request in requests)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=14),
    instances=st.integers(1, 6),
    blocks=st.integers(64, 80),
    uneven=st.integers(0, 3),
    ahead=st.integers(1, 2),
)
def test_all_requests_finish_and_all_blocks_are_freed(
    lengths: list[tuple[int, int]], instances: int, blocks: int, uneven: int, ahead: int
) -> None:
    cluster = Cluster(setup(num_instances=instances, num_blocks=blocks, uneven=uneven, max_steps_in_flight=ahead))
    requests = [cluster.add(range(i, i + prompt), max_tokens=answer) for i, (prompt, answer) in enumerate(lengths)]
    cluster.run()
    for request in requests:
        assert request.output == cluster.expected_output(request)


def test_disaggregated_prefill_takes_the_group_that_is_quickest_for_itself() -> None:
    roles = Roles(num_prefill=4, num_decode=1, backends=4)
    cluster = Cluster(setup(policy="loongserve-disagg", num_instances=5, roles=roles, num_blocks=512))
    requests = [cluster.add(range(start, start + 4000), max_tokens=4) for start in (0, 10_000)]
    cluster.run()
    for request in requests:
        parts = cluster.parts_of(request)
        assert parts[0].group == (0, 1, 2, 3), "a long prompt is fastest on all instances, with any later request"
        assert parts[-1].group == (4,)


@pytest.mark.parametrize(
    ("name", "roles", "options", "parameter"),
    [
        ("loongserve", True, {}, "policy"),
        ("loongserve-disagg", False, {}, "policy"),
        ("loongserve", False, {"improvement_rate": "0.3"}, "improvement_rate"),
        ("loongserve", False, {"sp_sizes": "8"}, "sp size"),
    ],
)
def test_mistakes(name: str, roles: bool, options: Mapping[str, str], parameter: str) -> None:
    given = Facts(cluster=Roles(num_prefill=3, num_decode=1, backends=1).cluster if roles else None)
    with refused(parameter):
        make_policy(name, num_instances=4, options=options, facts=given)
