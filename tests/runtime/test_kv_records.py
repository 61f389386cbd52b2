"""Blocks of layers that differ keep every byte on devices, hosts and disks, and on all ways between these.

The layers are invented: keys and values of different sizes, a state without KV, a latent that all heads read, and all
of it together. Tests read and write the memory of pools at offsets of their own, so a wrong offset is found.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.attn.backends import backend_of
from longspan.attn.memory import MemoryTransport, Wires
from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.kv_record import KvRecord, LayerRecord
from longspan.core.steps import Content, Forward, MoveKV
from longspan.runtime import block_messages
from longspan.runtime.block_messages import BlockMessages
from longspan.runtime.disk_pool import DiskPool
from longspan.runtime.host_pool import HostPool, map_blocks
from longspan.runtime.host_tiers import HostMemory
from longspan.runtime.moves import Moves, StepMoves
from longspan.runtime.pool import KvMemory, KvPool

CPU, BLOCK, DTYPE = torch.device("cpu"), 4, torch.float16
NUM_BLOCKS, NUM_HOST_BLOCKS, TIMEOUT_S = 7, 9, 60.0
TOKEN = BLOCK * DTYPE.itemsize


def record_of(state_bytes: int) -> KvRecord:
    return KvRecord(
        layers=(
            LayerRecord(num_heads=6, num_kv_heads=3, key_bytes=6 * TOKEN, value_bytes=10 * TOKEN),
            LayerRecord(num_heads=6, num_kv_heads=3, state_bytes=state_bytes),
            LayerRecord(num_heads=6, num_kv_heads=1, key_bytes=9 * TOKEN),
            LayerRecord(num_heads=6, num_kv_heads=3, key_bytes=8, value_bytes=24, state_bytes=16),
        )
    )


RECORDS = {8: record_of(40), 2: record_of(42)}
"""By the bytes of their words."""
SHARES = {
    (3, 1): [(0, 1, 2)],
    (3, 2): [(0, 1), (2,)],
    (3, 3): [(0,), (1,), (2,)],
    (1, 1): [(0,)],
    (1, 2): [(0,), (0,)],
    (1, 3): [(0,), (0,), (0,)],
}
"""The KV heads of each shard, by KV heads and tp."""


def content(number: int, layer: int, field: str, shape: tuple[int, ...]) -> Tensor:
    """The bytes of a field in block `number` of a request: `[kv_head, byte]`."""
    place = ("keys", "values", "state").index(field)
    numbers = torch.Generator().manual_seed((number * 100 + layer) * 3 + place)
    return torch.randint(0, 256, shape, generator=numbers, dtype=torch.uint8)


def sizes_of(layer: LayerRecord) -> list[tuple[str, int]]:
    sizes = (("keys", layer.key_bytes), ("values", layer.value_bytes), ("state", layer.state_bytes))
    return [(field, size) for field, size in sizes if size]


class Memory:
    """The memory of a pool as arrays `[block, kv_head, byte]`, which follow each other by layer and field."""

    def __init__(
        self, memory: Tensor, record: KvRecord, num_blocks: int, layers: Sequence[int], shard: int, tp: int
    ) -> None:
        self._arrays: dict[tuple[int, str], tuple[tuple[int, ...], Tensor]] = {}
        self._record, offset = record, 0
        for number in layers:
            layer = record.layers[number]
            heads = SHARES[layer.num_kv_heads, tp][shard]
            for field, size in sizes_of(layer):
                stop = offset + num_blocks * len(heads) * size
                self._arrays[number, field] = heads, memory[offset:stop].view(num_blocks, len(heads), size)
                offset = stop
        assert offset == len(memory)

    def array(self, layer: int, field: str) -> Tensor:
        return self._arrays[layer, field][1]

    def fill(self, block: int, number: int) -> None:
        for own, wanted in self._of(block, number):
            own.copy_(wanted)

    def check(self, block: int, number: int) -> None:
        for own, wanted in self._of(block, number):
            assert torch.equal(own, wanted), "bytes differ"

    def _of(self, block: int, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for (layer, field), (heads, array) in self._arrays.items():
            all_heads = self._record.layers[layer].num_kv_heads
            yield array[block], content(number, layer, field, (all_heads, array.shape[2]))[list(heads)]


@dataclass
class ToyRank:
    pool: KvPool
    memory: Memory
    messages: BlockMessages
    moves: Moves
    rebalances: MemoryTransport


def cluster_of(*specs: str) -> Cluster:
    return Cluster.of(*specs).with_layers(4, 0.0)


@contextmanager
def ranks_of(cluster: Cluster, record: KvRecord, host: Path | None = None) -> Iterator[list[ToyRank]]:
    """All ranks of a cluster, in one thread, whose blocks have the numbers 50, 51 ... of other requests."""
    wires, backend = (Wires(TIMEOUT_S), Wires(TIMEOUT_S)), backend_of(CPU, compiled=False)
    with ExitStack() as acquired:
        ranks = []
        for rank in range(cluster.num_ranks):
            instance, stage, shard = cluster.at(rank)
            tp, layers, memory = cluster.tp(instance), cluster.layers(instance, stage), KvMemory(CPU)
            sizes: dict[str, Any] = {"block_size": BLOCK, "dtype": DTYPE}
            own: dict[str, Any] = {"shard": shard, "tp": tp, "layers": layers, "memory": memory}
            pool = KvPool(record, num_blocks=NUM_BLOCKS, device=CPU, **sizes, **own)
            messages = BlockMessages(pool, cluster, rank)
            shared = None
            if host is not None:
                mapped = map_blocks(host, record, num_blocks=NUM_HOST_BLOCKS, **sizes)
                shared = HostPool(mapped, pool, cluster, rank, backend)
            moves = Moves(messages, MemoryTransport(wires[0], rank, waits_for_sends=True), shared)
            acquired.callback(moves.close)
            acquired.callback(wires[0].close, rank)
            raw = Memory(memory.take(memory.num_bytes), record, NUM_BLOCKS, layers, shard, tp)
            for block in range(NUM_BLOCKS):
                raw.fill(block, 50 + block)
            ranks.append(ToyRank(pool, raw, messages, moves, MemoryTransport(wires[1], rank)))
        yield ranks


def of_instance(cluster: Cluster, ranks: Sequence[ToyRank], instance: int) -> list[ToyRank]:
    return [ranks[rank] for rank in cluster.ranks(instance)]


def run(ranks: Sequence[ToyRank], move: MoveKV) -> None:
    for rank in ranks:
        rank.moves.expect([move])
    for rank in ranks:
        list(rank.moves.send([move]))
    finish(ranks)


def finish(ranks: Sequence[ToyRank]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not all(rank.moves.is_idle for rank in ranks):
        assert time.monotonic() < end_s
        for rank in ranks:
            rank.moves.take_arrived()
        time.sleep(0.001)


def move(number: int, way: Any, source: int, target: int, blocks: dict[int, int]) -> MoveKV:
    copies = tuple((BlockRef(source, one), BlockRef(target, other)) for one, other in blocks.items())
    return MoveKV(number=number, request_id=0, copies=copies, way=way)


OUT, SAVED, LOADED, IN = {5: 1, 0: 8, 3: 2}, {1: 0, 8: 3, 2: 1}, {0: 4, 3: 0, 1: 7}, {4: 6, 0: 2, 7: 1}
"""The ways of three blocks, by the number that each has before."""


def through_all_tiers(before: str, after: str, record: KvRecord, folder: Path) -> None:
    """Three blocks go from one instance to the host, the disk, other blocks of the host and another instance."""
    cluster = cluster_of(before, after)
    with ExitStack() as acquired:
        memory = acquired.enter_context(closing(HostMemory(NUM_HOST_BLOCKS * record.block_bytes)))
        ranks = acquired.enter_context(ranks_of(cluster, record, memory.path))
        host_pool = cluster.host_pool(0)
        with memory.path.open("r+b") as file:
            bytes_of_host = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        host = Memory(bytes_of_host, record, NUM_HOST_BLOCKS, range(4), 0, 1)
        for rank in of_instance(cluster, ranks, 0):
            for number, block in enumerate(OUT):
                rank.memory.fill(block, number)
        run(ranks, move(1, "out", 0, host_pool, OUT))
        for number, block in enumerate(OUT.values()):
            host.check(block, number)
        mapped = map_blocks(memory.path, record, num_blocks=NUM_HOST_BLOCKS, block_size=BLOCK, dtype=DTYPE)
        disk = acquired.enter_context(closing(DiskPool(folder, "toy", num_blocks=4, host=mapped)))
        for number, (source, block) in enumerate(SAVED.items()):
            assert disk.save(source, block, Content(b"", (number,)))
            [saved] = folder.glob(f"*{block}.kv")
            assert saved.read_bytes().endswith(bytes_of(number, record)), "bytes differ"
        bytes_of_host.zero_()
        for number, (block, target) in enumerate(LOADED.items()):
            assert disk.load(block, target, Content(b"", (number,)))
            host.check(target, number)
        run(ranks, move(2, "in", host_pool, 1, IN))
        for rank in of_instance(cluster, ranks, 1):
            check_blocks(rank, dict(zip(IN.values(), range(3), strict=True)))


def bytes_of(number: int, record: KvRecord) -> bytes:
    fields = [
        content(number, index, field, (layer.num_kv_heads, size))
        for index, layer in enumerate(record.layers)
        for field, size in sizes_of(layer)
    ]
    return b"".join(field.numpy().tobytes() for field in fields)


def check_blocks(rank: ToyRank, numbers: dict[int, int]) -> None:
    """Some blocks have the expected content, and all other blocks are unchanged."""
    for block in range(NUM_BLOCKS):
        rank.memory.check(block, numbers.get(block, 50 + block))


SPLITS = [("1", "1"), ("tp2", "1"), ("tp2pp2", "tp3"), ("tp3", "pp3"), ("pp2", "tp2")]


@pytest.mark.parametrize("word_bytes", RECORDS)
@pytest.mark.parametrize(("before", "after"), SPLITS)
def test_blocks_go_to_a_host_and_its_disk_and_return(before: str, after: str, word_bytes: int, tmp_path: Path) -> None:
    assert RECORDS[word_bytes].word_bytes == word_bytes
    through_all_tiers(before, after, RECORDS[word_bytes], tmp_path)


def between_instances(before: str, after: str, record: KvRecord) -> None:
    cluster, copies = cluster_of(before, after), {5: 1, 0: 6, 3: 2}
    with ranks_of(cluster, record) as ranks:
        run(ranks, move(1, "across", 0, 1, copies))
        for rank in of_instance(cluster, ranks, 0):
            check_blocks(rank, {})
        for rank in of_instance(cluster, ranks, 1):
            check_blocks(rank, {target: 50 + source for source, target in copies.items()})


@pytest.mark.parametrize("word_bytes", RECORDS)
@pytest.mark.parametrize(("before", "after"), SPLITS)
def test_transfers_between_instances(before: str, after: str, word_bytes: int) -> None:
    between_instances(before, after, RECORDS[word_bytes])


def test_large_transfers_are_cut_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_messages, "_CHUNK_BYTES", 100)
    between_instances("tp2", "tp3", RECORDS[8])


@pytest.mark.parametrize("prefill", ["2", "2xtp2", "2xtp2pp2"])
def test_blocks_move_layer_by_layer_inside_a_forward(prefill: str) -> None:
    """One block is rebalanced. Then it and another are streamed to an instance that is split differently."""
    cluster, record = cluster_of(prefill, "tp3"), RECORDS[8]
    rebalance = move(1, "across", 0, 1, {5: 1})
    streams = (move(2, "across", 1, 2, {1: 3, 4: 0}),)
    forward = Forward(number=0, parts=(), rebalances=(rebalance,), streams=streams)
    with ranks_of(cluster, record) as ranks:
        for rank in ranks:
            rank.moves.expect(streams)
        steps = [
            StepMoves(forward, one.messages, rebalances=one.rebalances, moves=one.moves, sent=Counter())
            for instance in (0, 1)
            for one in of_instance(cluster, ranks, instance)
        ]
        for layer in range(4):
            for rank, step in zip(ranks, steps, strict=False):
                if layer in rank.pool.layers:
                    step.complete(layer)
            for rank, step in zip(ranks, steps, strict=False):
                if layer in rank.pool.layers:
                    step.stream(layer)
        finish(ranks)
        for rank in of_instance(cluster, ranks, 1):
            check_blocks(rank, {1: 55})
        for rank in of_instance(cluster, ranks, 2):
            check_blocks(rank, {3: 55, 0: 54})


Plant = Callable[[pytest.MonkeyPatch], None]


def shift_a_field(patch: pytest.MonkeyPatch) -> None:
    """The last layer begins a word too early."""
    right = KvRecord.__dict__["places"].func

    def wrong(record: KvRecord) -> tuple[dict[str, range], ...]:
        *places, last = right(record)
        word = record.word_bytes
        return (*places, {field: range(at.start - word, at.stop - word) for field, at in last.items()})

    patch.setattr(KvRecord, "places", property(wrong))


def swap_shards(patch: pytest.MonkeyPatch) -> None:
    right = LayerRecord.kv_heads
    patch.setattr(LayerRecord, "kv_heads", lambda layer, tp: [range(3 - len(one), 3) for one in right(layer, tp)])


def send_other_heads(patch: pytest.MonkeyPatch) -> None:
    """Each second head of a message is that before it."""
    right = BlockMessages.filled

    def wrong(messages: BlockMessages, leaving: Any) -> Any:
        message = right(messages, leaving)
        for field in message.tensors:
            field[:, 1:] = field[:, :1].clone()
        return message

    patch.setattr(BlockMessages, "filled", wrong)


@pytest.mark.parametrize("plant", [shift_a_field, swap_shards], ids=lambda plant: plant.__name__)
def test_a_planted_error_in_a_tier_is_found(plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = KvRecord(layers=RECORDS[8].layers[:2] + RECORDS[8].layers[3:] + RECORDS[8].layers[3:])
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="bytes differ"):
        through_all_tiers("tp2", "1", record, tmp_path)


@pytest.mark.parametrize("plant", [shift_a_field, send_other_heads], ids=lambda plant: plant.__name__)
def test_a_planted_error_in_a_transfer_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="bytes differ"):
        between_instances("tp2", "1", RECORDS[8])


def test_attention_sees_keys_and_values_of_their_own_sizes() -> None:
    """Only for layers with both."""
    with ranks_of(cluster_of("1"), RECORDS[8]) as [rank]:
        pool, table = rank.pool, [6, 2]
        assert [tuple(kv.keys.shape) for kv in pool.kv] == [(NUM_BLOCKS, 3, BLOCK, 6), (NUM_BLOCKS, 3, BLOCK, 1)]
        assert [tuple(kv.values.shape) for kv in pool.kv] == [(NUM_BLOCKS, 3, BLOCK, 10), (NUM_BLOCKS, 3, BLOCK, 3)]
        k, v = torch.randn(3, 7, 6).to(DTYPE), torch.randn(3, 7, 10).to(DTYPE)
        token = torch.arange(7)
        pool.write(0, torch.tensor(table)[token // BLOCK], token % BLOCK, k, v)
        k_out, v_out = torch.empty_like(k), torch.empty_like(v)
        pool.layer(0).gather(table, 0, 7, k_out, v_out)
        assert torch.equal(k_out, k) and torch.equal(v_out, v)
        stored = rank.memory.array(0, "values")[6].view(DTYPE).view(3, BLOCK, 10)
        assert torch.equal(stored, v[:, :BLOCK])


def test_slots_are_cleared_and_copied_in_all_layers() -> None:
    """A state is cleared with any slot of its block, and is not copied with a part of one."""
    record = RECORDS[8]
    fields = [(index, field) for index, layer in enumerate(record.layers) for field, _ in sizes_of(layer)]
    with ranks_of(cluster_of("1"), record) as [rank]:
        before = {key: rank.memory.array(*key).clone() for key in fields}
        rank.pool.clear([(5, 1), (2, 3)])
        rank.pool.copy_block(0, 4, 3)
        for key, old in before.items():
            wanted = old.clone()
            if key[1] == "state":
                wanted[[5, 2]] = 0
            else:
                tokens = wanted.view(NUM_BLOCKS, -1, BLOCK, wanted.shape[2] // BLOCK)
                tokens[5, :, 1:], tokens[2, :, 3:] = 0, 0
                tokens[4, :, :3] = tokens[0, :, :3]
            assert torch.equal(rank.memory.array(*key), wanted), key
