"""Transports of ranks, and the memory reserved for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import lane_member
import psutil
import pytest
import stage_member
import torch
from forked import run_ranks
from hand_made import workers
from tiny_models import make_tiny

from longspan.attn.comm import NO_PEERS
from longspan.attn.transports import polite_threads
from longspan.core.cluster import Cluster
from longspan.runtime import nccl_lanes, worker_process
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.nccl_lanes import PairLanes, moving_pairs
from longspan.runtime.pool import WINDOW_BYTES, default_kv_bytes
from longspan.runtime.worker_process import keep_to_cores, own_cores


def test_lanes_of_their_own(tmp_path: Path) -> None:
    """As with NCCL: subsets of three ranks use each lane, after a call in which all took part."""
    ended = run_ranks(lane_member.main, tmp_path / "store", 3)
    assert [rank.returncode for rank in ended] == [0, 0, 0], ended


class NoMoves(PairLanes):
    """Opens no communicator, and counts the pairs."""

    def __init__(self, _: torch.device, rank: int) -> None:
        self.rank, self.opened, self.transport = rank, set[tuple[int, int]](), NO_PEERS  # type: ignore[assignment]

    def meet(self, cluster: Cluster) -> None:
        self.opened |= {*moving_pairs(cluster)}

    @property
    def num_own(self) -> int:
        return 2 * sum(self.rank in pair for pair in self.opened)


def test_devices_of_their_own_sum_by_all_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a stage sum on a lane of their own, and each lane is opened once."""
    opened: list[tuple[int, ...] | None] = []
    summed: list[object] = []

    def open_lane(_: torch.device, ranks: tuple[int, ...] | None = None) -> object:
        opened.append(ranks)
        return ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(worker_process, "meet", lambda *_, backend, **__: opened.append((backend,)))
    monkeypatch.setattr(nccl_lanes, "open_lane", open_lane)
    monkeypatch.setattr(nccl_lanes, "PairLanes", NoMoves)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _, group: summed.append(group))
    found = worker_process.open_transports(torch.device("cuda", 0), 0, (0, 0, 0, 0), "")
    assert opened.pop(0) == ("nccl",) and not any(opened)
    opened.clear()
    for spec in ("tp4", "2xtp2", "tp2pp2", "4", "tp4"):
        found.meet(Cluster.of(spec))
    assert opened == [(0, 1, 2, 3), (0, 1), (2, 3)]
    lanes, term = found.steps, torch.ones(3)
    assert lanes.inside.sums is not None and lanes.inside.sums(range(2), term) is term and summed == [(0, 1)]
    others = (lanes.exchange, lanes.weights, found.rebalances, found.moves, found.hidden, found.samples)
    assert all(lane.sums is None for lane in others)


@pytest.mark.parametrize(("spec", "num_pairs"), [("1", 0), ("tp8", 0), ("pp4", 0), ("2xtp4", 16), ("8", 28), ("5", 10)])
def test_pairs_of_ranks_that_move_kv_meet_in_rounds(spec: str, num_pairs: int) -> None:
    """Ranks of one instance move no KV. The pairs of a round are disjoint, so they meet at the same time."""
    cluster = Cluster.of(spec)
    pairs = moving_pairs(cluster)
    assert len({*pairs}) == len(pairs) == num_pairs
    assert all(low < high and cluster.at(low).instance != cluster.at(high).instance for low, high in pairs)
    free, last = dict.fromkeys(range(cluster.num_ranks), 0), 0
    for low, high in pairs:  # each rank calls its pairs one after the other
        last = max(last, free[low], free[high])
        free[low] = free[high] = max(free[low], free[high]) + 1
    assert max(free.values()) <= cluster.num_ranks, "calls that take equally long overlap"


@pytest.mark.parametrize(("spec", "warns"), [("tp8", False), ("2xtp4", False), ("8", False), ("12", True)])
def test_ranks_with_more_streams_than_hardware_queues_are_reported(
    spec: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_lanes, "open_lane", lambda *_: None)
    monkeypatch.setattr(nccl_lanes, "PairLanes", NoMoves)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "nccl")
    nccl_lanes.nccl_transports(torch.device("cpu"), 1).meet(Cluster.of(spec))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns
    assert not warns or "35 streams" in caplog.text


@pytest.mark.parametrize("apart", [False, True])
def test_hidden_states_sent_to_another_stage_are_freed(apart: bool, tmp_path: Path) -> None:
    """Else the ranks of a pipeline would grow with each step."""
    ended = run_ranks(partial(stage_member.main, apart), tmp_path / "store", 2)
    assert [rank.returncode for rank in ended] == [0, 0], ended


@pytest.mark.parametrize(
    ("cluster", "backends", "windows"),
    [
        (Cluster.of("1"), None, 0),
        (Cluster.of("4"), None, 4),
        (Cluster.of("4", "1"), 4, 4),
        (Cluster.of("4", "2xtp4"), 2, 8),
        (Cluster.of("3xtp2", "1"), 2, 4),
    ],
)
def test_memory_is_left_for_moves(
    cluster: Cluster, backends: int | None, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cluster.num_ranks)

    found = default_kv_bytes(replace(cluster, transfer_backends=backends), "cuda", weight_bytes=2**30)
    assert found == 85 * 2**30 - 2**30 - windows * WINDOW_BYTES


NOT_LINUX = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")


@pytest.fixture
def two_cores() -> Iterator[list[int]]:
    """This process and its fork server have no other cores."""

    def keep_all_to(cores: Iterable[int]) -> None:
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with suppress(ProcessLookupError):  # a worker that has just ended
                os.sched_setaffinity(process.pid, cores)

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # pytest -n leaves one
    cores = sorted(os.sched_getaffinity(0))[:2]
    keep_all_to(cores)
    yield cores
    keep_all_to(before)


@NOT_LINUX
@pytest.mark.parametrize("cluster", [Cluster.of("2"), Cluster.of("1", "1"), Cluster.of("3")], ids=["2", "roles", "3"])
def test_threads_of_workers(cluster: Cluster, two_cores: list[int], tmp_path: Path) -> None:
    """Threads that take messages interrupt no computation. Where there is a core for each rank, both keep to it."""
    if len(two_cores) < 2:
        pytest.skip("one core")
    with workers(make_tiny("llama", tmp_path), cluster, launch=ProcessLauncher) as started:
        for rank, pid in enumerate(started.executor.pids):
            of_gloo = [
                int(task.name)
                for task in Path(f"/proc/{pid}/task").iterdir()
                if task.joinpath("comm").read_text().startswith("gloo")
            ]
            assert of_gloo
            own = {two_cores[rank]} if cluster.num_ranks == len(two_cores) else set(two_cores)
            assert {os.sched_getscheduler(thread) for thread in of_gloo} == {os.SCHED_BATCH}
            assert os.sched_getscheduler(pid) == os.SCHED_OTHER
            assert [os.sched_getaffinity(thread) for thread in (pid, *of_gloo)] == [own] * (1 + len(of_gloo))


def policies_seen(own: int) -> list[int]:
    """Return the policies of a thread that starts among polite threads, and of its starter, which had `own`."""
    seen = []

    def look() -> None:
        os.sched_setscheduler(0, own, os.sched_param(0))
        with polite_threads():
            child = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
            child.start()
            child.join()
        seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen


@NOT_LINUX
def test_waiting_threads_leave_the_core_to_a_computing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert policies_seen(os.SCHED_OTHER) == [os.SCHED_BATCH, os.SCHED_OTHER]
    for chosen in (os.SCHED_BATCH, os.SCHED_IDLE):
        assert policies_seen(chosen) == [chosen, chosen], "the user chose that"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert policies_seen(os.SCHED_OTHER) == [os.SCHED_OTHER] * 2


@NOT_LINUX
def test_systems_that_allow_nothing_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(*args: object) -> None:
        calls.append(args)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 2})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with polite_threads():
        assert len(calls) == 1
    keep_to_cores("cpu", 0, 2, own_cores())
    assert len(calls) == 2
    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    with polite_threads():
        assert len(calls) == 3
    assert len(calls) == 3, "an unchanged policy is not restored"


@NOT_LINUX
@pytest.mark.parametrize(
    ("kind", "threads", "num_ranks", "kept"),
    [("cpu", 1, 3, [{2}, {5}, {9}]), ("cpu", 1, 2, []), ("cpu", 1, 4, []), ("cpu", 2, 3, []), ("cuda", 1, 3, [])],
    ids=["a core each", "cores to spare", "too few cores", "more threads", "devices"],
)
def test_ranks_that_fill_the_machine_keep_to_a_core(
    kind: str, threads: int, num_ranks: int, kept: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 2, 5})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: chosen.append(set(cores)))
    for rank in range(num_ranks):
        keep_to_cores(kind, rank, num_ranks, own_cores())
    assert chosen == kept


@NOT_LINUX
def test_a_rank_leaves_its_core_when_more_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: chosen.append(set(cores)))
    keep_to_cores("cpu", 0, 2, [2, 5])
    keep_to_cores("cpu", 0, 3, [2, 5])
    assert chosen == [{2, 5}]


def test_compiled_kernels_of_triton_stay_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has chosen another folder. Ranks on CPUs compile none."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is restored
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    worker_process.open_device("cpu", 0)
    assert "TRITON_CACHE_DIR" not in os.environ
    assert worker_process.open_device("cuda", 3) == torch.device("cuda", 1)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    worker_process.open_device("cuda", 0)
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
