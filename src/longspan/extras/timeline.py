"""A record of the work of each instance and the time of each request in a simulation, also as a trace for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from longspan.core.cluster import Cluster
from longspan.core.engine import Engine
from longspan.core.runs import num_tokens
from longspan.core.steps import Forward, Part
from longspan.cost.step_cost import StepCost
from longspan.sim.executor import MoveTiming, StepTiming
from longspan.sim.run import Observers, Result, Served

_MAX_BLOCKS, _MAX_MOMENTS = 500_000, 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A time interval of a pipeline stage: a chunk of one request's prompt, or the decodes of a step.

    Attributes:
        index: of the request among the arrivals. None for decodes.
        start, stop: of the chunk, in tokens of the request. For decodes, 0 and their number.
    """

    instance: int
    stage: int
    start_s: float
    end_s: float
    index: int | None
    start: int
    stop: int
    group: tuple[int, ...] = ()
    exchange: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A transfer of KV blocks to other instances. `index` is the request's position among the arrivals."""

    index: int
    start_s: float
    end_s: float
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot: the number of waiting requests, and by role the fractions of held and of cached KV blocks."""

    at_s: float
    num_waiting: int
    held: Mapping[str, float]
    cached: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """The seconds of a request by cause. They add up to the time from arrival to the last token.

    Attributes:
        queue_s: before its first token, while none of its steps runs.
        compute_s: in steps with a part of its prompt, without exposed communication. Other requests share these steps.
        exposed_communication_s: not overlapped communication in these steps, of the slowest member of its group. If the
            cost model does not give it, this is None, and `compute_s` includes it.
        transfer_s: from its first token until its KV is on the decode instance.
        decode_s: the remaining time.
    """

    queue_s: float
    compute_s: float
    exposed_communication_s: float | None
    transfer_s: float
    decode_s: float


def roles_of(cluster: Cluster) -> dict[str, Sequence[int]]:
    """Return the instances by role: `prefill` and `decode`, or `all` without roles."""
    if not cluster.has_roles:
        return {"all": cluster.instances}
    return {"prefill": cluster.prefill, "decode": cluster.decode}


class Timeline:
    """Records a simulation through the callbacks of `observers`.

    Attributes:
        blocks: the first `_MAX_BLOCKS` blocks, in the order in which steps were planned.
        transfers: the first `_MAX_BLOCKS` transfers, in the order in which they ended.
        complete: whether `blocks` and `transfers` contain everything.
        moments: a bounded number of snapshots, evenly spread over the whole time.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.transfers: list[Transfer] = []
        self.moments: list[Moment] = []
        self.complete = True
        self._every_s, self._next_s = 0.0, 0.0
        self._indices: dict[int, int] = {}
        self._steps: defaultdict[int, list[tuple[float, float, float | None]]] = defaultdict(list)
        """By request: begin, end and exposed seconds of each step until its first token."""
        self._arrived_at: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """By request: begin and end of each transfer."""
        self._sampled: set[int] = set()

    def observers(self, cost: StepCost) -> Observers:
        """Return the callbacks for a simulation. `cost` gives the exposed communication of steps."""
        return Observers(
            ran=lambda ran: self._ran(ran, cost),
            moved=self._moved,
            moment=self._moment,
            admitted=self._indices.__setitem__,
            lost=self._lost,
        )

    def split(self, request: Served) -> TimeSplit:
        """Return the seconds of a request by cause."""
        first_s = request.arrival_s + request.ttft_s
        busy_s, exposed_s, covered_s, has_exposed = 0.0, 0.0, request.arrival_s, True
        for start_s, end_s, messages_s in self._steps[request.index]:
            own_s = min(end_s, first_s) - max(start_s, covered_s)
            if own_s > 0:  # steps of a request may overlap where its group grows
                busy_s, covered_s = busy_s + own_s, end_s
                has_exposed = has_exposed and messages_s is not None
                exposed_s += (messages_s or 0.0) * own_s / (end_s - start_s)
        second_s = first_s + request.tbt_s[0] if request.tbt_s else first_s
        ends_s = [end_s for start_s, end_s in self._arrived_at[request.index] if start_s < second_s]
        transfer_s = max(0.0, min(second_s, max(ends_s, default=first_s)) - first_s)
        return TimeSplit(
            queue_s=max(0.0, request.ttft_s - busy_s),
            compute_s=busy_s - exposed_s,
            exposed_communication_s=exposed_s if has_exposed else None,
            transfer_s=transfer_s,
            decode_s=request.e2e_s - request.ttft_s - transfer_s,
        )

    def _ran(self, ran: StepTiming, cost: StepCost) -> None:
        self._note_steps(ran, cost)
        if len(self.blocks) >= _MAX_BLOCKS:
            self.complete = False
            return
        for (instance, stage), (start_s, end_s) in ran.stages.items():
            self._add(instance, stage, ran.forward, start_s, end_s)

    def _note_steps(self, ran: StepTiming, cost: StepCost) -> None:
        """Record the step for all its requests without a first token."""
        parts = [part for part in ran.forward.parts if part.request_id not in self._sampled]
        if not parts:
            return
        ends_s, exposed_s, end_s = ran.ends_s, cost.exposed_s(ran.forward), max(ran.ends_s.values())
        for part in parts:
            last = max(part.group, key=ends_s.__getitem__)
            messages_s = None if exposed_s is None else min(exposed_s[last], ends_s[last] - ran.start_s)
            self._steps[self._index(part.request_id)].append((ran.start_s, end_s, messages_s))
            if part.sample is not None:
                self._sampled.add(part.request_id)

    def _index(self, request_id: int) -> int:
        return self._indices.get(request_id, request_id)

    def _add(self, instance: int, stage: int, forward: Forward, start_s: float, end_s: float) -> None:
        """Split the time of a step on one stage among its chunks and its decodes, by their tokens."""
        chunks: list[tuple[Part, int]] = []
        num_decodes = 0
        for part in forward.parts:
            if instance not in part.group:
                continue
            if part.stop - part.start == 1:
                num_decodes += 1
            elif own := num_tokens(part.runs[part.group.index(instance)]):
                chunks.append((part, own))
        total = num_decodes + sum(own for _, own in chunks)
        at_s, per_token_s = start_s, (end_s - start_s) / max(1, total)
        block = partial(Block, instance=instance, stage=stage)
        for part, own in chunks:
            self.blocks.append(
                block(
                    start_s=at_s,
                    end_s=at_s + own * per_token_s,
                    index=self._index(part.request_id),
                    start=part.start,
                    stop=part.stop,
                    group=part.group,
                    exchange=part.exchange.shown,
                )
            )
            at_s += own * per_token_s
        if num_decodes:
            self.blocks.append(block(start_s=at_s, end_s=end_s, index=None, start=0, stop=num_decodes))

    def _moved(self, ran: MoveTiming) -> None:
        index, move = self._index(ran.move.request_id), ran.move
        if move.way != "across":
            return  # a timeline shows no copies to or from hosts
        self._arrived_at[index].append((ran.start_s, ran.end_s))
        if len(self.transfers) >= _MAX_BLOCKS:
            self.complete = False
            return
        self.transfers.append(
            Transfer(
                index=index,
                start_s=ran.start_s,
                end_s=ran.end_s,
                sources=move.sources,
                targets=move.targets,
                num_blocks=len(move.copies),
            )
        )

    def _lost(self, at_s: float) -> None:
        """Truncate all blocks and steps at the time of the loss."""
        self.blocks = [replace(block, end_s=min(block.end_s, at_s)) for block in self.blocks if block.start_s < at_s]
        for index, steps in self._steps.items():
            self._steps[index] = [_truncated(at_s, *step) for step in steps if step[0] < at_s]
        self._sampled.clear()  # `split` ignores steps after the first token

    def _moment(self, at_s: float, engine: Engine) -> None:
        if at_s < self._next_s:
            return
        held, cached = {}, {}
        for role, instances in roles_of(engine.config.cluster).items():
            usage = engine.kv.account.usage(instances)
            held[role] = usage.num_used / usage.num_blocks
            cached[role] = usage.num_cached / usage.num_blocks
        self.moments.append(Moment(at_s, engine.num_waiting, held, cached))
        if len(self.moments) >= _MAX_MOMENTS:
            self.moments = self.moments[::2]
            self._every_s = at_s / len(self.moments)
        self._next_s = at_s + self._every_s


def _truncated(at_s: float, start_s: float, end_s: float, exposed_s: float | None) -> tuple[float, float, float | None]:
    kept_s = min(end_s, at_s)
    return start_s, kept_s, None if exposed_s is None else exposed_s * (kept_s - start_s) / (end_s - start_s)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The run of a workload with one policy, for reports and traces."""

    policy: str
    cluster: Cluster
    result: Result
    timeline: Timeline


# ---------------------------------------------------------------- the trace


_KINDS = ("instances", "requests", "transfers")
"""The trace processes of each run."""


def chrome_trace(records: Sequence[Record]) -> str:
    """Return a Perfetto trace as JSON: rows of stages and of requests, transfers, and counters.

    Each run has its own trace processes.
    """
    is_named = len(records) > 1
    events = [event for number, record in enumerate(records) for event in _events(record, number, named=is_named)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _events(record: Record, run: int, *, named: bool) -> Iterator[dict[str, Any]]:
    result, timeline = record.result, record.timeline
    instances, requests, transfers = (len(_KINDS) * run + number for number in range(1, len(_KINDS) + 1))
    prefix, rows = f"{record.policy}: " if named else "", record.cluster.rows
    names = [("process_name", instances + number, 0, f"{prefix}{kind}") for number, kind in enumerate(_KINDS)]
    names += [("thread_name", instances, row, f"instance {name}") for row, name in enumerate(record.cluster.row_names)]
    for kind, process, thread, name in names:
        yield {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
    for block in timeline.blocks:
        yield _of_block(block) | {"pid": instances, "tid": rows[block.instance, block.stage]}
    for request in result.served:
        times = {"ttft_s": request.ttft_s, "e2e_s": request.e2e_s} | asdict(timeline.split(request))
        tokens = {"prompt_tokens": request.num_prompt_tokens, "output_tokens": request.num_output_tokens}
        common = {"cat": "request", "id": request.index, "pid": requests, "tid": 0, "name": f"request {request.index}"}
        yield common | {"ph": "b", "ts": request.arrival_s * 1e6, "args": tokens | times}
        yield common | {"ph": "n", "ts": (request.arrival_s + request.ttft_s) * 1e6, "args": {"what": "first token"}}
        yield common | {"ph": "e", "ts": request.finished_s * 1e6}
    for number, move in enumerate(timeline.transfers):
        common = {"cat": "transfer", "id": number, "pid": transfers, "tid": 0, "name": f"request {move.index}"}
        about = {"from": list(move.sources), "to": list(move.targets), "blocks": move.num_blocks}
        yield common | {"ph": "b", "ts": move.start_s * 1e6, "args": about}
        yield common | {"ph": "e", "ts": move.end_s * 1e6}
    for moment in timeline.moments:
        common = {"ph": "C", "pid": instances, "tid": 0, "ts": moment.at_s * 1e6}
        yield common | {"name": "waiting", "args": {"requests": moment.num_waiting}}
        for role in moment.held:
            percents = {"held": 100 * moment.held[role], "cached": 100 * moment.cached[role]}
            yield common | {"name": "KV" if role == "all" else f"KV {role}", "args": percents}


def _of_block(block: Block) -> dict[str, Any]:
    event = {
        "ph": "X",
        "ts": block.start_s * 1e6,
        "dur": (block.end_s - block.start_s) * 1e6,
    }
    if block.index is None:
        return event | {"name": f"{block.stop} decodes", "cat": "decode"}
    about = {"start": block.start, "stop": block.stop, "group": list(block.group), "exchange": block.exchange}
    return event | {"name": f"request {block.index}", "cat": "prefill", "args": about}
