"""Plans of chunks, held against the paper's pseudocode (`tetris_paper.py`) and against examples made by hand."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tetris_paper import Instance, Paper, numbers
from tetris_paper import get_group as group_of_paper

from longspan.cost.profile import PrefillTime
from longspan.policy.baselines.fixed_sp import FixedGroups
from longspan.policy.tetris.execution import QueueTimes
from longspan.policy.tetris.planner import Groups, Planner, Prompt

COEFFICIENTS = st.builds(
    PrefillTime,
    start_s=st.sampled_from([0.0, 0.01, 0.2]),
    token_s=st.sampled_from([1e-6, 1e-5, 4e-5]),
    cached_s=st.sampled_from([0.0, 1e-9, 3e-9]),
    square_s=st.sampled_from([0.0, 5e-10, 2e-9]),
)


def ideal(size: int, *, start_s: float = 0.0) -> PrefillTime:
    """10,000 tokens a second on one instance, and even shares."""
    return PrefillTime(start_s=start_s, token_s=1e-4 / size, cached_s=0.0, square_s=0.0)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Draw hosts of equal and of different sizes, which powers of two divide or not, and queues of their instances.

    Many instances are idle, and some become idle at the same time.
    """
    alike = st.sampled_from([[4] * 4, [8] * 2, [6] * 3, [12, 12], [3] * 6, [7, 7, 4]])
    per_host = draw(st.one_of(st.lists(st.integers(1, 5), min_size=1, max_size=4), alike))
    hosts = [host for host, number in enumerate(per_host) for _ in range(number)]
    queue = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 3))
    return hosts, draw(st.lists(queue, min_size=len(hosts), max_size=len(hosts)))


@st.composite
def sizes_of(draw: st.DrawFn, most: int) -> list[int]:
    powers = [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]
    anything = st.lists(st.integers(1, most), min_size=1, max_size=4, unique=True)
    return sorted(draw(st.one_of(st.just(powers), anything)))


def pool_of(hosts: list[int], queue_s: list[float]) -> list[Instance]:
    both = enumerate(zip(hosts, queue_s, strict=True))
    return [Instance(number=i, host=host, first_s=wait, queue_s=wait) for i, (host, wait) in both]


# ---------------------------------------------------------------- against the paper


@given(clusters(), st.data())
@settings(max_examples=400, deadline=None)
def test_groups_are_the_papers(case: tuple[list[int], list[float]], data: st.DataObject) -> None:
    """Also after some time has passed (Eq. 2), in a part of the cluster, and when groups follow from each other."""
    hosts, queue_s = case
    initial = data.draw(st.sets(st.integers(0, len(hosts) - 1), max_size=3))
    size = data.draw(st.integers(max(1, len(initial)), len(hosts)))
    passed_s = data.draw(st.sampled_from([0.0, 1.0, 10.0]))
    passed = [
        Instance(number=p.number, host=p.host, first_s=p.first_s, queue_s=max(0.0, p.queue_s - passed_s))
        for p in pool_of(hosts, queue_s)
    ]
    expected = numbers(group_of_paper(passed, frozenset(initial), size))
    groups = Planner({size: ideal(size)}, hosts).groups(queue_s, tuple(sorted(initial)))
    assert set(groups.group(0)) == expected
    assert groups.queue_s[0] == max(queue_s[i] for i in expected)


@given(clusters(), st.data())
@settings(max_examples=600, deadline=None)
def test_plans_are_the_papers(case: tuple[list[int], list[float]], data: st.DataObject) -> None:
    hosts, queue_s = case
    sizes = data.draw(sizes_of(len(hosts)))
    times = {size: data.draw(COEFFICIENTS) for size in sizes}
    if data.draw(st.integers(0, 3)):
        start_s = data.draw(st.sampled_from([0.0, 0.01, 0.05, 0.3]))
        times = {size: ideal(size, start_s=start_s) for size in sizes}
    prompt = Prompt(
        new_tokens=data.draw(st.integers(1, 200_000)),
        improvement_rate=data.draw(st.sampled_from([0.0, 0.05, 0.3, 0.75])),
        chunking=data.draw(st.sampled_from([True, True, False])),
        instance_tokens=data.draw(st.sampled_from([None, 20_000])),
    )
    min_chunk = data.draw(st.sampled_from([1, 500]))
    paper = Paper(
        times=times,
        improvement_rate=prompt.improvement_rate,
        min_chunk=min_chunk,
        chunking=prompt.chunking,
        instance_tokens=prompt.instance_tokens or math.inf,
        total=prompt.new_tokens,
    )
    expected_s, allocation = paper.cdsp_schedule(prompt.new_tokens, [], sizes, pool_of(hosts, queue_s))
    plan = Planner(times, hosts, min_chunk_tokens=min_chunk).plan(prompt, queue_s)
    assert plan is not None
    assert plan.ttft_s == pytest.approx(expected_s, rel=1e-6, abs=1e-9)
    assert sum(chunk.num_tokens for chunk in plan.chunks) == prompt.new_tokens
    for before, after in zip(plan.chunks, plan.chunks[1:], strict=False):
        assert set(before.group) < set(after.group)
    if len(allocation) == 1 and len(plan.chunks) == 1:
        assert set(plan.chunks[0].group) == allocation[0][1]


@given(clusters(), st.integers(1, 100_000), st.integers(0, 50_000), st.data())
@settings(max_examples=200, deadline=None)
def test_cached_tokens_stay_in_their_group(
    case: tuple[list[int], list[float]], new: int, cached: int, data: st.DataObject
) -> None:
    hosts, queue_s = case
    held = tuple(sorted(data.draw(st.sets(st.integers(0, len(hosts) - 1), max_size=len(hosts)))))
    sizes = data.draw(sizes_of(len(hosts)))
    times = {size: ideal(size, start_s=0.01) for size in sizes}
    plan = Planner(times, hosts).plan(Prompt(new_tokens=new, cached_tokens=cached, held=held), queue_s)
    if len(held) > max(sizes):
        assert plan is None
        return
    assert plan is not None and set(held) <= set(plan.chunks[0].group)
    end_s = 0.0
    for chunk in plan.chunks:
        end_s = max([end_s, *(queue_s[i] for i in chunk.group)])
        end_s += times[len(chunk.group)].seconds(chunk.num_tokens, cached)
    assert plan.ttft_s == pytest.approx(end_s)


@pytest.mark.parametrize("per_host", [3, 6, 7, 12])
def test_groups_that_many_cuts_come_to_are_looked_for_once(per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two of 128 instances, on hosts that these do not divide: the number of searches stays small."""
    made = []
    create = Groups.__init__

    def counted(groups: Groups, *given: Any) -> None:
        made.append(given)
        create(groups, *given)

    monkeypatch.setattr(Groups, "__init__", counted)
    sizes = [1 << bit for bit in range(8)]
    times = {
        n: PrefillTime(start_s=0.02 * n, token_s=6.5e-5 / n, cached_s=1.1e-9 / n, square_s=5e-10 / n) for n in sizes
    }
    planner = Planner(times, [instance // per_host for instance in range(128)])
    draw = Random(per_host)
    for _ in range(200):
        made.clear()
        longest_s = 10 ** draw.uniform(-1, 1.5)
        planner.plan(
            Prompt(new_tokens=draw.randrange(4_000, 400_000)), [draw.uniform(0, longest_s) for _ in range(128)]
        )
        assert len(made) <= 40


# ---------------------------------------------------------------- by hand


def test_chunks_use_free_instances_as_in_figure_3() -> None:
    """Two instances are free now, two after 1 s, four after 2 s: 2, then 4, then 8 work on one prompt."""
    queue_s = [2.0, 2.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    planner = Planner({size: ideal(size) for size in (1, 2, 4, 8)}, [0] * 8)
    plan = planner.plan(Prompt(new_tokens=140_000), queue_s)
    assert plan is not None
    assert [(c.num_tokens, sorted(c.group)) for c in plan.chunks] == [
        (20_000, [2, 3]),
        (40_000, [2, 3, 4, 5]),
        (80_000, [0, 1, 2, 3, 4, 5, 6, 7]),
    ]
    assert plan.ttft_s == pytest.approx(3.0)
    whole = planner.plan(Prompt(new_tokens=140_000, chunking=False), queue_s)
    assert whole is not None and [len(c.group) for c in whole.chunks] == [8]
    assert whole.ttft_s == pytest.approx(3.75)


def test_larger_groups_must_be_worth_it() -> None:
    """16 instances are idle in 1 s. On 1, 2, 4, 8 and 16 of them it ends at 2, 1.5, 1.25, 1.125 and 1.0625 s."""
    planner = Planner({size: ideal(size) for size in (1, 2, 4, 8, 16)}, [0] * 16)
    taken = []
    for rate in (0.0, 0.08, 0.3, 0.5):
        plan = planner.plan(Prompt(new_tokens=10_000, improvement_rate=rate), [1.0] * 16)
        assert plan is not None
        taken.append(len(plan.chunks[-1].group))
    assert taken == [16, 8, 4, 1]


def test_groups_stay_on_a_host() -> None:
    """Hosts 1 and 2 each have one idle instance. The two instances that are idle soonest together are on host 0."""
    hosts, queue_s = [0, 0, 1, 1, 2, 2], [1.0, 1.0, 0.0, 2.0, 0.0, 2.0]
    planner = Planner({2: ideal(2), 4: ideal(4)}, hosts)
    plan = planner.plan(Prompt(new_tokens=1000, chunking=False, improvement_rate=0.9), queue_s)
    assert plan is not None and plan.chunks[0].group == (0, 1)


def test_a_chunk_that_is_too_short_is_left_out() -> None:
    """One instance is idle 0.01 s before its peer: time for 100 tokens."""
    times = {size: ideal(size) for size in (1, 2)}
    for min_chunk, expected in ((100, [100, 9_900]), (101, [10_000])):
        plan = Planner(times, [0, 0], min_chunk_tokens=min_chunk).plan(Prompt(new_tokens=10_000), [0.0, 0.01 + 1e-9])
        assert plan is not None and [chunk.num_tokens for chunk in plan.chunks] == expected


def test_a_chunk_has_as_many_tokens_as_there_is_time_for_after_its_start() -> None:
    """Instance 1 is idle in 0.3 s. A start takes 0.1 s on one instance and 0.2 s on two."""
    planner = Planner({1: ideal(1, start_s=0.1), 2: ideal(2, start_s=0.2)}, [0, 0])
    for free_s, expected in ((0.12, [200, 99_800]), (0.3, [2000, 98_000]), (0.1, [100_000])):
        plan = planner.plan(Prompt(new_tokens=100_000), [0.0, free_s + 1e-9])
        assert plan is not None and [chunk.num_tokens for chunk in plan.chunks] == expected
        assert plan.ttft_s == pytest.approx(free_s + 0.2 + expected[-1] * 5e-5)


def test_a_prompt_that_one_instance_cannot_hold_goes_to_several() -> None:
    planner = Planner({size: ideal(1) for size in (1, 2, 4)}, [0] * 4)
    for instance_tokens, expected in ((None, 1), (1000, 1), (999, 2), (499, 4)):
        plan = planner.plan(Prompt(new_tokens=1000, instance_tokens=instance_tokens), [0.0] * 4)
        assert plan is not None and len(plan.chunks[-1].group) == expected


def test_groups_that_are_larger_than_usual_are_for_prompts_that_need_them() -> None:
    planner = Planner({size: ideal(size) for size in (1, 2, 4, 8)}, [0] * 8, usual_size=3)
    for room, held, expected in ((None, (), 2), (2500, (), 4), (2000, (), 8), (1, (), 8), (None, (0, 1, 2), 4)):
        plan = planner.plan(Prompt(new_tokens=10_000, instance_tokens=room, held=held), [0.0] * 8)
        assert plan is not None and [len(chunk.group) for chunk in plan.chunks] == [expected]


# ---------------------------------------------------------------- Eq. 1


@given(COEFFICIENTS, st.floats(0, 100), st.integers(0, 300_000))
def test_the_quadratic_is_solved(times: PrefillTime, budget_s: float, cached: int) -> None:
    tokens = times.most_tokens(budget_s, cached)
    if budget_s <= times.start_s:
        assert tokens == 0
    else:
        assert times.seconds(tokens, cached) == pytest.approx(budget_s)


# ---------------------------------------------------------------- fixed groups and queues


def test_fixed_groups_are_ordered_by_the_first_free_instance() -> None:
    fixed = FixedGroups(ideal(2), [0, 2, 1, 3], 2)
    plan = fixed.plan(Prompt(new_tokens=10_000), [0.0, 1.0, 2.0, 1.5])
    assert plan is not None
    assert (plan.chunks[0].group, plan.ttft_s) == ((1, 3), pytest.approx(2.0))
    assert fixed.plan(Prompt(new_tokens=1, held=(0, 1)), [0.0] * 4) is None


def test_queues_shrink_with_time_and_are_corrected() -> None:
    queue = QueueTimes(3)
    queue.book((0, 1), 4.0)
    assert queue.waits_s(1.0) == [3.0, 3.0, 0.0]
    assert queue.waits_s(5.0) == [0.0, 0.0, 0.0]
    assert queue.is_old(1.0) and not QueueTimes(1).is_old(-1.0)
    queue.correct(5.0, [[(2.0, (0,)), (1.0, (0, 1))], [(5.0, (2,))], [(1.0, (1, 2))]])
    assert queue.waits_s(5.0) == [3.0, 6.0, 6.0]
    queue.book((0, 1, 2), 105.0)
    assert not queue.is_old(6.0) and queue.is_old(8.0)
