"""Random workloads on simulated clusters, and how they must end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cluster import VOCAB, Cluster, Setup
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.core.steps import MoveKV
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.profile import Prefill, Profile
from longspan.cost.profile_key import ProfileKey
from longspan.policy.facts import Facts

ALONE = ("chunked", "prefill-first", "decode-first")
"""Policies that keep each request on one instance."""
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
    cache_salt: str = ""


def machine(num_instances: int) -> Profile:
    """Short prompts are quicker on one instance, longer ones on two, three or four. Each exchange is best for some."""
    profile = Profile(
        profile_key=ProfileKey(model="m", dtype="d", device="d", tp=1, threads=1, kernel="k", machine="m")
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
            profile = profile.with_measured(times)
    return profile


MACHINES = {number: machine(number) for number in range(1, 5)}
TABLE = PartitionTable(
    tuple(
        Entry(model="m", members=members, length=length, fractions=fractions)
        for members, fractions in ((2, (0.7, 0.3)), (3, (0.5, 0.3, 0.2)), (4, (0.1, 0.2, 0.3, 0.4)))
        for length, fractions in ((20, fractions), (100, fractions[::-1]))
    )
)


@st.composite
def setups_of(draw: st.DrawFn, policy: str, num_instances: int, options: dict[str, str]) -> Setup:
    """A cluster of any kind on which that policy runs."""
    num_blocks, block_size = draw(st.integers(2, 12)), draw(st.sampled_from([1, 2, 4, 16]))
    most = min(150, (1 if policy in ALONE else num_instances) * num_blocks * block_size)
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
        pp=draw(st.sampled_from([1, 1, 1, 2, 3])),
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
        cache_salt=draw(st.sampled_from(["", "", "", "a", "b"])),
    )


def play(
    setup: Setup,
    work: list[Job],
    timeouts: random.Random | None = None,
    damaged: Callable[[MoveKV], tuple[int, ...]] = lambda _: (),
    poison: Collection[int] = (),
) -> Cluster:
    """Run a workload to its end. With `timeouts`, some polls end early. `damaged` returns the copies of a move that a
    disk cannot make. For `poison` tokens ranks compute NaN.
    """
    cluster = Cluster(setup)
    cluster.executor.damaged, cluster.executor.poison = damaged, poison
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
    prompt = (prompt or [1])[: cluster.engine.config.longest(cluster.engine._policy) - 1]
    params = SamplingParams(min_tokens=job.min_tokens, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos)
    return cluster.add(prompt, params, cache_salt=job.cache_salt)


def assert_lawful(cluster: Cluster) -> None:
    """Every request without an abort has all its tokens, and none was computed twice without need."""
    setup, poison = cluster.setup, cluster.executor.poison
    for request in cluster.requests:
        expected = cluster.expected_output(request)
        tokens = [*request.prompt, *expected[:-1]]
        non_finite = next((place for place, token in enumerate(tokens) if token in poison), None)
        if non_finite is not None and request.finish_reason != "abort":
            assert (request.finish_reason, request.error) == ("error", "non_finite")
            assert request.output == expected[: max(0, non_finite + 1 - len(request.prompt))]
            assert request.stop_reason and "NaN" in str(request.stop_reason)
        elif request.finish_reason == "abort":
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


def in_flight(cluster: Cluster, request: Request) -> bool:
    return any(part.request_id == request.id for f in cluster.executor.in_flight.values() for part in f.parts)


def finishes_lawfully(setups: st.SearchStrategy[Setup]) -> Callable[[], None]:
    """A test: any workload on any of these clusters ends as it must."""

    @settings(RANDOM_RUNS, max_examples=200)
    @given(setups, st.lists(jobs(), min_size=1, max_size=10), st.randoms(use_true_random=False))
    def test(setup: Setup, work: list[Job], timeouts: random.Random) -> None:
        assert_lawful(play(setup, work, timeouts))

    return test


def repeats(setups: st.SearchStrategy[Setup]) -> Callable[[], None]:
    """A test: the same workload on the same of these clusters takes the same steps."""

    @settings(RANDOM_RUNS, max_examples=25)
    @given(setups, st.lists(jobs(), min_size=1, max_size=6))
    def test(setup: Setup, work: list[Job]) -> None:
        assert play(setup, work).executor.steps == play(setup, work).executor.steps

    return test
