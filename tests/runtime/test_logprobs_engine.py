"""Log-probabilities of prompts and outputs that real workers report, against the oracle's."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engines import Engines, ThreadLLM
from oracle import Oracle
from tiny_models import write_checkpoint
from transformers import GPT2Config, OPTConfig, PreTrainedConfig

from longspan import SamplingParams
from longspan.core.steps import TokenLogprobs
from longspan.outputs import LogprobsOfToken, RequestOutput
from longspan.runtime import results
from longspan.runtime.sampling import token_logprobs

TOLERANCE = 1e-3


def assert_like(reported: LogprobsOfToken, token: int, num_top: int, expected: npt.NDArray[np.float32]) -> None:
    """Check the reported log-probabilities of `token` against `expected`: [vocab]."""
    assert next(iter(reported)) == token
    for candidate, found in reported.items():
        assert abs(found.logprob - expected[candidate]) <= TOLERANCE
    above = [int((expected > expected[token] + slack).sum()) for slack in (2 * TOLERANCE, -2 * TOLERANCE)]
    rank = reported[token].rank
    assert rank is not None and above[0] < rank <= max(above[1], 1)
    best = sorted((found for found in reported.values() if (found.rank or 0) <= num_top), key=lambda one: -one.logprob)
    assert [one.rank for one in best] == sorted(one.rank or 0 for one in best)
    np.testing.assert_allclose(
        [one.logprob for one in best],
        np.sort(np.partition(expected, -num_top)[-num_top:])[::-1] if num_top else [],
        atol=TOLERANCE,
    )


def assert_scored(output: RequestOutput, params: SamplingParams, oracle: Oracle) -> None:
    """Every token of the prompt and of each output has the oracle's log-probability."""
    prompt = output.prompt_token_ids
    for one in output.outputs:
        expected = oracle.logprobs([*prompt, *one.token_ids])
        if one.index == 0:
            assert_prompt_scored(output, params, expected)
        if params.logprobs is None:
            assert one.logprobs is None and one.cumulative_logprob is None
            continue
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids) == params.max_tokens
        for position, (token, reported) in enumerate(zip(one.token_ids, one.logprobs, strict=True), len(prompt)):
            assert_like(reported, token, params.logprobs, expected[position - 1])
        total = sum(reported[token].logprob for token, reported in zip(one.token_ids, one.logprobs, strict=True))
        assert one.cumulative_logprob == pytest.approx(total)


def assert_prompt_scored(output: RequestOutput, params: SamplingParams, expected: npt.NDArray[np.float32]) -> None:
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    prompt, reported = output.prompt_token_ids, output.prompt_logprobs
    assert reported is not None
    assert len(reported) == len(prompt) and reported[0] is None
    for token, scored, reference in zip(prompt[1:], reported[1:], expected, strict=False):
        assert scored is not None
        assert_like(scored, token, params.prompt_logprobs, reference)


def sampled(*, n: int = 1, logprobs: int | None, prompt_logprobs: int | None, temperature: float = 0) -> SamplingParams:
    return SamplingParams(
        n=n,
        seed=5,
        temperature=temperature,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=6,
        ignore_eos=True,
    )


REQUESTS = (
    (1, sampled(logprobs=3, prompt_logprobs=2)),
    (2, sampled(logprobs=0, prompt_logprobs=0)),
    (40, sampled(n=3, logprobs=5, prompt_logprobs=1, temperature=0.9)),
    (70, sampled(logprobs=2, prompt_logprobs=None)),
    (200, sampled(logprobs=None, prompt_logprobs=3)),
    (600, sampled(n=2, logprobs=1, prompt_logprobs=4, temperature=1.3)),
)


# Chunks of 256 tokens per instance: chunks of a sharded prompt end where the next token is another member's.
@pytest.mark.parametrize("instances", [1, 2, 3])
def test_equal_the_oracles(engines: Engines, tiny: Path, oracle: Oracle, instances: int) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 199) for _ in range(length)] for length, _ in REQUESTS]
    params = [params for _, params in REQUESTS]
    llm = engines(tiny, instances=instances, max_num_batched_tokens=256)
    llm.set_policy("context" if instances > 1 else "chunked", {"threshold": "60"} if instances > 1 else {})
    together = llm.generate(prompts, params, use_tqdm=False)
    again = llm.generate(prompts[-1], params[-1])  # all of it is cached by now
    for output, wish in zip([*together, *again], [*params, params[-1]], strict=True):
        assert_scored(output, wish, oracle)
    assert (llm.bytes_exchanged["total"] > 0) == (instances > 1)


def gpt2() -> PreTrainedConfig:
    """Its head calls the layers with positional arguments."""
    return GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)


def opt() -> PreTrainedConfig:
    """Its head calls the decoder inside its base model."""
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return OPTConfig(vocab_size=199, word_embed_proj_dim=64, max_position_embeddings=256, pad_token_id=0, **sizes)


@pytest.mark.parametrize("config", [gpt2, opt])
@pytest.mark.parametrize("pp", [1, 2])
def test_prompts_are_scored_however_the_head_calls_its_layers(
    tmp_path: Path, config: Callable[[], PreTrainedConfig], pp: int
) -> None:
    folder = write_checkpoint(config(), tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=2)
    prompt = random.Random(9).choices(range(3, 199), k=70)
    with ThreadLLM(str(folder), skip_tokenizer_init=True, block_size=16, max_num_batched_tokens=48, pp=pp) as llm:
        [output] = llm.generate([prompt], params, use_tqdm=False)
    assert_scored(output, params, Oracle(folder))


@pytest.mark.parametrize("instances", [1, 2])
def test_survive_preemption(engines: Engines, tiny: Path, oracle: Oracle, instances: int) -> None:
    rng = random.Random(8)
    prompts = [[rng.randrange(3, 199) for _ in range(rng.randint(30, 200))] for _ in range(8)]
    params = [
        SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=rng.choice([None, 0, 3])
        )
        for _ in prompts
    ]
    num_blocks = 34 // instances
    llm = engines(tiny, instances=instances, num_gpu_blocks_override=num_blocks, max_num_batched_tokens=2048)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert preempted(outputs) > 0
    for output, wish in zip(outputs, params, strict=True):
        assert_scored(output, wish, oracle)


def preempted(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs)


def test_one_rank_of_an_instance_reports(engines: Engines, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def found(*arguments: Any) -> list[TokenLogprobs]:
        asked.append(threading.current_thread().name)
        return token_logprobs(*arguments)

    llm = engines(tiny, parallel="tp2")  # may try the split on threads of its own
    monkeypatch.setattr(results, "token_logprobs", found)
    llm.generate([[5, 6, 7]], sampled(logprobs=1, prompt_logprobs=1))
    assert set(asked) == {"longspan rank 0"}
