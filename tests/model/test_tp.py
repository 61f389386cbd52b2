"""Tensor parallelism inside instances, alone and under context parallelism, says what Hugging Face says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Oracle, assert_exact
from tiny_models import BASE, TINY, write_checkpoint
from transformers import Olmo2Config

from longspan import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, output_logits=True)
LENGTHS = (1, 17, 40, 160)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [*((name, "tp2") for name in TINY), ("llama", "tp5"), ("qwen2", "2xtp2"), ("gemma2", "2xtp3"), ("phi3", "2xtp2")],
)
def test_sharded_models_say_what_the_whole_one_says(
    folders: dict[str, Path], oracles: dict[str, Oracle], name: str, parallel: str
) -> None:
    """Three KV heads on two ranks are two and one; on five ranks most of them are there twice."""
    rng = np.random.default_rng(len(parallel))
    prompts = [rng.integers(3, 199, length).tolist() for length in LENGTHS]
    with LLM(
        str(folders[name]),
        parallel=parallel,
        skip_tokenizer_init=True,
        block_size=16,
        max_num_batched_tokens=48,
        policy_options={"threshold": "20"} if "x" in parallel else {},
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.bytes_exchanged["all_reduce"] > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(output, oracles[name].complete(prompt, 16))


def test_more_ranks_than_heads_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="tp 7 is too much for layers with 6 query heads and 3 KV heads"):
        LLM(str(folders["llama"]), tp=7, skip_tokenizer_init=True)


@pytest.mark.parametrize("arguments", [{"tp": 2}, {"instances": 2, "policy_options": {"exchange": "gather_hidden"}}])
def test_a_model_that_nobody_knows_how_to_split_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """OLMo 2 normalises all query heads together, which no rank has."""
    write_checkpoint(Olmo2Config(**BASE), tmp_path)
    with pytest.raises(ValueError, match=r"not known how to cut model\.layers\.0\.self_attn\.q_norm\.weight"):
        LLM(str(tmp_path), skip_tokenizer_init=True, **arguments)
