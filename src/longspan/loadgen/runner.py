"""Sends requests at their times, whatever became of those before, and gathers the results."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from longspan.loadgen.client import Client
from longspan.loadgen.results import Answered, Result, Run
from longspan.loadgen.workload import Ask

_AHEAD_BYTES = 256 * 2**20
"""Requests that are written before the first one is sent."""


@dataclass(kw_only=True)
class Progress:
    """How far a run is."""

    results: list[Result] = field(default_factory=list)
    num_failed: int = 0
    num_running: int = 0
    most_running: int = 0
    num_output_tokens: int = 0

    def add(self, result: Result) -> None:
        """Takes in a request that ended."""
        self.results.append(result)
        if isinstance(result.outcome, Answered):
            self.num_output_tokens += result.outcome.num_output_tokens
        else:
            self.num_failed += 1


class Load:
    """A run: every request at its time, whatever became of those before.

    A request never waits for others, except for a slot when `max_concurrency` are under way; its times count from when
    it was due all the same, so that a slow server cannot hide behind requests that were sent late (coordinated
    omission).
    """

    def __init__(
        self,
        client: Client,
        asks: Sequence[Ask],
        bodies: Iterator[bytes],
        *,
        max_concurrency: int | None = None,
        watch: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """`watch` is called whenever a request starts or ends."""
        self._client, self._asks, self._bodies, self._watch = client, asks, bodies, watch
        self._slots = asyncio.Semaphore(max_concurrency or len(asks))
        self._progress = Progress()
        self._start_s = 0.0

    async def run(self) -> Run:
        """Waits for all answers. When it is cancelled, it ends the requests under way and returns what there is."""
        loop, progress, interrupted = asyncio.get_running_loop(), self._progress, False
        bodies = _written(self._bodies)
        self._start_s = loop.time()
        try:
            async with asyncio.TaskGroup() as group:
                for index, (ask, body) in enumerate(zip(self._asks, bodies, strict=True)):
                    due_s = await self._turn(ask)
                    group.create_task(self._send(index, ask, body, due_s))
        except asyncio.CancelledError:
            interrupted = True
        return Run(
            results=tuple(sorted(progress.results, key=lambda result: result.index)),
            num_asked=len(self._asks),
            duration_s=loop.time() - self._start_s,
            max_concurrent=progress.most_running,
            interrupted=interrupted,
        )

    async def _turn(self, ask: Ask) -> float:
        """Waits until a request is due and a slot free; returns when it was due, on the loop's clock."""
        loop = asyncio.get_running_loop()
        if ask.due_s is None:
            await self._slots.acquire()
            return loop.time()
        due_s = self._start_s + ask.due_s
        await asyncio.sleep(max(0, due_s - loop.time()))  # also when it is late: answers under way need a turn
        await self._slots.acquire()
        return due_s

    async def _send(self, index: int, ask: Ask, body: bytes, due_s: float) -> None:
        progress = self._progress
        progress.num_running += 1
        progress.most_running = max(progress.most_running, progress.num_running)
        self._watch(progress)
        sent_s = asyncio.get_running_loop().time()
        try:
            outcome = await self._client.ask(body, due_s)
        finally:
            progress.num_running -= 1
            self._slots.release()
        result = Result(
            index=index,
            input_len=ask.input_len,
            output_len=ask.output_len,
            due_s=due_s - self._start_s,
            sent_s=sent_s - self._start_s,
            outcome=outcome,
        )
        progress.add(result)
        self._watch(progress)


def _written(bodies: Iterator[bytes]) -> Iterator[bytes]:
    """The same bodies; as many as fit into memory are made now, the others when their turn comes."""
    ahead: deque[bytes] = deque()
    num_bytes = 0
    for body in bodies:
        ahead.append(body)
        num_bytes += len(body)
        if num_bytes >= _AHEAD_BYTES:
            break

    def all_of_them() -> Iterator[bytes]:
        while ahead:
            yield ahead.popleft()
        yield from bodies

    return all_of_them()
