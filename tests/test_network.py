"""What carries the messages of ranks, and the memory that is set aside for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hand_made import fleet_of

from longspan.core.fleet import Fleet
from longspan.runtime.capacity import default_kv_bytes, move_bytes
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
