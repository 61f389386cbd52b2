"""Preempted requests find their KV in the memory of their host: whole engines, on threads and processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from engines import Engines, ThreadLLM, num_free_blocks
from oracle import Oracle
from refusals import refused
from test_exact import assert_all_exact, prompts_of

from longspan import SamplingParams
from longspan.args import EngineArgs
from longspan.core.steps import MoveKV, Step
from longspan.errors import WorkerLostError
from longspan.runtime.executor.control_plane import WorkerExecutor
from longspan.service import Service

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_logits=True)
LENGTHS = tuple(5 + 7 * number % 20 for number in range(16))
"""With 40 tokens of output each takes up to four blocks. Devices have one block per request."""
BLOCKS_OF_4 = 4 * 4
HOST = {"host_kv_gib": 0.02, "max_num_seqs": 32}


@pytest.mark.parametrize("spec", ["1", "2", "pp2", "tp2", "2xpp2"])
def test_no_token_is_computed_twice(tiny: Path, oracle: Oracle, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 requests on devices with blocks for 4. Without a price every load pays off."""
    monkeypatch.setattr("longspan.resolve.swap_price", lambda *_: None)
    num_blocks = BLOCKS_OF_4 // (int(spec[0]) if spec[0].isdigit() else 1)
    given = {"block_size": 16, "num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 48, **HOST}
    with ThreadLLM(str(tiny), parallel=spec, skip_tokenizer_init=True, **given) as llm:
        outputs = assert_all_exact(llm, oracle, prompts_of(*LENGTHS), LONG)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        num_computed = sum(output.metrics.num_computed_tokens for output in outputs)
        assert num_computed == sum(length + 40 - 1 for length in LENGTHS)
        assert all(free == llm.engine.kv.account.num_blocks(i) for i, free in enumerate(num_free_blocks(llm)))
        host = llm.engine.kv.pool(llm.engine.config.cluster.host_pool(0))
        assert host.num_free == host.num_blocks


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_worker_is_killed_in_mid_swap(tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    given = EngineArgs(
        str(tiny),
        dtype="float32",
        tp=2,
        skip_tokenizer_init=True,
        block_size=16,
        num_gpu_blocks_override=BLOCKS_OF_4,
        **HOST,
    )
    service, submit, swaps = Service(given), WorkerExecutor.submit, []

    def killing(executor: WorkerExecutor, step: Step) -> None:
        submit(executor, step)
        if isinstance(step, MoveKV) and step.way == way:
            swaps.append(step)
            if len(swaps) == 3:
                os.kill(executor.pids[1], signal.SIGKILL)

    monkeypatch.setattr(WorkerExecutor, "submit", killing)
    try:
        requests = [service.engine.add(prompt, LONG) for prompt in prompts_of(*LENGTHS)]
        num_losses = 0
        while service.engine.has_unfinished:
            try:
                service.engine.step()
            except WorkerLostError:
                num_losses += 1
                service.restart()
        assert num_losses == 1
        account = service.engine.kv
        pools = [account.pool(number) for number in range(len(service.engine.config.cluster.pool_blocks))]
        assert [pool.num_free for pool in pools] == [pool.num_blocks for pool in pools]
    finally:
        service.close()
    for request in requests:
        assert request.output == oracle.complete(request.prompt, 40).token_ids


def test_the_next_turn_reads_host_blocks_that_devices_have_evicted(
    engines: Engines, tiny: Path, oracle: Oracle
) -> None:
    llm = engines(tiny, parallel="1", num_gpu_blocks_override=12, **HOST)
    first, over, more = prompts_of(120, 150, 20)
    [output] = assert_all_exact(llm, oracle, [first])
    assert_all_exact(llm, oracle, [over])
    turn = [*first, *output.outputs[0].token_ids, *more]
    [output] = assert_all_exact(llm, oracle, [turn])
    assert output.metrics.num_cached_tokens >= 120


def test_instances_lie_on_one_host_each(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_HOSTS", "2")
    with refused("host_kv_gib"):
        ThreadLLM(str(tiny), skip_tokenizer_init=True, tp=2, host_kv_gib=0.02)
    with ThreadLLM(str(tiny), skip_tokenizer_init=True, instances=2, host_kv_gib=0.02) as llm:
        assert len(llm.engine.config.cluster.host_blocks) == 2
        [output] = llm.generate([[3, 4, 5]], LONG)
    assert len(output.outputs[0].token_ids) == 40
