"""A contestant's side of the pipe: start orders and jobs come in on stdin, answers go out, one JSON object a line.

Runs in every contestant's own environment, so it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

Prompts = Sequence[Sequence[int]]
WorkerTimes = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A contestant that is ready.

    Attributes:
        versions: of the packages that do the work.
        generate: `(prompts, new_tokens) -> arrivals`: completes all prompts together, greedily and past any
            end-of-sequence token; for every prompt, when each of its tokens came, in seconds of any one clock.
        worker_times: seconds per category and rank since the start, where a contestant records them.
        close: ends it.
    """

    versions: dict[str, str]
    generate: Callable[[Prompts, int], list[list[float]]]
    worker_times: Callable[[], WorkerTimes] | None = None
    close: Callable[[], None] = lambda: None


def serve(start: Callable[[dict[str, Any]], Started]) -> None:
    """Starts a contestant from the first line of stdin and answers one line per job until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is not an answer
    contestant = start(json.loads(sys.stdin.readline()))
    _send(answers, {"versions": contestant.versions})
    for line in sys.stdin:
        job = json.loads(line)
        _send(answers, _run(contestant, job["prompts"], job["new_tokens"]))
    contestant.close()


def _run(contestant: Started, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
    before = contestant.worker_times() if contestant.worker_times else []
    start = time.perf_counter()
    arrivals = contestant.generate(prompts, new_tokens)
    seconds = time.perf_counter() - start
    after = contestant.worker_times() if contestant.worker_times else []
    if [len(times) for times in arrivals] != [new_tokens] * len(prompts):
        raise RuntimeError(f"{new_tokens} tokens asked for, but {[len(times) for times in arrivals]} generated")
    spent = [{key: now[key] - then[key] for key in now} for then, now in zip(before, after, strict=True)]
    return {"seconds": seconds, "arrivals": arrivals, "worker_times": spent}


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
