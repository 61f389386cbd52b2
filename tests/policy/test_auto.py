"""The default policy: groups by their cost for all requests, and decodes on one instance."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cluster import Cluster, Setup
from hypothesis import strategies as st
from test_tetris import GROUPS, machine
from workloads import Job, assert_lawful, finishes_lawfully, play, repeats, setups_of

from longspan.core.blocks import PrefixHit, Target
from longspan.core.locations import Location
from longspan.core.policy import NoOptions, Policy
from longspan.core.view import ClusterView, Plan
from longspan.errors import ParameterError
from longspan.policy.auto import Auto
from longspan.policy.auto.candidates import CandidateGroups, Costs, Load
from longspan.policy.auto.estimates import Estimates
from longspan.policy.auto.history import History
from longspan.policy.auto.observation import Observation, Observer
from longspan.policy.auto.waiting import Waiting, WaitingQueue
from longspan.policy.batching import Batch, single_part
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    number = draw(st.integers(2, 4))
    options = dict(draw(st.sampled_from(GROUPS)))
    if draw(st.booleans()):
        options["target_tbt"] = draw(st.sampled_from(["0.001", "0.05"]))
    facts = draw(st.sampled_from([Facts(), machine(*range(1, number + 1), start_s=0.0)]))
    locations = tuple(Location(host=i % 2, device=i) for i in range(number))
    setup = replace(draw(setups_of("auto", number, options)), num_instances=number, facts=facts, locations=locations)
    return replace(setup, max_model_len=min(100, Cluster(setup).engine.config.max_model_len))


test_any_workload_finishes_lawfully = finishes_lawfully(setups())
test_the_same_input_gives_the_same_steps = repeats(setups())


@pytest.mark.parametrize(
    ("room", "seed", "jobs"),
    [
        (5, 0, [(0, 11, 11, None, None), (0, 19, 40, None, None), (1, 0, 10, 25, 0)]),
        (6, 1, [(27, 0, 11, None, None), (0, 40, 19, None, 2), (27, 0, 15, 26, 0)]),
    ],
    ids=["the phase of the other request", "both requests need the last block"],
)
def test_a_request_that_waits_for_a_block_delays_no_other(
    room: int, seed: int, jobs: list[tuple[int, int, int, int, int]]
) -> None:
    """With two stages requests have phases, and decodes that rotate may have to wait for a block of another request."""
    setup = Setup(
        num_instances=2,
        num_blocks=room,
        max_num_seqs=room,
        block_size=16,
        policy="auto",
        options={"layout": "striped", "rotate": "token"},
        max_model_len=100,
        max_num_batched_tokens=79,
        rope_switch_length=87,
        prefix_caching=False,
        max_steps_in_flight=1,
        pp=2,
        facts=machine(1, 2, start_s=0.0),
        locations=(Location(host=0, device=0), Location(host=1, device=1)),
    )
    work = [
        Job(
            turn=turn,
            family=0,
            num_shared=shared,
            num_own=own,
            max_tokens=most,
            min_tokens=0,
            ignore_eos=most == 26,
            after=after,
            abort_turn=None,
        )
        for turn, shared, own, most, after in jobs
    ]
    assert_lawful(play(setup, work, random.Random(seed)))


# ---------------------------------------------------------------- groups


def cluster(number: int = 4, **wishes: object) -> Cluster:
    facts = machine(*(size for size in (1, 2, 4, 8) if size <= number), start_s=0.001)
    return Cluster(replace(Setup(num_instances=number, policy="auto", facts=facts), **wishes))  # type: ignore[arg-type]


def test_a_prompt_that_is_alone_is_shared_by_all_and_decoded_by_one() -> None:
    made = cluster(num_blocks=1000)
    request = made.add(range(4000), max_tokens=20)
    made.run()
    assert_lawful(made)
    groups = [part.group for part in made.parts_of(request)]
    assert groups[0] == (0, 1, 2, 3) and len(groups[-1]) == 1 and groups[-1] == groups[-18]


def test_a_queue_of_short_prompts_has_an_instance_for_each() -> None:
    made = cluster()
    requests = [made.add([number] * 10, max_tokens=2) for number in range(16)]
    made.run()
    assert Counter(len(made.parts_of(request)[0].group) for request in requests)[1] >= 12
    assert {(i,) for i in range(4)} <= {made.parts_of(request)[0].group for request in requests}


def test_short_prompts_of_a_burst_pass_long_ones_for_a_bounded_time() -> None:
    made = cluster(2, num_blocks=4000)
    burst = [made.add([number] * length, max_tokens=1) for number, length in enumerate((4000, 40, 400))]
    made.run()
    long, short, middle = (request.metrics.ttft_s for request in burst)
    assert long is not None and short is not None and middle is not None
    assert short <= middle < long
    waited = made.add([7] * 4000, max_tokens=1)
    for number in range(8, 2000):
        made.add([number] * 400, max_tokens=1)
        if number > 40:
            made.engine.step()
        if waited.finish_reason is not None:
            break
    assert waited.finish_reason is not None and made.engine.num_waiting > 10


@pytest.mark.parametrize(("wait_s", "group"), [(0.2, (0, 1, 2, 3)), (100.0, (0,))])
def test_a_prompt_waits_for_a_larger_group_that_is_soon_idle(wait_s: float, group: tuple[int, ...]) -> None:
    """Instance 0 is idle, and instances 1 to 3 prefill for `wait_s` seconds."""
    estimates = Estimates(machine(1, 2, 4, start_s=0.001), (), 4, None)
    candidates = CandidateGroups([[0, 1, 2, 3]], estimates.sizes, {i: i for i in range(4)})
    costs = Costs(candidates, estimates, History(estimates.token_s), 5.0, 3.0)
    by_size, _ = estimates.prefills_s(6000, 0, 8192)
    load = Load(
        wait_s=np.array([0.0, wait_s, wait_s, wait_s]), token_s=np.ones(4), decodes=np.zeros(4), later=np.zeros(4)
    )
    request = Cluster(Setup()).add(range(10), max_tokens=2)
    found = costs.of(Waiting(request, float(by_size.min()), 1e9), candidates.by_size(by_size), 0.0, 0.0, load)
    assert candidates.groups[int(found.argmin())] == group


def test_a_prefill_takes_as_long_as_its_steps_together() -> None:
    facts = machine(1, 2, start_s=0.01)
    estimates = Estimates(facts, (), 2, None)
    assert facts.profile is not None
    for members, alone_s in zip(estimates.sizes, estimates.prefills_s(5000, 300, 1024)[0], strict=True):
        chunk = 1024 * members
        starts = range(0, 5000, chunk)
        whole_s = sum(estimates.prefill_s(members, min(chunk, 5000 - start), 300 + start, chunk) for start in starts)
        assert estimates.prefill_s(members, 5000, 300, 1024) == pytest.approx(whole_s) == pytest.approx(alone_s)


def test_a_long_prompt_is_overtaken_for_a_bounded_time() -> None:
    made = Cluster(Setup())
    queue = WaitingQueue(2, 1.25, 5.0)
    long, *short = [made.add([number] * 10, max_tokens=2) for number in range(6)]
    queue.started(long, 1.0, 8.0)
    for request in short:
        queue.started(request, 0.1, 0.1)
    assert queue.ordered(0.9)[-1].request is queue.ordered(5.3)[0].request is long, "overdue after 1.25 x 8 / 2 s"


def test_a_further_turn_goes_where_its_whole_prefix_is() -> None:
    """Copies that its first group still has are no reason to bring that group together again."""
    made = cluster(num_blocks=1000)
    first = made.add(range(4000), max_tokens=20)
    made.run()
    [home] = made.parts_of(first)[-1].group
    second = made.add([*range(4000), *first.output, *range(50, 60)], max_tokens=2)
    made.run()
    part = made.parts_of(second)[0]
    assert home in part.group and len(part.group) < 4 and part.start > 3990


@pytest.mark.parametrize(
    ("hosts", "sizes", "groups"),
    [
        ([4, 4], (1, 2, 4, 8), [1] * 8 + [2] * 4 + [4] * 2 + [8]),
        ([3, 3], (1, 2, 4, 6), [1] * 6 + [2] * 2 + [4] + [6]),
        ([4, 2], (1, 2, 4, 6), [1] * 6 + [2] * 3 + [4] + [6]),
        ([1, 1], (1, 2), [1, 1, 2]),
    ],
)
def test_groups_of_a_size_do_not_overlap(hosts: list[int], sizes: tuple[int, ...], groups: list[int]) -> None:
    numbers = iter(range(9, 9 - sum(hosts), -1))
    places = [[next(numbers) for _ in range(size)] for size in hosts]
    everyone = [instance for host in places for instance in host]
    candidates = CandidateGroups(places, sizes, {instance: place for place, instance in enumerate(everyone)})
    assert [len(group) for group in candidates.groups] == groups == candidates.sizes.tolist()
    for size in sizes:
        members = [instance for group in candidates.groups if len(group) == size for instance in group]
        assert len(members) == len(set(members))
    values = np.arange(1.0, len(everyone) + 1)
    ranks = dict(zip(everyone, values, strict=True))
    assert candidates.sum(values).tolist() == [sum(ranks[one] for one in group) for group in candidates.groups]
    assert candidates.max(values).tolist() == [max(ranks[one] for one in group) for group in candidates.groups]


def test_a_document_leaves_instances_to_chats() -> None:
    made = cluster(num_blocks=1000, max_num_batched_tokens=2048)
    for number in range(12):
        made.add([number] * 10, max_tokens=2)
        made.run()
    document = made.add(range(10_000), max_tokens=2)
    made.engine.step()
    chat = made.add(range(50, 60), max_tokens=2)
    made.run()
    assert len(made.parts_of(document)[0].group) < 4
    assert not {*made.parts_of(chat)[0].group} & {*made.parts_of(document)[0].group}
    assert chat.metrics.ttft_s is not None and document.metrics.ttft_s is not None
    assert chat.metrics.ttft_s < 0.1 * document.metrics.ttft_s


def test_prefills_avoid_instances_that_decode() -> None:
    made = cluster(2, facts=machine(1, 2, start_s=0.1), num_blocks=1000)
    decoding = made.add(range(10), max_tokens=200)
    while len(decoding.output) < 5:
        made.engine.step()
    [home] = decoding.group
    prompt = made.add([1] * 10, max_tokens=2)
    made.run()
    assert made.parts_of(prompt)[0].group == (1 - home,)


@pytest.mark.parametrize("short_s", [0.0, 0.002])
def test_a_long_prompt_takes_not_all_instances_that_are_free_or_soon_free(short_s: float) -> None:
    """Instances 2 and 3 are free, or compute short prompts. Instances 0 and 1 prefill for long."""
    estimates = Estimates(machine(1, 2, 4, start_s=0.001), (), 4, None)
    candidates = CandidateGroups([[0, 1, 2, 3]], estimates.sizes, {i: i for i in range(4)})
    history = History(estimates.token_s)
    for number in range(128):
        history.add_prompt(number * 0.1, 0.005, 0.005, 10)
    costs = Costs(candidates, estimates, history, 5.0, 3.0)
    by_size, _ = estimates.prefills_s(50_000, 0, 8192)
    waits_s = np.array([20.0, 20.0, short_s, short_s])
    load = Load(wait_s=waits_s, token_s=np.ones(4), decodes=np.zeros(4), later=np.zeros(4))
    request = Cluster(Setup()).add(range(10), max_tokens=2)
    found = costs.of(Waiting(request, float(by_size.min()), 1e9), candidates.by_size(by_size), 0.0, 12.8, load)
    assert not {2, 3} <= {*candidates.groups[int(found.argmin())]}


@pytest.mark.parametrize(("number", "largest"), [(2, [1, 2]), (8, [4, 6, 7, 8]), (64, [48, 56, 60, 64])])
def test_some_groups_leave_a_few_instances_free(number: int, largest: list[int]) -> None:
    facts = machine(*(2**power for power in range(number.bit_length())), start_s=0.001)
    estimates = Estimates(facts, (), number, None)
    assert list(estimates.sizes[-len(largest) :]) == largest
    whole_s, _ = estimates.prefills_s(100_000, 0, 8192)
    assert whole_s.tolist() == sorted(whole_s, reverse=True), "more members are faster, also if unmeasured"


# ---------------------------------------------------------------- where requests decode


def test_requests_whose_kv_is_on_its_way_count_nowhere_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Observation]()
    observe = Observer.observe

    def record(observer: Observer, view: ClusterView) -> Observation:
        seen.append(observe(observer, view))
        return seen[-1]

    monkeypatch.setattr(Observer, "observe", record)
    made = cluster(num_blocks=1000)
    requests = [made.add([number] * length, max_tokens=30) for number, length in enumerate((4000, 10, 900, 2000, 10))]
    made.run()
    assert_lawful(made)
    assert made.moves and any(len(made.parts_of(request)[0].group) > 1 for request in requests)
    assert min(one.active.min() for one in seen) == 0
    assert all((one.decodes >= one.active).all() for one in seen)


def placed(waits_s: list[float], decodes: list[int]) -> int:
    """Return the instance that decodes a short prompt of instance 0 with these prefills and decodes."""
    made = cluster(len(waits_s), num_blocks=1000)
    policy = made.policy
    assert isinstance(policy, Auto)
    number = np.array(decodes, float)
    seen = Observation(
        wait_s=np.array(waits_s),
        decodes=number,
        active=number,
        context=10 * number,
        free_blocks=np.full(len(number), 1000.0),
        free_slots=np.full(len(number), 100.0),
    )
    request = made.add(range(10), max_tokens=100)
    [target] = policy._placement.targets(request, (0,), seen, 0.0) or [Target(0, 1)]
    return target.instance


def test_answers_avoid_instances_whose_prefills_go_on() -> None:
    assert placed([0.0, 0.0, 0.0, 0.0], [0, 0, 0, 3]) == 2, "half of the instances are usual"
    assert placed([0.0, 0.0, 60.0, 0.0], [0, 0, 0, 3]) == 3
    assert placed([0.0, 0.0, 60.0, 60.0], [0, 0, 0, 3]) in {0, 1}, "no usual instance is as quick"


def test_few_long_prompts_that_take_most_of_the_time_are_noticed() -> None:
    history = History(0.01)
    for number in range(40):
        history.add_prompt(number, 0.1, 0.05, 200)
    assert not history.has_long_prompts
    for number in range(3):
        history.add_prompt(40 + number, 40.0, 6.0, 150_000)
    assert history.has_long_prompts
    alike = History(0.01)
    for number in range(40):
        alike.add_prompt(number, 40.0, 6.0, 150_000)
    assert not alike.has_long_prompts


def test_blocks_that_the_target_computes_are_not_sent() -> None:
    made = cluster(2, num_blocks=1000)
    request = made.add(range(3200), max_tokens=5)
    made.run()
    assert len(made.parts_of(request)[0].group) == 2
    [home] = made.parts_of(request)[-1].group
    assert sum(len(move.copies) for move in made.moves) == 100, "of 200 blocks, half are there"
    assert all(move.targets == (home,) for move in made.moves)
    assert [made.executor.pool(i).num_free for i in range(2)] == [1000, 1000]


def test_a_request_that_fits_on_no_instance_stays_on_its_group() -> None:
    made = cluster(2, num_blocks=20)
    request = made.add(range(500), max_tokens=5)
    made.run()
    assert not made.moves and made.parts_of(request)[-1].group == (0, 1)


def test_a_request_that_fits_on_no_instance_is_sharded_over_the_fewest_instances() -> None:
    made = cluster(num_blocks=20)
    request = made.add(range(500), max_tokens=5)
    made.run()
    assert_lawful(made)
    assert len(made.parts_of(request)[0].group) == 4 and len(made.parts_of(request)[-1].group) == 3


def test_prefill_steps_are_shorter_on_instances_that_decode() -> None:
    made, idle = (cluster(1, num_blocks=1000, options={"target_tbt": "0.05"}) for _ in range(2))
    answer = made.add([1] * 10, max_tokens=100)
    while len(answer.output) < 5:
        made.engine.step()
    mixed, alone = made.add(range(5, 2005), max_tokens=2), idle.add(range(5, 2005), max_tokens=2)
    made.run()
    idle.run()
    longest, whole = (
        max(part.stop - part.start for part in one) for one in (made.parts_of(mixed), idle.parts_of(alone))
    )
    assert longest < 0.3 * whole


@pytest.mark.parametrize(("name", "value"), [("target_tbt", "-1"), ("ttft_slowdown", "0.5"), ("overtaking", "0")])
def test_a_bad_option_is_refused(name: str, value: str) -> None:
    with pytest.raises(ParameterError, match=f"{name} must be (above 0 seconds|at least 1), but"):
        make_policy("auto", num_instances=2, options={name: value})


def test_a_request_is_recomputed_when_no_block_is_freed() -> None:
    """Two requests fill an instance each, and are to be decoded on the other: one gives its KV up."""
    made = Cluster(Setup(num_instances=2, num_blocks=4, block_size=16, policy="auto"))
    made.engine.set_policy(Swapped((0, 1), NoOptions(), None))
    requests = [made.add([number] * 60, max_tokens=4) for number in range(2)]
    made.run()
    assert [request.metrics.num_preemptions for request in requests] == [0, 1]
    assert [request.output for request in requests] == [made.expected_output(request) for request in requests]


class Swapped(Policy):
    """Prefills each request on one of two instances and decodes it on the other one."""

    def plan(self, view: ClusterView) -> Plan:
        batch = Batch(view, frozenset((0, 1)))
        for request in batch.running():
            batch.add(single_part(request, request.group[0], request.num_scheduled, batch.budget))
        for request in batch.waiting():
            here = request.id % 2
            able = here in batch.budget.tokens
            part = single_part(request, here, 0, batch.budget, PrefixHit()) if able else None
            targets = (Target(1 - here, request.blocks_for(request.num_tokens)),)
            batch.add(None if part is None else replace(part, targets=targets))
        return batch.plan()
