"""Layers with chunked attention (Llama 4) equal Hugging Face, however their tokens are split, cached and moved.

Chunks have 40 tokens, and blocks 16. So chunks begin inside blocks, steps cross them, and prefixes end inside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Engines, Row, ThreadLLM, num_free_blocks, pairwise
from oracle import Oracle
from test_exact import DECODES, SHORT, assert_all_exact, is_legal, options_of, prompts_of
from tiny_models import CHUNK, TINY, write_checkpoint
from transformers import AutoModelForCausalLM

from longspan import SamplingParams
from longspan.attn.spec import Visibility
from longspan.runtime.prompt_attention import hidden_keys

SHARING = {
    "instances": (2, 3),
    "tp": (1, 2),
    "pp": (1, 2),
    "exchange": ("auto", "ring_kv", "ring_q", "alltoall", "gather_kv", "gather_hidden", "chain"),
    "variant": ("", "dense", "weights=host", "weights=peers", "home=computed", "micro_partitions=3"),
    "layout": ("zigzag", "striped", "contiguous", "uneven"),
    "decode": DECODES,
    "rotate": ("block", "token"),
}
LONG = SamplingParams(temperature=0, max_tokens=CHUNK + 2, ignore_eos=True, output_logits=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama4"]


@pytest.fixture(scope="module")
def oracle4(oracles: dict[str, Oracle]) -> Oracle:
    return oracles["llama4"]


def has_heads(row: Row) -> bool:
    """Shares of two ranks have one KV head, which `gather_hidden` splits between two instances at most."""
    return is_legal(row) and not (row["exchange"] == "gather_hidden" and row["tp"] == 2 and row["instances"] > 2)


def assert_turns_exact(llm: ThreadLLM, oracle: Oracle) -> None:
    """Answer prompts at once, then two more turns, which begin inside a chunk and are longer than one."""
    prompts = prompts_of(1, 17, CHUNK, 202)
    assert_all_exact(llm, oracle, prompts, SHORT)
    turn = prompts[2]
    for length in (33, 70):
        turn = [*turn, *oracle.complete(turn, 4).token_ids, *prompts_of(length)[0]]
        [output] = assert_all_exact(llm, oracle, [turn], SHORT)
        assert output.metrics.num_cached_tokens > 0


@pytest.mark.parametrize("row", pairwise(SHARING, has_heads))
def test_prompts_and_turns(engines: Engines, folder: Path, oracle4: Oracle, row: Row) -> None:
    llm = engines(folder, instances=row["instances"], tp=row["tp"], pp=row["pp"])
    llm.set_policy("context", options_of(row))
    assert_turns_exact(llm, oracle4)


@pytest.mark.parametrize("parallel", ["1", "tp2", "pp2"])
@pytest.mark.parametrize("max_tokens", [48, 30, 400])
def test_steps_of_any_length(engines: Engines, folder: Path, oracle4: Oracle, parallel: str, max_tokens: int) -> None:
    """Steps that are longer and shorter than a chunk, and prompts in one step."""
    assert_turns_exact(engines(folder, parallel=parallel, max_num_batched_tokens=max_tokens), oracle4)


@pytest.mark.parametrize(("parallel", "host"), [("1", 0.0), ("2", 0.02), ("tp2", 0.0), ("pp2", 0.02)])
def test_preempted_requests_resume(
    engines: Engines,
    folder: Path,
    oracle4: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    parallel: str,
    host: float,
) -> None:
    """Answers cross borders of chunks. KV is computed again, or copied back from hosts."""
    monkeypatch.setattr("longspan.resolve.swap_price", lambda *_: None)
    llm = engines(folder, parallel=parallel, num_gpu_blocks_override=8 if parallel == "2" else 12, host_kv_gib=host)
    outputs = assert_all_exact(llm, oracle4, prompts_of(30, 45, 12, 39), LONG)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert all(free == llm.engine.kv.account.num_blocks(i) for i, free in enumerate(num_free_blocks(llm)))


CONFIGS: dict[str, dict[str, Any]] = {
    "one chunk": {"attention_chunk_size": 4096},
    "chunks of a block": {"attention_chunk_size": 16},
    "chunks of a token": {"attention_chunk_size": 1},
    "all layers chunked": {"layer_types": ["chunked_attention"] * 4},
    "no layer chunked": {"layer_types": ["full_attention"] * 4},
    "RoPE in all layers": {"no_rope_layers": [1, 1, 1, 1]},
    "RoPE in no layer": {"no_rope_layers": [0, 0, 0, 0], "layer_types": ["chunked_attention", "full_attention"] * 2},
    "no temperature": {"attn_temperature_tuning": False},
    "no norms, only experts": {"use_qk_norm": False, "interleave_moe_layer_step": 1},
    "one expert of three": {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 96},
    "experts half as wide": {"intermediate_size": 48},  # twice the inner size is the hidden size
}


@pytest.mark.parametrize("name", CONFIGS)
def test_other_configurations(tmp_path: Path, name: str) -> None:
    config = type(TINY["llama4"]())(**{**TINY["llama4"]().to_dict(), "layer_types": None, **CONFIGS[name]})
    folder = write_checkpoint(config, tmp_path / "model")
    oracle = Oracle(folder, use_cache=config.attention_chunk_size > 1)  # its cache keeps one token too many
    given = {"skip_tokenizer_init": True, "block_size": 16, "max_num_batched_tokens": 48}
    for parallel in ("2", "tp2"):
        with ThreadLLM(str(folder), parallel=parallel, **given) as llm:
            if parallel == "2":
                llm.set_policy("context", {"threshold": "20"})
            assert_all_exact(llm, oracle, prompts_of(1, 17, 150), SHORT)


@pytest.mark.parametrize("parallel", ["1", "2", "tp2"])
@torch.no_grad()
def test_bfloat16_is_as_close_as_that_of_transformers(folder: Path, oracle4: Oracle, parallel: str) -> None:
    [prompt] = prompts_of(180)
    rows, following = range(len(prompt) - 1), prompt[1:]
    exact = oracle4.logprobs(prompt)[rows, following]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    own = logits.float().log_softmax(-1).numpy()[rows, following]
    given = {"skip_tokenizer_init": True, "block_size": 16, "max_num_batched_tokens": 48, "dtype": "bfloat16"}
    with ThreadLLM(str(folder), parallel=parallel, **given) as llm:
        if parallel == "2":
            llm.set_policy("context", {"threshold": "20"})
        [output] = llm.generate([prompt], SCORED, use_tqdm=False)
    assert output.prompt_logprobs is not None
    scored = zip(following, output.prompt_logprobs[1:], strict=True)
    found = np.array([logprobs[token].logprob for token, logprobs in scored if logprobs is not None])
    assert np.abs(found - exact).mean() <= 3 * np.abs(own - exact).mean()


@pytest.mark.parametrize("visibility", [Visibility(), Visibility(window=7), Visibility(chunk=7)])
def test_hidden_keys_are_those_before_the_first_visible_one(visibility: Visibility) -> None:
    queries, keys = torch.tensor([3, 0, 20, 14, 13]), torch.arange(25).flip(0)
    hidden = [[not visibility.first(q) <= k <= q for k in keys.tolist()] for q in queries.tolist()]
    assert hidden_keys(queries, keys, visibility).tolist() == hidden
