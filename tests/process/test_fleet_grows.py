"""Worker processes join a fleet in mid-stream. Old processes stay the same, and all end without a trace."""

from __future__ import annotations

import os
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from leftovers import left_names, wait_until_gone
from oracle import Oracle

from longspan import LLM, SamplingParams
from longspan.args import EngineArgs
from longspan.core.request import Request
from longspan.core.steps import Reshard, Step
from longspan.errors import WorkerLostError
from longspan.runtime.executor.control_plane import WorkerExecutor
from longspan.service import Service

pytestmark = pytest.mark.usefixtures("own_folder")
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LENGTHS = (90, 17, 40, 61, 25)


def make_service(model: Path, spec: str) -> Service:
    given = EngineArgs(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        parallel=spec,
        policy="chunked",
        threads_per_rank=1,
        block_size=16,
        num_gpu_blocks_override=60,
        max_num_batched_tokens=48,
        host_kv_gib=0.02,
    )
    return Service(given)


def start_requests(service: Service) -> list[Request]:
    """Some steps into requests that none of which has finished."""
    rng = np.random.default_rng(5)
    requests = [service.engine.add(rng.integers(3, 199, length).tolist(), LONG) for length in LENGTHS]
    for _ in range(12):
        service.engine.step()
    assert any(request.output for request in requests) and not any(request.finish_reason for request in requests)
    return requests


def finish(service: Service, requests: list[Request], oracle: Oracle, *, num_losses: int = 0) -> None:
    found = 0
    while service.engine.has_unfinished:
        try:
            service.engine.step()
        except WorkerLostError:
            found += 1
            service.restart()
    assert found == num_losses
    for request in requests:
        assert request.output == oracle.complete(request.prompt, 30).token_ids


def test_workers_join_in_mid_stream(tiny: Path, oracle: Oracle) -> None:
    before, service = left_names(), make_service(tiny, "1")
    try:
        pids, requests = service.executor.pids, start_requests(service)
        service.reshard("3")
        finish(service, requests, oracle)
        assert len(set(service.executor.pids)) == 3 and service.executor.pids[:1] == pids
        assert all(request.metrics.num_computed_tokens == len(request.prompt) + 29 for request in requests)
        pids, requests = service.executor.pids, start_requests(service)
        service.reshard("2xpp2")
        finish(service, requests, oracle)
        assert len(set(service.executor.pids)) == 4 and service.executor.pids[:3] == pids
        pids = service.executor.pids
    finally:
        service.close()
    wait_until_gone(pids, before)


@pytest.mark.parametrize("killed", [0, 2])
def test_one_is_killed_while_another_joins(
    tiny: Path, oracle: Oracle, killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is made by the workers that follow."""
    submit, number = WorkerExecutor.submit, count()

    def submitting(executor: WorkerExecutor, step: Step) -> None:
        submit(executor, step)
        if isinstance(step, Reshard) and next(number) == 0:
            os.kill(executor.pids[killed], signal.SIGKILL)

    monkeypatch.setattr(WorkerExecutor, "submit", submitting)
    before, service = left_names(), make_service(tiny, "2")
    try:
        requests = start_requests(service)
        service.reshard("3")
        finish(service, requests, oracle, num_losses=1)
        assert str(service.engine.config.cluster.spec) == "3"
        pids = service.executor.pids
        assert len(pids) == 3
    finally:
        service.close()
    wait_until_gone(pids, before)


def test_a_python_engine_that_is_idle_grows_at_once(tiny: Path, oracle: Oracle) -> None:
    with LLM(
        str(tiny), dtype="float32", skip_tokenizer_init=True, parallel="1", threads_per_rank=2, block_size=16
    ) as llm:
        llm.reshard("2")
        assert len(llm.service.executor.pids) == 2 and len(llm.engine.transitions) == 1
        [output] = llm.generate([[*range(3, 90)]], LONG, use_tqdm=False)
        assert output.outputs[0].token_ids == oracle.complete([*range(3, 90)], 30).token_ids
