"""Requests whose groups grow say what Hugging Face says: planned chunks, and groups that change at any step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from forced_plans import PLANS, Plans, Wandering, forced
from oracle import Oracle, assert_exact
from texts import topic_tokens

from longspan import LLM, SamplingParams
from longspan.policy.tetris.policy import GroupOptions

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_logits=True)
COUNTING = SamplingParams(
    temperature=0, frequency_penalty=0.5, presence_penalty=0.25, max_tokens=30, ignore_eos=True, output_logits=True
)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), instances=4, skip_tokenizer_init=True, block_size=16, max_num_batched_tokens=48) as running:
        yield running


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)  # the same for all, so that the oracle answers once
    return [rng.integers(3, 199, length).tolist() for length in lengths]


@pytest.mark.parametrize("exchange", get_args(get_type_hints(GroupOptions)["exchange"]))
@pytest.mark.parametrize("balance", [False, True], ids=["as computed", "balanced"])
@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_forced_plans(llm: LLM, oracle: Oracle, plans: Plans, exchange: str, balance: bool) -> None:
    """Chunks of several steps each, that end inside blocks; a short prompt decodes on instance 0 meanwhile."""
    options = GroupOptions(exchange=exchange)  # type: ignore[arg-type]  # one of its names
    llm.engine.set_policy(forced(plans, 4, options.sharing(), balance=balance))
    llm.reset_prefix_cache()
    prompts = prompts_of(300, 200, 17)
    moved = llm.bytes_exchanged.get("kv_balance", 0)
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(output, oracle.complete(prompt, 6))
    assert (llm.bytes_exchanged.get("kv_balance", 0) > moved) == balance
    held = [i for i, tokens in enumerate(outputs[0].metrics.kv_tokens_per_instance) if tokens]
    assert held == sorted(plans[300][-1][1])


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_change_at_any_step(llm: LLM, oracle: Oracle, seed: int) -> None:
    """Also while tokens are decoded a step ahead."""
    llm.engine.set_policy(Wandering(4, seed))
    llm.reset_prefix_cache()
    prompts = prompts_of(300, 200, 17)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert_exact(output, oracle.complete(prompt, 6))


def test_penalties_on_groups_that_change(llm: LLM) -> None:
    """Members that come later have to be told all tokens so far."""
    llm.engine.set_policy(Wandering(4, seed=7))
    llm.reset_prefix_cache()
    for output in llm.generate(prompts_of(17, 60, 3), COUNTING):
        [got] = output.outputs
        assert got.logits is not None
        counts = np.zeros(len(got.logits[0]), dtype=np.float32)
        for token, logits in zip(got.token_ids, got.logits, strict=True):
            assert token == int((logits - 0.5 * counts - 0.25 * (counts > 0)).argmax())
            counts[token] += 1


@pytest.mark.parametrize("policy", ["tetris", "fixed-sp"])
def test_policies(llm: LLM, oracle: Oracle, policy: str) -> None:
    """Many prompts at once, then another turn of the longest conversation."""
    llm.set_policy(policy, {"min_chunk": "16", "improvement_rate": "0"} if policy == "tetris" else {"sp": "2"})
    llm.reset_prefix_cache()
    prompts = prompts_of(1, 17, 40, 300, 200)
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(output, oracle.complete(prompt, 6))
    turn = [*prompts[3], *outputs[3].outputs[0].token_ids, *prompts[2]]
    [output] = llm.generate([turn], GREEDY)
    assert output.metrics.num_cached_tokens > 0
    assert_exact(output, oracle.complete(turn, 6))


def test_smollm2(smollm2_oracle: Oracle) -> None:
    prompt = list(topic_tokens()[:1500])
    with LLM(instances=2) as llm:
        llm.engine.set_policy(forced({1500: [(600, (1,)), (900, (0, 1))]}, 2))
        [output] = llm.generate([prompt], GREEDY)
        assert llm.bytes_exchanged["ring_kv"] > 0
    assert_exact(output, smollm2_oracle.complete(prompt, 6))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM(instances=4, block_size=16, max_num_batched_tokens=64) as running:
        yield running


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_forced_plans_of_smollm2(smollm2: LLM, smollm2_oracle: Oracle, plans: Plans) -> None:
    smollm2.engine.set_policy(forced(plans, 4))
    smollm2.reset_prefix_cache()
    prompts = [list(topic_tokens()[:length]) for length in (300, 200, 17)]
    outputs = smollm2.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(output, smollm2_oracle.complete(prompt, 6))
    held = [i for i, tokens in enumerate(outputs[0].metrics.kv_tokens_per_instance) if tokens]
    assert held == sorted(plans[300][-1][1])
