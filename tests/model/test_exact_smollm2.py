"""SmolLM2 on 1 to 4 instances says what Hugging Face says."""

from __future__ import annotations

import pytest
from oracle import Oracle, assert_exact
from texts import topic_tokens

from longspan import LLM, SamplingParams
from longspan.model.source import smollm2_folder

LENGTHS = (1, 2, 17, 1000, 4096)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, output_logits=True)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(smollm2_folder())


# A threshold of 0 deals even the shortest prompt; small blocks give every member a piece of it.
@pytest.mark.parametrize(("instances", "block_size"), [(1, 256), (2, 256), (3, 16), (4, 64)])
@pytest.mark.timeout(600)
def test_any_number_of_instances(oracle: Oracle, instances: int, block_size: int) -> None:
    options = {"threshold": "0"} if instances > 1 else {}
    prompts = [list(topic_tokens()[:length]) for length in LENGTHS]
    with LLM(instances=instances, block_size=block_size, policy_options=options) as llm:
        for prompt in prompts:
            [output] = llm.generate([prompt], GREEDY)
            assert_exact(output, oracle.complete(prompt, 32))
            assert sum(output.metrics.kv_tokens_per_instance) == len(prompt)
        moved = llm.bytes_exchanged
    if instances > 1:
        assert moved["ring_kv"] > 0
        assert moved["ring_q"] > 0
    else:
        assert not any(moved.values())
