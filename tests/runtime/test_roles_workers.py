"""Instances that prefill and instances that decode, on real workers, through the whole engine."""

from __future__ import annotations

import os
import signal
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from engines import Engines, ThreadLLM
from oracle import Oracle, assert_exact

from longspan import LLM, SamplingParams
from longspan.core.steps import Forward, MoveKV, Step
from longspan.errors import WorkerLostError
from longspan.runtime.executor.control_plane import WorkerExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_logits=True)
PLANS = {"min_chunk": "16", "improvement_rate": "0"}


def start(
    tiny: Path, prefill: str, decode: str, backends: int | None = None, kind: type[LLM] = ThreadLLM, **arguments: object
) -> LLM:
    return kind(
        str(tiny),
        dtype="float32",
        prefill_parallel=prefill,
        decode_parallel=decode,
        transfer_backends=backends,
        policy_options=PLANS,
        skip_tokenizer_init=True,
        block_size=16,
        max_num_batched_tokens=48,
        **arguments,  # type: ignore[arg-type]  # of LLM
    )


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 199, length).tolist() for length in lengths]


def run_all(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()


@pytest.mark.parametrize(
    ("prefill", "decode", "backends"),
    [
        ("1", "tp2", 1),
        ("tp2", "1", 2),
        ("3", "tp2", 1),
        ("2xtp2", "2", None),
        ("pp2", "tp2", 1),
        ("tp2", "pp2", 2),
        ("2xpp2", "2xtp2pp3", None),
    ],
)
def test_many_prompts_and_another_turn(
    tiny: Path, oracle: Oracle, prefill: str, decode: str, backends: int | None
) -> None:
    prompts = prompts_of(300, 200, 17, 1, 90, 250, 33)
    with start(tiny, prefill, decode, backends) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_exact(output, oracle.complete(prompt, 8))
        moved = llm.bytes_exchanged["kv_transfer"]
        assert moved >= sum(map(len, prompts)) * 3 * 16 * 4 * 2 * 3, "all tokens, in three layers"
        turn = [*prompts[0], *outputs[0].outputs[0].token_ids, *prompts[2]]
        [output] = llm.generate([turn], GREEDY)
        assert output.metrics.num_cached_tokens > 0
        assert_exact(output, oracle.complete(turn, 8))


def test_one_backend_serves_twelve_in_the_order_of_their_handshakes(
    tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On real workers: transfers are sent in that order, request after request, and all end."""
    prompts = prompts_of(300, 20, 100, 250, 40, 17, 200, 150, 1, 90, 280, 60)
    shaken: list[int] = []
    moves: list[MoveKV] = []
    with start(tiny, "2", "1", 1) as llm:
        submit = llm.service.executor.submit

        def watched(step: Step) -> None:
            if isinstance(step, Forward):
                shaken.extend(part.request_id for part in step.parts)
                moves.extend(step.streams)
            elif isinstance(step, MoveKV):
                moves.append(step)
            submit(step)

        monkeypatch.setattr(llm.service.executor, "submit", watched)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_exact(output, oracle.complete(prompt, 8))
    moves.sort(key=lambda move: move.number)
    in_turn = [name for name, _ in groupby(move.request_id for move in moves)]
    assert in_turn == list(dict.fromkeys(shaken)) and len(in_turn) == 12


def test_a_missing_table_of_improvement_rates_is_logged(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="longspan"):
        start(tiny, "1", "1").shutdown()
        assert "improvement_rate" not in caplog.text, "it was given"
        roles = {"policy": "tetris", "prefill_parallel": "1", "decode_parallel": "1"}
        ThreadLLM(str(tiny), **roles, skip_tokenizer_init=True).shutdown()
    assert "improvement_rate=auto is 0.3 until rates for the requests are found" in caplog.text


def test_decode_instances_with_few_blocks(tiny: Path, oracle: Oracle) -> None:
    """Requests wait for blocks there, and are preempted while they decode."""
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_logits=True)
    prompts = prompts_of(100, 90, 60, 80, 40)
    with start(tiny, "2", "1", 1, num_gpu_blocks_override=12, max_model_len=150) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, long, use_tqdm=False), strict=True):
            assert_exact(output, oracle.complete(prompt, 40))


def test_penalties_count_tokens_sampled_on_other_instances(tiny: Path) -> None:
    counting = SamplingParams(
        temperature=0, frequency_penalty=0.5, presence_penalty=0.25, max_tokens=20, ignore_eos=True, output_logits=True
    )
    with start(tiny, "2", "1") as llm:
        for output in llm.generate(prompts_of(70, 17), counting, use_tqdm=False):
            [got] = output.outputs
            assert got.logits is not None
            counts = np.zeros(len(got.logits[0]), dtype=np.float32)
            for token, logits in zip(got.token_ids, got.logits, strict=True):
                assert token == int((logits - 0.5 * counts - 0.25 * (counts > 0)).argmax())
                counts[token] += 1


def test_an_abort_during_a_transfer_frees_all_blocks(tiny: Path, oracle: Oracle) -> None:
    """Streams are closed at any moment. All blocks are free afterwards, and other requests are not affected."""
    prompts = prompts_of(300, 200, 250)
    with start(tiny, "2", "tp2", 1) as llm:
        for num_steps in range(1, 12, 2):
            requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts[:2]]
            for _ in range(num_steps):
                llm.engine.step()
            for request in requests:
                llm.engine.finish(request, "abort")
            [output] = llm.generate([prompts[2]], GREEDY)
            assert_exact(output, oracle.complete(prompts[2], 8))
            run_all(llm)
            assert llm.engine.load().used_blocks == [0, 0, 0]
            llm.reset_prefix_cache()


@pytest.mark.parametrize("rank", [0, 2], ids=["prefill", "decode"])
def test_workers_that_are_lost_in_mid_transfer(tiny: Path, oracle: Oracle, rank: int) -> None:
    """With new ones everything goes on where it was."""
    prompts = prompts_of(300, 200)
    with start(tiny, "2", "tp2", 1, LLM) as llm:
        requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
        for _ in range(9):
            llm.engine.step()
        os.kill(llm.service.executor.pids[rank], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=f"rank {rank} .*SIGKILL"):
            run_all(llm)
        llm.service.restart()
        run_all(llm)
    for prompt, request in zip(prompts, requests, strict=True):
        expected = oracle.complete(prompt, 8)
        assert request.output == expected.token_ids


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"policy": "context"}, "choose auto or tetris or fixed-sp"),
        ({"policy_options": {"exchange": "gather_hidden"}}, "gather_hidden"),
        ({"decode_parallel": "tp7"}, "tp 7 is too much"),
    ],
)
def test_impossible_roles_are_refused(tiny: Path, arguments: dict[str, object], says: str) -> None:
    given = {
        "prefill_parallel": "2",
        "decode_parallel": "1",
        "dtype": "float32",
        "skip_tokenizer_init": True,
    } | arguments
    with pytest.raises(ValueError, match=says):
        LLM(str(tiny), **given)  # type: ignore[arg-type]  # of LLM


def test_members_send_and_receive_kv_of_one_step(
    engines: Engines, tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members of a group of four decode a prompt that no instance holds: each gets blocks from the other, too."""
    submit, both = WorkerExecutor.submit, set[int]()

    def noting(executor: WorkerExecutor, step: Step) -> None:
        submit(executor, step)
        for move in step.streams if isinstance(step, Forward) else ():
            both.update(*(set(move.targets).intersection(other.sources) for other in step.streams))

    monkeypatch.setattr(WorkerExecutor, "submit", noting)
    options = {"policy": "auto", "num_gpu_blocks_override": 60, "max_num_batched_tokens": 64}
    llm = engines(tiny, parallel="4", **options)
    prompt = [3 + at * 37 % 190 for at in range(1200)]
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == oracle.complete(prompt, 8).token_ids
    assert both, "an instance sends and receives"
