"""`prefill-first` and `decode-first`: steps of prompts or of decodes, in either order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import RANDOM_RUNS, assert_lawful, finishes_lawfully, repeats, setups_of

from longspan.core.cluster import Cluster as Instances
from longspan.core.kv.account import KvAccount
from longspan.core.kv.residency import RESIDENT
from longspan.core.policy import NoOptions
from longspan.core.queues import Running
from longspan.core.request import Request, RequestMetrics
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Forward, Part
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.policy.baselines.phase_order import PrefillFirst

POLICIES = ("prefill-first", "decode-first")


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    return draw(setups_of(draw(st.sampled_from(POLICIES)), draw(st.integers(1, 4)), {}))


test_any_workload_finishes_lawfully = finishes_lawfully(setups())
test_the_same_input_gives_the_same_steps = repeats(setups())


# ---------------------------------------------------------------- laws of every plan


Law = Callable[[ClusterView, Plan], None]


@contextmanager
def held_to(law: Law) -> Iterator[None]:
    """Checks every plan of these policies."""
    decide = PrefillFirst.plan

    def checked(policy: PrefillFirst, view: ClusterView) -> Plan:
        plan = decide(policy, view)
        law(view, plan)
        return plan

    with patch.object(PrefillFirst, "plan", checked):
        yield


def decodes(part: ScheduledPart) -> bool:
    """Whether it is the latest token of a request, and none of its prompt."""
    return part.start >= part.request.num_prompt and part.stop == part.request.num_tokens == part.start + 1


def decode_instances(plan: Plan) -> list[int]:
    return [batch[0].group[0] for batch in plan.batches if decodes(batch[0])]


def fits(request: RequestView, instance: int, view: ClusterView) -> bool:
    """Return True if an uncached request fits in the blocks that running requests neither hold nor need."""
    num_free = view.kv.num_free(instance) - max(0, view.running.due_blocks[instance])
    has_slot = len(view.running.on(instance)) < view.max_num_seqs
    return has_slot and request.blocks_for(request.num_tokens) <= num_free


def chosen(view: ClusterView, plan: Plan, instances: Iterable[int]) -> int | None:
    """Return the instance for the first waiting request, or None if it fits on none or the plan admits requests."""
    if not view.startable or any(part.hit is not None for batch in plan.batches for part in batch):
        return None
    able = [i for i in instances if fits(view.startable[0], i, view)]
    return min(able, key=lambda i: (view.running.due_tokens[i], view.kv.num_allocated(i), i), default=None)


@st.composite
def crowds(draw: st.DrawFn, policy: str, **changes: object) -> Setup:
    """Draw a cluster that holds a few of the requests of `serve` at a time."""
    setup = Setup(
        policy=policy,
        num_instances=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(16, 60)),
        block_size=4,
        max_num_batched_tokens=draw(st.sampled_from([7, 30, 100, 2048])),
        max_num_seqs=draw(st.sampled_from([3, 8, 128])),
        max_steps_in_flight=draw(st.sampled_from([1, 2])),
        uneven=draw(st.integers(0, 3)),
        pp=draw(st.integers(1, 3)),
        host_blocks=draw(st.sampled_from([(), (80,)])) if changes.get("prefix_caching", True) else (),
    )
    return replace(setup, **changes)  # type: ignore[arg-type]


def serve(setup: Setup, seed: int) -> None:
    """Sixteen requests arrive at once, and as many later. Some share a prefix."""
    cluster, draw, num_later = Cluster(setup), random.Random(seed), 16
    while num_later or cluster.engine.has_unfinished:
        for _ in range(16 if not cluster.requests else num_later > 0 and draw.random() < 0.3):
            prompt = [len(cluster.requests)] * draw.choice([1, 5, 20, 50])
            cluster.add([50] * draw.choice([0, 9]) + prompt, max_tokens=draw.choice([1, 2, 8, 20]))
            num_later -= len(cluster.requests) > 16
        cluster.step(draw.choice([None, 0.0]))
    assert_lawful(cluster)


def holds(law: Callable[[], Law], clusters: st.SearchStrategy[Setup]) -> Callable[[], None]:
    """A test: all plans for a crowd on any of these clusters keep a law."""

    @settings(RANDOM_RUNS, max_examples=120)
    @given(clusters, st.integers(0, 99))
    def test(setup: Setup, seed: int) -> None:
        with held_to(law()):
            serve(setup, seed)

    return test


EITHER = st.sampled_from(POLICIES).flatmap(crowds)


def never_mixed() -> Law:
    def law(_view: ClusterView, plan: Plan) -> None:
        for batch in plan.batches:
            assert len({part.group for part in batch}) == 1
            assert len({decodes(part) for part in batch}) == 1

    return law


test_no_step_mixes_prompts_and_decodes = holds(never_mixed, EITHER)


def unfinished_prompts_go_on() -> Law:
    def law(view: ClusterView, plan: Plan) -> None:
        unfinished = [request for request in view.running if request.num_scheduled < request.num_prompt]
        able = [request for request in unfinished if request.residency.can_compute]
        prefilling = {request.group[0] for request in able if request not in plan.preempted}
        assert prefilling.isdisjoint(decode_instances(plan))

    return law


test_no_instance_decodes_before_its_prompts_are_done = holds(unfinished_prompts_go_on, EITHER)


def prompts_that_fit_go_first() -> Law:
    """A waiting request goes to the instance with the fewest due tokens. No decode runs there before its admission."""

    def law(view: ClusterView, plan: Plan) -> None:
        assert chosen(view, plan, view.cluster.instances) not in decode_instances(plan)

    return law


test_prefill_first_lets_no_decode_pass_a_prompt_that_fits = holds(
    prompts_that_fit_go_first, crowds("prefill-first", prefix_caching=False)
)


def batches_are_static() -> Law:
    """No request starts on an instance that has begun to decode. Decoding begins when no other request fits."""
    begun = set[int]()

    def law(view: ClusterView, plan: Plan) -> None:
        closed = {request.group[0] for request in view.running if request.id in begun}
        for batch in plan.batches:
            for part in batch:
                assert part.hit is None or part.request.was_admitted or part.group[0] not in closed
        opened = [i for i in view.cluster.instances if i not in closed]
        assert chosen(view, plan, opened) not in decode_instances(plan)
        begun.update(part.request.id for batch in plan.batches for part in batch if part.stop > part.request.num_prompt)

    return law


test_decode_first_decodes_whole_batches_to_the_end = holds(
    batches_are_static, crowds("decode-first", prefix_caching=False)
)


# ---------------------------------------------------------------- by example


def kinds(cluster: Cluster, since: int = 0) -> str:
    """A letter for each step: one of prompts, or one of decodes."""
    return "".join("PD"[is_decode_step(cluster, forward)] for forward in cluster.forwards[since:])


def is_decode_step(cluster: Cluster, forward: Forward) -> bool:
    part = forward.parts[0]
    return part.start >= cluster.executor.requests[part.request_id].num_prompt


def named(forward: Forward) -> set[int]:
    return {part.request_id for part in forward.parts}


def until_decoding(cluster: Cluster, *requests: Request) -> None:
    while not all(len(request.output) > 2 for request in requests):
        cluster.step()


@pytest.mark.parametrize(("policy", "expected"), [("prefill-first", "PPDPPD"), ("decode-first", "PPDDPPD")])
def test_a_prompt_that_arrives_during_decodes_is_cut_by_the_budget(policy: str, expected: str) -> None:
    """It is cut in two by the tokens of a step."""
    cluster = Cluster(Setup(policy=policy, max_num_batched_tokens=64, max_steps_in_flight=1))
    first = cluster.add([1] * 100, max_tokens=3)
    while len(first.output) != 2:
        cluster.step()
    cluster.add([2] * 100, max_tokens=2)
    cluster.run()
    assert kinds(cluster) == expected


def test_ended_requests_are_replaced_at_once_or_all_together() -> None:
    order = {}
    for policy in POLICIES:
        cluster = Cluster(Setup(policy=policy, num_blocks=8))
        short, long = cluster.add([1] * 60, max_tokens=4), cluster.add([2] * 20, max_tokens=40)
        following = cluster.add([3] * 60, max_tokens=4)
        cluster.run()
        assert_lawful(cluster)
        finished = {"short": short, "long": long, "following": following}
        order[policy] = sorted(finished, key=lambda name: finished[name].metrics.finished_s or 0.0)
    assert order == {"prefill-first": ["short", "following", "long"], "decode-first": ["short", "long", "following"]}


def test_one_instance_decodes_while_another_prefills() -> None:
    """And a batch begins on one instance while the batch of another is decoded to the end."""
    cluster = Cluster(Setup(policy="decode-first", num_instances=2, max_num_batched_tokens=64))
    long, short = cluster.add([1] * 40, max_tokens=60), cluster.add([2] * 30, max_tokens=4)
    until_decoding(cluster, long)
    while short.finish_reason is None:
        cluster.step()
    following = [cluster.add([3 + number] * 100, max_tokens=2) for number in range(5)]
    cluster.run()
    assert {part.group for request in following for part in cluster.parts_of(request)} == {(1,)}
    assert all((one.metrics.finished_s or 0.0) < (long.metrics.finished_s or 0.0) for one in following)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_preempted_request_resumes_before_another_batch(pp: int) -> None:
    cluster = Cluster(Setup(policy="decode-first", num_blocks=24, block_size=4, pp=pp))
    batch = [cluster.add([number] * 15, max_tokens=20 + 5 * number) for number in range(6)]
    following = [cluster.add([10 + number] * 15, max_tokens=5) for number in range(3)]
    cluster.run()
    assert_lawful(cluster)
    assert sum(request.metrics.num_preemptions for request in batch) > 0
    last, first = (
        edge(forward.number for forward in cluster.forwards if named(forward) & {one.id for one in requests})
        for edge, requests in ((max, batch), (min, following))
    )
    assert last < first


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_loaded_from_a_host_joins_the_decodes(policy: str) -> None:
    cluster = Cluster(Setup(policy=policy, num_blocks=48, block_size=4, max_model_len=90, host_blocks=(1000,)))
    requests = [cluster.add([number] * (5 + 3 * number % 11), max_tokens=35 + number % 4) for number in range(24)]
    cluster.run()
    assert_lawful(cluster)
    assert sum(request.metrics.num_preemptions for request in requests) > 3
    returns = [
        forward for forward in cluster.forwards if is_decode_step(cluster, forward) and any(map(is_told, forward.parts))
    ]
    assert returns and all(len(forward.parts) > 1 for forward in returns)
    assert "P" not in kinds(cluster, since=cluster.forwards.index(returns[-1]))


def is_told(part: Part) -> bool:
    """Whether ranks are told of a request, for the first time or again."""
    return part.sampling is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_stages_alternate_between_batches(policy: str) -> None:
    """Each step decodes a share of the batch, and prompts fill the stages before."""
    cluster = Cluster(Setup(policy=policy, pp=3))
    for number in range(9):
        cluster.add([number] * 20, max_tokens=8)
    cluster.run()
    sizes = [len(forward.parts) for forward in cluster.forwards if is_decode_step(cluster, forward)]
    assert sizes.count(3) == len(sizes) == 7 * 3


# ---------------------------------------------------------------- views that hardly ever occur


def computed(account: KvAccount, instance: int, request_id: int, *, upto: int, **counters: object) -> Request:
    """A request with a prompt of 12 tokens whose first tokens are computed on one instance."""
    known = {"num_computed": upto, "num_scheduled": upto, "admission": request_id + 1}
    request = Request(
        id=request_id,
        prompt=(request_id,) * 12,
        params=SamplingParams(),
        seed=0,
        block_size=account.block_size,
        max_tokens=99,
        metrics=RequestMetrics(arrival_s=0.0),
        group=(instance,),
        residency=RESIDENT,
        **{**known, **counters},  # type: ignore[arg-type]
    )
    account.extend(request, (instance,) * request.blocks_for(upto))
    return request


def plan_for(spec: str, account: KvAccount, requests: Sequence[Request], busy: Sequence[int] = ()) -> Plan:
    running = Running(len(Instances.of(spec).instances))
    for request in requests:
        running.add(request)
    view = ClusterView(
        cluster=Instances.of(spec),
        max_num_batched_tokens=2048,
        max_num_seqs=128,
        waiting=[],
        startable=[],
        running=running,
        kv=account,
        busy=frozenset(busy),
        full=frozenset(),
        now_s=0.0,
    )
    return PrefillFirst(tuple(view.cluster.instances), NoOptions(), None).plan(view)


def test_no_request_decodes_next_to_a_prompt_that_lacks_a_block() -> None:
    """The prompt itself is preempted, since the other request was admitted first."""
    account = KvAccount([5], block_size=4)
    decoding, prompt = computed(account, 0, 0, upto=12, output=[1]), computed(account, 0, 1, upto=8)
    plan = plan_for("1", account, [decoding, prompt])
    assert (plan.preempted, plan.batches) == ((prompt,), ())


def test_busy_instances_wait_for_a_prompt_in_flight_that_lacks_a_block() -> None:
    account = KvAccount([2, 9, 9], block_size=4)
    prompt = computed(account, 0, 0, upto=8, num_computed=4)
    others = [computed(account, instance, instance, upto=12, output=[1]) for instance in (1, 2)]
    plan = plan_for("3", account, [prompt, *others], busy=(0, 1))
    assert not plan.preempted
    assert [[part.request for part in batch] for batch in plan.batches] == [[others[1]]]
