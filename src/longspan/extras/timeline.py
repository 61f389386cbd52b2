"""A record of what a simulation did, and where the time of each request went; as a trace for Perfetto, too."""

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
    """The work of a stage of an instance for some time: a chunk of one request's prompt, or the decodes of a step.

    Attributes:
        index: of the request among the arrivals; None for decodes.
        start, stop: of the chunk, in tokens of the request; of decodes, 0 and how many there were.
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
    """KV blocks on their way to other instances; `index` is that of the request among the arrivals."""

    index: int
    start_s: float
    end_s: float
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The number of requests that waited, and by role the parts of all KV blocks that requests held, and that were free
    with contents that may be found again.
    """

    at_s: float
    num_waiting: int
    held: Mapping[str, float]
    cached: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """The seconds of a request, which add up to its time from arrival to the last token.

    Attributes:
        queue_s: before its first token, while no step of it runs.
        compute_s: in steps with a part of its prompt, beside what follows; others' tokens in these steps included.
        exposed_communication_s: of the slowest member of its group in these steps, for messages that nothing hides;
            None when the cost does not tell, and compute has it, too.
        transfer_s: from its first token until its KV is where it decodes.
        decode_s: the rest.
    """

    queue_s: float
    compute_s: float
    exposed_communication_s: float | None
    transfer_s: float
    decode_s: float


def roles_of(cluster: Cluster) -> dict[str, Sequence[int]]:
    """Returns the instances that prefill and those that decode, or all as `all`."""
    if not cluster.has_roles:
        return {"all": cluster.instances}
    return {"prefill": cluster.prefill, "decode": cluster.decode}


class Timeline:
    """Writes down what a simulation does, by the callbacks of `observers`.

    Attributes:
        blocks: the first, in the order in which steps were planned.
        transfers: the first, in the order in which they ended.
        complete: whether `blocks` and `transfers` are all.
        moments: a bounded number, evenly spread over the whole time.
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
        """Returns the callbacks to give to `simulate`; the cost tells what steps spend on messages."""
        return Observers(
            ran=lambda ran: self._ran(ran, cost),
            moved=self._moved,
            moment=self._moment,
            admitted=self._indices.__setitem__,
            lost=self._lost,
        )

    def split(self, one: Served) -> TimeSplit:
        """Says where the time of a request went."""
        first_s = one.arrival_s + one.ttft_s
        busy_s, exposed_s, covered_s, is_told = 0.0, 0.0, one.arrival_s, True
        for start_s, end_s, messages_s in self._steps[one.index]:
            own_s = min(end_s, first_s) - max(start_s, covered_s)
            if own_s > 0:  # steps of a request may overlap where its group grows
                busy_s, covered_s = busy_s + own_s, end_s
                is_told = is_told and messages_s is not None
                exposed_s += (messages_s or 0.0) * own_s / (end_s - start_s)
        second_s = first_s + one.tbt_s[0] if one.tbt_s else first_s
        ends_s = [end_s for start_s, end_s in self._arrived_at[one.index] if start_s < second_s]
        transfer_s = max(0.0, min(second_s, max(ends_s, default=first_s)) - first_s)
        return TimeSplit(
            queue_s=max(0.0, one.ttft_s - busy_s),
            compute_s=busy_s - exposed_s,
            exposed_communication_s=exposed_s if is_told else None,
            transfer_s=transfer_s,
            decode_s=one.e2e_s - one.ttft_s - transfer_s,
        )

    def _ran(self, ran: StepTiming, cost: StepCost) -> None:
        self._note_steps(ran, cost)
        if len(self.blocks) >= _MAX_BLOCKS:
            self.complete = False
            return
        for (instance, stage), (start_s, end_s) in ran.stages.items():
            self._add(instance, stage, ran.forward, start_s, end_s)

    def _note_steps(self, ran: StepTiming, cost: StepCost) -> None:
        """Notes the step for all requests in it that have no token yet."""
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
        """Shares the time of a step on one stage among its chunks and all its decodes, by their tokens."""
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
            return  # only instances are shown
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
        """Cuts off all that had not ended at that time."""
        self.blocks = [replace(one, end_s=min(one.end_s, at_s)) for one in self.blocks if one.start_s < at_s]
        for index, steps in self._steps.items():
            self._steps[index] = [_until(at_s, *step) for step in steps if step[0] < at_s]
        self._sampled.clear()  # who has a token may have a step more, which does not count

    def _moment(self, at_s: float, engine: Engine) -> None:
        if at_s < self._next_s:
            return
        held, cached = {}, {}
        for role, instances in roles_of(engine.config.cluster).items():
            usage = engine.kv.usage(instances)
            held[role] = usage.num_used / usage.num_blocks
            cached[role] = usage.num_cached / usage.num_blocks
        self.moments.append(Moment(at_s, engine.num_waiting, held, cached))
        if len(self.moments) >= _MAX_MOMENTS:
            self.moments = self.moments[::2]
            self._every_s = at_s / len(self.moments)
        self._next_s = at_s + self._every_s


def _until(at_s: float, start_s: float, end_s: float, exposed_s: float | None) -> tuple[float, float, float | None]:
    """Cuts off a step."""
    kept_s = min(end_s, at_s)
    return start_s, kept_s, None if exposed_s is None else exposed_s * (kept_s - start_s) / (end_s - start_s)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A policy's run of a workload, for pictures and traces."""

    policy: str
    cluster: Cluster
    result: Result
    timeline: Timeline


# ---------------------------------------------------------------- the trace


_KINDS = ("instances", "requests", "transfers")
"""The processes that viewers show, for each run."""


def chrome_trace(records: Sequence[Record]) -> str:
    """Writes a row per stage of an instance with what it did, one per request from arrival to end, transfers, counters.

    Returns:
        JSON for Perfetto, with processes of their own for each of several runs.
    """
    events = [event for place, one in enumerate(records) for event in _events(one, place, named=len(records) > 1)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _events(record: Record, place: int, *, named: bool) -> Iterator[dict[str, Any]]:
    result, timeline = record.result, record.timeline
    instances, requests, transfers = (len(_KINDS) * place + number for number in range(1, len(_KINDS) + 1))
    names = [("process_name", instances + number, 0, kind) for number, kind in enumerate(_KINDS)]
    if named:
        names = [(what, process, thread, f"{record.policy}: {name}") for what, process, thread, name in names]
    rows = record.cluster.rows
    names += [("thread_name", instances, row, f"instance {name}") for row, name in enumerate(record.cluster.row_names)]
    for kind, process, thread, name in names:
        yield {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
    for block in timeline.blocks:
        yield _of_block(block) | {"pid": instances, "tid": rows[block.instance, block.stage]}
    for one in result.served:
        times = {"ttft_s": one.ttft_s, "e2e_s": one.e2e_s} | asdict(timeline.split(one))
        tokens = {"prompt_tokens": one.num_prompt_tokens, "output_tokens": one.num_output_tokens}
        common = {"cat": "request", "id": one.index, "pid": requests, "tid": 0, "name": f"request {one.index}"}
        yield common | {"ph": "b", "ts": one.arrival_s * 1e6, "args": tokens | times}
        yield common | {"ph": "n", "ts": (one.arrival_s + one.ttft_s) * 1e6, "args": {"what": "first token"}}
        yield common | {"ph": "e", "ts": one.finished_s * 1e6}
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
