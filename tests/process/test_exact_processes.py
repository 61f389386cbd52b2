"""Models on worker processes equal Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
from forced_plans import forced
from oracle import Oracle, assert_exact
from texts import topic_tokens

from longspan import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_logits=True)
LONG = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, output_logits=True)


@pytest.mark.full
@pytest.mark.parametrize(("instances", "block_size"), [(1, 256), (2, 256), (3, 16), (4, 64)])
def test_any_number_of_instances(smollm2_oracle: Oracle, instances: int, block_size: int) -> None:
    """A threshold of 0 shards even the shortest prompt. With small blocks every member has a part of it."""
    options = {"threshold": "0"} if instances > 1 else {}
    with LLM(dtype="float32", instances=instances, block_size=block_size, policy_options=options) as llm:
        for length in (1, 2, 17, 1000, 4096):
            prompt = list(topic_tokens()[:length])
            [output] = llm.generate([prompt], LONG)
            assert_exact(output, smollm2_oracle.complete(prompt, 32))
            assert sum(output.metrics.kv_tokens_per_instance) == length
        moved = llm.bytes_exchanged
    if instances > 1:
        assert moved["ring_kv"] > 0
        assert moved["ring_q"] > 0
    else:
        assert not any(moved.values())


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2", marks=pytest.mark.full)])
def test_a_prompt_that_grows_and_is_decoded_elsewhere(model: str, request: pytest.FixtureRequest) -> None:
    """Three KV heads. The prompt grows from one instance to two, and another of tp 2 decodes."""
    folder = str(request.getfixturevalue("tiny")) if model == "tiny" else "smollm2-135m"
    oracle: Oracle = request.getfixturevalue("oracle" if model == "tiny" else "smollm2_oracle")
    prompt = [5 + token % 190 for token in topic_tokens()[:300]]
    with LLM(
        folder, dtype="float32", skip_tokenizer_init=True, block_size=16, prefill_parallel="2", decode_parallel="tp2"
    ) as llm:
        llm.engine.set_policy(forced({300: [(100, (1,)), (200, (0, 1))]}, 2, decode=(2,), balance=True))
        [output] = llm.generate([prompt], GREEDY)
        assert llm.bytes_exchanged["kv_transfer"] > 0 and llm.bytes_exchanged["kv_balance"] > 0
    assert_exact(output, oracle.complete(prompt, 8))


def test_kv_of_a_long_request_moves_to_several_decode_instances(tiny: Path, oracle: Oracle) -> None:
    """Of policy `csps` with roles: its KV moves from two processes to two processes, together with a short request."""
    prompts = [
        [5 + token % 190 for token in topic_tokens()[first : first + size]] for first, size in ((0, 300), (300, 20))
    ]
    with LLM(
        str(tiny),
        dtype="float32",
        prefill_parallel="2",
        decode_parallel="2",
        policy="csps",
        policy_options={"threshold": "100"},
        block_size=16,
        skip_tokenizer_init=True,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_exact(output, oracle.complete(prompt, 8))
        assert [set(output.metrics.exchanges["decode"]) for output in outputs] == [{"ring_q"}, {"local"}]


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2", marks=pytest.mark.full)])
def test_a_context_that_no_device_holds(model: str, request: pytest.FixtureRequest) -> None:
    """Two thirds of it lie on the host. Ranks of two shards read their heads there."""
    folder = str(request.getfixturevalue("tiny")) if model == "tiny" else "smollm2-135m"
    oracle: Oracle = request.getfixturevalue("oracle" if model == "tiny" else "smollm2_oracle")
    size, block_size = (300, 16) if model == "tiny" else (4000, 64)
    prompt = [5 + token % 190 for token in topic_tokens()[:size]]
    with LLM(
        folder,
        dtype="float32",
        parallel="tp2",
        block_size=block_size,
        num_gpu_blocks_override=size // block_size // 3,
        max_num_batched_tokens=size // 10,
        host_kv_gib=0.02 if model == "tiny" else 0.5,
        skip_tokenizer_init=True,
    ) as llm:
        [output] = llm.generate([prompt], LONG)
        assert llm.bytes_exchanged["host_copy"] > 0
    assert_exact(output, oracle.complete(prompt, 32))


@pytest.mark.full
@pytest.mark.parametrize("exchange", ["ring_kv", "ring_q", "alltoall", "gather_kv", "gather_hidden", "chain"])
def test_every_exchange(smollm2_oracle: Oracle, exchange: str) -> None:
    prompt = list(topic_tokens()[:1500])
    with LLM(dtype="float32", instances=2, policy_options={"exchange": exchange, "threshold": "1000"}) as llm:
        [output] = llm.generate([prompt], GREEDY)
        assert llm.bytes_exchanged[exchange] > 0
    assert_exact(output, smollm2_oracle.complete(prompt, 8))
