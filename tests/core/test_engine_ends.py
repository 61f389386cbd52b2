"""Ends of requests, by the engine or by a caller, and the parts that ranks get until then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster import VOCAB, Cluster, Setup
from refusals import refused
from workloads import in_flight

from longspan.core.cluster import Cluster as Instances
from longspan.core.config import EngineConfig
from longspan.core.options import SchedulingArgs
from longspan.core.request import ContextLengthError, check_length
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Forward, Free
from longspan.policy.registry import make_policy

# ---------------------------------------------------------------- endings


def test_endings() -> None:
    """End-of-sequence tokens end a request at `min_tokens` or later unless ignored. So do both limits."""
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


@pytest.mark.parametrize(
    ("length", "message"), [(0, "the prompt is empty"), (50, "length is 50 tokens.*has 50 tokens")]
)
def test_prompts_that_cannot_be_served_are_refused(length: int, message: str) -> None:
    cluster = Cluster(Setup(max_model_len=50))
    with pytest.raises(ValueError, match=message):
        cluster.engine.add(tuple(range(length)), cluster.add([1]).params)


def test_requests_are_as_long_as_the_policy_of_the_moment_can_place() -> None:
    cluster = Cluster(Setup(num_instances=2, num_blocks=4, policy="context"))
    assert cluster.engine.config.max_model_len == 128
    cluster.engine.set_policy(make_policy("chunked", num_instances=2, options={}))
    with pytest.raises(ValueError, match=r"length is 64 tokens.*has 100 tokens"):
        cluster.add(range(100))
    request = cluster.add(range(40), max_tokens=100)
    cluster.run()
    assert request.num_tokens == 64
    cluster.engine.set_policy(make_policy("context", num_instances=2, options={}))
    request = cluster.add(range(100), max_tokens=100)
    cluster.run()
    assert request.num_tokens == 128


def test_a_longer_context_than_the_models_or_the_pools_is_refused() -> None:
    cluster, policy = Instances.of("1", num_blocks=[4]), make_policy("chunked", num_instances=1, options={})

    def longest(wanted: int | None, context_length: int) -> int:
        asked = SchedulingArgs(block_size=16, max_model_len=wanted)
        return EngineConfig.of(asked, cluster, policy, context_length=context_length).longest(policy)

    assert (longest(None, 100), longest(None, 50), longest(50, 50), longest(64, 100)) == (64, 50, 50, 64)
    with refused("max_model_len"):
        longest(51, 50)
    with refused("max_model_len"):
        longest(65, 100)


@pytest.mark.parametrize(
    ("num_tokens", "remedy"),
    [
        (9_000, "serve a model with a longer context, such as HuggingFaceTB/SmolLM3-3B (65536 tokens)"),
        (65_536, "such as meta-llama/Llama-3.2-1B-Instruct (131072 tokens)"),
        (262_143, "such as Qwen/Qwen3-4B-Instruct-2507 (262144 tokens)"),
        (262_144, "serve a model whose config.json has a larger max_position_embeddings"),
    ],
)
def test_the_error_of_a_long_prompt_names_a_model_that_holds_it(num_tokens: int, remedy: str) -> None:
    with pytest.raises(ContextLengthError, match=r"length is 8192 tokens, .* shorten the prompt") as caught:
        check_length(num_tokens, 8192)
    assert remedy in str(caught.value)


def test_an_abort_in_flight_frees_blocks_when_the_step_is_done() -> None:
    cluster = Cluster(Setup(max_num_batched_tokens=32))
    request = cluster.add(range(100), max_tokens=5)
    cluster.step(0.0)
    pool = cluster.engine.kv.pool(0)
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
    assert after.metrics.num_cached_tokens == 64, "computed blocks can be used again"


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


def test_tokens_after_the_end_are_thrown_away() -> None:
    """The step after an end-of-sequence token was in flight. Its sample is dropped, and its KV is found again."""
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


# ---------------------------------------------------------------- parts for ranks


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


@pytest.mark.parametrize("num_instances", [1, 2])
def test_choices_share_the_prompt(num_instances: int) -> None:
    """Further choices wait until the first has computed the prompt, and recompute its last token only."""
    cluster = Cluster(Setup(num_instances=num_instances, max_num_batched_tokens=50, options={}))
    params = SamplingParams(n=3, temperature=1.0, max_tokens=5)
    first = cluster.add(range(220), params)
    others = [cluster.follow(first, choice) for choice in (1, 2)]
    cluster.run()
    assert [r.choice for r in (first, *others)] == [0, 1, 2]
    assert {r.seed for r in others} == {first.seed}
    assert all(r.metrics.num_cached_tokens == 220 - 1 for r in others)
    records = [part.sampling.choice for r in (first, *others) for part in cluster.parts_of(r)[:1] if part.sampling]
    assert records == [0, 1, 2]


def test_choices_do_not_wait_for_an_aborted_choice() -> None:
    cluster = Cluster(Setup(max_num_batched_tokens=50))
    first = cluster.add(range(210), SamplingParams(n=2, temperature=1.0, max_tokens=5))
    other = cluster.follow(first, 1)
    cluster.step()
    cluster.engine.finish(first, "abort")
    cluster.run()
    assert other.output == cluster.expected_output(other)


def test_ranks_learn_every_output_token_of_a_request_with_penalties() -> None:
    """In order, once per admission, and in time: the sampling rank has all tokens except the token that it computes."""
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
