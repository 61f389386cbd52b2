"""A record of each instance's work, of the queue and of the KV pools: for pictures, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from longspan.core.engine import Engine
from longspan.core.steps import Part
from longspan.sim.executor import Ran
from longspan.sim.result import Result
from longspan.sim.run import Watch


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The work of an instance for some time: a chunk of one request's prompt, or the decodes of a step.

    Attributes:
        index: of the request among the arrivals; None for decodes.
        start, stop: of the chunk, in tokens of the request; of decodes, 0 and how many there were.
    """

    instance: int
    start_s: float
    end_s: float
    index: int | None
    start: int
    stop: int
    group: tuple[int, ...] = ()
    exchange: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """The number of requests that waited, and the part of all KV blocks that was held."""

    at_s: float
    num_waiting: int
    kv_used: float


class Timeline:
    """Writes down what a simulation does, through `watch`.

    Attributes:
        blocks: in the order in which steps were planned; at most `most_blocks`, the first.
        complete: whether that were all.
        moments: at most `most_moments`, evenly spread over the whole time.
    """

    def __init__(self, *, most_blocks: int = 500_000, most_moments: int = 2000) -> None:
        self.blocks: list[Block] = []
        self.moments: list[Moment] = []
        self.complete = True
        self._most_blocks, self._most_moments = most_blocks, most_moments
        self._every_s, self._next_s = 0.0, 0.0
        self._indices: dict[int, int] = {}

    @property
    def watch(self) -> Watch:
        """To give to `simulate`."""
        return Watch(ran=self._ran, moment=self._moment, admitted=self._indices.__setitem__, lost=self._lost)

    def _ran(self, ran: Ran) -> None:
        if len(self.blocks) >= self._most_blocks:
            self.complete = False
            return
        for instance, end_s in ran.ends_s.items():
            self._add(instance, ran, end_s)

    def _add(self, instance: int, ran: Ran, end_s: float) -> None:
        """Shares the time of a step on one instance among its chunks and all its decodes, by their tokens."""
        chunks: list[tuple[Part, int]] = []
        num_decodes = 0
        for part in ran.forward.parts:
            if instance not in part.group:
                continue
            if part.stop - part.start == 1:
                num_decodes += 1
            elif own := sum(len(run) for run in part.runs[part.group.index(instance)]):
                chunks.append((part, own))
        total = num_decodes + sum(own for _, own in chunks)
        at_s, per_token_s = ran.start_s, (end_s - ran.start_s) / max(1, total)
        for part, own in chunks:
            self.blocks.append(
                Block(
                    instance=instance,
                    start_s=at_s,
                    end_s=at_s + own * per_token_s,
                    index=self._indices.get(part.request_id, part.request_id),
                    start=part.start,
                    stop=part.stop,
                    group=part.group,
                    exchange=part.exchange.shown,
                )
            )
            at_s += own * per_token_s
        if num_decodes:
            self.blocks.append(
                Block(instance=instance, start_s=at_s, end_s=end_s, index=None, start=0, stop=num_decodes)
            )

    def _lost(self, at_s: float) -> None:
        """Cuts off all that had not ended then."""
        cut = (replace(one, end_s=min(one.end_s, at_s)) for one in self.blocks if one.start_s < at_s)
        self.blocks = list(cut)

    def _moment(self, at_s: float, engine: Engine) -> None:
        if at_s < self._next_s:
            return
        pools = [engine.account.pool(i) for i in engine.config.cluster.instances]
        kv_used = 1 - sum(pool.num_free for pool in pools) / sum(pool.num_blocks for pool in pools)
        self.moments.append(Moment(at_s, engine.num_waiting, kv_used))
        if len(self.moments) >= self._most_moments:
            self.moments = self.moments[::2]
            self._every_s = at_s / len(self.moments)
        self._next_s = at_s + self._every_s


_CLUSTER, _REQUESTS = 1, 2  # the two processes that viewers show


def chrome_trace(result: Result, timeline: Timeline) -> str:
    """Writes its JSON: a row per instance with what it did, a row per request from arrival to end, and counters."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(result, timeline))}) + "\n"


def _events(result: Result, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _CLUSTER, 0, "instances")
    yield _named("process_name", _REQUESTS, 0, "requests")
    for instance in range(len(result.busy_s)):
        yield _named("thread_name", _CLUSTER, instance, f"instance {instance}")
    for block in timeline.blocks:
        yield _of_block(block)
    for one in result.served:
        times = {"queue_s": one.scheduled_s - one.arrival_s, "ttft_s": one.ttft_s, "e2e_s": one.e2e_s}
        tokens = {"prompt_tokens": one.num_prompt_tokens, "output_tokens": one.num_output_tokens}
        common = {"cat": "request", "id": one.index, "pid": _REQUESTS, "tid": 0, "name": f"request {one.index}"}
        yield common | {"ph": "b", "ts": one.arrival_s * 1e6, "args": tokens | times}
        yield common | {"ph": "n", "ts": (one.arrival_s + one.ttft_s) * 1e6, "args": {"what": "first token"}}
        yield common | {"ph": "e", "ts": one.finished_s * 1e6}
    for moment in timeline.moments:
        common = {"ph": "C", "pid": _CLUSTER, "tid": 0, "ts": moment.at_s * 1e6}
        yield common | {"name": "waiting", "args": {"requests": moment.num_waiting}}
        yield common | {"name": "KV", "args": {"percent": 100 * moment.kv_used}}


def _of_block(block: Block) -> dict[str, Any]:
    event = {
        "ph": "X",
        "pid": _CLUSTER,
        "tid": block.instance,
        "ts": block.start_s * 1e6,
        "dur": (block.end_s - block.start_s) * 1e6,
    }
    if block.index is None:
        return event | {"name": f"{block.stop} decodes", "cat": "decode"}
    about = {"start": block.start, "stop": block.stop, "group": list(block.group), "exchange": block.exchange}
    return event | {"name": f"request {block.index}", "cat": "prefill", "args": about}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
