"""Records a running engine, so that real runs have the traces and pages of simulated runs."""

from __future__ import annotations

import logging
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from longspan.core.engine import Engine
from longspan.core.request import FinishReason, Request
from longspan.core.steps import Completion, Forward, MoveKV, Reshard
from longspan.extras.timeline import Record, Timeline, moment_of
from longspan.extras.trace import chrome_trace
from longspan.sim.executor import MoveTiming, StepTiming
from longspan.sim.run import Refused, Result, Served
from longspan.workload.recorded import block_ids

_log = logging.getLogger("longspan")
_MAX_BLOCKS, _MAX_REQUESTS = 100_000, 20_000
"""The recording keeps the latest blocks, transfers and requests. A block takes about 200 bytes."""


class Recorder:
    """Observes an engine from now on, and keeps a bounded number of its latest steps and requests.

    Times are taken by the controller. A step begins when it is sent, or when the previous step on that stage ends. It
    ends when the last rank of the stage has reported. Time 0 is the first arrival, or the first step if there is none.
    The index of a request is its id in the engine.

    Args:
        now: the clock of the engine.
    """

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self._engine, self._now, self._is_written = engine, now, False
        self._begin_s: float | None = None
        self._salt = secrets.token_bytes(32)
        self._timeline = Timeline(latest=_MAX_BLOCKS)
        self._watch = self._timeline.observers(None)
        self._served: deque[Served] = deque()
        self._failed: dict[int, Refused] = {}
        self._block_ids: dict[int, list[int]] = {}
        self._steps: dict[int, tuple[Forward, float]] = {}
        """Forwards in flight and the time when each was sent, by number."""
        self._moves: dict[int, tuple[MoveKV, float]] = {}
        self._free_s: dict[tuple[int, int], float] = {}
        """By instance and stage: the end of its latest step."""
        self._busy_s: list[float] = []
        self._max_queue, self._num_preemptions = 0, engine.counts.num_preemptions
        engine.observe(self)

    def _at(self) -> float:
        """Return the time since the begin of the recording."""
        now_s = self._now()
        return now_s - self._begin(now_s)

    def _begin(self, at_s: float) -> float:
        """Return the begin of the recording, which is this time of the engine if it has not begun."""
        if self._begin_s is None:
            self._begin_s, self._busy_s = at_s, self._engine.load().busy_s
        return self._begin_s

    # ---------------------------------------------------------------- the engine's observer

    def arrived(self, request: Request) -> None:
        self._begin(request.metrics.arrival_s)
        root = self._salt + request.cache_salt.encode("utf-8", "surrogatepass")
        self._block_ids[request.id] = block_ids(request.prompt, root)

    def ended(self, request: Request, reason: FinishReason) -> None:
        metrics = request.metrics
        begin_s, finished_s = self._begin(metrics.arrival_s), metrics.finished_s
        assert finished_s is not None, "it has ended"
        arrival_s = metrics.arrival_s - begin_s
        if metrics.ttft_s is None or arrival_s < 0:
            problem = f"{reason}, without a recorded first token"
            self._failed[request.id] = Refused(reason=problem, num_prompt_tokens=len(request.prompt))
            self._forget(request.id)
            return
        if len(self._served) == _MAX_REQUESTS:
            self._forget(self._served.popleft().index)
        served = Served(
            index=request.id,
            arrival_s=arrival_s,
            ttft_s=metrics.ttft_s,
            tbt_s=array("d", metrics.tbt_s),
            finished_s=finished_s - begin_s,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=len(request.output),
            num_cached_tokens=metrics.num_cached_tokens,
            num_missing_tokens=0,
        )
        self._served.append(served)

    def _forget(self, index: int) -> None:
        self._timeline.forget(index)
        self._block_ids.pop(index, None)
        for oldest in list(islice(self._failed, max(0, len(self._failed) - _MAX_REQUESTS))):
            del self._failed[oldest]

    def sent(self, step: Forward | MoveKV | Reshard) -> None:
        at_s = self._at()
        if isinstance(step, Forward):
            self._steps[step.number] = step, at_s
            self._moves.update((move.number, (move, at_s)) for move in step.streams)
        elif isinstance(step, MoveKV):
            self._moves[step.number] = step, at_s

    def completed(self, done: Completion) -> None:
        at_s, watch = self._at(), self._watch
        if done.number in self._moves and watch.moved is not None:
            move, sent_s = self._moves.pop(done.number)
            watch.moved(MoveTiming(move=move, start_s=sent_s, end_s=at_s))
        elif done.number in self._steps:
            self._end(*self._steps.pop(done.number), self._ends_s(done), at_s)
        self._max_queue = max(self._max_queue, self._engine.num_waiting)
        if watch.moment is not None:
            watch.moment(at_s, self._engine)

    def lost(self) -> None:
        if self._watch.lost is not None:
            self._watch.lost(self._at())
        for entries in (self._steps, self._moves, self._free_s):
            entries.clear()

    def _ends_s(self, done: Completion) -> dict[tuple[int, int], float]:
        """Return when the latest rank of each instance and stage reported a step."""
        begin_s, ends_s = self._begin(self._now()), dict[tuple[int, int], float]()
        for rank, reported_s in done.reported_s.items():
            place = self._engine.config.cluster.at(rank)
            row = place.instance, place.stage
            ends_s[row] = max(ends_s.get(row, 0.0), reported_s - begin_s)
        return ends_s

    def _end(self, forward: Forward, sent_s: float, ends_s: Mapping[tuple[int, int], float], at_s: float) -> None:
        """Add a complete step. A later stage begins after the stage before."""
        cluster = self._engine.config.cluster
        stages: dict[tuple[int, int], tuple[float, float]] = {}
        for instance in forward.instances:
            begin_s = sent_s
            for stage in range(cluster.pp(instance)):
                row = instance, stage
                end_s = ends_s.get(row, at_s)
                begin_s = min(end_s, max(begin_s, self._free_s.get(row, 0.0)))
                stages[row] = begin_s, end_s
                self._free_s[row] = begin_s = end_s
        if self._watch.ran is not None:
            self._watch.ran(StepTiming(forward=forward, stages=stages))

    # ---------------------------------------------------------------- the record

    def record(self, policy: str, *, last_s: float | None = None) -> Record:
        """Return the recording up to now, or its last seconds. Call it between two steps of the engine."""
        at_s, load = self._at(), self._engine.load()
        since_s = 0.0 if last_s is None else at_s - last_s
        finished = [request for request in self._served if request.finished_s >= since_s]
        served = tuple(sorted(finished, key=lambda request: request.index))
        timeline = self._timeline.since(since_s, served)
        timeline.moments.append(moment_of(at_s, self._engine))
        before_s = self._busy_s if len(self._busy_s) == len(load.busy_s) else [0.0] * len(load.busy_s)
        result = Result(
            served=served,
            refused=dict(self._failed),
            makespan_s=max((request.finished_s for request in served), default=0.0),
            busy_s=tuple(after_s - first_s for first_s, after_s in zip(before_s, load.busy_s, strict=True)),
            max_queue=self._max_queue,
            num_preemptions=self._engine.counts.num_preemptions - self._num_preemptions,
        )
        return Record(
            policy=policy,
            cluster=self._engine.config.cluster,
            result=result,
            timeline=timeline,
            block_ids=dict(self._block_ids),
            is_recorded=True,
        )

    def stop(self) -> None:
        """Observe the engine no more."""
        self._engine.observe(None)

    def write(self, policy: str, given: Any) -> None:  # noqa: ANN401 - `EngineArgs` is in a layer above
        """Write the files that the options of an engine name, once. An error is logged, since the run has ended.

        Args:
            policy: the name of the policy.
            given: the options, a dataclass with `model`, `trace` and `report`.
        """
        if self._is_written or (given.trace, given.report) == (None, None):
            return
        self._is_written, record = True, self.record(policy)
        if not record.timeline.complete:
            _log.warning("the recording has the latest %d blocks only", len(record.timeline.blocks))
        settings = {"model": given.model, "cluster": str(record.cluster), "policy": policy}
        for option in fields(given):
            if option.name not in ("model", "trace", "report") and getattr(given, option.name) != option.default:
                settings[option.name.replace("_", "-")] = getattr(given, option.name)
        try:
            if given.trace is not None:
                Path(given.trace).write_text(chrome_trace([record]), encoding="utf-8")
            if given.report is not None:
                from longspan.extras.report import html_report  # noqa: PLC0415 - plotly is optional

                page = html_report([record], [record.result.summary()], settings)
                Path(given.report).write_text(page, encoding="utf-8")
        except OSError as error:
            _log.error("the recording cannot be written: %s", error)
