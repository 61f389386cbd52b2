"""`--tune-idle`: partitions of chains that are measured while no request runs, on simulated ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from fake_llm import run

from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.options import SchedulingArgs
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.partitions import search
from longspan.cost.profile_key import ProfileKey
from longspan.policy.registry import make_policy
from longspan.policy.runahead import Runahead
from longspan.profiling import idle
from longspan.profiling.idle import IdleTuner, tuner_of
from longspan.profiling.store import load_partitions, save_partitions
from longspan.sim.executor import SimExecutor, StepTiming, VirtualClock
from longspan.sim.experiment import Experiment
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment

LATER_S = 1e6
VOCAB_SIZE = 1000
KEY = ProfileKey(model="llama-3-8b", dtype="d", device="cpu", tp=1, threads=1, kernel="k", machine="m")
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@cache
def experiment(members: int) -> Experiment:
    scheduling = SchedulingArgs(policy="runahead", max_num_batched_tokens=16_384)
    return make_experiment("llama-3-8b", ClusterSpec(hardware="a100-sxm-80g", parallel=str(members)), scheduling)


class Ranks:
    """An engine on simulated ranks, whose policy has no partitions. `pieces` has the chains that were computed."""

    def __init__(self, members: int = 2, *, num_blocks: int = 1000, partition: str = "auto") -> None:
        made = experiment(members)
        facts = replace(made.facts, partitions=PartitionTable(), profile=None)
        options = {"threshold": "1000", "partition": partition}
        policy = make_policy("runahead", num_instances=members, options=options, facts=facts)
        assert isinstance(policy, Runahead)
        self.policy, self.clock, self.pieces = policy, VirtualClock(), list[tuple[int, ...]]()
        config = EngineConfig.of(made.scheduling, replace(made.cluster, num_blocks=(num_blocks,) * members), policy)
        executor = SimExecutor(clock=self.clock, vocab_size=VOCAB_SIZE, cost=made.cost, watch=self._watch)
        self.engine = Engine(policy=policy, executor=executor, clock=self.clock, config=config)

    def _watch(self, timing: StepTiming) -> None:
        self.pieces += [tuple(sum(map(len, runs)) for runs in part.runs) for part in timing.forward.parts]

    def add(self, num_tokens: int, seed: int = 0) -> Request:
        prompt = random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)
        return self.engine.add(prompt, ONE_TOKEN)

    def run(self) -> None:
        while self.engine.has_unfinished:
            self.engine.step()

    def ttft_s(self, num_tokens: int, seed: int = 0) -> float:
        request = self.add(num_tokens, seed)
        self.run()
        assert request.metrics.ttft_s is not None
        return request.metrics.ttft_s

    def tuner(self, max_model_len: int = 16_384) -> IdleTuner:
        return tuner_of(self.engine, self.policy, KEY, max_model_len, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    monkeypatch.setattr(idle, "_MAX_PROMPT_S", 10.0)


def tune(ranks: Ranks, tuner: IdleTuner) -> int:
    """Tune until nothing is left. Return the number of prompts."""
    number = 0
    while tuner.begin(LATER_S):
        ranks.run()
        number += 1
    return number


@pytest.mark.parametrize("members", [2, 3])
def test_the_partitions_are_the_quickest_and_are_used_at_once(members: int) -> None:
    ranks = Ranks(members)
    even_s = ranks.ttft_s(8192)
    tune(ranks, ranks.tuner())
    tuned_s = ranks.ttft_s(8192, seed=1)
    partition = ranks.pieces[-1]

    def timed_s(partition: tuple[int, ...]) -> float:
        other = Ranks(members)
        fractions = tuple(piece / 8192 for piece in partition)
        other.policy.cuts.add(Entry(model=other.policy.cuts.model, members=members, length=8192, fractions=fractions))
        return other.ttft_s(8192)

    assert partition == search(timed_s, 8192, members, 256)
    assert tuned_s == pytest.approx(timed_s(partition)) and tuned_s < even_s
    assert partition[0] > partition[-1]


def test_partitions_are_stored_and_only_missing_lengths_are_measured(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    with caplog.at_level("INFO", "longspan"):
        assert tune(ranks, ranks.tuner(4096)) > 0
    table = load_partitions(KEY, 256)
    assert table.lengths("llama-3-8b", 2) == (1024, 2048, 4095)
    assert "measured for prompts of these tokens: 1024, 2048, 4095" in caplog.text
    assert "partition of 2048 tokens: " in caplog.text
    caplog.clear()
    again = Ranks()
    with caplog.at_level("INFO", "longspan"):
        assert tune(again, again.tuner(4096)) == 0
        assert tune(again, again.tuner(16_384)) > 0
    assert "these tokens: no further length" in caplog.text
    assert "these tokens: 1024, 4096, 8192, 16383" in caplog.text, "the first length bounds the next times"


def test_a_length_far_above_the_known_ones_is_not_tried_if_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [Entry(model="llama-3-8b", members=2, length=n, fractions=(0.5, 0.5)) for n in (1024, 2048, 4096, 8192)]
    save_partitions(KEY, 256, PartitionTable(tuple(known)))
    monkeypatch.setattr(idle, "_MAX_PROMPT_S", 3 * Ranks().ttft_s(2048))
    other = Ranks()
    tune(other, other.tuner())
    assert max(map(sum, other.pieces)) == 1024


def test_a_request_stops_the_prompt_and_waits_for_no_more_than_its_step(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    alone_s, [even] = Ranks().ttft_s(8192), {(4096, 4096)}
    tuner = ranks.tuner()
    while ranks.pieces[-1:] in ([], [even]) or sum(ranks.pieces[-1]) != 8192:  # until other pieces are tried
        ranks.run()
        assert tuner.begin(LATER_S)
        ranks.engine.emit()
    tried = ranks.pieces[-1]
    assert ranks.engine.has_unfinished and tried != even
    with caplog.at_level("INFO", "longspan"):
        tuner.stop(LATER_S)
    ttft_s = ranks.ttft_s(8192, seed=1)
    assert ranks.pieces[-1] == even, "the table has no such length yet"
    assert ttft_s < alone_s + ranks_step_s(tried) + 1e-9
    assert "stopped" in caplog.text
    assert not tuner.begin(LATER_S + 9.0), "more requests may come"
    assert tuner.begin(LATER_S + 10.0), "the prompt is timed again"
    ranks.run()
    assert ranks.pieces[-1] == tried


def ranks_step_s(partition: tuple[int, ...]) -> float:
    """Return the seconds of a prompt alone with this partition."""
    ranks, length = Ranks(), sum(partition)
    fractions = tuple(piece / length for piece in partition)
    ranks.policy.cuts.add(Entry(model=ranks.policy.cuts.model, members=2, length=length, fractions=fractions))
    return ranks.ttft_s(length)


def test_a_request_that_comes_before_a_step_delays_nothing() -> None:
    ranks = Ranks()
    tuner = ranks.tuner()
    assert tuner.begin(LATER_S)
    tuner.stop(LATER_S)
    assert ranks.ttft_s(8192) == Ranks().ttft_s(8192)


def test_no_cached_block_is_evicted_and_no_block_is_added_to_the_cache() -> None:
    ranks = Ranks(num_blocks=80)
    ranks.ttft_s(8000)
    pools = [ranks.engine.kv.account.pool(instance) for instance in range(2)]
    cached = [pool.num_cached for pool in pools]
    num_queries = ranks.engine.counts.num_prefix_queries
    assert sum(cached) > 0
    tune(ranks, ranks.tuner())
    assert [pool.num_cached for pool in pools] == cached
    assert ranks.engine.counts.num_prefix_queries == num_queries
    again = ranks.add(8000)
    ranks.run()
    assert again.metrics.num_cached_tokens > 7000


def test_a_full_cache_is_said_once_and_longer_prompts_than_a_pool_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks(num_blocks=20)
    ranks.ttft_s(5000)
    with caplog.at_level("INFO", "longspan"):
        tuner = ranks.tuner()
        assert not tuner.begin(LATER_S) and not tuner.begin(LATER_S)
    assert "these tokens: 1024, 2048, 4096" in caplog.messages[0]
    assert caplog.messages[1:] == ["partitions of 1024 tokens are not measured while cached KV leaves too few blocks"]


def test_prompts_that_take_too_long_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(idle, "_MAX_PROMPT_S", 3 * Ranks().ttft_s(2048))
    ranks = Ranks()
    with caplog.at_level("INFO", "longspan"):
        tune(ranks, ranks.tuner())
    assert load_partitions(KEY, 256).lengths("llama-3-8b", 2) == (1024, 2048)
    assert "from 4096 tokens on are not measured" in caplog.text


@pytest.mark.parametrize("partition", ["even"])
def test_given_pieces_are_not_tuned(partition: str) -> None:
    assert not Ranks(partition=partition).policy.cuts.is_tunable and Ranks().policy.cuts.is_tunable


@pytest.mark.parametrize(
    "arguments",
    [
        ("--parallel", "2"),
        ("--policy", "context", "--parallel", "2"),
        ("--policy", "runahead", "--parallel", "2", "-o", "partition=even"),
        ("--policy", "runahead", "--parallel", "1"),
    ],
)
def test_it_needs_chains_to_tune(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "smollm2-135m", "--tune-idle", *arguments) == 2
    assert "--tune-idle needs --policy runahead" in capsys.readouterr().err
