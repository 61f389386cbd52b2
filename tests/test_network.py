"""What carries the messages of ranks, and the memory that is set aside for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hand_made import fleet_of, workers
from tiny_models import make_tiny

from longspan.attn.comm import polite_threads
from longspan.core.fleet import Fleet
from longspan.runtime.capacity import default_kv_bytes, move_bytes
from longspan.runtime.devices import keep_to_cores
from longspan.runtime.move_ways import WINDOW_BYTES


def test_lanes_of_their_own(tmp_path: Path) -> None:
    """As with NCCL: subsets of three ranks use each lane, after a call in which all took part."""
    command = [sys.executable, str(Path(__file__).with_name("lane_member.py")), str(tmp_path / "store"), "3"]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(3)
    ]
    try:
        reports = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], reports


@pytest.mark.parametrize(
    ("fleet", "backends", "windows"),
    [(fleet_of("4"), 0, 0), (fleet_of("4", "1"), 4, 4), (fleet_of("4", "2xtp4"), 2, 8), (fleet_of("3xtp2", "1"), 2, 4)],
)
def test_memory_is_left_for_what_moves(
    fleet: Fleet, backends: int, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: fleet.num_ranks)

    def kv_bytes(moving: int) -> int:
        return default_kv_bytes(device="cuda", num_ranks=fleet.num_ranks, weight_bytes=2**30, move_bytes=moving)

    assert kv_bytes(0) - kv_bytes(move_bytes(fleet, backends)) == windows * WINDOW_BYTES


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_threads_that_take_messages_interrupt_nobody(tmp_path: Path) -> None:
    """Only they: what computes is as before."""
    with workers(make_tiny("llama", tmp_path), fleet_of("2")) as cluster:
        for pid in cluster.executor.pids:
            of_gloo = [
                int(task.name)
                for task in Path(f"/proc/{pid}/task").iterdir()
                if task.joinpath("comm").read_text().startswith("gloo")
            ]
            assert of_gloo
            assert {os.sched_getscheduler(thread) for thread in of_gloo} == {os.SCHED_BATCH}
            assert os.sched_getscheduler(pid) == os.SCHED_OTHER


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
@pytest.mark.parametrize("own", ["SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE"])
def test_a_policy_that_somebody_chose_stays(own: str) -> None:
    chosen = getattr(os, own)
    seen = []

    def look() -> None:
        os.sched_setscheduler(0, chosen, os.sched_param(0))
        with polite_threads():
            child = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
            child.start()
            child.join()
        seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [os.SCHED_BATCH if own == "SCHED_OTHER" else chosen, chosen]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
@pytest.mark.parametrize(
    ("num_ranks", "num_threads", "kept"),
    [
        (3, 2, [{2, 3}, {5, 7}, {8, 9}]),
        (6, 1, [{2}, {3}, {5}, {7}, {8}, {9}]),
        (1, 6, [None]),
        (2, 2, [None, None]),
        (4, 2, [None] * 4),
    ],
    ids=["three of two", "six of one", "alone", "cores to spare", "too few cores"],
)
def test_ranks_that_fill_the_machine_keep_to_cores_of_their_own(
    num_ranks: int, num_threads: int, kept: list[set[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 8, 2, 3, 5, 7})
    chosen: list[set[int] | None] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: chosen.append(set(cores)))
    for rank in range(num_ranks):
        num_before = len(chosen)
        keep_to_cores(rank, num_ranks, num_threads)
        if len(chosen) == num_before:
            chosen.append(None)
    assert chosen == kept
