"""A contestant's side of the pipe: start orders and jobs come in on stdin, answers go out, one JSON object a line.

Runs in every contestant's own environment, so it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

WorkerTimes = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A prompt of a job, decoded greedily and past any end-of-sequence token.

    Attributes:
        after_tokens: it comes later than those before it in the job, when each of them has so many tokens or has ended;
            0: at once.
    """

    prompt: Sequence[int]
    new_tokens: int
    after_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When a prompt was submitted and when each of its tokens came, in seconds of any one clock."""

    submitted_s: float
    arrivals_s: list[float]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a job says how long it took.

    Attributes:
        seconds: from the call to its end.
        timelines: of its submissions, in their order.
        worker_times: seconds per category and rank, where a contestant records them.
    """

    seconds: float
    timelines: list[Timeline]
    worker_times: WorkerTimes = field(default_factory=list)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Self:
        """Reads what `asdict` wrote."""
        return cls(**{**message, "timelines": [Timeline(**one) for one in message["timelines"]]})


@dataclass(frozen=True, kw_only=True)
class Started:
    """A contestant that is ready.

    Attributes:
        versions: of the packages that do the work.
        generate: completes all submissions of a job together.
        worker_times: seconds per category and rank since the start, where a contestant records them.
        close: ends it.
    """

    versions: dict[str, str]
    generate: Callable[[Sequence[Submission]], list[Timeline]]
    worker_times: Callable[[], WorkerTimes] | None = None
    close: Callable[[], None] = lambda: None


def serve(start: Callable[[dict[str, Any]], Started]) -> None:
    """Starts a contestant from the first line of stdin and answers one line per job until stdin ends."""
    send = answers()
    contestant = start(json.loads(sys.stdin.readline()))
    send({"versions": contestant.versions})
    for line in sys.stdin:
        send(asdict(_run(contestant, [Submission(**one) for one in json.loads(line)["submissions"]])))
    contestant.close()


def answers() -> Callable[[Mapping[str, Any]], None]:
    """Keeps stdout for answers, since libraries print there, and returns what sends one."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: Mapping[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    return send


def is_due(submission: Submission, earlier: Iterable[Submission], timelines: Iterable[Timeline]) -> bool:
    """Tells whether a submission's time has come, by the timelines so far of those before it."""
    return all(
        len(timeline.arrivals_s) >= min(submission.after_tokens, one.new_tokens)
        for one, timeline in zip(earlier, timelines, strict=False)
    )


def _run(contestant: Started, submissions: Sequence[Submission]) -> Answer:
    before = contestant.worker_times() if contestant.worker_times else []
    start = time.perf_counter()
    timelines = contestant.generate(submissions)
    seconds = time.perf_counter() - start
    after = contestant.worker_times() if contestant.worker_times else []
    asked, generated = [one.new_tokens for one in submissions], [len(one.arrivals_s) for one in timelines]
    if generated != asked:
        raise RuntimeError(f"{asked} tokens asked for, but {generated} generated")
    spent = [{key: now[key] - then[key] for key in now} for then, now in zip(before, after, strict=True)]
    return Answer(seconds=seconds, timelines=timelines, worker_times=spent)
