"""Files of blocks, and the thread that writes and reads them."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import pytest
import torch

from longspan.attn.spec import AttnSpec
from longspan.core.blocks import BlockRef
from longspan.core.steps import Content, MoveKV
from longspan.runtime.block_records import BlockRecords, kv_record
from longspan.runtime.disk_pool import DiskLane, DiskPool
from longspan.runtime.messages import Stored

HOST, DISK = 1, 2
NUM_BLOCKS = 8
TIMEOUT_S = 60.0


def opened(folder: Path, num_blocks: int = NUM_BLOCKS) -> DiskPool:
    """A pool for a host whose block i holds the number i only."""
    sizes: dict[str, Any] = {"block_size": 4, "dtype": torch.float32}
    spec = AttnSpec(num_heads=2, num_kv_heads=2, head_dim=3, scale=1.0, window=None, softcap=None)
    record = kv_record([spec], **sizes)
    memory = torch.arange(NUM_BLOCKS, dtype=torch.float32).repeat_interleave(2 * 4 * 3).repeat(2).view(torch.uint8)
    host = BlockRecords(memory, record, num_blocks=NUM_BLOCKS, layers=[0], **sizes)
    return DiskPool(folder, "a model", num_blocks=num_blocks, host=host)


def content(number: int) -> Content:
    """Return the content of block `number`."""
    return Content(b"parent", (number, 1, 2))


def move(number: int, way: Any, *blocks: int) -> MoveKV:
    """Saves blocks under their own numbers, or loads them."""
    pairs = [(BlockRef(HOST, block), BlockRef(DISK, block)) for block in blocks]
    copies = tuple(pairs if way == "save" else [(below, above) for above, below in pairs])
    contents = tuple(content(block) for block in blocks)
    return MoveKV(number=number, request_id=0, copies=copies, way=way, contents=contents)


def test_a_smaller_disk_keeps_the_most_recently_used_blocks(tmp_path: Path) -> None:
    """Under the numbers that it has."""
    before = opened(tmp_path)
    for time, block in enumerate([4, 0, 2, 7, 1]):
        assert before.save(block, block, content(block))
        os.utime(tmp_path / f"{block:08d}.kv", (time, time))
    before.close()
    after = opened(tmp_path, num_blocks=3)
    assert after.contents() == [(2, content(2)), (0, content(7)), (1, content(1))]
    assert all(after.load(block, 5, kept) for block, kept in after.contents())


def test_a_file_that_cannot_be_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be correct, unlike a damaged file."""

    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pool = opened(tmp_path)
    assert pool.save(3, 3, content(3))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing)
        assert not pool.load(3, 4, content(3))
    assert "Too many open files" in caplog.text
    assert pool.load(3, 4, content(3))
    assert not pool.load(3, 4, content(5))
    assert pool.contents() == []


def test_loads_come_before_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in the order in which they came."""
    pool, reports, open_file = opened(tmp_path), Queue[Stored](), Path.open
    assert all(pool.save(block, block, content(block)) for block in (0, 1))
    lane, begins, goes_on = DiskLane({DISK: pool}, reports.put), Event(), Event()

    def waiting(path: Path, mode: str, **given: Any) -> Any:
        if mode == "wb":
            begins.set()
            assert goes_on.wait(TIMEOUT_S)
        return open_file(path, mode, **given)

    monkeypatch.setattr(Path, "open", waiting)
    lane.put(move(1, "save", 3))
    assert begins.wait(TIMEOUT_S)
    for number, way, block in ((2, "save", 4), (3, "load", 1), (4, "save", 5), (5, "load", 0)):
        lane.put(move(number, way, block))
    goes_on.set()
    done = [reports.get(timeout=TIMEOUT_S) for _ in range(5)]
    lane.close()
    assert [(report.number, report.failed) for report in done] == [(number, ()) for number in (1, 3, 5, 2, 4)]


def test_a_lane_that_closes_ends_behind_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written files are complete, and the remaining blocks have failed."""
    pool, reports = opened(tmp_path), list[Stored]()
    lane, open_file, shutdown = DiskLane({DISK: pool}, reports.append), Path.open, ThreadPoolExecutor.shutdown
    begins, closes = Event(), Event()

    def waiting(path: Path, mode: str, **given: Any) -> Any:
        if mode == "wb":
            begins.set()
            assert closes.wait(TIMEOUT_S)
        return open_file(path, mode, **given)

    def closing(thread: ThreadPoolExecutor, **given: Any) -> None:
        closes.set()
        shutdown(thread, **given)

    monkeypatch.setattr(Path, "open", waiting)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", closing)
    lane.put(move(1, "save", 3, 4, 5))
    lane.put(move(2, "save", 6))
    assert begins.wait(TIMEOUT_S)
    lane.close()
    assert [(report.number, report.failed) for report in reports] == [(1, (1, 2))]
    assert pool.contents() == [(3, content(3))]
