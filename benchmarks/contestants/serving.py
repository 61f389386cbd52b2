"""A contestant's side of the pipe: reads start options and jobs from stdin and writes answers, one JSON object a line.

This module runs in every contestant's own environment, so it imports the standard library only.
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
        after_tokens: it is submitted when each earlier prompt of the job has this many tokens or is finished. 0 submits
            it immediately.
    """

    prompt: Sequence[int]
    new_tokens: int
    after_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times of a prompt's submission and of each of its tokens, in seconds of one clock."""

    submitted_s: float
    arrivals_s: list[float]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The times of a job.

    Attributes:
        seconds: from the call to its end.
        timelines: of the job's submissions, in their order.
        worker_times: seconds per category and rank, where a contestant records them.
    """

    seconds: float
    timelines: list[Timeline]
    worker_times: WorkerTimes = field(default_factory=list)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Self:
        """Read the dictionary that `asdict` made of an answer."""
        return cls(**{**message, "timelines": [Timeline(**timeline) for timeline in message["timelines"]]})


@dataclass(frozen=True, kw_only=True)
class Started:
    """A contestant that is ready.

    Attributes:
        versions: of its packages.
        generate: completes all submissions of a job together.
        worker_times: seconds per category and rank since the start, where a contestant records them.
        close: shuts the engine down.
    """

    versions: dict[str, str]
    generate: Callable[[Sequence[Submission]], list[Timeline]]
    worker_times: Callable[[], WorkerTimes] | None = None
    close: Callable[[], None] = lambda: None


def serve(start: Callable[[dict[str, Any]], Started]) -> None:
    """Start a contestant with the options on the first line of stdin, and answer one line per job until stdin ends."""
    send = answers()
    contestant = start(json.loads(sys.stdin.readline()))
    send({"versions": contestant.versions})
    for line in sys.stdin:
        send(asdict(_run(contestant, [Submission(**fields) for fields in json.loads(line)["submissions"]])))
    contestant.close()


def answers() -> Callable[[Mapping[str, Any]], None]:
    """Redirect stdout, to which libraries print, to stderr. Return a function that writes answers to the old stdout."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: Mapping[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    return send


def is_due(submission: Submission, earlier: Iterable[Submission], timelines: Iterable[Timeline]) -> bool:
    """Return True if all earlier submissions have `after_tokens` tokens, or all their tokens."""
    return all(
        len(timeline.arrivals_s) >= min(submission.after_tokens, before.new_tokens)
        for before, timeline in zip(earlier, timelines, strict=False)
    )


def _run(contestant: Started, submissions: Sequence[Submission]) -> Answer:
    before = contestant.worker_times() if contestant.worker_times else []
    start = time.perf_counter()
    timelines = contestant.generate(submissions)
    seconds = time.perf_counter() - start
    after = contestant.worker_times() if contestant.worker_times else []
    expected, generated = [item.new_tokens for item in submissions], [len(item.arrivals_s) for item in timelines]
    if generated != expected:
        raise RuntimeError(f"{expected} tokens asked for, but {generated} generated")
    spent = [{key: now[key] - then[key] for key in now} for then, now in zip(before, after, strict=True)]
    return Answer(seconds=seconds, timelines=timelines, worker_times=spent)
