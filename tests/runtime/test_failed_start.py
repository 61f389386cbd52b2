"""A service that does not start keeps nothing, whatever step of its start fails."""

from __future__ import annotations

import fcntl
import gc
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from engines import InOrderLauncher

from longspan import service
from longspan.args import EngineArgs
from longspan.core.cluster import Cluster
from longspan.runtime import disk_pool, host_tiers
from longspan.runtime.executor import channel, control_plane, processes
from longspan.runtime.messages import WorkerConfig
from longspan.service import Service

Step = tuple[CodeType, int]
"""A line that calls something, of a function that acquires something."""
FILES = {module.__file__ for module in (service, host_tiers, disk_pool, control_plane)}
FUNCTIONS = ("__init__", "_open", "open_disk", "_start")


class InjectedError(Exception):
    """Any failure."""


@contextmanager
def watched(see: Callable[[Step], object]) -> Iterator[None]:
    """Call `see` before each step. The records of acquired resources are no steps."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        caller = frame if event == "c_call" else frame.f_back
        if event not in ("call", "c_call") or caller is None:
            return
        code, keeps_account = caller.f_code, event == "call" and "contextlib" in frame.f_code.co_filename
        if code.co_filename in FILES and code.co_name in FUNCTIONS and not keeps_account:
            see((code, caller.f_lineno))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class Recording(InOrderLauncher):
    """Records every launcher, to look for leftovers."""

    made: list[Recording] = []  # noqa: RUF012 - emptied by each test

    def __init__(self, config: WorkerConfig) -> None:
        Recording.made.append(self)
        super().__init__(config)


def open_memory() -> int:
    """Counts the open files that are memory of hosts."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("longspan-kv" in str(link) for link in links)


def mapped_memory() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("longspan-kv")


def assert_nothing_is_left(disk: Path, before: tuple[int, int, set[threading.Thread]]) -> None:
    """Nothing waits for the garbage collector, but memory that threads have mapped."""
    for lock in disk.glob("*/host-*/lock"):
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    gc.collect()
    num_open, num_mapped, threads = before
    assert (open_memory(), mapped_memory()) == (num_open, num_mapped)
    names = [thread.name for thread in {*threading.enumerate()} - threads]
    assert not [name for name in names if name.startswith(("longspan rank", "disk"))]
    assert all(not hasattr(one, "context") or one.context.closed for one in Recording.made)
    assert torch.get_num_threads() == 1


@pytest.fixture
def start(tiny: Path, tmp_path: Path, one_thread: None) -> Iterator[Callable[[], Service]]:
    """Two hosts, so that one of two can fail."""
    del one_thread
    given = EngineArgs(
        str(tiny),
        dtype="float32",
        skip_tokenizer_init=True,
        instances=2,
        block_size=16,
        host_kv_gib=0.002,
        disk_kv_gib=0.002,
        disk_kv_dir=str(tmp_path),
    )
    yield lambda: Service(given, launcher=Recording)
    gc.enable()
    gc.unfreeze()
    Recording.made.clear()


def test_a_step_that_fails_leaves_nothing_behind(
    start: Callable[[], Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPAN_HOSTS", "2")
    monkeypatch.setattr(control_plane, "_STOP_TIMEOUT_S", 0.0)
    steps: dict[Step, None] = {}
    start().close()  # some steps are made once in a process
    gc.collect()
    gc.freeze()
    before = open_memory(), mapped_memory(), {*threading.enumerate()}  # engines that tests share, for instance
    with watched(steps.setdefault):
        start().close()
    assert len(steps) > 50
    for failing in steps:

        def fail(step: Step, failing: Step = failing) -> None:
            if step == failing:
                raise InjectedError

        gc.disable()
        with pytest.raises(InjectedError) as caught, watched(fail):
            start()
        traceback.clear_frames(caught.tb)
        assert_nothing_is_left(tmp_path, before)
        gc.enable()
    start().close()
    assert_nothing_is_left(tmp_path, before)


def test_a_launcher_that_fails_leaves_no_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(channel.zmq, "Context", fail)
    config: Any = SimpleNamespace(cluster=Cluster.of("1", num_blocks=[1]))
    with pytest.raises(OSError, match="too many open files"):
        processes.ProcessLauncher(config)
    assert not [*tmp_path.iterdir()]
