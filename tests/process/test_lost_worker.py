"""A worker that dies ends its requests quickly and by name; nothing is left behind, however the engine ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
from tiny_models import make_tiny

from longspan import LLM, SamplingParams
from longspan.core.cluster import Cluster
from longspan.errors import WorkerLostError
from longspan.runtime.executor import processes
from longspan.runtime.executor.control_plane import WorkerExecutor

LONG = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other engines on this machine have their run folders elsewhere."""
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def _left_behind(pids: tuple[int, ...]) -> tuple[list[int], set[str], set[str]]:
    """Worker processes still there, and all run folders and shared-memory segments (but those of foreign OpenMPs)."""
    alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    folders = {path.name for path in Path(tempfile.gettempdir()).glob("longspan-*")}
    segments = {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("__KMP_")}
    return alive, folders, segments


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_in_mid_prefill_names_the_rank(rank: int) -> None:
    _, folders, segments = _left_behind(())
    llm = LLM(instances=2)
    pids = llm.worker_pids
    killed_at = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(pids[rank], signal.SIGKILL)

    timer = threading.Timer(1.0, kill)
    timer.start()
    with pytest.raises(WorkerLostError, match=f"rank {rank} .*SIGKILL"):
        llm.generate([list(range(10, 8000))], LONG)
    assert killed_at, "the prompt was done before the worker was killed"
    assert time.monotonic() - killed_at[0] < 60
    with pytest.raises(WorkerLostError, match="make a new one"):
        llm.generate([[1, 2, 3]], LONG)
    llm.shutdown()
    assert _left_behind(pids) == ([], folders, segments)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_follow_their_controller(end: signal.Signals) -> None:
    _, folders, segments = _left_behind(())
    program = (
        "import signal\n"
        "from longspan import LLM, SamplingParams\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell in the background has it ignored
        "llm = LLM(instances=2)\n"
        "print(*llm.worker_pids, flush=True)\n"
        "llm.generate([list(range(10, 8000))], SamplingParams(temperature=0, max_tokens=500))\n"
    )
    controller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert controller.stdout is not None
    pids = tuple(int(pid) for pid in controller.stdout.readline().split())
    assert len(pids) == 2
    family = tuple(process.pid for process in psutil.Process(controller.pid).children(recursive=True))
    assert set(pids) < set(family), "the workers, and the process that they were forked from"
    time.sleep(0.5)
    controller.send_signal(end)
    assert controller.wait(timeout=60) != 0
    controller.stdout.close()
    deadline = time.monotonic() + 60
    while _left_behind(family) != ([], folders, segments):
        assert time.monotonic() < deadline, _left_behind(family)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.mark.parametrize("with_forkserver", [False, True])
def test_a_worker_that_hangs_is_lost_and_ended_with_the_others(tiny: str, with_forkserver: bool) -> None:
    _, folders, segments = _left_behind(())
    llm = LLM(tiny, instances=2, skip_tokenizer_init=True, step_timeout_s=1.5)
    llm.generate([[3, 4, 5], [6, 7, 8]], LONG, use_tqdm=False)
    time.sleep(2)  # while there is nothing to do, nobody is late
    llm.generate([[3, 4, 5]], LONG)
    pids = llm.worker_pids
    os.kill(pids[1], signal.SIGSTOP)
    if with_forkserver:
        os.kill(psutil.Process(pids[1]).ppid(), signal.SIGSTOP)
    start_s = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"rank 1 .* no step was completed by rank 1 for 1.5 s"):
        llm.generate([[3 + i, 4, 5] for i in range(4)], LONG, use_tqdm=False)
    assert time.monotonic() - start_s < 60
    llm.shutdown()
    assert _left_behind(pids) == ([], folders, segments)
    with LLM(tiny, skip_tokenizer_init=True) as again:
        assert again.generate([[3, 4, 5]], LONG)


def test_a_controller_that_was_stopped_takes_what_came_meanwhile(tiny: str) -> None:
    with LLM(tiny, skip_tokenizer_init=True, step_timeout_s=1.0) as llm:
        stream = llm.stream([3, 4, 5], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        for _ in range(3):
            next(stream)
            time.sleep(1.2)
        assert len(list(stream)[-1].outputs[0].token_ids) == 6


def test_hung_workers_end_with_a_controller_that_is_killed(tiny: str) -> None:
    program = (
        "import sys, time\n"
        "from longspan import LLM\n"
        f"llm = LLM({tiny!r}, skip_tokenizer_init=True)\n"
        "print(*llm.worker_pids, flush=True)\n"
        "time.sleep(300)\n"
    )
    controller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert controller.stdout is not None
    [pid] = (int(pid) for pid in controller.stdout.readline().split())
    os.kill(pid, signal.SIGSTOP)
    controller.kill()
    controller.wait()
    controller.stdout.close()
    deadline = time.monotonic() + 60
    while _left_behind((pid,))[0]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_logs_are_kept_while_their_worker_runs(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cache_root", lambda: tmp_path)
    folder = tmp_path / "logs"
    with LLM(tiny, skip_tokenizer_init=True):
        [log] = folder.glob("*/rank0.log")
        os.utime(log.parent, (0, 0))  # others are newer
        for number in range(40):
            (folder / f"longspan-{number}").mkdir()
        processes._log_dir("longspan-new")
        assert log.exists()
        assert len(list(folder.iterdir())) == 21
    processes._log_dir("longspan-newer")
    assert not log.exists()


def test_a_worker_that_raises_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM()
    # A block number beyond the pool: only a bug in the controller could send it, and the worker must not survive it.
    monkeypatch.setattr(llm.engine.account.pool(0), "allocate", lambda number: [10**6] * number)
    with pytest.raises(WorkerLostError, match=r"rank 0 .*IndexError"):
        llm.generate([[1, 2, 3]], LONG)
    llm.shutdown()


def test_a_loss_is_reported_while_another_request_waits_for_its_turn() -> None:
    """A request may hold KV without being in flight; ending it must not hide what happened."""
    prompts = [list(range(10, 2900)), [5, 6, 7, 8], list(range(10, 3500))]
    llm = LLM(instances=2, policy_options={"threshold": "3000"}, max_num_seqs=1)
    timer = threading.Timer(1.0, os.kill, (llm.worker_pids[0], signal.SIGKILL))
    timer.start()
    with pytest.raises(WorkerLostError, match=r"rank 0 .*SIGKILL"):
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    llm.shutdown()


def test_after_shutdown_there_is_a_clear_error() -> None:
    llm = LLM()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        llm.generate([[1, 2, 3]], LONG)


def test_what_was_begun_of_an_executor_is_ended_when_a_worker_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, and not whenever it is collected: the error refers to it, and it to its sockets."""

    def refuse(*_: object) -> NoReturn:
        raise OSError("no process")

    monkeypatch.setattr(processes, "start_worker", refuse)
    config: Any = SimpleNamespace(cluster=Cluster.of("1"))
    with pytest.raises(OSError, match="no process"):
        WorkerExecutor(processes.ProcessLauncher(config), step_timeout_s=1.0)
    assert not list(Path(tempfile.gettempdir()).glob("longspan-*"))
