"""Steps made by hand for real workers: requests whose KV goes where a test says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from oracle import Expected, assert_exact
from thread_launcher import ThreadLauncher

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster as Instances
from longspan.core.exchange import CHAIN, LOCAL, RING_KV, RING_Q, Exchange
from longspan.core.layouts import shard_span
from longspan.core.locations import Location
from longspan.core.runs import Layout, positions
from longspan.core.steps import Completion, Forward, MoveKV, MoveWay, Part, Sample, Sampling
from longspan.model.source import prepare
from longspan.model.store import read_info
from longspan.runtime.executor.control_plane import Launcher, WorkerExecutor
from longspan.runtime.host_tiers import HostMemory
from longspan.runtime.messages import WorkerConfig

BLOCK, NUM_HOST_BLOCKS = 16, 40


@contextmanager
def workers(
    folder: Path,
    instances: Instances,
    *,
    num_blocks: int = 40,
    step_timeout_s: float = 60.0,
    launch: Callable[[WorkerConfig], Launcher] = ThreadLauncher,
    host_memory: HostMemory | None = None,
) -> Iterator[Cluster]:
    """Starts workers, each on a host of its own, or with `host_memory` for 40 blocks all on one host."""
    if host_memory is None:
        locations = tuple(Location(host=rank, device=rank) for rank in range(instances.num_ranks))
        instances = replace(instances, locations=locations)
    else:
        instances = replace(instances, host_blocks=(NUM_HOST_BLOCKS,))
    files = prepare(str(folder), dtype="float32")
    instances = instances.with_layers(read_info(files.weights).num_layers, 0.0)
    instances = instances.with_blocks([num_blocks] * instances.num_instances)
    config = WorkerConfig(
        files=files,
        cluster=instances,
        device="cpu",
        num_threads=1,
        block_size=BLOCK,
        host_memory=() if host_memory is None else (host_memory.path,),
    )
    with WorkerExecutor(launch(config), step_timeout_s=step_timeout_s) as executor:
        yield Cluster(executor, instances)


class Cluster:
    """An executor, numbers for steps, and free blocks. The most recently freed block is used first."""

    def __init__(self, executor: WorkerExecutor, instances: Instances) -> None:
        self.executor, self.instances = executor, instances
        self.free = [list(range(num_blocks)) for num_blocks in (*instances.num_blocks, *instances.host_blocks)]
        self.completions: dict[int, Completion] = {}
        self._number = self._request = 0

    def number(self) -> int:
        self._number += 1
        return self._number

    def request_id(self) -> int:
        self._request += 1
        return self._request

    def block(self, pool: int) -> BlockRef:
        return BlockRef(pool, self.free[pool].pop())

    def release(self, refs: Sequence[BlockRef]) -> None:
        for ref in refs:
            self.free[ref.pool].append(ref.block)

    def wait(self, *numbers: int, timeout_s: float = 60.0) -> list[Completion]:
        """Return the completions of some steps. Keep other completions for later calls."""
        deadline = time.monotonic() + timeout_s
        while not set(numbers) <= set(self.completions):
            assert time.monotonic() < deadline, f"steps {numbers} are not done"
            self.completions.update({one.number: one for one in self.executor.poll(timeout_s)})
        return [self.completions[number] for number in numbers]


@dataclass
class Driven:
    """One greedy request. `stop` is how far it is computed, `moved` where its first blocks were moved to."""

    cluster: Cluster
    prompt: Sequence[int]
    table: list[BlockRef] = field(default_factory=list)
    moved: list[BlockRef] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    stop: int = 0

    def __post_init__(self) -> None:
        self.id = self.cluster.request_id()

    def forward(
        self,
        stop: int,
        group: tuple[int, ...],
        exchange: Exchange = RING_KV,
        *,
        rebalances: Sequence[MoveKV] = (),
        stream_to: int | None = None,
    ) -> Forward:
        """Computes up to `stop`, and samples if these are all tokens. Members are told everything each time.

        With `stream_to` all blocks that have not moved yet and are complete then go to that instance or host.
        """
        tokens = [*self.prompt, *self.output]
        start, self.stop = self.stop, stop
        single = len(group) == 1 or stop - start == 1
        layout: Layout = "single" if single else "contiguous" if exchange == CHAIN else "zigzag"
        head = 0 if not start % BLOCK or exchange == CHAIN else group.index(self.table[start // BLOCK].instance)
        runs = shard_span(layout, start, stop, len(group), align=BLOCK, head=head)
        for block in range(len(self.table), -(-stop // BLOCK)):
            member = next(m for m, own in enumerate(runs) if block * BLOCK in positions(own))
            self.table.append(self.cluster.block(group[-1 if exchange == CHAIN else member]))
        last = next(group[m] for m, own in enumerate(runs) if own and own[-1].stop == stop)
        part = Part(
            request_id=self.id,
            start=start,
            stop=stop,
            tokens=tokens[start:stop],
            group=group,
            runs=runs,
            exchange=LOCAL if len(group) == 1 else RING_Q if stop - start == 1 else exchange,
            first_block=0,
            blocks=tuple(self.table),
            sample=Sample(instance=last, position=stop) if stop == len(tokens) else None,
            sampling=Sampling(seed=0, output_logits=True),
        )
        number = self.cluster.number()
        streams = () if stream_to is None else tuple(self.moves_to(stream_to))
        forward = Forward(number=number, parts=(part,), rebalances=tuple(rebalances), streams=streams)
        self.cluster.executor.submit(forward)
        return forward

    def moves_to(self, target: int) -> list[MoveKV]:
        """Of all complete blocks that no move has taken there yet, a move per source."""
        num_complete = len(self.table) if self.stop >= len(self.prompt) else self.stop // BLOCK
        new = range(len(self.moved), num_complete)
        self.moved += [self.cluster.block(target) for _ in new]
        copies = [(self.table[index], self.moved[index]) for index in new]
        sources = sorted({source.instance for source, _ in copies})
        way: MoveWay = "across" if target in self.cluster.instances.instances else "out"
        return [self._move([copy for copy in copies if copy[0].instance == source], way) for source in sources]

    def even_out(self, group: tuple[int, ...]) -> tuple[MoveKV, list[BlockRef]]:
        """Distribute full blocks over the members of a group. Return the move and the old blocks."""
        copies = []
        for index in range(self.stop // BLOCK):
            home = group[index % len(group)]
            if self.table[index].instance != home:
                copies.append((self.table[index], self.cluster.block(home)))
                self.table[index] = copies[-1][1]
        return self._move(copies), [old for old, _ in copies]

    def swap(self, way: MoveWay, pool: int) -> MoveKV:
        """Begin to copy all blocks to a pool of the host or of an instance, and free the old blocks."""
        old, self.table = self.table, [self.cluster.block(pool) for _ in self.table]
        self.cluster.release(old)
        move = self._move(list(zip(old, self.table, strict=True)), way)
        self.cluster.executor.submit(move)
        return move

    def _move(self, copies: Sequence[tuple[BlockRef, BlockRef]], way: MoveWay = "across") -> MoveKV:
        return MoveKV(number=self.cluster.number(), request_id=self.id, copies=tuple(copies), way=way)

    def take(self, forward: Forward) -> Completion:
        """Waits for one, and takes its token in."""
        [done] = self.cluster.wait(forward.number)
        for sampled in done.sampled:
            self.output.append(sampled.token)
            self.logits.append(np.frombuffer(sampled.logits, dtype=np.float32))
        return done

    def decode(self, group: tuple[int, ...], num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.take(self.forward(self.stop + 1, group))

    def assert_exact(self, expected: Expected) -> None:
        got = SimpleNamespace(token_ids=self.output, logits=self.logits)
        assert_exact(SimpleNamespace(outputs=[got]), expected)  # type: ignore[arg-type]  # it reads nothing else
