"""Every exchange and layout, on two to four instances and under tensor parallelism, says what Hugging Face says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from oracle import Oracle, assert_exact
from texts import topic_tokens

from longspan import LLM, SamplingParams
from longspan.model.source import smollm2_folder

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_logits=True)
EXCHANGES = ("auto", "ring_kv", "ring_q", "alltoall", "gather_kv", "gather_hidden", "chain")
DECODES = ("ring_kv", "ring_q", "alltoall", "gather_kv")
LAYOUTS = ("zigzag", "striped", "contiguous")
SHARINGS = [
    *({"exchange": exchange, "layout": layout} for exchange, layout in itertools.product(EXCHANGES, LAYOUTS)),
    {"exchange": "gather_kv", "dense": "true"},
    {"exchange": "chain", "home": "computed"},
    {"layout": "contiguous", "fractions": "uneven"},
    {"exchange": "chain", "fractions": "uneven"},
]
LEGAL = [sharing for sharing in SHARINGS if sharing.get("exchange") != "chain" or sharing.get("layout") != "zigzag"]
LEGAL = [sharing for sharing in LEGAL if sharing.get("exchange") != "chain" or sharing.get("layout") != "striped"]
UNEVEN = {2: "0.7,0.3", 3: "0.5,0.3,0.2", 4: "0.4,0.3,0.2,0.1"}


@pytest.fixture(scope="module", params=["2", "3", "4", "2xtp2", "3xtp2", "4xtp2"])
def llm(tiny: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """The workers stay while the policy changes."""
    with LLM(
        str(tiny), parallel=request.param, skip_tokenizer_init=True, block_size=16, max_num_batched_tokens=64
    ) as running:
        yield running


@pytest.mark.parametrize("sharing", LEGAL, ids=lambda sharing: "-".join(sharing.values()))
def test_prompts_and_turns(llm: LLM, oracle: Oracle, sharing: dict[str, str]) -> None:
    """Prompts of mixed lengths at once, the longest in several chunks, then two more turns of one conversation."""
    num_instances = len(llm.num_free_blocks)
    options = {"threshold": "20", **sharing}
    if sharing.get("exchange") in DECODES:
        options["decode"] = sharing["exchange"]
    if "fractions" in options:
        options["fractions"] = UNEVEN[num_instances]
    if sharing.get("exchange") == "gather_hidden" and num_instances > 2 and len(llm.worker_pids) > num_instances:
        with pytest.raises(ValueError, match=r"gather_hidden splits 2 query heads and 1 KV heads between"):
            llm.set_policy("context", options)  # tp2 leaves one of two ranks with a single KV head
        return
    assert_prompts_and_turns(llm, oracle, options)


@pytest.mark.parametrize("weights", ["host", "peers"])
@pytest.mark.parametrize("llm", ["2xtp2"], indirect=True)
def test_whole_weights(llm: LLM, oracle: Oracle, weights: str) -> None:
    before = llm.bytes_exchanged
    assert_prompts_and_turns(llm, oracle, {"threshold": "20", "exchange": "alltoall", "weights": weights})
    fetched = llm.bytes_exchanged.get("weights", 0) - before.get("weights", 0)
    assert (fetched > 0) == (weights == "peers")


def assert_prompts_and_turns(llm: LLM, oracle: Oracle, options: dict[str, str]) -> None:
    llm.set_policy("context", options)
    llm.reset_prefix_cache()
    before = llm.bytes_exchanged
    num_instances = len(llm.num_free_blocks)
    rng = np.random.default_rng(num_instances)  # the same for all, so that the oracle answers once
    prompts = [rng.integers(3, 199, length).tolist() for length in (1, 17, 40, 300)]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert_exact(output, oracle.complete(prompt, 6))
    turn = prompts[2]
    for length in (30, 70):
        answer = llm.generate([turn], GREEDY)[0].outputs[0].token_ids
        turn = [*turn, *answer, *rng.integers(3, 199, length).tolist()]
        [output] = llm.generate([turn], GREEDY)
        assert output.metrics.num_cached_tokens > 0
        assert_exact(output, oracle.complete(turn, 6))
    exchange = options.get("exchange", "auto").replace("auto", "ring_kv") + "_dense" * ("dense" in options)
    assert llm.bytes_exchanged[exchange] > before[exchange]


@pytest.fixture(scope="module")
def smollm2() -> Oracle:
    return Oracle(smollm2_folder())


@pytest.mark.parametrize("exchange", EXCHANGES[1:])
def test_smollm2(smollm2: Oracle, exchange: str) -> None:
    prompt = list(topic_tokens()[:1500])
    with LLM(instances=2, policy_options={"exchange": exchange, "threshold": "1000"}) as llm:
        [output] = llm.generate([prompt], GREEDY)
        assert llm.bytes_exchanged[exchange] > 0
    assert_exact(output, smollm2.complete(prompt, 6))
