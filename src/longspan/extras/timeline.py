"""A record of the work of each instance and the time of each request, simulated or real."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

from longspan.core.cluster import Cluster
from longspan.core.engine import Engine
from longspan.core.runs import num_tokens
from longspan.core.steps import Forward, MoveWay, Part
from longspan.cost.step_cost import StepCost
from longspan.sim.executor import MoveTiming, StepTiming
from longspan.sim.run import Observers, Result, Served

_MAX_BLOCKS, _MAX_MOMENTS = 500_000, 2000
_LATEST_EVERY_S, _LATEST_MOMENTS = 0.05, 20_000
"""A timeline of the latest steps has at most 20 snapshots per second, and the latest 20,000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A time interval of a pipeline stage: a chunk of one request's prompt, or the decodes of a step by one group.

    Attributes:
        step: the number of the step.
        index: of the request among the arrivals. None for decodes.
        start, stop: of the chunk, in tokens of the request. For decodes, 0 and their number.
    """

    step: int
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
    """A move of KV blocks to other instances or another tier. `index` is the request's position among the arrivals."""

    index: int
    start_s: float
    end_s: float
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_blocks: int
    way: MoveWay = "across"


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot of an engine.

    Attributes:
        held, cached: fractions of held and of cached KV blocks, by role, and for the tiers `host` and `disk` if used.
        bytes_sent: bytes sent so far, by exchange. Exchanges without bytes are left out.
    """

    at_s: float
    num_waiting: int
    held: Mapping[str, float]
    cached: Mapping[str, float]
    bytes_sent: Mapping[str, int] = field(default_factory=dict)


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
    """Records a run through the callbacks of `observers`.

    Args:
        latest: keep this number of the latest blocks and transfers. None keeps the first `_MAX_BLOCKS` of each.

    Attributes:
        blocks: in the order in which steps were planned, or in which they ended in a real run.
        transfers: in the order in which they ended.
        complete: whether `blocks` and `transfers` contain everything.
        moments: a bounded number of snapshots: the latest, or snapshots that are evenly spread over the whole time.
    """

    def __init__(self, *, latest: int | None = None) -> None:
        self.blocks: deque[Block] = deque(maxlen=latest)
        self.transfers: deque[Transfer] = deque(maxlen=latest)
        self.moments: deque[Moment] = deque(maxlen=None if latest is None else _LATEST_MOMENTS)
        self.complete = True
        self._every_s, self._next_s = 0.0 if latest is None else _LATEST_EVERY_S, 0.0
        self._splits: dict[int, TimeSplit] = {}
        self._indices: dict[int, int] = {}
        self._steps: defaultdict[int, list[tuple[float, float, float | None]]] = defaultdict(list)
        """By request: begin, end and exposed seconds of each step until its first token."""
        self._arrived_at: dict[int, list[tuple[float, float]]] = defaultdict(list)
        """By request: begin and end of each transfer."""
        self._sampled: set[int] = set()

    @classmethod
    def of(
        cls,
        blocks: Iterable[Block],
        transfers: Iterable[Transfer],
        moments: Iterable[Moment],
        splits: Mapping[int, TimeSplit],
    ) -> Timeline:
        """Return the timeline of a finished run. `splits` has the times of its requests."""
        timeline = cls()
        timeline.blocks, timeline.transfers, timeline.moments = deque(blocks), deque(transfers), deque(moments)
        timeline._splits = dict(splits)
        return timeline

    def since(self, at_s: float, served: Iterable[Served]) -> Timeline:
        """Return the part that ends after `at_s`, with the times of these requests."""
        kept = Timeline.of(
            (block for block in self.blocks if block.end_s >= at_s),
            (move for move in self.transfers if move.end_s >= at_s),
            (moment for moment in self.moments if moment.at_s >= at_s),
            {request.index: self.split(request) for request in served},
        )
        kept.complete = self.complete
        return kept

    def forget(self, index: int) -> None:
        """Forget the times of a request. Its blocks stay."""
        self._steps.pop(index, None)
        self._arrived_at.pop(index, None)
        self._sampled.discard(index)

    def observers(self, cost: StepCost | None) -> Observers:
        """Return the callbacks for a run. `cost` gives the exposed communication of steps, if it is known."""
        return Observers(
            ran=lambda ran: self._ran(ran, cost),
            moved=self._moved,
            moment=self._moment,
            admitted=self._indices.__setitem__,
            lost=self._lost,
        )

    def split(self, request: Served) -> TimeSplit:
        """Return the seconds of a request by cause."""
        if request.index in self._splits:
            return self._splits[request.index]
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

    def _ran(self, ran: StepTiming, cost: StepCost | None) -> None:
        self._note_steps(ran, cost)
        if self._may_add(self.blocks):
            for (instance, stage), (start_s, end_s) in ran.stages.items():
                self._add(instance, stage, ran.forward, start_s, end_s)

    def _may_add(self, entries: deque[Any]) -> bool:
        """Return whether to add an entry. A timeline of the latest entries then drops its first entry."""
        if len(entries) < (entries.maxlen or _MAX_BLOCKS):
            return True
        self.complete = False
        return entries.maxlen is not None

    def _note_steps(self, ran: StepTiming, cost: StepCost | None) -> None:
        """Record the step for all its requests without a first token."""
        parts = [part for part in ran.forward.parts if part.request_id not in self._sampled]
        if not parts:
            return
        exposed_s = None if cost is None else cost.exposed_s(ran.forward)
        ends_s, end_s = ran.ends_s, max(ran.ends_s.values())
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
        decodes: Counter[tuple[tuple[int, ...], str]] = Counter()
        for part in forward.parts:
            if instance not in part.group:
                continue
            if part.stop - part.start == 1:
                decodes[part.group, part.exchange.shown] += 1
            elif own := num_tokens(part.runs[part.group.index(instance)]):
                chunks.append((part, own))
        total = decodes.total() + sum(own for _, own in chunks)
        at_s, per_token_s = start_s, (end_s - start_s) / max(1, total)
        block = partial(Block, step=forward.number, instance=instance, stage=stage)
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
        for (group, exchange), number in decodes.items():
            until_s = at_s + number * per_token_s
            decode = block(start_s=at_s, end_s=until_s, index=None, start=0, stop=number, group=group)
            self.blocks.append(replace(decode, exchange=exchange))
            at_s = until_s

    def _moved(self, ran: MoveTiming) -> None:
        index, move = self._index(ran.move.request_id), ran.move
        if move.way == "across":
            self._arrived_at[index].append((ran.start_s, ran.end_s))
        if not self._may_add(self.transfers):
            return
        self.transfers.append(
            Transfer(
                index=index,
                start_s=ran.start_s,
                end_s=ran.end_s,
                sources=move.sources,
                targets=move.targets,
                num_blocks=len(move.copies),
                way=move.way,
            )
        )

    def _lost(self, at_s: float) -> None:
        """Truncate all blocks and steps at the time of the loss."""
        kept = (replace(block, end_s=min(block.end_s, at_s)) for block in self.blocks if block.start_s < at_s)
        self.blocks = deque(kept, maxlen=self.blocks.maxlen)
        for index, steps in self._steps.items():
            self._steps[index] = [_truncated(at_s, *step) for step in steps if step[0] < at_s]
        self._sampled.clear()  # `split` ignores steps after the first token

    def _moment(self, at_s: float, engine: Engine) -> None:
        if at_s < self._next_s:
            return
        self.moments.append(moment_of(at_s, engine))
        if self.moments.maxlen is None and len(self.moments) >= _MAX_MOMENTS:
            self.moments = deque(islice(self.moments, 0, None, 2))
            self._every_s = at_s / len(self.moments)
        self._next_s = at_s + self._every_s


def moment_of(at_s: float, engine: Engine) -> Moment:
    """Return a snapshot of an engine."""
    held, cached, sent, cluster = {}, {}, Counter[str](), engine.config.cluster
    for name, pools in {**roles_of(cluster), "host": cluster.host_pools, "disk": cluster.disk_pools}.items():
        if pools:
            usage = engine.kv.account.usage(pools)
            held[name] = usage.num_used / usage.num_blocks
            cached[name] = usage.num_cached / usage.num_blocks
    for (exchange, _), num_bytes in engine.counts.bytes_sent.items():
        sent[exchange] += num_bytes
    return Moment(at_s, engine.num_waiting, held, cached, {name: number for name, number in sent.items() if number})


def _truncated(at_s: float, start_s: float, end_s: float, exposed_s: float | None) -> tuple[float, float, float | None]:
    kept_s = min(end_s, at_s)
    return start_s, kept_s, None if exposed_s is None else exposed_s * (kept_s - start_s) / (end_s - start_s)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The run of a workload with one policy, for reports and traces.

    Attributes:
        cluster: the cluster, or the last of several clusters.
        block_ids: by request, ids of the prompt's whole blocks of `BLOCK_LEN` tokens, if they were recorded.
        is_recorded: whether it is the recording of a real run, and no simulation.
    """

    policy: str
    cluster: Cluster
    result: Result
    timeline: Timeline
    block_ids: Mapping[int, Sequence[int]] = field(default_factory=dict)
    is_recorded: bool = False

    @cached_property
    def rows(self) -> dict[tuple[int, int], str]:
        """The names of the rows of timelines, by instance and stage. Earlier clusters may have had more rows."""
        names = dict(zip(self.cluster.rows, self.cluster.row_names, strict=True))
        for block in self.timeline.blocks:
            row = block.instance, block.stage
            if row not in names:
                names[row] = f"{block.instance}, stage {block.stage}" if block.stage else str(block.instance)
        return dict(sorted(names.items()))
