"""The steps in flight: which ranks must report them, and which ranks are stalled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from longspan.core.cluster import Cluster
from longspan.core.steps import Completion, Forward, Link, MoveKV, Reshard, Sampled, Scored
from longspan.runtime import messages

_StepReport = messages.Done | messages.Moved | messages.Regrouped


@dataclass
class _StepInFlight:
    """A Forward, a MoveKV or a Reshard that is not complete.

    Attributes:
        awaited: ranks that have not reported its completion.
        carried: the moves sent with it: the streams of a Forward, or a MoveKV itself.
        unsent: of a MoveKV, ranks that have not started to send their share.
        sending: of a MoveKV, ranks that have not reported the end of their sends.
        reported_s: the time of each report, by rank.
    """

    awaited: set[int]
    carried: Sequence[int] = ()
    unsent: set[int] = field(default_factory=set)
    sending: set[int] = field(default_factory=set)
    reports: list[_StepReport] = field(default_factory=list)
    reported_s: dict[int, float] = field(default_factory=dict)


class InFlight:
    """Tracks the steps in flight and turns reports into completions. Times are seconds of any clock.

    A rank is busy while a step needs work from it that waits for no other step. Receivers of a MoveKV are busy once all
    sources have started to send. Loads from a host make them busy immediately. Sources of a stream to a host are busy
    until they report it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._steps: dict[int, _StepInFlight] = {}
        self._due: dict[int, set[int]] = {}  # by rank: the steps that need work from it now
        self._since_s: dict[int, float] = {}  # by busy rank: time of its latest report, or when it became busy

    def ranks(self, instances: Iterable[int]) -> list[int]:
        return [rank for instance in instances for rank in self._cluster.ranks(instance)]

    def begin(self, step: Forward | MoveKV, now_s: float) -> None:
        instances = (step.sources or step.targets) if isinstance(step, MoveKV) else step.instances
        carried = (step,) if isinstance(step, MoveKV) else step.streams
        workers = self.ranks(instances)
        for move in carried:
            assert move.way == "in" or not {*move.targets} & {*move.sources}, "sources are no targets"
            sources = self.ranks(move.sources)
            ends = sources if move.way == "out" else self.ranks(move.targets)
            sending = () if move.way == "out" else sources
            self._steps[move.number] = _StepInFlight(awaited={*ends}, unsent={*sources}, sending={*sending})
        own = self._steps.setdefault(step.number, _StepInFlight(awaited=set()))
        own.awaited.update(workers)
        own.carried = [move.number for move in carried]
        self._make_busy(workers, step.number, now_s)

    def regroup(self, step: Reshard, ranks: Iterable[int], now_s: float) -> None:
        """Begin a Reshard of all ranks. Later steps use its cluster."""
        assert not self._steps, "ranks regroup when nothing else is in flight"
        self._cluster = step.cluster
        self._steps[step.number] = _StepInFlight(awaited={*ranks})
        self._make_busy(ranks, step.number, now_s)

    def take(self, report: _StepReport, now_s: float) -> Completion | None:
        """Record a report. Return the completion of its step if this was the last awaited rank."""
        rank, number = report.rank, report.number
        step = self._steps[number]
        step.awaited.remove(rank)
        step.reports.append(report)
        step.reported_s[rank] = now_s
        self._finish_work(rank, number, now_s)
        for carried in step.carried:
            move = self._steps.get(carried)  # a stream may complete before its Forward
            if move is not None and rank in move.unsent:
                move.unsent.remove(rank)
                if not move.unsent:
                    self._make_busy(move.awaited, carried, now_s)
        if step.awaited:
            return None
        del self._steps[number]
        return _completion(number, step)

    def sent(self, rank: int, number: int) -> None:
        """Record that a rank's sends of a move have completed. The move may be complete already."""
        if number in self._steps:
            self._steps[number].sending.discard(rank)

    def busy_since_s(self) -> float | None:
        """Return the earliest time since which a rank is busy without a report. None if no rank is busy."""
        return min(self._since_s.values(), default=None)

    def stalled(self, late_s: float) -> list[int]:
        """List busy ranks without a report since `late_s`, then idle ranks whose sends to one of them are incomplete.

        A send completes when both ends take part, so either end may block it.
        """
        late = {rank for rank, since_s in self._since_s.items() if since_s <= late_s}
        steps = [self._steps[number] for rank in late for number in self._due[rank]]
        sources = {rank for step in steps if not step.unsent for rank in step.sending} - late
        return [*sorted(late), *sorted(rank for rank in sources if rank not in self._since_s)]

    def _make_busy(self, ranks: Iterable[int], number: int, now_s: float) -> None:
        for rank in ranks:
            self._due.setdefault(rank, set()).add(number)
            self._since_s.setdefault(rank, now_s)

    def _finish_work(self, rank: int, number: int, now_s: float) -> None:
        due = self._due.get(rank, set())
        due.discard(number)
        if due:
            self._since_s[rank] = now_s
        else:
            self._since_s.pop(rank, None)


def _completion(number: int, step: _StepInFlight) -> Completion:
    sampled: list[Sampled] = []
    scored: list[Scored] = []
    non_finite: set[int] = set()
    sent: Counter[tuple[str, Link]] = Counter()
    for report in step.reports:
        sent.update(report.bytes_sent)
        if isinstance(report, messages.Done):
            sampled += report.sampled
            scored += report.scored
            non_finite.update(report.non_finite)
    return Completion(
        number=number,
        sampled=tuple(sampled),
        bytes_sent=sent,
        scored=tuple(scored),
        non_finite=tuple(sorted(non_finite)),
        reported_s=step.reported_s,
    )
