"""Prompts that devices compute before requests arrive."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from engines import ThreadLLM

from longspan import SamplingParams
from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.runtime import warm_up
from longspan.runtime.warm_up import warm_up_lengths
from longspan.runtime.worker import Worker


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "num_blocks", "lengths"),
    [
        (2048, 10**6, 1000, [128, 512, 1023, 1024, 2047, 2048]),
        (8192, 1025, 1000, [128, 512, 1023, 1024]),
        (8192, 10**6, 40, [128, 512]),
        (64, 10**6, 1000, []),
    ],
)
def test_prompts_fit_a_step_the_context_and_the_pool(
    num_tokens: int, max_len: int, num_blocks: int, lengths: list[int]
) -> None:
    config = EngineConfig(
        cluster=Cluster.of("2", num_blocks=[num_blocks, num_blocks + 1]),
        block_size=16,
        max_model_len=max_len,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=4,
    )
    assert warm_up_lengths(config) == lengths


def test_workers_forget_prompts_of_the_warm_up(tiny: Path) -> None:
    """Ids and blocks are used again by the first requests, whose tokens are those of an engine without a warm-up."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7] * 9, [8] * 40]
    ran: list[int] = []
    run = Worker.run

    def counting(worker: Worker, forward: object) -> object:
        ran.append(1)
        return run(worker, forward)  # type: ignore[arg-type]

    with ThreadLLM(str(tiny), skip_tokenizer_init=True, parallel="2xtp2", max_model_len=128) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with (
        mock.patch.object(Worker, "run", counting),
        mock.patch.object(warm_up, "_SHORT", (16, 100)),
        ThreadLLM(str(tiny), skip_tokenizer_init=True, parallel="2xtp2", max_model_len=128) as llm,
    ):
        warm_up.warm_up(llm.service.executor, llm.service.engine.config)  # as engines on CUDA devices
        assert len(ran) == 2 * 4
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
