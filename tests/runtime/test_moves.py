"""KV that real workers send each other: between instances of different tp, while they compute, and in mid-growth."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hand_made import BLOCK, Cluster, Driven, workers
from oracle import Oracle
from texts import topic_tokens
from tiny_models import BASE, write_checkpoint
from transformers import LlamaConfig

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster as Instances
from longspan.core.exchange import ALLTOALL, CHAIN, GATHER_HIDDEN, RING_KV, RING_Q, Exchange
from longspan.core.steps import Completion, MoveKV
from longspan.errors import WorkerLostError
from longspan.model.source import smollm2_folder
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.pool import WINDOW_BYTES

MIB = 2**20
BLOCK_BYTES = BLOCK * 3 * 16 * 4 * 2 * BASE["num_hidden_layers"]
"""Of the first model below, on an instance of one rank."""
NUM_TOKENS = 6
LENGTH = 150
HEADS = {"9 on 3": (9, 3), "8 on 2": (8, 2)}
"""As in SmolLM2, where no tp divides both, and with KV heads that tp 4 has twice."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_checkpoint(
            LlamaConfig(**BASE | {"hidden_size": 144, "num_attention_heads": heads, "num_key_value_heads": kv_heads}),
            root / name,
        )
        for name, (heads, kv_heads) in HEADS.items()
    }


@pytest.fixture(scope="module")
def oracles(folders: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(folder) for name, folder in folders.items()}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 199, length).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "streamed"),
    [
        ("9 on 3", "1", "tp2", False),
        ("9 on 3", "tp2", "1", True),
        ("9 on 3", "3", "tp2", True),
        ("9 on 3", "2xtp2", "tp3", False),
        ("9 on 3", "2xtp2", "tp3", True),
        ("8 on 2", "1", "tp4", True),
        ("8 on 2", "tp4", "tp3", False),
        ("9 on 3", "pp2", "tp2", False),
        ("9 on 3", "tp2", "pp3", True),
        ("9 on 3", "2xpp2", "tp2pp3", True),
        ("8 on 2", "pp3", "tp4pp2", False),
        pytest.param("9 on 3", "1", "tp2", True, marks=pytest.mark.full),
        pytest.param("9 on 3", "tp2", "1", False, marks=pytest.mark.full),
        pytest.param("9 on 3", "3", "tp2", False, marks=pytest.mark.full),
        pytest.param("8 on 2", "1", "tp4", False, marks=pytest.mark.full),
        pytest.param("8 on 2", "tp4", "tp3", True, marks=pytest.mark.full),
    ],
)
def test_from_prefill_to_decode(
    folders: dict[str, Path], oracles: dict[str, Oracle], model: str, prefill: str, decode: str, streamed: bool
) -> None:
    """Two chunks, the first of which ends inside a block. Another request decodes at the target meanwhile."""
    instances = Instances.of(prefill, decode)
    group, target = tuple(range(instances.spec.instances)), instances.spec.instances
    with workers(folders[model], instances) as cluster:
        other = Driven(cluster, prompt_of(40, seed=1))
        other.take(other.forward(40, (target,)))
        request = Driven(cluster, prompt_of(LENGTH))
        moves = []
        for stop in (70, LENGTH):
            forward = request.forward(stop, group, stream_to=target if streamed else None)
            alone = [] if streamed else request.moves_to(target)
            for move in alone:
                cluster.executor.submit(move)
            moves += [*forward.streams, *alone]
            other.decode((target,), 2)
            request.take(forward)
        sent = sum(one.bytes_sent.get(("kv_transfer", "other_host"), 0) for one in done_with(cluster, moves))
        request.table = list(request.moved)
        request.decode((target,), NUM_TOKENS - 1)
        other.decode((target,), 1)
    request.assert_exact(oracles[model].complete(request.prompt, NUM_TOKENS))
    other.assert_exact(oracles[model].complete(other.prompt, 6))
    heads = max(HEADS[model][1], instances.tp(target))  # copies of heads are sent, too
    assert sent == len(request.moved) * BLOCK * heads * 16 * 4 * 2 * BASE["num_hidden_layers"]


def done_with(cluster: Cluster, moves: Sequence[MoveKV]) -> list[Completion]:
    """All completions so far, once these moves are done."""
    cluster.wait(*(move.number for move in moves))
    return list(cluster.completions.values())


BALANCED: dict[str, list[tuple[int, ...]]] = {
    "4": [(0, 1), (0, 1, 2, 3)],
    "3": [(2,), (2, 0, 1)],
    "2xtp2": [(1,), (0, 1)],
    "2xtp2pp3": [(1,), (0, 1)],
}
"""The groups of a request before and after balancing, by split."""


def balanced() -> Iterator[Any]:
    """Yield each exchange with two splits, and each split with several exchanges. The rest are `full`."""
    for row, exchange in enumerate((RING_KV, RING_Q, ALLTOALL, CHAIN, GATHER_HIDDEN)):
        for column, (parallel, groups) in enumerate(BALANCED.items()):
            marks = [pytest.mark.full] if (row + column) % 2 else []
            yield pytest.param(parallel, groups, exchange, marks=marks, id=f"{parallel} {exchange}")


@pytest.mark.parametrize(("parallel", "groups", "exchange"), [*balanced()])
def test_balancing(
    folders: dict[str, Path],
    oracles: dict[str, Oracle],
    parallel: str,
    groups: list[tuple[int, ...]],
    exchange: Exchange,
) -> None:
    """Another request overwrites the old blocks at once."""
    with workers(folders["9 on 3"], Instances.of(parallel)) as cluster:
        request = Driven(cluster, prompt_of(LENGTH))
        request.take(request.forward(70, groups[0], exchange))
        balance, left = request.even_out(groups[1])
        assert balance.copies
        done = request.take(request.forward(120, groups[1], exchange, rebalances=[balance]))
        cluster.release(left)
        heads = max(3, cluster.instances.spec.tp)
        size = BLOCK * heads * 16 * 4 * 2 * BASE["num_hidden_layers"]
        assert done.bytes_sent["kv_balance", "other_host"] == len(left) * size
        other = Driven(cluster, prompt_of(100, seed=1))
        other.take(other.forward(100, groups[0], RING_KV))
        request.take(request.forward(LENGTH, groups[1], exchange))
        request.decode(groups[1], NUM_TOKENS - 1)
    request.assert_exact(oracles["9 on 3"].complete(request.prompt, NUM_TOKENS))


@pytest.mark.parametrize("exchange", [RING_Q, CHAIN, GATHER_HIDDEN])
def test_balancing_and_streaming_in_one_step(
    folders: dict[str, Path], oracles: dict[str, Oracle], exchange: Exchange
) -> None:
    """Blocks go on from where they have just come to, and new ones when they are stored, however late that is."""
    with workers(folders["9 on 3"], Instances.of("2", "tp2")) as cluster:
        request = Driven(cluster, prompt_of(LENGTH))
        request.take(request.forward(70, (0,)))
        balance, _ = request.even_out((0, 1))
        forward = request.forward(LENGTH, (0, 1), exchange, rebalances=[balance], stream_to=2)
        request.take(forward)
        cluster.wait(*(move.number for move in forward.streams))
        request.table = list(request.moved)
        request.decode((2,), NUM_TOKENS - 1)
    request.assert_exact(oracles["9 on 3"].complete(request.prompt, NUM_TOKENS))


@pytest.mark.full
def test_smollm2() -> None:
    """Three chunks on a group that grows. Then a transfer to an instance whose ranks have two KV heads and one."""
    prompt = list(topic_tokens()[:900])
    with workers(smollm2_folder(), Instances.of("2", "tp2"), num_blocks=80) as cluster:
        request = Driven(cluster, prompt)
        request.take(request.forward(300, (1,), stream_to=2))
        balance, _ = request.even_out((0, 1))
        request.take(request.forward(610, (0, 1), rebalances=[balance], stream_to=2))
        forward = request.forward(900, (0, 1), stream_to=2)
        request.take(forward)
        cluster.wait(*(move.number for move in forward.streams))
        request.table = list(request.moved)
        request.decode((2,), NUM_TOKENS - 1)
    request.assert_exact(Oracle(smollm2_folder()).complete(prompt, NUM_TOKENS))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="nobody counts the peak anew")
@pytest.mark.parametrize("decode", [pytest.param("1", marks=pytest.mark.full), "tp2"])
def test_memory_for_moves_in_flight_is_bounded(folders: dict[str, Path], decode: str) -> None:
    """Of 400 MiB in a single move little is in messages at a time, also while the target is stopped."""
    num_blocks, slack = 400 * MIB // BLOCK_BYTES, 48 * MIB
    instances = Instances.of("1", decode)
    with workers(folders["9 on 3"], instances, num_blocks=num_blocks, launch=ProcessLauncher) as cluster:
        source, *targets = (psutil.Process(pid) for pid in cluster.executor.pids)
        before = [peak_bytes(process, anew=True) for process in (source, *targets)]
        copies = tuple((BlockRef(0, block), BlockRef(1, block)) for block in range(num_blocks))
        for process in targets:
            process.suspend()
        cluster.executor.submit(MoveKV(number=1, request_id=1, copies=copies))
        time.sleep(0.5)
        for process in targets:
            process.resume()
        cluster.wait(1)
        grown = [peak_bytes(process) - was for process, was in zip((source, *targets), before, strict=True)]
    pools = [0, *(num_blocks * BLOCK_BYTES * heads // 3 for heads in ((3,) if len(targets) == 1 else (2, 1)))]
    grown = [peak - pool for peak, pool in zip(grown, pools, strict=True)]
    ways = [len(targets), *(1 for _ in targets)]
    assert all(peak < 2 * num * WINDOW_BYTES + slack for peak, num in zip(grown, ways, strict=True)), (
        "the allocator may keep as much again as is in messages"
    )


def peak_bytes(process: psutil.Process, *, anew: bool = False) -> int:
    """The most memory that a process has had, since it was last counted `anew`."""
    folder = Path("/proc", str(process.pid))
    if anew:
        folder.joinpath("clear_refs").write_text("5")
    [line] = [line for line in folder.joinpath("status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def test_many_moves_between_all_instances(folders: dict[str, Path]) -> None:
    """More bytes than the windows hold, from each source to each target, given in any order. All moves end."""
    num_blocks = 3 * WINDOW_BYTES // BLOCK_BYTES
    with workers(folders["9 on 3"], Instances.of("2", "2"), num_blocks=num_blocks, launch=ProcessLauncher) as cluster:
        pairs = [(source, target) for source in (0, 1) for target in (2, 3)] * 3
        random.Random(0).shuffle(pairs)
        moves = []
        for place, (source, target) in enumerate(pairs):
            first = place * num_blocks // len(pairs)
            blocks = range(first, first + num_blocks // len(pairs))
            copies = tuple((BlockRef(source, block), BlockRef(target, block)) for block in blocks)
            moves.append(MoveKV(number=cluster.number(), request_id=place, copies=copies))
            cluster.executor.submit(moves[-1])
        done = cluster.wait(*(move.number for move in moves))
    moved = sum(sum(one.bytes_sent.values()) for one in done)
    assert moved == BLOCK_BYTES * sum(len(move.copies) for move in moves)


def test_a_move_that_waits_for_its_source_is_not_late(folders: dict[str, Path]) -> None:
    """The error names the stopped rank, not the rank that waits for it."""
    with workers(folders["9 on 3"], Instances.of("1", "1"), step_timeout_s=1.5, launch=ProcessLauncher) as cluster:
        request = Driven(cluster, prompt_of(LENGTH))
        os.kill(cluster.executor.pids[0], signal.SIGSTOP)
        forward = request.forward(LENGTH, (0,), stream_to=1)
        with pytest.raises(WorkerLostError, match=r"rank 0 .* no step was completed by rank 0 for 1.5 s"):
            cluster.wait(forward.number)


@pytest.mark.parametrize("stopped", [0, 1], ids=["source", "target"])
def test_both_ranks_of_a_late_move_are_named_if_the_cause_is_unknown(folders: dict[str, Path], stopped: int) -> None:
    """The source has begun to send, but nothing leaves before the target takes part."""
    with workers(folders["9 on 3"], Instances.of("1", "1"), step_timeout_s=2.5, launch=ProcessLauncher) as cluster:
        request = Driven(cluster, prompt_of(LENGTH))
        request.take(request.forward(LENGTH, (0,)))
        ends = [psutil.Process(pid) for pid in cluster.executor.pids]
        ends[1].suspend()
        [move] = request.moves_to(1)
        cluster.executor.submit(move)
        assert not cluster.executor.poll(1.0), "it has begun"
        ends[stopped].suspend()
        while ends[stopped].status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)  # until a thread has seen the signal, its other threads continue
        if not stopped:
            ends[1].resume()
        with pytest.raises(WorkerLostError, match=r"no step was completed by ranks 1, 0 for 2.5 s"):
            cluster.wait(move.number)


def test_a_source_that_dies(folders: dict[str, Path]) -> None:
    with workers(folders["9 on 3"], Instances.of("1", "1"), launch=ProcessLauncher) as cluster:
        request = Driven(cluster, prompt_of(LENGTH))
        request.take(request.forward(LENGTH, (0,)))
        os.kill(cluster.executor.pids[0], signal.SIGSTOP)
        [move] = request.moves_to(1)
        cluster.executor.submit(move)
        time.sleep(0.2)
        os.kill(cluster.executor.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"rank 0 .*SIGKILL"):
            cluster.wait(move.number)


def test_workers_end_in_mid_move(folders: dict[str, Path]) -> None:
    """The target does not wait for lost messages. The source, which is stopped, is killed."""
    with workers(folders["9 on 3"], Instances.of("1", "1"), launch=ProcessLauncher) as cluster:
        request = Driven(cluster, prompt_of(LENGTH))
        request.take(request.forward(LENGTH, (0,)))
        source, target = (psutil.Process(pid) for pid in cluster.executor.pids)
        source.suspend()
        [move] = request.moves_to(1)
        cluster.executor.submit(move)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 60
    assert not source.is_running() and not target.is_running()
