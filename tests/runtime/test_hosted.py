"""Contexts of which a device holds a part, and the host the rest: the same tokens as Hugging Face."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from engines import Engines, ThreadLLM, num_free_blocks
from oracle import Oracle
from refusals import refused
from test_exact import COUNTING, assert_all_exact, prompts_of
from tiny_models import make_tiny

from longspan import SamplingParams
from longspan.args import EngineArgs
from longspan.core.request import ContextLengthError, Request
from longspan.core.steps import Forward, MoveKV, Step
from longspan.errors import WorkerLostError
from longspan.runtime.executor.control_plane import WorkerExecutor
from longspan.service import Service

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_logits=True)
LONGER = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_logits=True)
"""For requests that are preempted while they decode."""
HOST = {"host_kv_gib": 0.02, "num_gpu_blocks_override": 6, "policy": "chunked"}
"""96 tokens on a device."""


def follow(llm: ThreadLLM, prompts: list[list[int]]) -> tuple[list[Request], list[int]]:
    """Return the finished requests, and the largest number of blocks that each has read from the host."""
    requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
    most = [0] * len(requests)
    while llm.engine.has_unfinished:
        llm.engine.step()
        most = [max(before, request.hosted.total()) for before, request in zip(most, requests, strict=True)]
    return requests, most


@pytest.mark.parametrize(
    ("spec", "is_async"),
    [
        ("1", False),
        ("2", True),
        ("tp2", True),
        ("pp2", True),
        pytest.param("1", True, marks=pytest.mark.full),
        pytest.param("tp2", False, marks=pytest.mark.full),
    ],
)
def test_most_of_a_context_lies_on_the_host(
    engines: Engines, tiny: Path, oracle: Oracle, spec: str, is_async: bool
) -> None:
    """Of single requests in several chunks, and of requests at once, long and short."""
    llm = engines(tiny, parallel=spec, async_scheduling=is_async, **HOST)
    prompts = prompts_of(300, 90, 20, 180)
    [request], most = follow(llm, [prompts[0]])
    assert most[0] * 16 > (300 + NUM_TOKENS) / 2
    assert request.output == oracle.complete(prompts[0], NUM_TOKENS).token_ids
    llm.reset_prefix_cache()
    assert_all_exact(llm, oracle, prompts, GREEDY)


def test_other_policies_refuse_it(engines: Engines, tiny: Path) -> None:
    llm = engines(tiny, instances=2, **(HOST | {"policy": "runahead"}))
    with pytest.raises(ContextLengthError, match="maximum context length is 192 tokens"):
        llm.generate(prompts_of(300), GREEDY)
    with refused("max_model_len"):
        ThreadLLM(str(tiny), instances=2, max_model_len=300, block_size=16, **(HOST | {"policy": "runahead"}))


GROUPS = ["context", "auto", "tetris"]


@pytest.mark.parametrize(
    ("policy", "spec"),
    [("context", "3"), ("context", "2xtp2"), ("auto", "2"), ("auto", "2xpp2"), ("tetris", "2"), ("tetris", "2xtp2")],
)
def test_prompts_three_times_as_large_as_all_devices(
    engines: Engines, tiny: Path, oracle: Oracle, policy: str, spec: str
) -> None:
    """Together with a short prompt. Members share the pool of their host."""
    assert_reads_hosts(engines(tiny, parallel=spec, **(HOST | {"policy": policy})), oracle)


@pytest.mark.parametrize(("policy", "instances"), [("context", 2), ("auto", 2), ("tetris", 4)])
def test_each_of_two_hosts_has_its_own_pool(
    tiny: Path, oracle: Oracle, policy: str, instances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPAN_HOSTS", "2")
    given = HOST | {"policy": policy, "instances": instances, "skip_tokenizer_init": True, "block_size": 16}
    with ThreadLLM(str(tiny), max_num_batched_tokens=48, **given) as llm:
        assert len(llm.engine.config.cluster.host_blocks) == 2
        assert_reads_hosts(llm, oracle)


def assert_reads_hosts(llm: ThreadLLM, oracle: Oracle) -> None:
    """Answers a prompt three times as large as all devices as Hugging Face does, and computes nothing twice."""
    devices = llm.engine.config.cluster.num_instances * 96
    prompts = prompts_of(3 * devices, 20)
    [request, short], most = follow(llm, prompts)
    assert most[0] * 16 > 3 * devices / 2
    assert request.metrics.num_computed_tokens == len(prompts[0]) + NUM_TOKENS - 1
    for answered in (request, short):
        assert answered.output == oracle.complete(answered.prompt, NUM_TOKENS).token_ids


@pytest.mark.parametrize("policy", GROUPS)
def test_a_decode_moves_queries_and_partial_results(engines: Engines, tiny: Path, policy: str) -> None:
    llm = engines(tiny, parallel="2", **(HOST | {"policy": policy}))
    llm.reset_prefix_cache()
    request = llm.engine.add(prompts_of(500)[0], GREEDY)
    while len(request.output) < 2:
        llm.engine.step()
    before, num_before = Counter(llm.bytes_exchanged), len(request.output)
    while len(request.output) < NUM_TOKENS - 4:
        llm.engine.step()
    sent, num_tokens = Counter(llm.bytes_exchanged) - before, len(request.output) - num_before
    spec = llm.info.specs[0]
    of_a_token = llm.info.num_layers * spec.num_heads * (2 * spec.head_dim * 4 + 4)  # a query, its output and its lse
    assert set(sent) <= {"ring_q", "tokens", "host_copy", "total"}, "only full blocks go, to their host"
    assert sent["host_copy"] <= (num_tokens // 16 + 2) * llm.facts.shape.block_bytes(16)
    assert num_tokens <= sent["ring_q"] / of_a_token <= num_tokens + 1, "one step may be under way"
    while llm.engine.has_unfinished:
        llm.engine.step()


@pytest.mark.parametrize("policy", GROUPS)
def test_turns_and_choices_share_host_blocks_of_a_group(
    engines: Engines, tiny: Path, oracle: Oracle, policy: str
) -> None:
    llm = engines(tiny, parallel="2", **(HOST | {"policy": policy}))
    turn = prompts_of(350)[0]
    for _ in range(2):
        [output] = assert_all_exact(llm, oracle, [turn], GREEDY)
        [again] = assert_all_exact(llm, oracle, [[*turn, 7]], GREEDY)
        assert again.metrics.num_cached_tokens >= len(turn) - 16
        turn = [*turn, *output.outputs[0].token_ids, *prompts_of(20)[0]]
    both = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)
    [output] = llm.generate([turn], both, use_tqdm=False)
    expected = oracle.complete(turn, NUM_TOKENS).token_ids
    assert [one.token_ids for one in output.outputs] == [expected] * 2


@pytest.mark.parametrize("policy", GROUPS)
def test_a_group_is_preempted_and_resumes(engines: Engines, tiny: Path, oracle: Oracle, policy: str) -> None:
    """The host holds one and a half of them."""
    llm = engines(tiny, parallel="2", **(HOST | {"policy": policy, "host_kv_gib": 0.0003}))
    prompts = prompts_of(270, 260, 30)
    assert max(map(len, prompts)) + 24 > 192
    assert llm.max_model_len < sum(len(prompt) + 24 for prompt in prompts)
    assert_all_exact(llm, oracle, prompts, LONGER)
    cluster, kv = llm.engine.config.cluster, llm.engine.kv
    assert all(free == kv.pool(i).num_blocks for i, free in enumerate(num_free_blocks(llm)))
    assert all(kv.pool(pool).num_free == kv.pool(pool).num_blocks for pool in cluster.host_pools)


@pytest.mark.parametrize(
    "policy",
    ["auto", pytest.param("context", marks=pytest.mark.full), pytest.param("tetris", marks=pytest.mark.full)],
)
def test_a_member_is_killed_while_blocks_lie_on_its_host(
    tiny: Path, oracle: Oracle, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"block_size": 16, "max_num_batched_tokens": 48, "skip_tokenizer_init": True, "dtype": "float32"}
    service = Service(EngineArgs(str(tiny), instances=2, **(HOST | options | {"policy": policy})))
    submit, killed = WorkerExecutor.submit, []

    def killing(executor: WorkerExecutor, step: Step) -> None:
        submit(executor, step)
        if isinstance(step, Forward) and not killed and any(sum(part.hosted) > 10 for part in step.parts):
            killed.append(step)
            os.kill(executor.pids[1], signal.SIGKILL)

    monkeypatch.setattr(WorkerExecutor, "submit", killing)
    try:
        requests = [service.engine.add(prompt, GREEDY) for prompt in prompts_of(400, 20)]
        num_losses = 0
        while service.engine.has_unfinished:
            try:
                service.engine.step()
            except WorkerLostError:
                num_losses += 1
                service.restart()
        assert num_losses == 1
        pools = list(map(service.engine.kv.pool, range(len(service.engine.config.cluster.pool_blocks))))
        assert [pool.num_free for pool in pools] == [pool.num_blocks for pool in pools]
    finally:
        service.close()
    for request in requests:
        assert request.output == oracle.complete(request.prompt, NUM_TOKENS).token_ids


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "phi3", "llama4", "mimo"])
@pytest.mark.parametrize("spec", [{}, {"instances": 2, "policy": "context"}])
def test_windows_chunks_and_softcaps(tmp_path: Path, name: str, spec: dict[str, object]) -> None:
    """Layers with a window or chunks see less of the host, or nothing."""
    folder, given = make_tiny(name, tmp_path / name), HOST | {"skip_tokenizer_init": True, "block_size": 16} | spec
    with ThreadLLM(str(folder), max_num_batched_tokens=48, **given) as llm:
        assert_all_exact(llm, Oracle(folder), prompts_of(300, 30), GREEDY)


def test_further_turns_read_the_blocks_on_the_host(
    engines: Engines, tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, submit, ways = engines(tiny, **HOST), WorkerExecutor.submit, set[str]()

    def noting(executor: WorkerExecutor, step: Step) -> None:
        submit(executor, step)
        if isinstance(step, MoveKV):
            ways.add(step.way)

    monkeypatch.setattr(WorkerExecutor, "submit", noting)
    turn = prompts_of(200)[0]
    for _ in range(3):
        [output] = assert_all_exact(llm, oracle, [turn], GREEDY)
        [again] = assert_all_exact(llm, oracle, [[*turn, 7]], GREEDY)
        assert again.metrics.num_cached_tokens >= len(turn) - 16
        turn = [*turn, *output.outputs[0].token_ids, *prompts_of(20)[0]]
    assert ways == {"out"}, "it is read where it is"


def test_answers_of_one_long_prompt(engines: Engines, tiny: Path, oracle: Oracle) -> None:
    llm = engines(tiny, **HOST)
    prompt, params = prompts_of(200)[0], SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=3)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    expected = oracle.complete(prompt, NUM_TOKENS).token_ids
    assert [one.token_ids for one in output.outputs] == [expected] * 3


def test_penalties_know_all_of_an_answer(engines: Engines, tiny: Path) -> None:
    """Ranks are told the output again with each new table."""
    prompts, found = prompts_of(90, 200), []
    for given in ({"policy": "chunked"}, HOST):
        outputs = engines(tiny, **given).generate(prompts, COUNTING, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_preempted_requests_resume_from_a_small_host(engines: Engines, tiny: Path, oracle: Oracle) -> None:
    """The host holds one and a half of them."""
    llm = engines(tiny, **(HOST | {"host_kv_gib": 0.0003}))
    prompts = prompts_of(150, 140, 30)
    assert llm.max_model_len < sum(len(prompt) + 24 for prompt in prompts)
    outputs = assert_all_exact(llm, oracle, prompts, LONGER)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
