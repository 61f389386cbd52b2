"""Two clusters alternate on the same workers, in the middle of requests. Outputs stay those of one rank."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import Engines, ThreadLLM, num_free_blocks
from oracle import Oracle
from test_exact import assert_all_exact, prompts_of
from texts import topic_tokens
from tiny_models import BASE, write_checkpoint
from transformers import Phi3Config

from longspan import SamplingParams
from longspan.core.sampling import StructuredOutputsParams
from longspan.errors import ParameterError
from longspan.model.source import smollm2_folder

SPECS = ("pp2 tp2", "2 tp2", "pp3 tp3", "pp4 tp2pp2", "pp2 3", "2xpp2 tp4", "tp2 4xpp2")
NUM_TOKENS = 14
LONG = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_logits=True)
LENGTHS = tuple(5 + 7 * number % 50 for number in range(24))
SMALL_HOST = {"host_kv_gib": 0.00015, "num_gpu_blocks_override": 30}
"""15 blocks of the odd model fit on the host, which is a fourth of the blocks of the prompts."""


def turning(engines: Engines, model: Path, spec: str, **given: Any) -> ThreadLLM:
    prefill, decode = spec.split()
    given = {"policy": "seesaw", "prefill_parallel": prefill, "decode_parallel": decode} | SMALL_HOST | given
    return engines(model, **given)


def assert_all_free(llm: ThreadLLM) -> None:
    assert all(free == llm.engine.kv.account.num_blocks(i) for i, free in enumerate(num_free_blocks(llm)))
    for number in llm.engine.config.cluster.host_pools:
        pool = llm.engine.kv.pool(number)
        assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("spec", SPECS)
def test_an_odd_model(engines: Engines, odd: Path, odd_oracle: Oracle, spec: str) -> None:
    """No token is computed twice, and nothing is copied but KV, of which all leaves."""
    llm = turning(engines, odd, spec)
    outputs = assert_all_exact(llm, odd_oracle, prompts_of(*LENGTHS), LONG)
    assert len(llm.engine.transitions) >= 5
    assert sum(one.metrics.num_computed_tokens for one in outputs) == sum(length + NUM_TOKENS - 1 for length in LENGTHS)
    assert sum(one.metrics.num_preemptions for one in outputs) == 0
    assert sum(one.copied_bytes for one in llm.engine.transitions) == 0
    clusters = [one.cluster.spec for one in llm.engine.transitions]
    assert all(one != other for one, other in pairwise(clusters))
    assert all(one.asked_s <= one.idle_s <= one.begun_s <= one.ended_s for one in llm.engine.transitions)
    assert 10 < llm.engine.kv.counts.peak_host_blocks <= 15, "a turn fills the host"
    num_moved = sum(-(-length // 16) for length in LENGTHS)
    assert llm.engine.kv.counts.num_swapped_blocks >= 2 * num_moved, "each is offloaded at least once, and loaded"
    assert_all_free(llm)


@pytest.mark.full
@pytest.mark.parametrize("spec", ["pp2 tp2"])
def test_smollm2(engines: Engines, spec: str) -> None:
    tokens = list(topic_tokens())
    llm = turning(engines, smollm2_folder(), spec, host_kv_gib=0.02, num_gpu_blocks_override=100, block_size=64)
    prompts = [tokens[start : start + 40 + 9 * start] for start in range(12)]
    assert_all_exact(llm, Oracle(smollm2_folder()), prompts, LONG)
    assert len(llm.engine.transitions) >= 5
    assert_all_free(llm)


WANTED: dict[str, dict[str, Any]] = {
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "several outputs": {"temperature": 1.0, "n": 2, "seed": 5},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "one token": {"temperature": 0, "max_tokens": 1},
}


@pytest.mark.parametrize(
    ("wanted", "spec"),
    [
        ("penalties", "pp2 tp2"),
        ("several outputs", "pp2 3"),
        ("logprobs", "pp2 tp2"),
        ("one token", "pp2 3"),
        pytest.param("penalties", "pp2 3", marks=pytest.mark.full),
        pytest.param("several outputs", "pp2 tp2", marks=pytest.mark.full),
        pytest.param("logprobs", "pp2 3", marks=pytest.mark.full),
        pytest.param("one token", "pp2 tp2", marks=pytest.mark.full),
    ],
)
def test_outputs_are_those_of_one_rank(engines: Engines, odd: Path, wanted: str, spec: str) -> None:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **WANTED[wanted]})
    prompts, found = prompts_of(*LENGTHS[:12]), []
    for llm in (engines(odd, parallel="1"), turning(engines, odd, spec)):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([([one.token_ids for one in output.outputs], _rounded(output)) for output in outputs])
    assert found[0] == found[1]
    assert llm.engine.transitions or wanted == "one token"
    assert_all_free(llm)


def _rounded(output: Any) -> object:
    """Returns the logprobs of prompt and output."""
    given = [*(output.prompt_logprobs or ()), *(at for one in output.outputs for at in one.logprobs or ())]
    return [None if at is None else {token: round(one.logprob, 2) for token, one in at.items()} for at in given]


def test_json_by_a_schema(engines: Engines, bytes_model: Path) -> None:
    """The rank that samples after a change follows the grammar from its beginning."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema), ignore_eos=False
    )
    texts = []
    host = {"host_kv_gib": 0.0002, "skip_tokenizer_init": False}
    for llm in (
        engines(bytes_model, parallel="1", skip_tokenizer_init=False),
        turning(engines, bytes_model, "pp2 tp2", **host),
    ):
        outputs = llm.generate([[5 + n, 6, 7] * (1 + n) for n in range(5)], params, use_tqdm=False)
        texts.append([output.outputs[0].text for output in outputs])
    assert llm.engine.transitions
    assert texts[0] == texts[1]
    assert all(text.startswith("{") for text in texts[0])


def test_fused_projections_are_copied_and_counted(engines: Engines, tmp_path: Path) -> None:
    """Their pieces lie apart. A share that was made is kept for the next phase."""
    model = write_checkpoint(Phi3Config(**BASE), tmp_path / "phi3")
    llm = turning(engines, model, "pp2 tp2", host_kv_gib=0.0003)
    assert_all_exact(llm, Oracle(model), prompts_of(*LENGTHS), LONG)
    copied = [one.copied_bytes for one in llm.engine.transitions]
    assert copied[0] > 0 and len(copied) >= 3 and sum(copied[1:]) == 0


def test_another_run_begins_where_the_last_has_ended(engines: Engines, odd: Path, odd_oracle: Oracle) -> None:
    llm = turning(engines, odd, "pp2 tp2")
    for lengths in (LENGTHS[:6], LENGTHS[6:12]):
        assert_all_exact(llm, odd_oracle, prompts_of(*lengths), LONG)
        assert_all_free(llm)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"parallel": "pp2", "prefill_parallel": None, "decode_parallel": None},
            "prefill_parallel needs `decode_parallel`",
        ),
        ({"decode_parallel": "pp2"}, "decode_parallel pp2 equals `prefill_parallel`"),
        ({"host_kv_gib": 0.0}, "host_kv_gib must be above 0"),
    ],
)
def test_invalid_options_are_refused(odd: Path, given: dict[str, Any], problem: str) -> None:
    wanted = {"policy": "seesaw", "prefill_parallel": "pp2", "decode_parallel": "tp2", "host_kv_gib": 0.01}
    with pytest.raises(ParameterError, match=problem):
        ThreadLLM(str(odd), skip_tokenizer_init=True, **wanted | given)


def test_a_prompt_beyond_the_host_pool_is_refused(engines: Engines, odd: Path) -> None:
    llm = turning(engines, odd, "pp2 tp2")
    with pytest.raises(ValueError, match="maximum context length is 240 tokens"):
        llm.generate(prompts_of(250), LONG, use_tqdm=False)


def test_the_policy_changes_to_none_of_one_cluster(engines: Engines, odd: Path) -> None:
    with pytest.raises(ParameterError, match="chunked supports one cluster, but this engine has two phases"):
        turning(engines, odd, "pp2 tp2").set_policy("chunked", {})
