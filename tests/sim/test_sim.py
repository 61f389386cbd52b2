"""The simulated executor: times of completions, and invented tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster import Cluster, Setup
from hypothesis import given
from hypothesis import strategies as st
from linear_cost import LinearCost

from longspan.core.blocks import BlockRef
from longspan.core.exchange import LOCAL, RING_KV
from longspan.core.runs import Run
from longspan.core.steps import Forward, Free, MoveKV, Part, Sample, Sampling
from longspan.sim.executor import SimExecutor, VirtualClock

COST = LinearCost(base_s=1.0, per_token_s=0.5)


def forward(
    number: int, *instances: int, num_tokens: int = 2, sample: Sample | None = None, banned: tuple[int, ...] = ()
) -> Forward:
    runs = ((Run(0, num_tokens),),) + ((),) * (len(instances) - 1)
    part = Part(
        request_id=number,
        start=0,
        stop=num_tokens,
        tokens=(0,) * num_tokens,
        group=instances,
        runs=runs,
        exchange=LOCAL if len(instances) == 1 else RING_KV,
        first_block=0,
        blocks=(BlockRef(instances[0], 0),),
        sample=sample,
        sampling=Sampling(seed=0, banned=banned),
    )
    return Forward(number=number, parts=(part,))


def wish(position: int, *, below_minimum: bool = False) -> Sample:
    return Sample(instance=0, position=position, below_minimum=below_minimum)


def executor(vocab_size: int = 10) -> tuple[SimExecutor, VirtualClock]:
    clock = VirtualClock()
    return SimExecutor(clock=clock, vocab_size=vocab_size, cost=COST), clock


def test_the_cost_is_that_of_the_busiest_instance() -> None:
    sharded = Part(
        request_id=0,
        start=0,
        stop=8,
        tokens=(0,) * 8,
        group=(1, 0),
        runs=((Run(0, 1), Run(6, 8)), (Run(1, 6),)),
        exchange=RING_KV,
        first_block=0,
        blocks=(),
        sample=None,
    )
    (short,) = forward(0, 0, num_tokens=2).parts
    assert COST.seconds(Forward(number=1, parts=(sharded,))) == dict.fromkeys((0, 1), 1.0 + 0.5 * 5)
    assert COST.seconds(Forward(number=1, parts=(sharded, short))) == dict.fromkeys((0, 1), 1.0 + 0.5 * 7)


def test_an_instance_does_one_step_at_a_time_and_instances_work_side_by_side() -> None:
    sim, clock = executor()
    sim.submit(forward(1, 0))  # 0 .. 2
    sim.submit(forward(2, 1, num_tokens=6))  # 0 .. 4
    sim.submit(forward(3, 0))  # 2 .. 4
    sim.submit(Free(number=4, request_ids=(1,)))
    sim.submit(forward(5, 0, 1))  # 4 .. 6
    done = [([c.number for c in sim.poll(None)], clock.now()) for _ in range(3)]
    assert done == [([1], 2.0), ([2, 3], 4.0), ([5], 6.0)]
    assert sim.poll(None) == []


def test_a_poll_goes_no_further_than_its_timeout() -> None:
    sim, clock = executor()
    sim.submit(forward(1, 0))
    assert sim.poll(0.5) == []
    assert clock.now() == 0.5
    assert sim.poll(1.0) == []
    assert [c.number for c in sim.poll(1.0)] == [1]
    assert clock.now() == 2.0


def test_virtual_time_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.advance_to(2.0)
    with pytest.raises(AssertionError, match="does not go back"):
        clock.advance_to(1.0)


@given(st.integers(0, 1000), st.integers(1, 1000), st.sets(st.integers(0, 9), max_size=9))
def test_invented_tokens_depend_on_request_and_position_only(request: int, position: int, banned: set[int]) -> None:
    tokens = []
    for num_tokens in (1, 5):
        sim, _ = executor()
        asked = wish(position, below_minimum=bool(banned))
        sim.submit(forward(request, 0, num_tokens=num_tokens, sample=asked, banned=tuple(banned)))
        ((sampled,),) = [c.sampled for c in sim.poll(None)]
        assert sampled.request_id == request
        tokens.append(sampled.token)
    assert tokens[0] == tokens[1]
    assert 0 <= tokens[0] < 10
    assert tokens[0] not in banned


def test_a_span_inside_the_prompt_samples_nothing() -> None:
    sim, _ = executor()
    sim.submit(forward(1, 0))
    assert [c.sampled for c in sim.poll(None)] == [()]


def test_times_of_a_request_add_up() -> None:
    cluster = Cluster(Setup(max_num_batched_tokens=32))
    request = cluster.add(range(64), max_tokens=4)
    cluster.run()
    metrics = request.metrics
    assert metrics.ttft_s is not None and metrics.ttft_s == pytest.approx(
        2 * LinearCost().seconds(cluster.forwards[0])[0]
    )
    assert len(metrics.tbt_s) == 3
    assert metrics.last_token_s == metrics.finished_s == cluster.clock.now()
    assert metrics.ttft_s + sum(metrics.tbt_s) == pytest.approx(cluster.clock.now())


# ---------------------------------------------------------------- moves

MOVES = LinearCost(base_s=1.0, per_token_s=0.5, per_block_s=1.0, num_layers=4)


def move(number: int, source: int, target: int, num_blocks: int = 2) -> MoveKV:
    copies = tuple((BlockRef(source, block), BlockRef(target, block)) for block in range(num_blocks))
    return MoveKV(number=number, request_id=number, copies=copies)


def ends(steps: list[Forward | MoveKV]) -> list[tuple[list[int], float]]:
    """Which steps, all sent at once, are complete when."""
    clock = VirtualClock()
    sim = SimExecutor(clock=clock, vocab_size=10, cost=MOVES)
    for step in steps:
        sim.submit(step)
    found = []
    while done := sim.poll(None):
        found.append(([one.number for one in done], clock.now()))
    return found


def test_moves_to_several_targets_go_at_the_same_time_and_share_the_links_of_their_ends() -> None:
    assert ends([move(1, 0, 2), move(2, 1, 3)]) == [([1, 2], 2.0)]
    assert ends([move(1, 0, 2), move(2, 2, 0)]) == [([1, 2], 2.0)], "both directions"
    # A block a second leaves 0, and comes to 3: the short move is not behind the long one.
    assert ends([move(1, 0, 2, 4), move(2, 0, 3, 1)]) == [([2], 2.0), ([1], 5.0)]
    assert ends([move(1, 0, 3, 4), move(2, 1, 3, 1)]) == [([2], 2.0), ([1], 5.0)]
    # Three moves share the link to 3, so two thirds of the link from 0 are left for the move to 4.
    moves = [move(1, 0, 3), move(2, 1, 3), move(3, 2, 3), move(4, 0, 4)]
    assert ends(moves) == [([4], pytest.approx(3.0)), ([1, 2, 3], pytest.approx(6.0))]


def test_moves_from_one_instance_to_another_follow_each_other() -> None:
    assert ends([move(1, 0, 2, 4), move(2, 0, 2, 1)]) == [([1], 4.0), ([2], 5.0)]


def test_a_move_begins_when_its_source_has_done_the_steps_before_it() -> None:
    assert ends([forward(1, 0), move(2, 0, 1), forward(3, 0)]) == [([1], 2.0), ([2, 3], 4.0)]
    assert ends([forward(1, 1), move(2, 0, 1)]) == [([1, 2], 2.0)], "a computing instance receives meanwhile"


def test_a_stream_ends_a_layer_after_its_step_or_when_its_bytes_are_sent() -> None:
    def streaming(num_blocks: int) -> Forward:
        return replace(forward(2, 0, num_tokens=6), streams=(move(3, 0, 1, num_blocks),))

    assert ends([forward(1, 0), streaming(2)]) == [([1], 2.0), ([2], 6.0), ([3], 6.5)]
    assert ends([forward(1, 0), streaming(8)]) == [([1], 2.0), ([2], 6.0), ([3], 10.0)]


def test_a_move_waits_for_streams_on_the_same_way_and_shares_links_with_other_moves() -> None:
    streaming = replace(forward(1, 0, num_tokens=6), streams=(move(2, 0, 1),))
    assert ends([streaming, move(3, 0, 1)]) == [([1], 4.0), ([2], 4.5), ([3], 6.5)]
    assert ends([streaming, move(3, 3, 1, 4)]) == [([1], 4.0), ([2], 4.5), ([3], 6.0)]


def test_a_poll_that_ends_early_loses_no_stream() -> None:
    clock = VirtualClock()
    sim = SimExecutor(clock=clock, vocab_size=10, cost=MOVES)
    sim.submit(forward(1, 0))
    sim.submit(replace(forward(2, 0, num_tokens=6), streams=(move(3, 0, 1),)))
    seen = []
    while not seen or seen[-1] != 3:
        seen += [done.number for done in sim.poll(0.25)]
    assert (seen, clock.now()) == ([1, 2, 3], 6.5)
