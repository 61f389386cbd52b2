"""Prompts that devices compute before requests arrive."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from engines import ThreadLLM

from longspan import SamplingParams
from longspan.attn.backends.pytorch import AttentionBackend
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.runtime import warm_up
from longspan.runtime.warm_up import warm_up_lengths
from longspan.runtime.worker import Worker


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "num_blocks", "lengths"),
    [
        (2048, 10**6, 1000, [128, 2048]),
        (2**17, 10**6, 10**5, [128, 8192]),
        (8192, 1025, 1000, [128, 1024]),
        (8192, 10**6, 40, [128, 640]),
        (64, 10**6, 1000, [64]),
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


def test_kernels_of_prompts_are_prepared_on_every_rank(tiny: Path) -> None:
    """For the heads and the type of KV of the rank."""
    prepared: list[tuple[int, int, torch.dtype, int, int]] = []

    def record(_: object, kv: PagedKv, specs: set[AttnSpec], max_queries: int, max_keys: int) -> None:
        (spec,) = specs
        prepared.append((spec.num_heads, spec.num_kv_heads, kv.keys.dtype, max_queries, max_keys))

    with (
        mock.patch.object(AttentionBackend, "prepare", record),
        ThreadLLM(str(tiny), dtype="float32", skip_tokenizer_init=True, parallel="2xtp2", max_model_len=128) as llm,
    ):
        llm.service.executor.prepare(3, 128, 64)
        shape = llm.facts.shape
    assert sum(num_heads for num_heads, *_ in prepared) == 2 * shape.num_heads, "each instance has all heads"
    assert [rest for _, _, *rest in prepared] == [[torch.float32, 64, 128]] * 4


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
        mock.patch.object(warm_up, "_LENGTHS", (16, 100)),
        ThreadLLM(str(tiny), skip_tokenizer_init=True, parallel="2xtp2", max_model_len=128) as llm,
    ):
        warm_up.warm_up(llm.service.executor, llm.service.engine.config)  # as engines on CUDA devices
        assert len(ran) == 2 * 4
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
