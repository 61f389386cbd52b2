"""SIGKILL during changes of phase: requests continue or end with a clear error, and the next run completes a batch."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from batch_files import answers_in, write_requests
from fake_llm import run
from forked import Forked
from leftovers import left_names, wait_until_gone
from oracle import Oracle
from turns import turning_args

from longspan import SamplingParams
from longspan.cli import app
from longspan.core.steps import Completion, Forward, MoveKV, Reshard, Step
from longspan.errors import WorkerLostError
from longspan.runtime import messages
from longspan.runtime.executor.control_plane import WorkerExecutor
from longspan.service import Service

pytestmark = pytest.mark.usefixtures("own_folder")
MAX_TOKENS = 24
LENGTHS = tuple(5 + 7 * number % 50 for number in range(24))
"""The host holds a fourth of these prompts, so that phases change some ten times."""
BATCH = "--policy seesaw --prefill-parallel pp2 --decode-parallel tp2 --threads-per-rank 1 --skip-tokenizer-init "
BATCH += "--block-size 16 --num-gpu-blocks-override 30 --max-num-batched-tokens 48 --host-kv-gib 0.00015 "
BATCH += "--dtype float32"


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, 199, length).tolist() for length in lengths]


def kill_amid(
    patch: pytest.MonkeyPatch, is_wanted: Callable[[Step], bool], count: int, *, after_others: bool = False
) -> list[Step]:
    """Kills rank 1 when it has been sent the `count`-th of some steps, of which it has done nothing: it is stopped.

    With `after_others` that is a Reshard, and the other rank has done it by then. Returns a list that gets the steps.
    """
    submit, take, found = WorkerExecutor.submit, WorkerExecutor._take, list[Step]()

    def submitting(executor: WorkerExecutor, step: Step) -> None:
        if not is_wanted(step):
            submit(executor, step)
            return
        found.append(step)
        if len(found) == count:
            stop(executor.pids[1])
        submit(executor, step)
        if len(found) == count and not after_others:
            os.kill(executor.pids[1], signal.SIGKILL)

    def taking(executor: WorkerExecutor, report: messages.Report) -> Completion | None:
        if after_others and len(found) == count and isinstance(report, messages.Regrouped):
            assert report.rank == 0, "the other one is stopped"
            os.kill(executor.pids[1], signal.SIGKILL)
        return take(executor, report)

    patch.setattr(WorkerExecutor, "submit", submitting)
    patch.setattr(WorkerExecutor, "_take", taking)
    return found


def stop(pid: int) -> None:
    """Returns when the process does nothing any more."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


def is_reshard(step: Step) -> bool:
    return isinstance(step, Reshard)


def is_swap_out(step: Step) -> bool:
    """Return True for a step that copies KV to the host, layer by layer or after its computation."""
    moves = step.streams if isinstance(step, Forward) else (step,)
    return any(isinstance(move, MoveKV) and move.way == "out" for move in moves)


def is_swap_in(step: Step) -> bool:
    return isinstance(step, MoveKV) and step.way == "in"


def worker_pids() -> tuple[int, ...]:
    """The living workers of this process's engines."""
    forkers = [
        one for one in psutil.Process().children() if "longspan.runtime.executor.forkserver_main" in one.cmdline()
    ]
    return tuple(worker.pid for forker in forkers for worker in forker.children())


@pytest.mark.parametrize(
    ("count", "after_others"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.full),
        pytest.param(2, False, marks=pytest.mark.full),
    ],
)
def test_a_worker_is_killed_in_mid_transition(
    odd: Path, odd_oracle: Oracle, monkeypatch: pytest.MonkeyPatch, count: int, after_others: bool
) -> None:
    """On the way to decode or back. All KV is on the host then, so that no token is computed twice."""
    before = left_names()
    service = Service(turning_args(odd, "pp2 tp2", host_kv_gib=0.00015))
    reshards = kill_amid(monkeypatch, is_reshard, count, after_others=after_others)
    engine, pids = service.engine, service.executor.pids
    try:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        requests = [engine.add(prompt, params) for prompt in prompts_of(LENGTHS)]
        losses = []
        while engine.has_unfinished:
            try:
                engine.step()
            except WorkerLostError as lost:
                losses.append((lost.rank, len(engine.transitions), len(reshards)))
                service.restart()
                pids += service.executor.pids
        assert losses == [(1, count - 1, count)]
        pools = [engine.kv.pool(number) for number in range(len(engine.config.cluster.pool_blocks))]
        assert [pool.num_free for pool in pools] == [pool.num_blocks for pool in pools]
    finally:
        service.close()
    specs = [one.cluster.spec for one in engine.transitions]
    assert len(specs) == len(reshards) - 1 >= 5
    assert all(one != other for one, other in pairwise(specs))
    for request in requests:
        assert request.output == odd_oracle.complete(request.prompt, MAX_TOKENS).token_ids
        assert request.metrics.num_computed_tokens == request.num_prompt + MAX_TOKENS - 1
    wait_until_gone(pids, before)


@pytest.mark.parametrize(
    ("is_wanted", "count"),
    [
        pytest.param(is_reshard, 3, id="to decode"),
        pytest.param(is_reshard, 4, id="to prefill", marks=pytest.mark.full),
        pytest.param(is_swap_out, 18, id="swap out", marks=pytest.mark.full),
        pytest.param(is_swap_in, 18, id="swap in"),
    ],
)
@pytest.mark.usefixtures("signals")
def test_a_batch_whose_worker_is_killed_is_completed_by_the_next_run(
    odd: Path,
    odd_oracle: Oracle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_wanted: Callable[[Step], bool],
    count: int,
) -> None:
    """It ends with a clear error and statistics of its work. Its answers stay."""
    before, prompts = left_names(), prompts_of(LENGTHS)
    source, target, stats = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "stats.json"))
    write_requests(source, prompts, MAX_TOKENS)
    command = ["batch", str(odd), "-i", str(source), "-o", str(target), "--json-stats", str(stats), *BATCH.split()]
    with pytest.MonkeyPatch.context() as patch:
        found = kill_amid(patch, is_wanted, count)
        assert run(*command) == 1
    assert len(found) >= count, "and steps sent before the loss was known"
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("longspan: worker rank 1 was lost: its process was killed by SIGKILL (log: ")
    wait_until_gone(worker_pids(), before)
    kept, lost = answers_in(target), json.loads(stats.read_text())
    assert 0 < len(kept) < len(prompts)
    assert lost["requests_per_s"] * sum(lost["phase_s"].values()) == pytest.approx(len(kept))
    assert lost["num_transitions"] == (count - 1 if is_wanted is is_reshard else len(lost["transition_s"])) >= 2
    assert lost["swap_bytes"] > 0
    first = target.read_bytes()
    assert run(*command) == 0
    assert target.read_bytes().startswith(first)
    assert_complete(target, prompts, odd_oracle)
    assert json.loads(stats.read_text())["num_transitions"] >= 2, "of this run"
    wait_until_gone(worker_pids(), before)


@pytest.mark.parametrize("whom", ["group", pytest.param("everyone", marks=pytest.mark.full)])
@pytest.mark.usefixtures("signals")
def test_a_batch_that_is_killed_is_completed_by_the_next_run(
    odd: Path, odd_oracle: Oracle, tmp_path: Path, whom: str
) -> None:
    """Workers are outside the group and end when their controller is gone. If all are killed, their sockets stay."""
    before, prompts = left_names(), prompts_of(2 * LENGTHS)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, prompts, MAX_TOKENS)
    command = ["batch", str(odd), "-i", str(source), "-o", str(target), *BATCH.split()]
    batch = Forked(app.main, command, own_group=True)
    deadline = time.monotonic() + 200
    while not target.exists() or target.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    family = psutil.Process(batch.pid).children(recursive=True)
    assert len(family) == 3, "two workers, and the process that they were forked from"
    os.killpg(batch.pid, signal.SIGKILL)
    if whom == "everyone":
        for process in family:
            process.kill()
        before |= {name for name in left_names() if name.startswith("longspan-")}
    assert batch.wait(60).returncode == -signal.SIGKILL
    wait_until_gone([process.pid for process in family], before)
    first = target.read_bytes()
    whole = first[: first.rfind(b"\n") + 1]
    assert 3 <= whole.count(b"\n") < len(prompts)
    with target.open("ab") as file:
        file.write(b'{"id": "batch_req_')  # a line that was cut off, which a restart removes
    assert run(*command) == 0
    assert target.read_bytes().startswith(whole)
    assert_complete(target, prompts, odd_oracle)
    wait_until_gone(worker_pids(), before)


def assert_complete(answers: Path, prompts: list[list[int]], oracle: Oracle) -> None:
    expected = {f"r{index}": oracle.complete(one, MAX_TOKENS).token_ids for index, one in enumerate(prompts)}
    assert answers_in(answers) == expected
