"""KV that is spread again over a group that has grown, and the choice of decode instances."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles
from forced_plans import forced
from hypothesis import given
from hypothesis import strategies as st
from workloads import assert_lawful

from longspan.core.blocks import BlockRef, Target
from longspan.core.cluster import Cluster as Instances
from longspan.core.kv.account import KvAccount
from longspan.core.queues import Running
from longspan.core.request import Request, RequestMetrics
from longspan.core.sampling import SamplingParams
from longspan.core.view import ClusterView
from longspan.policy.group_parts import even_moves
from longspan.policy.routing import Router

PLENTY = dict.fromkeys(range(8), 10_000)


def held_after(block_owners: list[int], moves: tuple[tuple[int, int], ...]) -> Counter[int]:
    after = list(block_owners)
    for place, instance in moves:
        after[place] = instance
    return Counter(after)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Holders of blocks, and a group that contains them."""
    group = draw(st.permutations(range(draw(st.integers(1, 8)))))
    return draw(st.lists(st.sampled_from(group), max_size=60)), group


@given(tables())
def test_blocks_are_even_after_as_few_moves_as_can_be(table: tuple[list[int], list[int]]) -> None:
    block_owners, group = table
    moves = even_moves([BlockRef(holder, place) for place, holder in enumerate(block_owners)], group, PLENTY)
    before, after = Counter(block_owners), held_after(block_owners, moves)
    counts = sorted(after[instance] for instance in group)
    assert counts[-1] - counts[0] <= 1
    most_first = sorted((before[instance] for instance in group), reverse=True)
    assert len(moves) == sum(max(0, have - want) for have, want in zip(most_first, reversed(counts), strict=True))


@given(tables(), st.lists(st.integers(-3, 6), min_size=8, max_size=8))
def test_no_instance_gets_more_than_its_free_blocks(table: tuple[list[int], list[int]], room: list[int]) -> None:
    block_owners, group = table
    refs = [BlockRef(holder, place) for place, holder in enumerate(block_owners)]
    moves = even_moves(refs, group, dict(enumerate(room)))
    given_to = Counter(instance for _, instance in moves)
    assert all(number <= max(0, room[instance]) for instance, number in given_to.items())
    spread = [
        max(held[i] for i in group) - min(held[i] for i in group)
        for held in (Counter(block_owners), held_after(block_owners, moves))
    ]
    assert spread[1] <= spread[0]


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("num_decode", [0, 1])
@pytest.mark.parametrize("groups", [[(0, 1), (0, 1, 2, 3)], [(0,), (0, 1, 2)], [(3,), (1, 3), (0, 1, 2, 3)]])
def test_earlier_chunks_are_spread_over_a_group_that_grows(
    groups: list[tuple[int, ...]], num_decode: int, *, balance: bool
) -> None:
    """Check each member's KV of earlier chunks when a chunk begins. The executor checks that attention finds it."""
    roles = Roles(num_prefill=4, num_decode=num_decode, backends=2) if num_decode else None
    setup = Setup(num_instances=4 + num_decode, num_blocks=500, max_num_batched_tokens=64, roles=roles)
    cluster = Cluster(replace(setup, policy="tetris", prefix_caching=False))
    length = 320 * len(groups)
    decode = [4] * num_decode
    cluster.engine.set_policy(forced({length: [(320, group) for group in groups]}, 4, decode=decode, balance=balance))
    request = cluster.add(range(length), max_tokens=5, presence_penalty=0.5)
    cluster.run()
    assert_lawful(cluster)
    balanced = [forward for forward in cluster.forwards if forward.rebalances]
    assert len(balanced) == (len(groups) - 1 if balance else 0)
    for forward, group in zip(balanced, groups[1:], strict=False):
        [part] = forward.parts
        held = Counter(ref.instance for ref in part.blocks[: part.start // 16])
        assert part.group == group and max(held.values()) - min(held[i] for i in group) <= 1
    grown = request.metrics.kv_tokens_per_instance[:4]
    members = [grown[instance] for instance in groups[-1]]
    assert (max(members) - min(members) <= 64) == balance, "chunks of a step are even but for odd blocks"


def test_spread_blocks_are_hit_by_prompts_with_the_same_beginning() -> None:
    setup = Setup(num_instances=4, num_blocks=500, policy="tetris")
    cluster = Cluster(setup)
    cluster.engine.set_policy(forced({640: [(320, (0,)), (320, (0, 1, 2, 3))]}, 4, balance=True))
    cluster.add(range(640), max_tokens=1)
    cluster.run()
    again = cluster.add(range(641), max_tokens=1)
    assert cluster.engine.kv.account.match(again, (1,)).num_tokens == 0, "the first blocks have stayed"
    assert cluster.engine.kv.account.match(again, (0,)).num_tokens >= 320
    assert cluster.engine.kv.account.match(again, (0, 1, 2, 3)).num_tokens >= 640
    cluster.run()


# ---------------------------------------------------------------- routes


def request_of(length: int, *, max_tokens: int = 10) -> Request:
    return Request(
        id=0,
        prompt=range(length),
        params=SamplingParams(),
        seed=0,
        block_size=16,
        max_tokens=max_tokens,
        metrics=RequestMetrics(arrival_s=0.0),
    )


def view(*, used: dict[int, int], active: dict[int, int], promised: dict[int, int]) -> ClusterView:
    account, running = KvAccount([100] * 3, block_size=16), Running(3)
    for instance, number in used.items():
        account.pool(instance).allocate(number)
    for instance, number in active.items():
        for _ in range(number):
            decoding = request_of(1)
            decoding.id, decoding.group = 1 + len(running), (instance,)
            running.add(decoding)
    nobody = frozenset[int]()
    return ClusterView(
        cluster=Instances.of("3"),
        max_num_batched_tokens=2048,
        max_num_seqs=128,
        waiting=(),
        startable=(),
        running=running,
        busy=nobody,
        full=nobody,
        kv=account,
        now_s=0.0,
        expected=promised,
    )


@pytest.mark.parametrize(
    ("used", "active", "promised", "target"),
    [
        ({}, {}, {}, 1),
        ({1: 1}, {}, {}, 2),
        ({}, {1: 2, 2: 1}, {}, 2),
        ({1: 20, 2: 60}, {1: 4, 2: 1}, {}, 2),
        ({}, {}, {1: 1}, 2),
        ({2: 10}, {1: 1, 2: 1}, {1: 20}, 2),
        ({}, {1: 64, 2: 1}, {1: 600, 2: 110}, 2),
        ({2: 99}, {1: 1, 2: 9}, {1: 110}, 2),
    ],
)
def test_freeness_is_free_slots_for_each_active_request(
    used: dict[int, int], active: dict[int, int], promised: dict[int, int], target: int
) -> None:
    """80 free blocks of 4 requests are 20 for each, and 40 of one request are more. Reserved blocks are not free.

    If all instances lack blocks, the router chooses the smaller deficit: 10 of one request, not 500 of 64 requests.
    """
    router = Router(view(used=used, active=active, promised=promised), (1, 2))
    assert router.route(request_of(100)) == (Target(target, 7),)


def test_requests_routed_in_the_same_plan_count() -> None:
    router = Router(view(used={}, active={}, promised={}), (1, 2))
    routed = [router.route(request_of(length)) for length in (160, 32, 32, 160)]
    assert routed == [(Target(1, 10),), (Target(2, 2),), (Target(2, 2),), (Target(2, 10),)]


def test_a_request_that_ends_with_its_next_token_is_not_moved() -> None:
    router = Router(view(used={}, active={}, promised={}), (1, 2))
    assert router.route(request_of(100, max_tokens=1)) == ()


@pytest.mark.parametrize("uneven", range(1, 6))
def test_a_prompt_that_fills_its_group_waits_for_blocks_whose_kv_is_on_its_way(uneven: int) -> None:
    """Copies of its earlier chunks still hold the blocks that it needs next. Recomputing the prompt would not help."""
    roles = Roles(num_prefill=2, num_decode=1, backends=2)
    setup = Setup(num_instances=3, num_blocks=10, decode_blocks=30, max_num_batched_tokens=16, roles=roles)
    cluster = Cluster(replace(setup, policy="tetris", prefix_caching=False, uneven=uneven))
    plans = {306: [(128, (0,)), (178, (0, 1))]}
    cluster.engine.set_policy(forced(plans, 2, decode=(2,), balance=True))
    request = cluster.add([1] * 306, max_tokens=3)
    cluster.run()
    assert_lawful(cluster)
    assert request.metrics.num_preemptions == 0
