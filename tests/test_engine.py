"""The engine loop over a simulated cluster; every step is checked by `cluster.CheckedExecutor`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import pytest
from cluster import VOCAB, Cluster, Setup, invented_token
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.core.protocols import Limits
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Forward, Free
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.profile import Prefill, Profile, Subject
from longspan.policy.choosing import Facts

RANDOM_RUNS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request of a random workload. It is added and aborted at turns of the engine's loop, and may repeat another's
    tokens: those of the prompt and answer of `after`, as far as they are known.
    """

    turn: int
    family: int
    num_shared: int
    num_own: int
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    after: int | None
    abort_turn: int | None


def machine(num_instances: int) -> Profile:
    """Short prompts are quicker on one instance, longer ones on two, three or four; every exchange is best for some."""
    profile = Profile(
        subject=Subject(model="m", dtype="d", device="d", tp=1, threads=1, kernel="k", machine="m"),
    )
    terms = {"local": (0, 2, 0, 0.0), "ring_kv": (60, 2, 1e-2, 0.0), "ring_q": (60, 2.4, 0, 0.0)}
    terms |= {"alltoall": (80, 1.6, 5e-3, 0.0), "gather_kv": (60, 1.8, 2e-2, 1e-2), "chain": (60, 2, 0, 0.0)}
    sizes = range(1, num_instances + 1)
    for (exchange, (a, b, c, d)), members, new, cached in itertools.product(
        terms.items(), sizes, (1, 10, 100), (0, 50)
    ):
        if (exchange == "local") == (members == 1):
            seconds = a * members / 2 + (b * new + c * cached * new + d * new * new) * 2 / members
            times = Prefill(
                members=members,
                exchange=exchange,  # type: ignore[arg-type]  # a name of one
                new_tokens=new,
                cached_tokens=cached,
                seconds=(seconds,),
            )
            profile = profile.with_prefill(times)
    return profile


MACHINES = {number: machine(number) for number in range(1, 5)}
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
TABLE = PartitionTable(
    tuple(
        Entry(model="m", members=members, length=length, fractions=fractions)
        for members, fractions in ((2, (0.7, 0.3)), (3, (0.5, 0.3, 0.2)), (4, (0.1, 0.2, 0.3, 0.4)))
        for length, fractions in ((20, fractions), (100, fractions[::-1]))
    )
)


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


@st.composite
def setups_of(draw: st.DrawFn, policy: str, num_instances: int, options: dict[str, str]) -> Setup:
    """A cluster of any kind on which that policy runs."""
    num_blocks, block_size = draw(st.integers(2, 12)), draw(st.sampled_from([1, 2, 4, 16]))
    most = min(150, (1 if policy == "chunked" else num_instances) * num_blocks * block_size)
    return Setup(
        num_instances=num_instances,
        num_blocks=num_blocks,
        block_size=block_size,
        policy=policy,
        options=options,
        max_model_len=draw(st.integers(2, most)) if draw(st.booleans()) else most,
        max_num_batched_tokens=draw(st.integers(1, 80)),
        max_num_seqs=draw(st.integers(1, 6)),
        eos_token_ids=tuple(range(draw(st.sampled_from([0, 0, 1, 6])))),
        rope_switch_length=draw(st.none() | st.integers(1, most)),
        prefix_caching=draw(st.booleans()),
        max_steps_in_flight=draw(st.sampled_from([1, 2, 2])),
        uneven=draw(st.integers(0, 3)),
        facts=Facts(profile=draw(st.sampled_from([None, MACHINES[num_instances]])), partitions=TABLE, model="m"),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    max_tokens = draw(st.none() | st.integers(1, 30))
    turn = draw(st.integers(0, 30))
    return Job(
        turn=turn,
        family=draw(st.integers(0, 1)),
        num_shared=draw(st.integers(0, 80)),
        num_own=draw(st.integers(0, 60)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, 5)) if (max_tokens or 5) >= 5 else 0,
        ignore_eos=draw(st.booleans()),
        after=draw(st.none() | st.integers(0, 5)),
        abort_turn=draw(st.none() | st.integers(turn, turn + 30)),
    )


def play(setup: Setup, work: list[Job], timeouts: random.Random | None = None) -> Cluster:
    """Runs a workload to its end. With `timeouts`, some polls end before anything is done."""
    cluster = Cluster(setup)
    due = sorted(work, key=lambda job: job.turn)
    aborts: dict[int, list[Request]] = {}
    for turn in range(20_000):
        while due and due[0].turn <= turn:
            job = due.pop(0)
            request = add(cluster, job)
            if job.abort_turn is not None:
                aborts.setdefault(job.abort_turn, []).append(request)
        for request in aborts.pop(turn, []):
            cluster.engine.finish(request, "abort")
        if not (due or cluster.engine.has_unfinished):
            break
        cluster.step(0.0 if timeouts is not None and timeouts.random() < 0.3 else None)
    else:
        raise AssertionError("the workload does not end")
    cluster.assert_at_rest()
    return cluster


def add(cluster: Cluster, job: Job) -> Request:
    prompt = [job.family * 7 + position % 5 for position in range(job.num_shared)]
    if job.after is not None and job.after < len(cluster.requests):
        before = cluster.requests[job.after]
        prompt = [*before.prompt, *before.output]
    prompt += [(len(cluster.requests) * 11 + position) % VOCAB for position in range(job.num_own)]
    prompt = (prompt or [1])[: cluster.engine.config.max_model_len - 1]
    params = SamplingParams(min_tokens=job.min_tokens, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos)
    return cluster.add(prompt, params)


@RANDOM_RUNS
@given(setups(), st.lists(jobs(), min_size=1, max_size=10), st.randoms(use_true_random=False))
def test_any_workload_finishes_lawfully(setup: Setup, work: list[Job], timeouts: random.Random) -> None:
    assert_lawful(play(setup, work, timeouts))


def assert_lawful(cluster: Cluster) -> None:
    """Every request that nobody aborted has all its tokens, and none was computed twice without need."""
    setup = cluster.setup
    for request in cluster.requests:
        expected = cluster.expected_output(request)
        if request.finish_reason == "abort":
            assert request.output == expected[: len(request.output)]
        else:
            assert request.output == expected
            stopped = expected[-1] in setup.eos_token_ids and not request.params.ignore_eos
            assert request.finish_reason == ("stop" if stopped else "length")
            assert len(request.metrics.tbt_s) == len(request.output) - 1
            metrics = request.metrics
            if metrics.num_preemptions == 0 and setup.rope_switch_length is None:
                overrun = metrics.num_cached_tokens + metrics.num_computed_tokens - (request.num_tokens - 1)
                assert overrun in ((0, 1) if stopped and setup.max_steps_in_flight > 1 else (0,))


@settings(RANDOM_RUNS, max_examples=25)
@given(setups(), st.lists(jobs(), min_size=1, max_size=6))
def test_the_same_input_gives_the_same_steps(setup: Setup, work: list[Job]) -> None:
    assert play(setup, work).executor.steps == play(setup, work).executor.steps


@pytest.mark.parametrize("num_instances", [1, 2, 3])
def test_preemption_changes_no_token(num_instances: int) -> None:
    """Little room: requests that grow at the same time must give way to each other."""
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
    assert (first.num_preemptions, first.num_computed_tokens) == (0, 8 + 24 - 1), "who came first gives way to nobody"


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
    """Two of three instances were quickest for its prompt; nobody else is there to make room."""
    facts = Facts(profile=MACHINES[3])
    cluster = Cluster(Setup(num_instances=3, num_blocks=4, options={"rotate": rotate}, facts=facts))
    request = cluster.add(range(40), max_tokens=130)
    cluster.run()
    assert request.output == cluster.expected_output(request)
    assert [sorted(part.group) for part in cluster.parts_of(request)][::129] == [[0, 1], [0, 1, 2]]


def test_a_prefix_that_fills_one_instance_leaves_room_on_the_others() -> None:
    cluster = Cluster(Setup(num_instances=2, num_blocks=4, options={"threshold": "70"}))
    cluster.add(range(64), max_tokens=1)
    cluster.run()
    request = cluster.add(range(84), max_tokens=2)
    cluster.run()
    assert request.metrics.num_cached_tokens == 64
    assert request.metrics.kv_tokens_per_instance == [64, 20]


# ---------------------------------------------------------------- endings


def test_endings() -> None:
    """End-of-sequence tokens end a request at `min_tokens` or later unless ignored; so do both limits of length."""
    eos = tuple(range(VOCAB // 2))
    cluster = Cluster(Setup(eos_token_ids=eos, max_model_len=40))
    by_eos = [cluster.add([number], max_tokens=30) for number in range(20)]
    late = [cluster.add([number], max_tokens=30, min_tokens=10) for number in range(20)]
    ignoring = [cluster.add([number], max_tokens=30, ignore_eos=True) for number in range(5)]
    by_context = cluster.add(range(35), max_tokens=30, ignore_eos=True)
    cluster.run()
    for request in by_eos:
        assert request.finish_reason == "stop"
        assert [token in eos for token in request.output] == [False] * (len(request.output) - 1) + [True]
    for request in late:
        assert len(request.output) > 10
        assert [token in eos for token in request.output] == [False] * (len(request.output) - 1) + [True]
    assert all((len(r.output), r.finish_reason) == (30, "length") for r in ignoring)
    assert (by_context.num_tokens, by_context.finish_reason) == (40, "length")
    parts = [part for part in cluster.parts_of(late[0]) if part.sample is not None]
    assert parts[0].sampling is not None and parts[0].sampling.banned == eos
    assert [part.sample.below_minimum for part in parts] == [True] * 10 + [False] * (len(parts) - 10)


def test_no_limit_of_tokens_means_up_to_the_context() -> None:
    cluster = Cluster(Setup(max_model_len=50))
    request = cluster.add(range(20), SamplingParams(max_tokens=None))
    cluster.run()
    assert request.num_tokens == 50


@pytest.mark.parametrize(("length", "message"), [(0, "the prompt is empty"), (50, "has 50 tokens.*at most 50")])
def test_prompts_that_cannot_be_served_are_refused(length: int, message: str) -> None:
    cluster = Cluster(Setup(max_model_len=50))
    with pytest.raises(ValueError, match=message):
        cluster.engine.add(tuple(range(length)), cluster.add([1]).params)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs"])
def test_limits_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, but 0 given"):
        Limits(**{name: 0})


def in_flight(cluster: Cluster, request: Request) -> bool:
    return any(part.request_id == request.id for f in cluster.executor.in_flight.values() for part in f.parts)


def test_an_abort_in_flight_frees_blocks_when_the_step_is_done() -> None:
    cluster = Cluster(Setup(max_num_batched_tokens=32))
    request = cluster.add(range(100), max_tokens=5)
    cluster.step(0.0)
    pool = cluster.engine.account.pool(0)
    held = pool.num_blocks - pool.num_free
    assert in_flight(cluster, request) and held == 4
    cluster.engine.finish(request, "abort")
    assert pool.num_blocks - pool.num_free == held, "a step in flight names its blocks"
    assert cluster.engine.has_unfinished
    assert cluster.step() == []
    assert pool.num_blocks - pool.num_free == held, "another step in flight names its blocks"
    assert cluster.step() == []
    cluster.assert_at_rest()
    assert request.finish_reason == "abort"
    assert isinstance(cluster.executor.steps[-1], Free)
    after = cluster.add(range(100), max_tokens=1)
    cluster.run()
    assert after.metrics.num_cached_tokens == 64, "what was computed can be used again"


def test_an_abort_while_waiting_or_between_steps_is_at_once() -> None:
    cluster = Cluster(Setup(max_num_seqs=1, max_steps_in_flight=1))
    running, waiting = cluster.add(range(20), max_tokens=5), cluster.add(range(20), max_tokens=5)
    cluster.step()
    for request in (waiting, running):
        cluster.engine.finish(request, "abort")
    cluster.engine.finish(running, "stop")
    cluster.assert_at_rest()
    assert (running.finish_reason, len(running.output)) == ("abort", 1), "the first reason stays"
    assert [type(step) for step in cluster.executor.steps] == [Forward, Free]


def test_a_token_sampled_for_an_aborted_request_is_dropped() -> None:
    cluster = Cluster(Setup())
    gone, stays = cluster.add([1], max_tokens=5), cluster.add([2], max_tokens=5)
    cluster.step(0.0)
    cluster.engine.finish(gone, "abort")
    assert cluster.step() == [stays]
    assert gone.output == []
    cluster.run()


# ---------------------------------------------------------------- what is computed once, and what again


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
    pool = cluster.engine.account.pool(0)
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


# ---------------------------------------------------------------- long and short side by side


def test_short_requests_stay_on_one_instance_and_long_ones_are_dealt() -> None:
    cluster = Cluster(Setup(num_instances=3, options={"threshold": "100"}))
    short = [cluster.add([number] * 100, max_tokens=3) for number in range(9)]
    long = [cluster.add([number] * 101, max_tokens=3) for number in range(2)]
    cluster.run()
    homes = [{part.group for part in cluster.parts_of(request)} for request in short]
    assert all(len(groups) == 1 for groups in homes)
    assert sorted(group for groups in homes for group in groups) == sorted([(0,), (1,), (2,)] * 3), "spread evenly"
    assert all({part.group for part in cluster.parts_of(request)} == {(0, 1, 2)} for request in long)
    assert {part.exchange for request in long for part in cluster.parts_of(request)} == {"ring_kv", "ring_q"}


def test_instances_without_common_requests_step_on_their_own() -> None:
    """The shorter steps of one instance do not wait for the longer ones of the other."""
    cluster = Cluster(Setup(num_instances=2))
    cluster.add([1] * 900, max_tokens=1)
    other = cluster.add([2] * 10, max_tokens=20)
    cluster.run()
    assert all(len(forward.instances) == 1 for forward in cluster.forwards)
    prefill, *decodes = cluster.parts_of(other)
    assert prefill.group == (1,)
    assert median(other.metrics.tbt_s) < 0.02
    assert other.metrics.ttft_s is not None and other.metrics.ttft_s < 0.02
    assert len(decodes) == 19


def long_and_short(max_num_batched_tokens: int) -> Iterator[tuple[Cluster, Request, list[Request]]]:
    for late in (False, True):
        setup = Setup(
            num_instances=2,
            options={"threshold": "100"},
            num_blocks=400,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        cluster = Cluster(setup)
        if late:
            long = cluster.add([1] * 5000, max_tokens=5)
            cluster.step()
            short = [cluster.add([2 + number] * 40, max_tokens=8) for number in range(4)]
        else:
            short = [cluster.add([2 + number] * 40, max_tokens=8) for number in range(4)]
            cluster.step()
            long = cluster.add([1] * 5000, max_tokens=5)
        yield cluster, long, short


@pytest.mark.parametrize("max_num_batched_tokens", [64, 100, 256])
def test_short_requests_pass_a_long_prefill(max_num_batched_tokens: int) -> None:
    for cluster, long, short in long_and_short(max_num_batched_tokens):
        cluster.run()
        assert long.metrics.finished_s is not None and long.metrics.ttft_s is not None
        first_token_s = long.metrics.arrival_s + long.metrics.ttft_s
        assert all(r.metrics.finished_s is not None and r.metrics.finished_s < first_token_s for r in short)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 100, 256])
def test_a_long_prefill_moves_on_beside_a_stream_of_short_requests(max_num_batched_tokens: int) -> None:
    """Short requests keep coming; every step with the long one's group still moves it on."""
    for cluster, long, _ in long_and_short(max_num_batched_tokens):
        turns = 0
        while long.metrics.ttft_s is None:
            cluster.add([turns % VOCAB] * 30, max_tokens=4)
            cluster.step()
            turns += 1
            assert turns < 3 * 5000 / max_num_batched_tokens + 20, "the long prompt starves"
        cluster.run()


def test_a_long_prompt_waits_for_idle_instances_no_longer_than_one_step() -> None:
    cluster = Cluster(Setup(num_instances=2, options={"threshold": "100"}))
    for number in range(3):
        cluster.add([number] * 50, max_tokens=100)
    for _ in range(7):
        cluster.step()
    assert cluster.executor.in_flight, "the instances are out of step"
    long = cluster.add(range(101), max_tokens=2)
    for _ in range(3):
        cluster.step()
    assert cluster.parts_of(long)
    cluster.run()


# ---------------------------------------------------------------- where KV lies


def held_per_instance(cluster: Cluster, request: Request) -> list[int]:
    slots = cluster.executor.live[request.id].slots.of[: request.num_computed]
    counts = Counter(ref.instance for ref, _ in slots)
    return [counts[instance] for instance in range(cluster.setup.num_instances)]


def spreads_of_2000_tokens(cluster: Cluster, request: Request) -> list[int]:
    """After each step of a long decode, by how many tokens the fullest and the emptiest instance differ."""
    spreads = []
    while len(request.output) < 2000:
        cluster.step()
        held = held_per_instance(cluster, request)
        spreads.append(max(held) - min(held))
    assert sum(held) == len(request.prompt) + 1999
    return spreads


@pytest.mark.parametrize("num_instances", [2, 3, 4])
def test_the_home_of_a_long_decode_rotates(num_instances: int) -> None:
    cluster = Cluster(Setup(num_instances=num_instances, options={"threshold": "50"}))
    request = cluster.add(range(100), max_tokens=2001)
    spreads = spreads_of_2000_tokens(cluster, request)
    assert spreads[0] <= 2 * 16, "the prompt's own deal"
    assert max(spreads[16 * num_instances :]) <= 16, "one block at most from the first round on"
    decodes = [part for part in cluster.parts_of(request) if part.start >= 100]
    assert {part.exchange for part in decodes} == {"ring_q"}
    assert len({part.sample.instance for part in decodes if part.sample is not None}) == num_instances
    cluster.run()


@pytest.mark.parametrize("num_instances", [2, 3, 4])
@pytest.mark.parametrize("sharing", [{}, {"exchange": "chain", "home": "computed"}], ids=["auto", "chain"])
def test_a_decode_that_rotates_by_token_is_even_to_the_token(num_instances: int, sharing: dict[str, str]) -> None:
    options = {"threshold": "50", "rotate": "token", **sharing}
    cluster = Cluster(Setup(num_instances=num_instances, options=options))
    request = cluster.add(range(100), max_tokens=2001)
    spreads = spreads_of_2000_tokens(cluster, request)
    assert 1 < spreads[0] <= 2 * 16, "the prompt's own deal"
    assert max(spreads[2 * 16 * num_instances :]) <= 1
    homes = Counter(part.sample.instance for part in cluster.parts_of(request)[1:] if part.sample is not None)
    assert max(homes.values()) - min(homes.values()) <= 2 * 16
    cluster.run()


def test_what_rotates_by_token_keeps_its_prompt_for_the_next_turn() -> None:
    cluster = Cluster(Setup(num_instances=3, options={"threshold": "50", "rotate": "token"}))
    first = cluster.add(range(60), max_tokens=50)
    cluster.run()
    second = cluster.add([*first.prompt, *first.output, 1, 2, 3], max_tokens=5)
    cluster.run()
    third = cluster.add([*second.prompt, *second.output], max_tokens=5)
    cluster.run()
    assert second.metrics.num_cached_tokens == 60, "the tail of the prompt, too, whose block was written on"
    assert third.metrics.num_cached_tokens == len(second.prompt)


@pytest.mark.parametrize("num_instances", [2, 3])
def test_what_rotates_by_token_gives_way_and_ends_without_a_trace(num_instances: int) -> None:
    """Requests that grow at the same time with little room, two of which are aborted, in flight."""
    options = {"threshold": "20", "rotate": "token"}
    cluster = Cluster(Setup(num_instances=num_instances, num_blocks=12, block_size=8, options=options))
    requests = [cluster.add([number] * (21 + number), max_tokens=60) for number in range(3 * num_instances)]
    short = [cluster.add([number] * 5, max_tokens=40) for number in range(10, 14)]
    gone: list[Request] = []
    while cluster.engine.has_unfinished:
        cluster.step()
        decoding = [r for r in requests if r.rotation is not None and len(r.output) > 15 and r not in gone]
        if len(gone) < 2 and decoding:
            cluster.step(0.0)
            assert in_flight(cluster, decoding[-1])
            gone.append(decoding[-1])
            cluster.engine.finish(gone[-1], "abort")
    cluster.assert_at_rest()
    assert len(gone) == 2
    assert requests[0].metrics.num_preemptions == 0, "who came first gives way to nobody"
    rotations = [{part.rotation for part in cluster.parts_of(r)} - {None} for r in requests]
    assert any(len(own) > 1 for own in rotations), "another one after a preemption"
    for request in (*requests, *short):
        expected = cluster.expected_output(request)
        assert request.output == (expected[: len(request.output)] if request in gone else expected)


def test_what_rotates_by_token_waits_for_those_before_it() -> None:
    """Its home is full of an older request's blocks: to compute all again, and again, would not help."""
    options = {"threshold": "50", "rotate": "token"}
    cluster = Cluster(Setup(num_instances=2, num_blocks=4, options=options))
    older, long = cluster.add([1] * 33, max_tokens=15), cluster.add(range(70), max_tokens=20)
    cluster.run()
    assert older.metrics.finished_s is not None and long.metrics.finished_s is not None
    assert older.metrics.finished_s < long.metrics.finished_s
    assert max(long.metrics.tbt_s) > 5 * median(long.metrics.tbt_s), "it has waited"
    assert (older.metrics.num_preemptions, long.metrics.num_preemptions) == (0, 0)


@settings(RANDOM_RUNS, max_examples=60)
@given(st.integers(2, 4), st.integers(101, 1500), st.integers(16, 400), st.sampled_from([1, 4, 16]), st.booleans())
def test_a_dealt_prompt_lies_evenly(num_instances: int, length: int, tokens: int, size: int, alone: bool) -> None:
    """Over all chunks together, whatever their lengths: KV differs by two blocks at most."""
    cluster = Cluster(
        Setup(
            num_instances=num_instances,
            num_blocks=4096 // size,
            block_size=size,
            options={"threshold": "100"},
            max_num_batched_tokens=tokens,
        )
    )
    request = cluster.add([position % VOCAB for position in range(length)])
    if not alone:
        cluster.add([1] * 20, max_tokens=30)
    cluster.run()
    held = request.metrics.kv_tokens_per_instance
    assert sum(held) == length
    blocks = [-(-tokens // size) for tokens in held]
    assert max(blocks) - min(blocks) <= 2


def test_chunks_of_a_dealt_prompt_are_even_work() -> None:
    cluster = Cluster(Setup(num_instances=4, max_num_batched_tokens=128, options={"threshold": "100"}))
    request = cluster.add([1] * 2048)
    cluster.run()
    chunks = [part for part in cluster.parts_of(request) if part.start < 2048]
    assert len(chunks) == 4
    for part in chunks:
        work = [sum(p + 1 for run in runs for p in run.positions) for runs in part.runs]
        assert max(work) == min(work)
    assert request.metrics.kv_tokens_per_instance == [512] * 4


def test_a_record_of_the_seed_goes_with_every_admission() -> None:
    cluster = Cluster(Setup(num_blocks=12, block_size=4))
    named = cluster.add([1] * 9, max_tokens=20, seed=17)
    drawn = [cluster.add([2] * 9, max_tokens=20) for _ in range(3)]
    cluster.run()
    again = Cluster(replace(cluster.setup, num_blocks=200))
    again.add([1], max_tokens=1)
    records = [[part.sampling for part in cluster.parts_of(r) if part.sampling is not None] for r in (named, *drawn)]
    seeds = [{record.seed for record in own} for own in records]
    assert seeds[0] == {17}
    assert all(len(own) == 1 for own in seeds) and len(set().union(*seeds)) == 4
    assert sum(request.metrics.num_preemptions for request in cluster.requests) > 0
    assert [len(own) for own in records] == [1 + r.metrics.num_preemptions for r in (named, *drawn)]


def test_the_next_step_is_there_before_the_present_one_ends() -> None:
    """With two steps in flight an instance never waits for the controller until the last token."""
    cluster = Cluster(Setup(max_num_batched_tokens=64))
    cluster.add(range(200), max_tokens=20)
    while cluster.engine.has_unfinished:
        cluster.step(0.0)
        assert len(cluster.executor.in_flight) == min(2, 23 - len(cluster.forwards) + len(cluster.executor.in_flight))
        cluster.step()
    assert len(cluster.forwards) == 4 + 19


def test_tokens_after_the_end_are_thrown_away() -> None:
    """The step after an end-of-sequence token was under way; nobody sees what it sampled, and its KV is found again."""
    eos = tuple(range(0, VOCAB, 7))
    cluster = Cluster(Setup(eos_token_ids=eos, block_size=4))
    requests = [cluster.add([number] * 9, max_tokens=40) for number in range(8)]
    cluster.run()
    assert all(r.output == cluster.expected_output(r) and r.output[-1] in eos for r in requests)
    overruns = [len(cluster.parts_of(r)) - len(r.output) for r in requests]
    assert set(overruns) <= {0, 1} and 1 in overruns
    ended = requests[overruns.index(1)]
    again = cluster.add([*ended.prompt, *ended.output, 1, 2], max_tokens=1)
    cluster.run()
    assert again.metrics.num_cached_tokens == len(ended.prompt) + len(ended.output)


def test_stop_tokens_end_a_request_after_its_minimum() -> None:
    stops = list(range(0, VOCAB, 5))
    cluster = Cluster(Setup(eos_token_ids=(1,)))
    early = [cluster.add([n], max_tokens=30, ignore_eos=True, stop_token_ids=stops) for n in range(12)]
    late = [cluster.add([n], max_tokens=60, ignore_eos=True, min_tokens=9, stop_token_ids=stops) for n in range(12)]
    cluster.run()
    for request in (*early, *late):
        assert request.output == cluster.expected_output(request)
        if request.finish_reason == "stop":
            assert request.stop_reason == request.output[-1] in stops
    assert {r.finish_reason for r in early} >= {"stop"} and all(len(r.output) > 9 for r in late)


@pytest.mark.parametrize("num_instances", [1, 2])
def test_choices_share_the_prompt(num_instances: int) -> None:
    """The others wait until the first has computed the prompt, and recompute no full block of it."""
    cluster = Cluster(Setup(num_instances=num_instances, max_num_batched_tokens=50, options={}))
    params = SamplingParams(n=3, temperature=1.0, max_tokens=5)
    first = cluster.add(range(210), params)
    others = [cluster.follow(first, choice) for choice in (1, 2)]
    cluster.run()
    assert [r.choice for r in (first, *others)] == [0, 1, 2]
    assert {r.seed for r in others} == {first.seed}
    assert all(r.metrics.num_cached_tokens == 210 // 16 * 16 for r in others)
    records = [part.sampling.choice for r in (first, *others) for part in cluster.parts_of(r)[:1] if part.sampling]
    assert records == [0, 1, 2]


def test_choices_do_not_wait_for_one_that_was_aborted() -> None:
    cluster = Cluster(Setup(max_num_batched_tokens=50))
    first = cluster.add(range(210), SamplingParams(n=2, temperature=1.0, max_tokens=5))
    other = cluster.follow(first, 1)
    cluster.step()
    cluster.engine.finish(first, "abort")
    cluster.run()
    assert other.output == cluster.expected_output(other)


def test_ranks_learn_every_output_token_of_a_request_with_penalties() -> None:
    """In order, once per admission, and in time: whoever samples knows all but the token that it computes itself."""
    cluster = Cluster(Setup(num_instances=2, num_blocks=6, block_size=4, options={"threshold": "12"}))
    requests = [cluster.add([n] * 13, max_tokens=14, repetition_penalty=1.5) for n in range(4)]
    plain = cluster.add([9] * 5, max_tokens=9)
    cluster.run()
    assert any(r.metrics.num_preemptions for r in requests)
    for request in requests:
        told: list[int] = []
        for part in cluster.parts_of(request):
            if part.sampling is not None:
                told = []
                assert part.sampling.prompt == tuple(set(request.prompt))
            assert part.first_output == len(told)
            told += part.new_output
            assert told == request.output[: len(told)]
            if part.sample is not None:
                known = part.sample.position - len(request.prompt) - (part.unknown_on is not None)
                assert len(told) == known
    assert all(part.new_output == () for part in cluster.parts_of(plain))


def test_a_step_that_is_done_early_waits_for_the_one_before() -> None:
    """Instance 0 goes on to the short request's next token while instance 1 still works on a step of both."""
    for uneven in range(1, 40):
        cluster = Cluster(Setup(num_instances=2, num_blocks=64, options={"threshold": "50"}, uneven=uneven))
        short = cluster.add(tuple(range(10)), SamplingParams(max_tokens=6, ignore_eos=True))
        cluster.engine.step()
        cluster.add(tuple(range(100)), SamplingParams(max_tokens=1, ignore_eos=True))
        cluster.run()
        assert short.output == [invented_token(short, position, ()) for position in range(10, 16)]
