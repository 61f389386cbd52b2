"""Tracks steps in flight: what is still to come, and from whom it could come by now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from longspan.core.cluster import Cluster
from longspan.core.steps import Completion, Forward, Link, MoveKV, Sampled, Scored
from longspan.runtime.messages import Done, Moved


class InFlight:
    """Makes completions of reports. Times are seconds of any clock.

    A rank works as long as a step wants something of it that does not wait for another step: who receives a MoveKV
    works on it from when all have started to send it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._awaited: dict[int, set[int]] = {}
        self._reports: dict[int, list[Done | Moved]] = {}
        self._due: dict[int, set[int]] = {}  # by rank: the steps that want something of it now
        self._since_s: dict[int, float] = {}  # by rank that works: when it reported, or got a step while it had none
        self._carried: dict[int, list[int]] = {}  # by step: the moves that it sends
        self._unsent: dict[int, set[int]] = {}  # by move: ranks that have not started to send their share
        self._leaving: dict[int, set[int]] = {}  # by move: ranks whose share has not left, as far as they said

    def ranks(self, instances: Iterable[int]) -> list[int]:
        """Lists the ranks of some instances."""
        return [rank for instance in instances for rank in self._cluster.ranks(instance)]

    def begin(self, step: Forward | MoveKV, now_s: float) -> None:
        """Notes that a step was sent to its ranks."""
        if isinstance(step, MoveKV):
            self._begin_move(step, step.number)
            self._work(self.ranks(step.sources), step.number, now_s)
            return
        ranks = self.ranks(step.instances)
        self._await(step.number, ranks)
        self._work(ranks, step.number, now_s)
        for move in step.streams:
            assert not {*move.targets} & {*step.instances}, "streams go to instances outside"
            self._begin_move(move, step.number)

    def take(self, report: Done | Moved, now_s: float) -> Completion | None:
        """Returns the completion of a step once its last rank has reported."""
        rank, number = report.rank, report.number
        self._awaited[number].remove(rank)
        self._reports[number].append(report)
        self._rest(rank, number, now_s)
        for move in self._carried.get(number, ()):
            unsent = self._unsent[move]
            if rank in unsent:
                unsent.remove(rank)
                if not unsent:
                    self._work(self._awaited.get(move, ()), move, now_s)
        if self._awaited[number]:
            return None
        for move in self._carried.pop(number, ()):
            del self._unsent[move]
        del self._awaited[number]
        self._leaving.pop(number, None)
        return _completion(number, self._reports.pop(number))

    def sent(self, rank: int, number: int) -> None:
        """Notes that a rank's share of a move has left it. The move may be done already."""
        self._leaving.get(number, set()).discard(rank)

    def first_due_s(self) -> float | None:
        """Returns since when the rank works that has not reported for longest; None when none works."""
        return min(self._since_s.values(), default=None)

    def stalled(self, late_s: float) -> list[int]:
        """Lists ranks that work and have not reported since `late_s`, then those whose KV has not left for one of them.

        Nothing says which end holds up a move of which a part has not left: it leaves when both ends take part.
        """
        late = {rank for rank, since_s in self._since_s.items() if since_s <= late_s}
        moves = {number for rank in late for number in self._due[rank] if not self._unsent.get(number)}
        sources = {rank for number in moves for rank in self._leaving.get(number, ())} - late
        return [*sorted(late), *sorted(rank for rank in sources if rank not in self._since_s)]

    def _begin_move(self, move: MoveKV, carrier: int) -> None:
        """`carrier` is the step in which sources send it: its own, or the Forward that it streams out of."""
        assert not {*move.sources} & {*move.targets}, "by itself, KV moves from some instances to others"
        sources = self.ranks(move.sources)
        self._await(move.number, [*self.ranks(move.targets), *(sources if carrier == move.number else ())])
        self._carried.setdefault(carrier, []).append(move.number)
        self._unsent[move.number] = set(sources)
        self._leaving[move.number] = set(sources)

    def _await(self, number: int, ranks: Iterable[int]) -> None:
        self._awaited[number] = set(ranks)
        self._reports[number] = []

    def _work(self, ranks: Iterable[int], number: int, now_s: float) -> None:
        for rank in ranks:
            self._due.setdefault(rank, set()).add(number)
            self._since_s.setdefault(rank, now_s)

    def _rest(self, rank: int, number: int, now_s: float) -> None:
        due = self._due.get(rank, set())
        due.discard(number)
        if due:
            self._since_s[rank] = now_s
        else:
            self._since_s.pop(rank, None)


def _completion(number: int, reports: Iterable[Done | Moved]) -> Completion:
    sampled: list[Sampled] = []
    scored: list[Scored] = []
    sent: Counter[tuple[str, Link]] = Counter()
    for report in reports:
        sent.update(report.bytes_sent)
        if isinstance(report, Done):
            sampled += report.sampled
            scored += report.scored
    return Completion(number=number, sampled=tuple(sampled), bytes_sent=sent, scored=tuple(scored))
