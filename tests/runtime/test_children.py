"""Processes that are started run no code that happens to lie in the current folder, and leave no pipe open."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from longspan.args import EngineArgs
from longspan.core.cluster import Cluster
from longspan.model.files import ModelFiles
from longspan.runtime.child import start_child
from longspan.runtime.contact import Contact
from longspan.runtime.executor import forkserver
from longspan.runtime.executor.forkserver import Ended, KillWorker, Started, StartWorker, _ForkServer
from longspan.runtime.messages import WorkerConfig
from longspan.serve.client import EngineClient
from longspan.serve.messages import EngineSetup
from longspan.text import grammar_check


def test_a_server_that_has_ended_leaves_no_pipe_open() -> None:
    num_open = psutil.Process().num_fds()
    _ForkServer().destroy()
    deadline_s = time.monotonic() + 60
    while psutil.Process().num_fds() > num_open:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_server_whose_owner_is_gone_does_not_finish_its_imports() -> None:
    child = start_child("longspan.runtime.executor.forkserver_main", stdout=subprocess.DEVNULL)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 1, "it would end with 0 once it has imported everything"


class Silent:
    """Replaces the process of a server. It sends the reports of a test, and ends on command."""

    def __init__(self, code: int | None = None) -> None:
        self.code, self.was_killed = code, False
        commands, self.stdin = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        self.stdout, self.said = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        self.commands = commands

    def say(self, report: Started | Ended) -> None:
        self.said.write(msgspec.json.encode(report) + b"\n")
        self.said.flush()

    def wait(self, timeout_s: float | None = None) -> int | None:
        if self.code is None:
            raise subprocess.TimeoutExpired("server", timeout_s or 0.0)
        return self.code

    def kill(self) -> None:
        self.code, self.was_killed = -9, True
        self.said.close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    process = Silent()
    monkeypatch.setattr(forkserver, "start_child", lambda *_, **__: process)
    monkeypatch.setattr(forkserver, "unless_forked", lambda _: lambda: None)  # nothing is closed at exit
    monkeypatch.setattr(forkserver, "_START_TIMEOUT_S", 0.05)
    yield process
    for pipe in (process.stdin, process.said, process.commands):
        with suppress(BrokenPipeError):
            pipe.close()


def start_worker(tmp_path: Path) -> StartWorker:
    files = ModelFiles(name="m", config_dir=tmp_path, weights=tmp_path, tokenizer_dir=None, dtype="float32")
    config = WorkerConfig(files=files, cluster=Cluster.of("1"), device="cpu", num_threads=1, block_size=16)
    return StartWorker(config, 0, Contact(address="ipc://"), str(tmp_path), tmp_path / "log")


DEFAULTS = {
    "GOMP_SPINCOUNT": "20000",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_GRAPH_REGISTER": "0",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


@pytest.mark.parametrize(
    ("given", "dropped"),
    [
        ({}, None),
        ({"OMP_WAIT_POLICY": "active"}, "GOMP_SPINCOUNT"),  # a number would go before it
        ({"GOMP_SPINCOUNT": "70"}, None),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "9"}, None),
        ({"NCCL_GRAPH_REGISTER": "1"}, None),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "PYTORCH_ALLOC_CONF"),  # the older name, which it would hide
    ],
    ids=["by itself", "policy", "spins", "queues", "registered", "allocator", "allocator by its older name"],
)
def test_libraries_of_workers_have_defaults_that_the_user_can_override(
    given: dict[str, str], dropped: str | None, monkeypatch: pytest.MonkeyPatch, silent: Silent
) -> None:
    """In the process that imports PyTorch for all workers of a host, so before CUDA starts."""
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(forkserver, "start_child", lambda *_, env, **__: environments.append(env) or silent)
    names = {*DEFAULTS, "OMP_WAIT_POLICY", "PYTORCH_CUDA_ALLOC_CONF"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    _ForkServer()
    [environment] = environments
    expected = {name: value for name, value in (DEFAULTS | given).items() if name != dropped}
    assert {name: environment[name] for name in names & environment.keys()} == expected


def test_a_server_that_forks_nothing_in_time_is_ended_and_named(silent: Silent, tmp_path: Path) -> None:
    server = _ForkServer()
    with pytest.raises(OSError, match=r"the process that forks workers did not answer for 0\.05 s"):
        server.start(start_worker(tmp_path))
    assert silent.was_killed


def test_a_server_that_ends_instead_of_forking_is_named_with_its_code(silent: Silent, tmp_path: Path) -> None:
    server = _ForkServer()
    silent.code = 3
    silent.said.close()
    with pytest.raises(OSError, match="the process that forks workers ended with code 3"):
        server.start(start_worker(tmp_path))


def test_commands_to_an_ended_server_are_dropped(silent: Silent) -> None:
    server = _ForkServer()
    silent.commands.close()
    server.send(KillWorker(7))
    silent.code = 3
    server.close()
    assert not silent.was_killed


def test_a_server_that_does_not_end_is_killed_with_its_workers(
    silent: Silent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        if pid == 2**30:
            raise ProcessLookupError

    monkeypatch.setattr(forkserver.os, "kill", kill)
    monkeypatch.setattr(forkserver, "_START_TIMEOUT_S", 20.0)
    server, workers = _ForkServer(), []
    for pid in (2**30, 2**30 + 1):
        silent.say(Started(pid))
        workers.append(server.start(start_worker(tmp_path)))
    with pytest.raises(TimeoutError, match=f"worker process {2**30} still runs after 0 s"):
        workers[0].wait(0)
    server.close()
    assert killed == [(2**30, signal.SIGKILL), (2**30 + 1, signal.SIGKILL)]
    assert silent.was_killed
    assert [worker.wait(20) for worker in workers] == [-9, -9]


def start_engine(events: Path) -> None:
    async def start() -> None:
        client = EngineClient(
            EngineSetup(engine=EngineArgs(str(events)), max_num_queued_reqs=1024, max_num_queued_tokens=2**20)
        )
        try:
            await client.start()
        finally:
            await client.close()

    asyncio.run(start())


def start_forkserver(_: Path) -> None:
    _ForkServer().close()


def check_grammar(_: Path) -> None:
    grammar_check.check('{"grammars": [{"lark_grammar": "start: /anywhere/"}]}')  # not checked before


@pytest.mark.parametrize("start", [start_engine, pytest.param(start_forkserver, marks=pytest.mark.full), check_grammar])
def test_a_module_in_the_current_folder_is_not_imported(
    start: Callable[[Path], None], events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "anywhere"
    folder.mkdir()
    for name in ("random", "resource", "selectors", "msgspec", "threading"):
        (folder / f"{name}.py").write_text("open('was-run', 'w').close(); raise SystemExit(1)")
    monkeypatch.chdir(folder)
    start(events)
    assert not (folder / "was-run").exists()
