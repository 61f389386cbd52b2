"""KV-Runahead's policy on a simulated cluster: the pieces of a prompt, and refused options."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Setup
from engines import ThreadLLM
from msgspec import structs
from oracle import Oracle, assert_exact
from refusals import refused
from test_profile import SUBJECT, prefill
from tiny_models import make_tiny

from longspan.core.exchange import CHAIN
from longspan.core.options import SchedulingArgs
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Forward
from longspan.cost.architecture import Architecture
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.precision import Precision
from longspan.cost.profile import Decode, Profile, profiled_prompts
from longspan.cost.shape import ModelShape
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.profiling.store import save_partitions
from longspan.sim.executor import SimExecutor
from longspan.sim.resolve import measured_experiment
from longspan.sim.spec import ClusterSpec, Faults
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload

TABLE = PartitionTable(
    (
        Entry(model="m", members=2, length=1600, fractions=(0.75, 0.25)),
        Entry(model="m", members=2, length=3200, fractions=(0.5, 0.5)),
        Entry(model="other", members=2, length=2000, fractions=(0.1, 0.9)),
        Entry(model="m", members=3, length=2000, fractions=(0.2, 0.2, 0.6)),
    )
)


def cluster(table: PartitionTable = TABLE, *, max_num_batched_tokens: int = 10_000, **options: str) -> Cluster:
    return Cluster(
        Setup(
            num_instances=2,
            num_blocks=4096,
            policy="runahead",
            options=options,
            facts=Facts(model="m", partitions=table),
            max_num_batched_tokens=max_num_batched_tokens,
        )
    )


def pieces(running: Cluster, length: int) -> list[int]:
    """How many tokens of a prompt each instance computes, in the order of the prompt."""
    request: Request = running.add([length % 7, *range(length - 1)], max_tokens=3)
    running.run()
    assert request.output == running.expected_output(request)
    parts = running.parts_of(request)
    assert (parts[0].exchange, parts[-1].group) == (CHAIN, (1,)), "the last one decodes alone"
    assert parts[0].runs[0][0].start == 0
    return [sum(map(len, runs)) for runs in parts[0].runs]


def test_partitions_of_every_kind() -> None:
    assert pieces(cluster(partition="even"), 1600) == [800, 800]
    assert pieces(cluster(partition="searched"), 1600) == [1200, 400]
    predicted = cluster(partition="predicted")
    assert pieces(predicted, 1600) == [1200, 400]
    assert pieces(predicted, 2400) == [1504, 896], "five eighths, in whole blocks"
    assert pieces(predicted, 4800) == [2400, 2400]


def test_searched_partitions_are_the_default() -> None:
    assert pieces(cluster(), 1600) == [1200, 400]
    assert pieces(cluster(PartitionTable()), 1600) == [800, 800]


@pytest.mark.parametrize("kind", ["searched", "predicted"])
def test_a_chunk_is_partitioned_by_its_length_and_cached_tokens(kind: str) -> None:
    """A prompt of 3,200 tokens would be cut in halves, but with 800 tokens per step it is several chains."""
    running = cluster(partition=kind, max_num_batched_tokens=800)
    request = running.add(range(3200), max_tokens=1)
    running.run()
    first, second, *_ = running.parts_of(request)
    assert [sum(map(len, runs)) for runs in first.runs] == [800, 256], "three quarters, as of 1,600 tokens alone"
    new = second.stop - second.start
    expected = 0.5 + 0.25 * 1600 / (1600 + second.start)  # of the 1,600 tokens of a step
    assert len(second.runs[0][0]) == pytest.approx(new * expected, abs=16)


def test_pieces_behind_a_cached_prefix_are_more_even() -> None:
    running = cluster(partition="predicted")
    request = running.add(range(1600), max_tokens=1)
    running.run()
    request = running.add([*range(1600), *range(7, 1607)], max_tokens=1)
    running.run()
    [part] = running.parts_of(request)
    assert (part.start, part.stop) == (1600, 3200)
    assert [sum(map(len, runs)) for runs in part.runs] == [1008, 592], "half way from even to three quarters"


def test_short_prompts_stay_on_one_instance() -> None:
    running = cluster(partition="searched")
    request = running.add(range(100), max_tokens=3)
    running.run()
    assert [len(part.group) for part in running.parts_of(request)] == [1, 1, 1]


def test_a_length_without_a_searched_partition_is_refused() -> None:
    running = cluster(partition="searched")
    with pytest.raises(
        ValueError, match=r"none for 1,601 tokens on 2 instances, only for 1,600, 3,200: .*--partitions"
    ):
        running.add(range(1601), max_tokens=3)
    running.assert_at_rest()


@pytest.mark.parametrize("kind", ["searched", "predicted"])
def test_without_a_table_the_remedy_is_named(kind: str) -> None:
    facts = Facts(model="m", partitions=TABLE)
    with pytest.raises(ValueError, match=rf"partition={kind} needs .* 4 instances .*longspan profile --partitions"):
        make_policy("runahead", num_instances=4, options={"partition": kind}, facts=facts)
    make_policy("runahead", num_instances=1, options={"partition": kind})


def test_kv_on_its_computing_member_can_rotate_by_token() -> None:
    running = cluster(home="computed", rotate="token")
    request = running.add(range(1600), max_tokens=1000)
    running.run()
    first, *decodes = running.parts_of(request)
    assert (first.exchange, request.metrics.kv_tokens_per_instance) == (CHAIN, [1200, 400])
    owners = [part.sample.instance for part in decodes if part.sample is not None]
    assert owners == [1] * 800 + [0, 1] * 99 + [0], "the last one had the shorter piece"


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"exchange": "ring_kv"}, "exchange"),
        ({"dense": "true"}, "dense"),
        ({"partition": "best"}, "partition"),
        ({"threshold": "-1"}, "threshold"),
    ],
)
def test_options_that_it_refuses(options: dict[str, str], parameter: str) -> None:
    with refused(parameter):
        make_policy("runahead", num_instances=2, options=options)


def recorded(monkeypatch: pytest.MonkeyPatch, executor: object) -> list[int]:
    """How many tokens each step of a chain computes, as it is sent to such an executor."""
    lengths: list[int] = []
    submit = executor.submit  # type: ignore[attr-defined]

    def submitted(*given: Any) -> None:
        if isinstance(step := given[-1], Forward):
            lengths.extend(part.stop - part.start for part in step.parts if part.exchange == CHAIN)
        submit(*given)

    monkeypatch.setattr(executor, "submit", submitted)
    return lengths


A100 = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=2)


@pytest.mark.parametrize("partition", ["auto", "even", "searched"])
def test_a_simulated_prompt_is_one_chain_where_memory_allows(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """16K tokens on two instances need a step of more than 8,192 tokens, the default of other policies."""
    options = {"partition": partition, "threshold": "0"}
    lengths, ttfts_s = recorded(monkeypatch, SimExecutor), {}
    for tokens in (8192, None):
        scheduling = SchedulingArgs(policy="runahead", policy_options=options, max_num_batched_tokens=tokens)
        experiment = make_experiment("llama-3-8b", A100, scheduling)
        workload = Workload(arrivals=[Arrival(due_s=0.0, prompt=range(16_900), output_len=1)], shares=False)
        [ttfts_s[tokens]] = experiment.run(workload).ttfts_s
    first, *rest, whole = lengths
    assert first + sum(rest) == whole == 16_900
    assert rest, "as many steps as were asked for"
    assert partition == "even" or ttfts_s[None] < ttfts_s[8192]


def test_memory_for_large_steps_is_not_used_for_kv() -> None:
    """Eager attention leaves no memory for larger steps. Steps of a small model are as large as its longest prompt."""

    def sizes(kernels: Any, **scheduling: Any) -> tuple[int | None, int]:
        args = SchedulingArgs(policy="runahead", **scheduling)
        found = make_experiment("llama-3-8b", replace(A100, attention=kernels), args)
        return found.scheduling.max_num_batched_tokens, found.cluster.num_blocks[0]

    usual = sizes("flash", max_num_batched_tokens=8192)[1]
    tokens, blocks = sizes("flash")
    assert tokens is not None and 65_536 < tokens < 131_072
    assert 0.74 * usual < blocks < 0.78 * usual, "a quarter of the memory beyond weights is for activations"
    assert sizes("flash", max_model_len=20_000)[0] == pytest.approx(20_000, abs=256)
    assert sizes("eager")[0] == 8192


def test_a_single_instance_keeps_small_steps() -> None:
    """It has no chain, whose cut would be of whole prompts."""
    for partition in ("auto", "even"):
        scheduling = SchedulingArgs(policy="runahead", policy_options={"partition": partition})
        found = make_experiment("llama-3-8b", replace(A100, gpus_per_host=1), scheduling)
        assert found.scheduling.max_num_batched_tokens == 8192


@pytest.mark.parametrize(("device", "most"), [("cpu", 2**29 // (4 * (6 * 96 + 4 * 128))), ("cuda", 2**20)])
def test_steps_of_a_profile_are_as_large_as_an_engine_has_them(device: str, most: int) -> None:
    """On CPU two ranks share a quarter of 4 GiB for a step. The memory of a measured GPU is not known."""
    key = structs.replace(SUBJECT, device=device, tp=1)
    shape = ModelShape(num_layers=2, hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=24, bytes_per_element=4)
    sizes = Architecture(
        name=key.model, attention=shape, intermediate_size=128, vocab_size=199, precision=Precision.of("float32")
    )
    profile = Profile(profile_key=key)
    for new, cached in profiled_prompts([256, 1024, 4096], 8192):
        profile = profile.with_measured(prefill(new, cached, 1e-4 * new, members=1, exchange="local"))
    for batch in (1, 4):
        for context in (1000, 8000):
            decode = Decode(members=1, exchange="local", batch=batch, context_tokens=context, seconds=(0.01,))
            profile = profile.with_measured(decode)

    def tokens(**scheduling: Any) -> int | None:
        options = {"partition": "even"}
        args = SchedulingArgs(policy="runahead", policy_options=options, **scheduling)
        found = measured_experiment(sizes, profile, ClusterSpec(profile="p.json", gpus_per_host=2), args, Faults())
        return found.scheduling.max_num_batched_tokens

    assert tokens() == most
    assert tokens(max_model_len=20_000) == 20_000
    assert tokens(max_num_batched_tokens=512) == 512


def test_a_prompt_is_one_chain_by_default(
    tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once cuts were searched, a piece of 2,800 tokens is not too much for a step, unless the user says so."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    start = partial(ThreadLLM, str(tiny), instances=2, policy="runahead", skip_tokenizer_init=True)
    draw, greedy = random.Random(1), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_logits=True)
    prompt = [draw.randrange(3, 199) for _ in range(4000)]
    with start() as llm:
        assert llm.engine.config.max_num_batched_tokens == 2048, "even pieces are quicker in several steps"
        entry = Entry(model=llm.profile_key.model, members=2, length=4000, fractions=(0.7, 0.3))
        save_partitions(llm.profile_key, llm.engine.config.block_size, PartitionTable((entry,)))
    for asked, is_one in (({}, True), ({"max_num_batched_tokens": 2048}, False)):
        with start(**asked) as llm:
            lengths = recorded(monkeypatch, llm.service.executor)
            [output] = llm.generate([prompt], greedy)
            assert_exact(output, oracle.complete(prompt, 4))
        assert sum(lengths) == 4000
        assert (len(lengths) == 1) == is_one


def test_steps_are_as_large_as_memory_and_the_longest_prompt_allow(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A token of the tiny model needs 6 * 96 + 4 * 128 numbers of 4 bytes. Attention in chunks is not modelled."""

    def step(folder: Path, **asked: Any) -> int:
        even = {"policy": "runahead", "policy_options": {"partition": "even"}, "skip_tokenizer_init": True}
        with ThreadLLM(str(folder), instances=2, **even, **asked) as llm:
            return llm.engine.config.max_num_batched_tokens

    assert step(tiny) == 4096
    assert step(tiny, max_model_len=3000) == 3000
    monkeypatch.setattr("longspan.resolve.default_step_bytes", lambda *_: 2500 * 4 * (6 * 96 + 4 * 128))
    assert step(tiny) == 2500
    monkeypatch.setattr("longspan.resolve.default_step_bytes", lambda *_: 0)
    assert step(tiny) == 2048, "as without chains"
    caplog.set_level("INFO", logger="longspan")
    assert step(make_tiny("llama4", tmp_path)) == 2048
    assert "steps have 2048 tokens: " in caplog.text
