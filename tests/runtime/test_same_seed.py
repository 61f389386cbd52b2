"""A seed gives the same tokens alone, in company, on any number of instances and through preemption."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import ThreadLLM
from late_copies import LateCopies

from longspan import SamplingParams
from longspan.outputs import CompletionOutput, RequestOutput
from longspan.runtime.random_tokens import uniforms

NUM_TOKENS = 24
TEMPERATURE = 0.8
TOLERANCE = 5e-6
"""Where a token's random quantile is closer to the edge of its share of the distribution, a neighbour is right, too."""


def params(seed: int, *, output_logits: bool = False) -> SamplingParams:
    return SamplingParams(
        temperature=TEMPERATURE,
        seed=seed,
        n=2 if seed % 4 == 0 else 1,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        output_logits=output_logits,
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """12 of 5 to 700 tokens."""
    rng = random.Random(21)
    return [[rng.randrange(3, 199) for _ in range(rng.choice([5, 40, 300, 700]))] for _ in range(12)]


@pytest.fixture(scope="module")
def alone(tiny: Path, prompts: list[list[int]]) -> Iterator[list[RequestOutput]]:
    """Each request on its own on one instance, with the logits that its tokens were drawn from."""
    with ThreadLLM(str(tiny), skip_tokenizer_init=True) as llm:
        yield [
            llm.generate(prompt, params(seed, output_logits=True), use_tqdm=False)[0]
            for seed, prompt in enumerate(prompts)
        ]


SHARED = {"policy": "context", "policy_options": {"threshold": "200"}}

COMPANY: dict[str, dict[str, Any]] = {
    "1 instance": {},
    "1 instance, one step at a time": {"async_scheduling": False},
    "1 instance, preempted": {"num_gpu_blocks_override": 75},
    "2 instances": {"instances": 2, **SHARED},
    "2 instances, preempted": {"instances": 2, **SHARED, "num_gpu_blocks_override": 30},
    "3 instances": {"instances": 3, **SHARED},
    "2 instances, by default": {"instances": 2},
    "3 instances, by default, preempted": {"instances": 3, "num_gpu_blocks_override": 20},
}
ALIKE = ("1 instance", "3 instances")
"""The remaining cases of `COMPANY` test the same."""


@pytest.mark.parametrize("company", ["1 instance, preempted", "2 instances, preempted"])
def test_the_same_tokens_if_the_host_reads_them_late(
    tiny: Path, prompts: list[list[int]], alone: list[RequestOutput], company: str
) -> None:
    """The host reads the tokens of steps with prompts before the tokens of the decode step before."""
    with LateCopies():
        test_the_same_tokens(tiny, prompts, alone, company)


@pytest.mark.parametrize(
    "company", [pytest.param(name, marks=[pytest.mark.full] if name in ALIKE else []) for name in COMPANY]
)
def test_the_same_tokens(tiny: Path, prompts: list[list[int]], alone: list[RequestOutput], company: str) -> None:
    common = {"skip_tokenizer_init": True, "block_size": 16, "max_num_batched_tokens": 512}
    with ThreadLLM(str(tiny), **common, **COMPANY[company]) as llm:
        together = llm.generate(prompts, [params(seed) for seed in range(len(prompts))], use_tqdm=False)
    assert (sum(output.metrics.num_preemptions for output in together) > 0) == ("preempted" in company)
    close: list[str] = []
    for seed, (output, expected) in enumerate(zip(together, alone, strict=True)):
        for got, one in zip(output.outputs, expected.outputs, strict=True):
            assert len(got.token_ids) == NUM_TOKENS
            for index, margin in enumerate(margins(one, len(expected.prompt_token_ids), seed)):
                same = got.token_ids[index] == one.token_ids[index]
                where = f"request {seed}, output {one.index}, token {index}, margin {margin:.1e}"
                assert same or margin < TOLERANCE, where
                if margin < TOLERANCE:
                    close.append(f"{where}: {'same' if same else 'other token, what follows is not compared'}")
                if not same:
                    break
    assert len(close) <= 4, close
    if close:
        warnings.warn(f"{len(close)} draws with a margin below {TOLERANCE}: {'; '.join(close)}", stacklevel=1)


def margins(output: CompletionOutput, prompt_length: int, seed: int) -> Iterator[float]:
    """How far each token's random quantile was from the edges of the token's share of the distribution."""
    assert output.logits is not None
    for index, (token, logits) in enumerate(zip(output.token_ids, output.logits, strict=True)):
        scaled = logits.astype(np.float64) / TEMPERATURE
        reached = np.exp(scaled - scaled.max()).cumsum()
        reached /= reached[-1]
        [quantile] = uniforms([(seed, output.index, prompt_length + index)])
        below = reached[token - 1] if token else 0.0
        assert below - 1e-9 <= quantile <= reached[token] + 1e-9
        yield min(quantile - below, reached[token] - quantile)
