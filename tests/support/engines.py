"""Engines whose workers are threads of the test's process, and pairwise choices from products of options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_order import Fabric, InOrderTransport
from thread_launcher import ThreadLauncher

import longspan
from longspan import LLM
from longspan.attn.comm import Transport
from longspan.attn.memory import MemoryTransport
from longspan.attn.routing import AnnouncedTransport, DirectedTransport
from longspan.runtime.messages import WorkerConfig
from longspan.runtime.step_comm import StepLanes
from longspan.runtime.worker import Transports
from longspan.service import Service

Row = dict[str, Any]
"""A value for each factor."""


class InOrderLauncher(ThreadLauncher):
    """Connects workers with the rules of NCCL, see `in_order`. A call that would hang there fails here.

    All calls of steps share one hardware queue of each device. Only KV moves have other queues.
    """

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.fabric = Fabric(queue_of=lambda lane: lane if lane.startswith("moves") else "steps")

    def transports(self, rank: int, num_ranks: int) -> Transports:
        def lane(name: str) -> Transport:
            return InOrderTransport(self.fabric, rank, name)

        ways = [InOrderTransport(self.fabric, rank, f"moves {way}", is_grouped=False) for way in ("up", "down")]
        notices = MemoryTransport(self.wires[2], rank, waits_for_sends=True)
        return Transports(
            steps=StepLanes(
                exchange=lane("exchange"),
                inside=InOrderTransport(self.fabric, rank, "inside", summing=num_ranks),
                weights=lane("weights"),
            ),
            rebalances=lane("rebalances"),
            moves=AnnouncedTransport(DirectedTransport(rank, *ways), notices),
            hidden=lane("hidden"),
            samples=lane("samples"),
            meet=lambda cluster: self.fabric.open(rank, num_ranks, cluster.shard_groups),
        )

    def disconnect(self, rank: int) -> None:
        super().disconnect(rank)
        self.fabric.close(rank)


class ThreadLLM(LLM):
    """An `LLM` whose workers run in this process, in float32 by default. It starts in a tenth of a second."""

    make_service = partial(Service, launcher=InOrderLauncher)

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **{"dtype": "float32", **given})


def run_on_threads(patch: pytest.MonkeyPatch) -> None:
    """Let the command line start engines in this process. Their workers are threads, in float32 by default."""
    patch.setenv("LONGSPAN_DTYPE", "float32")
    patch.setitem(vars(longspan), "LLM", ThreadLLM)
    patch.setattr("longspan.cli.options.start_server", lambda: None)


def num_free_blocks(llm: LLM) -> list[int]:
    """KV blocks per instance that no request holds, once the steps of finished ones are done."""
    while llm.engine.has_unfinished:
        llm.engine.step()
    account = llm.engine.kv
    return [account.pool(instance).num_free for instance in llm.engine.config.cluster.instances]


MAX_ENGINES = 4
"""Engines that `Engines` keeps. Each takes 10 to 30 MB. Most tests that share one follow each other."""


class Engines:
    """Engines on tiny models that tests share. The least recently used one ends when there are too many."""

    def __init__(self) -> None:
        self._engines: dict[tuple[object, ...], ThreadLLM] = {}

    def __call__(self, folder: Path, **arguments: Any) -> ThreadLLM:
        """Return an engine with blocks of 16 tokens and steps of at most 48 tokens per instance by default.

        Its prefix cache is empty. Its policy is that of the previous test.
        """
        given = {"skip_tokenizer_init": True, "block_size": 16, "max_num_batched_tokens": 48, **arguments}
        key = (folder, *sorted(given.items()))
        llm = self._engines.pop(key, None) or ThreadLLM(str(folder), **given)
        self._engines[key] = llm
        self.close(MAX_ENGINES)
        llm.reset_prefix_cache()
        return llm

    def close(self, num_kept: int = 0) -> None:
        while len(self._engines) > num_kept:
            self._engines.pop(next(iter(self._engines))).shutdown()


def pairwise(factors: Mapping[str, Sequence[Any]], is_legal: Callable[[Row], bool] = lambda _: True) -> list[Any]:
    """Return all legal rows of a product as parameters. Rows that pairs do not need are marked `full`.

    Rows are taken greedily until every pair of values that occurs in any legal row occurs in a taken one.
    """
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    rows = [row for row in rows if is_legal(row)]
    bits: dict[object, int] = {}
    masks = []
    for row in rows:
        pairs = itertools.combinations(((name, str(value)) for name, value in row.items()), 2)
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs))
    missing, taken = (1 << len(bits)) - 1, set[int]()
    while missing:
        best = max(range(len(rows)), key=lambda index: (masks[index] & missing).bit_count())
        taken.add(best)
        missing &= ~masks[best]
    return [
        pytest.param(row, id="-".join(map(str, row.values())), marks=[] if index in taken else [pytest.mark.full])
        for index, row in enumerate(rows)
    ]
