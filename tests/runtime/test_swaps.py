"""KV that real workers copy to the pool of their host and back, under whatever split, while they compute."""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made import BLOCK, NUM_HOST_BLOCKS, Driven, workers
from oracle import Oracle
from tiny_models import BASE, write_checkpoint
from torch import Tensor
from transformers import LlamaConfig

from longspan.attn.comm import NO_PEERS
from longspan.attn.spec import AttnSpec
from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.steps import Forward, MoveKV
from longspan.errors import WorkerLostError
from longspan.runtime.block_messages import BlockMessages
from longspan.runtime.block_records import kv_record
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.host_pool import HostPool
from longspan.runtime.host_tiers import HostMemory
from longspan.runtime.messages import Moved
from longspan.runtime.moves import Moves
from longspan.runtime.pool import KvPool

NUM_TOKENS, LENGTH = 6, 150
HEADS = {"9 on 3": (9, 3), "8 on 2": (8, 2), "5 on 1": (5, 1)}
HEAD_BYTES = BLOCK * 16 * 4 * 2 * BASE["num_hidden_layers"]
"""Of a block."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_checkpoint(
            LlamaConfig(
                **BASE | {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
            ),
            root / name,
        )
        for name, (heads, kv_heads) in HEADS.items()
    }


def memory_for(model: str) -> closing[HostMemory]:
    return closing(HostMemory(NUM_HOST_BLOCKS * HEAD_BYTES * HEADS[model][1]))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 199, length).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("9 on 3", "1", "1"),
        ("9 on 3", "tp2", "pp2"),
        ("9 on 3", "pp3", "tp2"),
        ("9 on 3", "tp2pp2", "tp3"),
        ("8 on 2", "tp4", "1"),
        ("8 on 2", "1", "tp4pp2"),
        ("5 on 1", "tp3", "pp2"),
        ("5 on 1", "pp2", "tp3"),
    ],
)
def test_out_and_in_again_under_another_split(folders: dict[str, Path], model: str, before: str, after: str) -> None:
    """Other requests decode meanwhile and overwrite its old blocks. One rank copies each head of each layer."""
    instances, num_blocks, (_, kv_heads) = Cluster.of(before, after), -(-LENGTH // BLOCK), HEADS[model]
    with memory_for(model) as memory, workers(folders[model], instances, host_memory=memory) as cluster:
        other = Driven(cluster, prompt_of(40, seed=1))
        other.take(other.forward(40, (1,)))
        request = Driven(cluster, prompt_of(LENGTH))
        request.take(request.forward(LENGTH, (0,)))
        out = request.swap("out", instances.host_pool(0))
        other.decode((1,), 2)
        [done] = cluster.wait(out.number)
        assert done.bytes_sent == {("host_copy", "same_host"): num_blocks * kv_heads * HEAD_BYTES}
        over = Driven(cluster, prompt_of(LENGTH, seed=2))
        over.take(over.forward(LENGTH, (0,)))
        into = request.swap("in", 1)
        other.decode((1,), 2)
        [done] = cluster.wait(into.number)
        assert done.bytes_sent == {
            ("host_copy", "same_host"): num_blocks * max(kv_heads, instances.tp(1)) * HEAD_BYTES
        }, "copies of heads are read, too"
        request.decode((1,), NUM_TOKENS - 1)
        other.decode((1,), 1)
    oracle = Oracle(folders[model])
    request.assert_exact(oracle.complete(request.prompt, NUM_TOKENS))
    other.assert_exact(oracle.complete(other.prompt, 6))


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("9 on 3", "1", "pp2"),
        ("9 on 3", "tp2pp2", "tp3"),
        ("9 on 3", "2xpp2", "tp3"),
        ("8 on 2", "tp4", "1"),
        ("5 on 1", "2", "pp2"),
    ],
)
def test_steps_copy_the_blocks_that_they_fill(folders: dict[str, Path], model: str, before: str, after: str) -> None:
    """A prompt in three steps, by a group if there is one. One rank copies each head of each layer once."""
    instances, (_, kv_heads) = Cluster.of(before, after), HEADS[model]
    host, target, group = instances.host_pool(0), instances.num_instances - 1, instances.prefill
    with memory_for(model) as memory, workers(folders[model], instances, host_memory=memory) as cluster:
        request, copied = Driven(cluster, prompt_of(LENGTH)), 0
        steps = [request.forward(stop, tuple(group), stream_to=host) for stop in (70, 112, LENGTH)]
        for step in steps:
            request.take(step)
            for done in cluster.wait(*(move.number for move in step.streams)):
                copied += done.bytes_sent["host_copy", "same_host"]
        assert copied == -(-LENGTH // BLOCK) * kv_heads * HEAD_BYTES
        cluster.release(request.table)
        over = Driven(cluster, prompt_of(LENGTH, seed=2))
        over.take(over.forward(LENGTH, tuple(group)))
        request.table = request.moved
        cluster.wait(request.swap("in", target).number)
        request.decode((target,), NUM_TOKENS - 1)
    request.assert_exact(Oracle(folders[model]).complete(request.prompt, NUM_TOKENS))


def test_it_outlives_workers_that_are_killed(folders: dict[str, Path]) -> None:
    folder = folders["9 on 3"]
    with memory_for("9 on 3") as memory:
        with workers(folder, Cluster.of("tp2"), host_memory=memory, launch=ProcessLauncher) as cluster:
            request = Driven(cluster, prompt_of(LENGTH))
            request.take(request.forward(LENGTH, (0,)))
            cluster.wait(request.swap("out", 1).number)
            os.kill(cluster.executor.pids[1], signal.SIGKILL)
            with pytest.raises(WorkerLostError, match="SIGKILL"):
                cluster.wait(99)
        with workers(folder, Cluster.of("pp2"), host_memory=memory, launch=ProcessLauncher) as cluster:
            request.cluster = cluster
            cluster.wait(request.swap("in", 0).number)
            request.decode((0,), NUM_TOKENS - 1)
    request.assert_exact(Oracle(folder).complete(request.prompt, NUM_TOKENS))


def test_memory_is_gone_when_it_is_closed() -> None:
    memory = HostMemory(2**40)
    assert memory.path.stat().st_size == 2**40 and memory.path.stat().st_blocks == 0, "nothing is written yet"
    memory.close()
    assert not memory.path.exists()


SPEC = AttnSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, window=None, softcap=None)
OUT = MoveKV(number=1, request_id=1, copies=((BlockRef(0, 3), BlockRef(1, 2)),), way="out")


class Slow(HostPool):
    """Copies when `go` is set, unless it raises then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.go, self._error = threading.Event(), threading.Event(), error

    def copies(self, move: MoveKV, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert move.way == "out" and layer == 0
        self.begun.set()
        self.go.wait()
        if self._error is not None:
            raise self._error
        yield torch.zeros(4), torch.ones(4)


class ByLayer(HostPool):
    """Records the layers that are copied."""

    def __init__(self) -> None:
        self.copied = queue.SimpleQueue[int]()

    def copies(self, move: MoveKV, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert move == OUT
        self.copied.put(layer)
        yield torch.zeros(4), torch.ones(4)


def moves_with(host: HostPool, num_layers: int = 1) -> Moves:
    record = kv_record([SPEC] * num_layers, 4, torch.float32)
    pool = KvPool(record, num_blocks=4, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    return Moves(BlockMessages(pool, Cluster.of("1").with_layers(num_layers, 0.0), 0), NO_PEERS, host)


def await_wakeup(moves: Moves) -> None:
    waiting = select.poll()
    waiting.register(moves.wakeup, select.POLLIN)
    assert waiting.poll(60_000), "the computing thread is not woken"


def test_a_rank_is_not_idle_before_its_copies_are_made() -> None:
    host = Slow()
    moves = moves_with(host)
    moves.expect([OUT])
    assert list(moves.send([OUT])) == [], "no message is sent"
    host.begun.wait()
    assert moves.take_arrived() == [] and not moves.is_idle
    host.go.set()
    await_wakeup(moves)
    [done] = moves.take_arrived()
    assert (done.number, moves.is_idle) == (OUT.number, True)
    moves.close()


def test_a_step_copies_each_layer_as_soon_as_its_kv_is_written() -> None:
    host = ByLayer()
    moves = moves_with(host, num_layers=3)
    step = moves.of_step(Forward(number=2, parts=(), streams=(OUT,)), NO_PEERS, Counter())
    for layer in range(3):
        assert host.copied.empty()
        step.stream(layer)
        assert host.copied.get(timeout=60) == layer, "before the next layer is computed"
        assert layer == 2 or (moves.take_arrived() == [] and not moves.is_idle)
    await_wakeup(moves)
    [done] = moves.take_arrived()
    assert (done.number, moves.is_idle) == (OUT.number, True)
    assert isinstance(done, Moved) and done.bytes_sent == {("host_copy", "same_host"): 3 * 16}
    moves.close()


def test_an_error_of_the_lane_is_raised_by_the_computing_thread() -> None:
    host = Slow(MemoryError("no page"))
    moves = moves_with(host)
    moves.expect([OUT])
    host.go.set()
    await_wakeup(moves)
    with pytest.raises(MemoryError, match="no page"):
        moves.take_arrived()
    moves.close()


def test_closing_does_not_wait_for_moves_that_are_not_begun() -> None:
    host = Slow()
    moves = moves_with(host)
    moves.expect([OUT] * 9)
    host.begun.wait()
    threading.Timer(0.2, host.go.set).start()
    moves.close()
    host.begun.clear()
    assert not host.begun.wait(0.2) and not moves.is_idle
