"""Tiny random models of every listed architecture, several prompts packed together, say what Hugging Face says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle, assert_exact
from tiny_models import TINY

from longspan import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, output_logits=True)
LENGTHS = (1, 2, 17, 40, 100, 333)


@pytest.mark.parametrize("instances", [2, 3])
@pytest.mark.parametrize("name", list(TINY))
def test_prompts_packed_together(
    folders: dict[str, Path], oracles: dict[str, Oracle], name: str, instances: int
) -> None:
    rng = np.random.default_rng(instances)
    prompts = [rng.integers(3, 199, length).tolist() for length in LENGTHS]
    # Blocks of 16 and chunks of at most 48 tokens per instance: prompts are dealt in several chunks.
    with LLM(
        str(folders[name]),
        instances=instances,
        skip_tokenizer_init=True,
        block_size=16,
        max_num_batched_tokens=48,
        policy_options={"threshold": "20"},
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(output, oracles[name].complete(prompt, 32))


@pytest.mark.parametrize(("name", "parallel"), [("llama", "2xtp2"), ("mistral-window", "3"), ("gemma2", "4")])
def test_decode_that_rotates_by_token(
    folders: dict[str, Path], oracles: dict[str, Oracle], name: str, parallel: str
) -> None:
    """With every exchange that decodes, into sliding windows too; the second turn computes the first answer again."""
    prompts = [np.random.default_rng(length).integers(3, 199, length).tolist() for length in (40, 100, 333)]
    with LLM(
        str(folders[name]), parallel=parallel, skip_tokenizer_init=True, block_size=16, max_num_batched_tokens=48
    ) as llm:
        for decode in ("ring_q", "ring_kv", "alltoall", "gather_kv"):
            llm.set_policy("context", {"threshold": "20", "rotate": "token", "decode": decode})
            llm.reset_prefix_cache()
            outputs = llm.generate(prompts, GREEDY)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_exact(output, oracles[name].complete(prompt, 32))
            turn = [*prompts[1], *outputs[1].outputs[0].token_ids, 7]
            [output] = llm.generate([turn], GREEDY)
            assert output.metrics.num_cached_tokens == len(prompts[1])
            assert_exact(output, oracles[name].complete(turn, 32))
