"""Prompts that some instances compute and another, split differently, continues say what Hugging Face says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forced_plans import PLANS, Plans, forced
from oracle import Oracle, assert_exact
from texts import topic_tokens

from longspan import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_logits=True)


@pytest.fixture(scope="module", params=[1, 4], ids=["1 backend", "4 backends"])
def llm(request: pytest.FixtureRequest, tiny: Path) -> Iterator[LLM]:
    """Four instances of one rank prefill, one of two ranks decodes."""
    with LLM(
        str(tiny),
        prefill_parallel="4",
        decode_parallel="tp2",
        transfer_backends=request.param,
        skip_tokenizer_init=True,
        block_size=16,
        max_num_batched_tokens=48,
    ) as running:
        yield running


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)  # the same for all, so that the oracle answers once
    return [rng.integers(3, 199, length).tolist() for length in lengths]


def moved(llm: LLM, name: str) -> int:
    return llm.bytes_exchanged.get(name, 0)


def assert_at_rest(llm: LLM) -> None:
    """Nobody holds a block."""
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert not any(llm.engine.load().used_blocks)


@pytest.mark.parametrize("balance", [True, False], ids=["balanced", "as it lies"])
@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_forced_plans(llm: LLM, oracle: Oracle, plans: Plans, balance: bool) -> None:
    """Chunks of several steps each, that end inside blocks, while others decode."""
    llm.engine.set_policy(forced(plans, 4, decode=(4,), balance=balance))
    llm.reset_prefix_cache()
    before = moved(llm, "kv_transfer"), moved(llm, "kv_balance")
    prompts = prompts_of(300, 200, 17)
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(output, oracle.complete(prompt, 6))
    assert moved(llm, "kv_transfer") > before[0]
    assert (moved(llm, "kv_balance") > before[1]) == balance
    assert_at_rest(llm)


def test_several_outputs_of_a_prompt_are_drawn_alike(llm: LLM) -> None:
    llm.set_policy("tetris", {"min_chunk": "16", "improvement_rate": "0"})
    drawn = SamplingParams(temperature=1, seed=3, n=3, max_tokens=8, ignore_eos=True)
    [first], [again] = llm.generate(prompts_of(150), drawn), llm.generate(prompts_of(150), drawn)
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in again.outputs]
    assert len({tuple(one.token_ids) for one in first.outputs}) == 3


def test_smollm2(smollm2_oracle: Oracle) -> None:
    """Nine query heads and three KV heads; the prompt grows from one instance to two."""
    prompt = list(topic_tokens()[:1500])
    with LLM(prefill_parallel="2", decode_parallel="tp2") as llm:
        llm.engine.set_policy(forced({1500: [(600, (1,)), (900, (0, 1))]}, 2, decode=(2,), balance=True))
        [output] = llm.generate([prompt], GREEDY)
        assert moved(llm, "kv_transfer") > 0 and moved(llm, "kv_balance") > 0
    assert_exact(output, smollm2_oracle.complete(prompt, 6))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM(prefill_parallel="4", decode_parallel="tp2", block_size=16, max_num_batched_tokens=64) as running:
        yield running


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_forced_plans_of_smollm2(smollm2: LLM, smollm2_oracle: Oracle, plans: Plans) -> None:
    smollm2.engine.set_policy(forced(plans, 4, decode=(4,), balance=True))
    smollm2.reset_prefix_cache()
    before = moved(smollm2, "kv_transfer"), moved(smollm2, "kv_balance")
    prompts = [list(topic_tokens()[:length]) for length in (300, 200, 17)]
    for prompt, output in zip(prompts, smollm2.generate(prompts, GREEDY), strict=True):
        assert_exact(output, smollm2_oracle.complete(prompt, 6))
    assert moved(smollm2, "kv_transfer") > before[0] and moved(smollm2, "kv_balance") > before[1]
    assert_at_rest(smollm2)
