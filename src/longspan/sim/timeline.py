"""What each instance did and when, and how full queue and KV pools were: for pictures and traces."""

from __future__ import annotations

from dataclasses import dataclass, replace

from longspan.core.engine import Engine
from longspan.core.steps import Part
from longspan.sim.executor import Ran
from longspan.sim.run import Watch


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What an instance did for some time: a chunk of one request's prompt, or the decodes of a step.

    Attributes:
        place: of the request among the arrivals; None for decodes.
        start, stop: of the chunk, in tokens of the request; of decodes, 0 and how many there were.
    """

    instance: int
    start_s: float
    end_s: float
    place: int | None
    start: int
    stop: int
    group: tuple[int, ...] = ()
    exchange: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """How many requests waited, and which part of all KV blocks was held."""

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
        self._places: dict[int, int] = {}

    @property
    def watch(self) -> Watch:
        """To give to `simulate`."""
        return Watch(ran=self._ran, moment=self._moment, admitted=self._places.__setitem__, lost=self._lost)

    def _ran(self, ran: Ran) -> None:
        if len(self.blocks) >= self._most_blocks:
            self.complete = False
            return
        for instance, end_s in ran.ends_s.items():
            self._add(instance, ran, end_s)

    def _add(self, instance: int, ran: Ran, end_s: float) -> None:
        """The time of a step on one instance, shared among its chunks and all its decodes by their tokens."""
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
                    place=self._places.get(part.request_id, part.request_id),
                    start=part.start,
                    stop=part.stop,
                    group=part.group,
                    exchange=part.exchange_name,
                )
            )
            at_s += own * per_token_s
        if num_decodes:
            self.blocks.append(
                Block(instance=instance, start_s=at_s, end_s=end_s, place=None, start=0, stop=num_decodes)
            )

    def _lost(self, at_s: float) -> None:
        """What had not ended then never did."""
        cut = (replace(one, end_s=min(one.end_s, at_s)) for one in self.blocks if one.start_s < at_s)
        self.blocks = list(cut)

    def _moment(self, at_s: float, engine: Engine) -> None:
        if at_s < self._next_s:
            return
        pools = [engine.account.pool(i) for i in range(engine.config.num_instances)]
        kv_used = 1 - sum(pool.num_free for pool in pools) / sum(pool.num_blocks for pool in pools)
        self.moments.append(Moment(at_s, engine.num_waiting, kv_used))
        if len(self.moments) >= self._most_moments:
            self.moments = self.moments[::2]
            self._every_s = at_s / len(self.moments)
        self._next_s = at_s + self._every_s
