"""Seesaw with prompts larger than the KV pool of one instance: outputs stay those of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import Engines, ThreadLLM
from oracle import Oracle
from test_exact import assert_all_exact, prompts_of
from test_seesaw import assert_all_free, turning

from longspan import SamplingParams

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_logits=True)
LENGTHS = (20, 300, 45, 7, 250, 33, 60, 350, 12)
SMALL = {"host_kv_gib": 0.0004, "num_gpu_blocks_override": 12}
"""12 blocks of 16 tokens for each instance, and 39 for the host. The longest request takes 23."""
LIMIT = 12 * 16


def exchanges_of(outputs: Sequence[Any], step: str) -> list[set[str]]:
    """Return the exchanges of each request for a kind of step."""
    return [set(output.metrics.exchanges.get(step, {})) for output in outputs]


def assert_computed_once(llm: ThreadLLM, outputs: Sequence[Any], lengths: Sequence[int], num_before: int) -> None:
    computed = [output.metrics.num_computed_tokens for output in outputs]
    assert computed == [length + NUM_TOKENS - 1 for length in lengths], "prompt and output are computed once"
    assert len(llm.engine.transitions) > num_before
    assert_all_free(llm)


@pytest.mark.parametrize("spec", ["2 2xtp2", "2xpp2 2xtp2", "3 2xpp2", "2xtp2 4"])
def test_long_prompts_alongside_short_ones_are_exact_and_computed_once(
    engines: Engines, odd: Path, odd_oracle: Oracle, spec: str
) -> None:
    """The host holds only some of the requests, so clusters change several times."""
    llm = turning(engines, odd, spec, **SMALL)
    llm.set_policy("seesaw", {})
    num_before = len(llm.engine.transitions)
    outputs = assert_all_exact(llm, odd_oracle, prompts_of(*LENGTHS), PARAMS)
    assert_computed_once(llm, outputs, LENGTHS, num_before + 2)
    is_long = [length + NUM_TOKENS > LIMIT for length in LENGTHS]
    assert exchanges_of(outputs, "prefill") == [{"ring_kv"} if long else {"local"} for long in is_long]
    assert exchanges_of(outputs, "decode") == [{"ring_q"} if long else {"local"} for long in is_long]


OPTIONS: dict[str, dict[str, str]] = {
    "2 2xtp2": {"threshold": "30", "exchange": "chain"},
    "2xpp2 2xtp2": {"threshold": "30", "exchange": "ring_q", "layout": "striped", "decode": "alltoall"},
    "3 2xpp2": {"threshold": "30", "exchange": "alltoall", "layout": "contiguous", "long_share": "0.5"},
}


@pytest.mark.parametrize("spec", OPTIONS)
def test_options_of_context_are_exact(engines: Engines, odd: Path, odd_oracle: Oracle, spec: str) -> None:
    llm, options = turning(engines, odd, spec, **SMALL), OPTIONS[spec]
    llm.set_policy("seesaw", options)
    num_before = len(llm.engine.transitions)
    outputs = assert_all_exact(llm, odd_oracle, prompts_of(*LENGTHS), PARAMS)
    assert_computed_once(llm, outputs, LENGTHS, num_before)
    expected = [{options["exchange"]} if length > 30 else {"local"} for length in LENGTHS]
    assert exchanges_of(outputs, "prefill") == expected


def test_one_instance_decodes_a_prompt_that_a_group_prefilled(engines: Engines, odd: Path, odd_oracle: Oracle) -> None:
    """Each rank has memory for 14 blocks of the whole model, or for 23 blocks of three of its five layers."""
    block_bytes = 16 * 5 * 2 * 16 * 4
    memory = {"host_kv_gib": 0.002, "kv_cache_memory_bytes": 14 * block_bytes, "num_gpu_blocks_override": None}
    llm = turning(engines, odd, "2 pp2", **memory)
    assert [cluster.num_blocks for cluster in llm.engine.config.fleet] == [(14, 14), (23,)]
    lengths = (20, 260, 45)
    outputs = assert_all_exact(llm, odd_oracle, prompts_of(*lengths), PARAMS)
    assert_computed_once(llm, outputs, lengths, 0)
    assert exchanges_of(outputs, "prefill") == [{"local"}, {"ring_kv"}, {"local"}]
    assert exchanges_of(outputs, "decode") == [{"local"}] * 3


@pytest.mark.parametrize("wanted", [{"n": 2, "temperature": 1.0, "seed": 5}, {"logprobs": 2, "prompt_logprobs": 2}])
def test_outputs_equal_one_rank(engines: Engines, odd: Path, wanted: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True} | wanted)
    answers = []
    for llm in (engines(odd, parallel="1"), turning(engines, odd, "2 2xtp2", **SMALL)):
        outputs = llm.generate(prompts_of(*LENGTHS[:5]), params, use_tqdm=False)
        answers.append([[one.token_ids for one in output.outputs] for output in outputs])
    assert answers[0] == answers[1]
    assert_all_free(llm)


def test_a_second_turn_finds_the_kv_of_a_shared_prompt(engines: Engines, odd: Path, odd_oracle: Oracle) -> None:
    llm = turning(engines, odd, "2 2xtp2", **SMALL | {"host_kv_gib": 0.002})
    llm.set_policy("seesaw", {})
    [turn] = prompts_of(260)
    assert_all_exact(llm, odd_oracle, [turn], PARAMS)
    turn = [*turn, *odd_oracle.complete(turn, NUM_TOKENS).token_ids, *prompts_of(30)[0]]
    [output] = assert_all_exact(llm, odd_oracle, [turn], PARAMS)
    assert output.metrics.num_cached_tokens >= 256


def test_a_prompt_beyond_all_instances_of_a_phase_is_refused(engines: Engines, odd: Path) -> None:
    with pytest.raises(ValueError, match="maximum context length is 384 tokens"):
        turning(engines, odd, "3 2xpp2", **SMALL).generate(prompts_of(400), PARAMS, use_tqdm=False)
    with pytest.raises(ValueError, match="maximum context length is 192 tokens"):
        turning(engines, odd, "2 tp2", **SMALL).generate(prompts_of(200), PARAMS, use_tqdm=False)
