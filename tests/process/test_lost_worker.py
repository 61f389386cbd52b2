"""A worker that dies ends its requests quickly and is named. No end of an engine leaves anything behind."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import psutil
import pytest
import thread_launcher as threads
import torch
from engines import ThreadLLM
from forked import Forked
from leftovers import left_names, wait_until_gone

from longspan import LLM, SamplingParams, limits
from longspan.core.cluster import Cluster
from longspan.core.steps import Forward, Free, Step
from longspan.errors import OutOfMemoryError, WorkerLostError
from longspan.limits import Memory
from longspan.runtime import messages
from longspan.runtime.executor import causes, control_plane, processes
from longspan.runtime.executor.channel import Channel
from longspan.runtime.executor.control_plane import WorkerExecutor

LONG = SamplingParams(temperature=0, max_tokens=4)
pytestmark = pytest.mark.usefixtures("own_folder")


def kill_after(patch: pytest.MonkeyPatch, rank: int, num_steps: int) -> list[Step]:
    """Kill a rank once its executor was given some steps. Return the list that gets these."""
    submit, steps = WorkerExecutor.submit, list[Step]()

    def killing(executor: WorkerExecutor, step: Step) -> None:
        submit(executor, step)
        steps.append(step)
        if len(steps) == num_steps:
            os.kill(executor.pids[rank], signal.SIGKILL)

    patch.setattr(WorkerExecutor, "submit", killing)
    return steps


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_kill_in_mid_prefill_names_the_rank(tiny: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = left_names()
    shared = {"policy": "context", "policy_options": {"threshold": "10"}, "max_num_batched_tokens": 48}
    llm = LLM(str(tiny), dtype="float32", instances=2, skip_tokenizer_init=True, **shared)  # type: ignore[arg-type]
    pids, steps = llm.service.executor.pids, kill_after(monkeypatch, rank, 3)
    with pytest.raises(WorkerLostError, match=f"rank {rank} .*SIGKILL"):
        llm.generate([[7] * 2000], LONG)
    computed = max(part.stop for step in steps if isinstance(step, Forward) for part in step.parts)
    assert computed < 2000, "the prompt was done before the worker was killed"
    with pytest.raises(WorkerLostError, match="make a new one"):
        llm.generate([[1, 2, 3]], LONG)
    llm.shutdown()
    wait_until_gone(pids, before)


def control(model: str) -> None:
    """Start two workers, print their pids, and compute until it is killed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    llm = LLM(model, dtype="float32", instances=2, skip_tokenizer_init=True, threads_per_rank=1)
    print(*llm.service.executor.pids, flush=True)
    while True:
        llm.generate([list(range(3, 190)) * 10], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))


@pytest.mark.parametrize(
    ("end", "hangs"),
    [
        (signal.SIGKILL, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.full),
    ],
)
def test_workers_follow_their_controller(end: signal.Signals, hangs: bool, tiny: Path) -> None:
    """Even a stopped one."""
    before = left_names()
    controller = Forked(control, str(tiny))
    deadline = time.monotonic() + 60
    while "\n" not in controller.stdout:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = tuple(int(pid) for pid in controller.stdout.split())
    assert len(pids) == 2
    family = tuple(process.pid for process in psutil.Process(controller.pid).children(recursive=True))
    assert set(pids) < set(family), "the workers, and the process that they were forked from"
    if hangs:
        os.kill(pids[1], signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(controller.pid, end)
    assert controller.wait(60).returncode != 0
    wait_until_gone(family, before)


@pytest.mark.parametrize("with_forkserver", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_worker_that_hangs_is_lost_and_all_workers_end(tiny: Path, with_forkserver: bool) -> None:
    before = left_names()
    llm = LLM(str(tiny), dtype="float32", instances=2, policy="context", skip_tokenizer_init=True, step_timeout_s=2.0)
    llm.generate([[3, 4, 5], [6, 7, 8]], LONG, use_tqdm=False)
    time.sleep(2.5)  # an idle worker is not late
    llm.generate([[3, 4, 5]], LONG)
    pids = llm.service.executor.pids
    os.kill(pids[1], signal.SIGSTOP)
    if with_forkserver:
        os.kill(psutil.Process(pids[1]).ppid(), signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match=r"rank 1 .* no step was completed by rank 1 for 2 s"):
        llm.generate([[3 + i, 4, 5] for i in range(4)], LONG, use_tqdm=False)
    llm.shutdown()
    wait_until_gone(pids, before)
    with LLM(str(tiny), dtype="float32", skip_tokenizer_init=True) as again:
        assert again.generate([[3, 4, 5]], LONG)


def test_a_controller_that_was_stopped_reads_late_reports(tiny: Path) -> None:
    with LLM(str(tiny), dtype="float32", skip_tokenizer_init=True, step_timeout_s=2.0) as llm:
        stream = llm.stream([3, 4, 5], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        for _ in range(2):
            next(stream)
        time.sleep(2.3)
        assert len(list(stream)[-1].outputs[0].token_ids) == 6


def test_logs_are_kept_while_their_worker_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cache_root", lambda: tmp_path)
    folder = tmp_path / "logs"
    with LLM(str(tiny), dtype="float32", skip_tokenizer_init=True):
        [log] = folder.glob("*/rank0.log")
        os.utime(log.parent, (0, 0))  # other logs are newer
        for number in range(40):
            (folder / f"longspan-{number}").mkdir()
        processes.log_dir("longspan-new")
        assert log.exists()
        assert len(list(folder.iterdir())) == 21
    processes.log_dir("longspan-newer")
    assert not log.exists()


def test_a_worker_that_raises_is_named_with_its_reason(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny), dtype="float32", skip_tokenizer_init=True)
    # A block number beyond the pool: only a bug in the controller could send it, and the worker must not survive it.
    monkeypatch.setattr(llm.engine.kv.pool(0), "allocate", lambda number: [10**6] * number)
    with pytest.raises(WorkerLostError, match=r"rank 0 .*IndexError"):
        llm.generate([[1, 2, 3]], LONG)
    llm.shutdown()


@pytest.mark.parametrize("num_steps", [3, 12])
def test_a_loss_is_reported_while_another_request_waits_for_admission(
    tiny: Path, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may hold KV without being in flight. Its end must not hide the loss."""
    prompts = [[7] * 290, [5, 6, 7, 8], [8] * 350]
    shared = {"policy": "context", "policy_options": {"threshold": "300"}, "max_num_batched_tokens": 48}
    llm = LLM(str(tiny), dtype="float32", instances=2, skip_tokenizer_init=True, max_num_seqs=1, **shared)  # type: ignore[arg-type]
    kill_after(monkeypatch, 0, num_steps)
    with pytest.raises(WorkerLostError, match=r"rank 0 .*SIGKILL"):
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    llm.shutdown()


def test_after_shutdown_there_is_a_clear_error(tiny: Path) -> None:
    llm = ThreadLLM(str(tiny), dtype="float32", skip_tokenizer_init=True)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        llm.generate([[1, 2, 3]], LONG)


def test_an_executor_removes_its_sockets_if_a_worker_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not whenever it is collected: the error refers to it, and it to its sockets."""

    def refuse(*_: object) -> NoReturn:
        raise OSError("no process")

    monkeypatch.setattr(processes, "start_server", refuse)
    config: Any = SimpleNamespace(cluster=Cluster.of("1"))
    with pytest.raises(OSError, match="no process"):
        WorkerExecutor(processes.ProcessLauncher(config), step_timeout_s=1.0)
    assert not list(Path(tempfile.gettempdir()).glob("longspan-*"))


# ---------------------------------------------------------------- reports of workers


class Puppet:
    """A worker that sends the reports of a test."""

    def __init__(self, launcher: Puppets, rank: int) -> None:
        self.pid, self._code, self._ended = os.getpid(), 0, threading.Event()
        self._controller = launcher.channel.contact.connect(launcher.channel.context, rank)
        if rank != launcher.silent:
            self.say(messages.Ready(rank))

    def say(self, report: messages.Report) -> None:
        self._controller.send(msgspec.msgpack.encode(report))

    def close(self) -> None:
        self._controller.close()

    def end(self, code: int) -> None:
        self._code = code
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> int:
        assert self._ended.wait(timeout_s)
        return self._code

    def kill(self) -> None:
        self._ended.set()

    destroy = kill


class Puppets:
    """Launches puppets. `silent` never gets ready."""

    def __init__(self, silent: int | None = None) -> None:
        self.silent = silent
        self.cluster, self.channel = Cluster.of("3"), Channel("inproc://puppets")
        self.workers: list[Puppet] = []

    def start(self, rank: int) -> Puppet:
        self.workers.append(Puppet(self, rank))
        return self.workers[-1]

    def hint(self, rank: int) -> str:
        return f"rank {rank} has strings"

    def clean_up(self) -> None:
        self.workers.clear()


def exits(rank: int, code: int) -> Callable[[Puppets], None]:
    return lambda puppets: puppets.workers[rank].end(code)


def fails(rank: int, *, peer: bool = False) -> Callable[[Puppets], None]:
    report = messages.Failed(rank, "a peer is gone" if peer else "ValueError: no", peer)
    return lambda puppets: puppets.workers[rank].say(report)


@pytest.mark.parametrize(
    ("act", "rank", "reason"),
    [
        (exits(1, 3), 1, "its process exited with code 3"),
        (exits(1, -signal.SIGKILL), 1, "its process was killed by SIGKILL"),
        (fails(2), 2, "ValueError: no"),
    ],
)
def test_a_worker_that_ends_is_named_with_the_reason(act: Callable[[Puppets], None], rank: int, reason: str) -> None:
    puppets = Puppets()
    executor = WorkerExecutor(puppets, step_timeout_s=60.0)
    act(puppets)
    with pytest.raises(WorkerLostError) as lost:
        executor.poll(20.0)
    assert str(lost.value) == f"worker rank {rank} was lost: {reason} (rank {rank} has strings)"


@pytest.mark.parametrize("is_limited", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_killed_for_lack_of_memory_is_reported_with_remedies(
    is_limited: bool, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts such processes. Another rank may notice the loss before its end is known."""
    count = [7]
    monkeypatch.setattr(limits, "num_oom_kills", lambda: count[0])
    monkeypatch.setattr(limits, "memory", lambda: Memory(total=3 * 2**29, available=0, is_limited=is_limited))
    puppets = Puppets()
    executor = WorkerExecutor(puppets, step_timeout_s=60.0)
    count[0] += 1
    if not is_first:
        fails(2, peer=True)(puppets)
    exits(1, -signal.SIGKILL)(puppets)
    with pytest.raises(
        OutOfMemoryError, match="rank 1 was lost: its process was killed by SIGKILL: the memory"
    ) as lost:
        executor.poll(20.0)
    assert f"of this {'container' if is_limited else 'machine'} (1.5 GiB) was used up" in lost.value.reason
    for flag in ("--kv-cache-memory-bytes", "--host-kv-gib", "--max-num-batched-tokens"):
        assert flag in lost.value.reason


NOTICES, ENDS, DISCONNECTS = fails(2, peer=True), exits(2, 1), exits(2, messages.DISCONNECTED)
SILENT = "its connection has ended, or its host is silent"


@pytest.mark.parametrize(
    ("acts", "rank", "reason"),
    [
        ([NOTICES, fails(1)], 1, "ValueError: no"),
        ([NOTICES, fails(0, peer=True), fails(1)], 1, "ValueError: no"),
        ([NOTICES, exits(0, -signal.SIGTERM)], 0, "its process was killed by SIGTERM"),
        ([NOTICES, exits(2, 7)], 2, "a peer is gone"),
        ([NOTICES, exits(0, 1)], 2, "a peer is gone"),
        ([NOTICES], 2, "a peer is gone"),
        ([ENDS, fails(2)], 2, "ValueError: no"),
        ([ENDS, NOTICES], 2, "a peer is gone"),
        ([ENDS, NOTICES, fails(1)], 1, "ValueError: no"),
        ([ENDS, exits(0, -signal.SIGKILL)], 0, "its process was killed by SIGKILL"),
        ([ENDS], 2, "its process exited with code 1"),
        ([NOTICES, exits(1, messages.DISCONNECTED)], 1, SILENT),
        ([NOTICES, exits(2, messages.DISCONNECTED)], 2, "a peer is gone"),
        ([DISCONNECTS], 2, SILENT),
        ([DISCONNECTS, fails(0, peer=True), exits(0, 1)], 2, SILENT),
        ([DISCONNECTS, fails(0)], 0, "ValueError: no"),
    ],
)
def test_the_rank_that_failed_is_named_instead_of_its_peer(
    acts: list[Callable[[Puppets], None]], rank: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ends with code 1 reports the reason, but its end may be seen before."""
    puppets, cause_of = Puppets(), causes.cause_of
    first, *others = acts

    def act_first(report: Any, receive: Any) -> Any:
        assert report.rank == 2
        for act in others:
            act(puppets)
        return cause_of(report, receive)

    monkeypatch.setattr(causes, "cause_of", act_first)
    monkeypatch.setattr(causes, "TIMEOUT_S", 0.1)
    executor = WorkerExecutor(puppets, step_timeout_s=60.0)
    first(puppets)
    with pytest.raises(WorkerLostError) as lost:
        executor.poll(20.0)
    assert str(lost.value) == f"worker rank {rank} was lost: {reason} (rank {rank} has strings)"


def test_sends_to_a_worker_that_reads_no_more_do_not_block() -> None:
    puppets = Puppets()
    executor = WorkerExecutor(puppets, step_timeout_s=60.0)
    puppets.workers[1].close()
    executor.submit(Free(number=1, request_ids=(7,)))
    exits(1, -signal.SIGKILL)(puppets)
    with pytest.raises(WorkerLostError, match=r"rank 1 was lost: .*SIGKILL"):
        executor.poll(20.0)


def test_a_rank_that_is_not_ready_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "_START_TIMEOUT_S", 0.1)
    with pytest.raises(WorkerLostError, match="rank 1 was lost: not ready after 0 s"):
        WorkerExecutor(Puppets(silent=1), step_timeout_s=60.0)


def test_a_thread_that_cannot_load_its_model_is_named_with_its_reason(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError("no such weights")

    monkeypatch.setattr(threads, "Rank", refuse)
    with pytest.raises(
        WorkerLostError, match=r"rank 0 was lost: .*no such weights.* \(see the log of process \d+ for r"
    ):
        ThreadLLM(str(tiny), dtype="float32", skip_tokenizer_init=True)


def test_a_thread_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its later actions affect no other worker."""
    held = threading.Event()

    def hang(*_: object, **__: object) -> NoReturn:
        held.wait(60)
        raise ValueError("too late")

    monkeypatch.setattr(threads, "Rank", hang)
    monkeypatch.setattr(threads, "_END_TIMEOUT_S", 0.02)
    num_threads = torch.get_num_threads()
    config: Any = SimpleNamespace(device="cpu", cluster=Cluster.of("1"), num_threads=num_threads + 1, kernels=None)
    launcher = threads.ThreadLauncher(config)
    worker = launcher.start(0)
    with pytest.raises(TimeoutError, match=r"rank 0 still runs after 0\.01 s"):
        worker.wait(0.01)
    worker.destroy()
    assert "rank 0 hangs, so its thread is abandoned" in caplog.text
    held.set()
    assert worker.wait(20) == 1
    report = launcher.channel.receive(5.0)
    assert report is not None and "too late" in msgspec.msgpack.decode(report, type=messages.Report).reason
    launcher.channel.close()
    assert torch.get_num_threads() == num_threads + 1
    launcher.clean_up()
    assert torch.get_num_threads() == num_threads


def test_threads_compute_on_cpu_only() -> None:
    config: Any = SimpleNamespace(device="cuda")
    with pytest.raises(ValueError, match="worker threads compute on cpu, not on cuda"):
        threads.ThreadLauncher(config)
