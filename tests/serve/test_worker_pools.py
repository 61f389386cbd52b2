"""Worker pools: order, bounds, cancelled work. They delay neither each other nor the end of a process."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import SAY
from fake_engine_install import until
from server_client import completion, post
from test_api_server import ask, serving

from longspan.serve import app, server
from longspan.serve.errors import QueueFullError, WireError
from longspan.serve.server import Server, WorkerPool

LARGE = "x" * 200_000


class Gate:
    """Work that takes until it is opened."""

    def __init__(self) -> None:
        self.num_begun, self.num_running, self.most_running = 0, 0, 0
        self._open, self._lock = threading.Event(), threading.Lock()

    def work(self, *_: object) -> Any:
        with self._lock:
            self.num_begun += 1
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        assert self._open.wait(20)
        with self._lock:
            self.num_running -= 1
        return {"count": 0}

    def open(self) -> None:
        self._open.set()


@asynccontextmanager
async def gate() -> AsyncIterator[Gate]:
    opened = Gate()
    try:
        yield opened
    finally:
        opened.open()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_work_is_done_in_order_by_the_given_number_of_threads(num_threads: int) -> None:
    async def check() -> None:
        pool, order = WorkerPool("test", num_threads), []
        async with gate() as closed:
            blocked = [asyncio.create_task(pool.run(closed.work)) for _ in range(5)]
            await until(lambda: closed.num_begun == num_threads)
            rest = [asyncio.create_task(pool.run(order.append, index)) for index in range(20)]
        await asyncio.gather(*blocked, *rest)
        assert closed.most_running == num_threads
        assert sorted(order) == list(range(20))
        assert num_threads > 1 or order == sorted(order)
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)
        assert await pool.run(divmod, 7, 2) == (3, 1)

    asyncio.run(check())


def test_work_cancelled_before_its_start_is_neither_done_nor_kept() -> None:
    class Body:
        pass

    async def check() -> None:
        pool, done = WorkerPool("test", 1, max_waiting=2), []
        async with gate() as closed:
            first = asyncio.create_task(pool.run(closed.work))
            await until(lambda: closed.num_begun == 1)
            body = Body()
            kept = weakref.ref(body)
            tasks = [asyncio.create_task(pool.run(done.append, body)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="2 test"):
                await pool.run(done.append, 3)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            del body, tasks, task
            gc.collect()
            assert kept() is None
            last = asyncio.create_task(pool.run(done.append, 4))
            await asyncio.sleep(0)
        await asyncio.gather(first, last)
        assert done == [4]

    asyncio.run(check())


@pytest.mark.parametrize(("error", "num_lines"), [(WireError("too long", "prompt"), 0), (ZeroDivisionError(), 1)])
def test_only_unexpected_errors_of_abandoned_work_are_logged(
    error: Exception, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with gate() as closed:

            def fail() -> None:
                closed.work()
                raise error

            pool = WorkerPool("test", 1)
            task = asyncio.create_task(pool.run(fail))
            await until(lambda: closed.num_begun == 1)
            task.cancel()
            await asyncio.wait([task])
        await pool.run(int)  # it runs after the other

    asyncio.run(check())
    assert [record.name for record in caplog.records] == ["longspan"] * num_lines


def test_the_refusal_of_a_request_whose_client_has_left_is_not_logged(
    events: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(events) as api, gate() as closed:

            def refuse(*_: object, **__: object) -> None:
                closed.work()
                raise WireError("too long", "prompt")

            monkeypatch.setattr(server, "prepared", refuse)
            connection = socket.create_connection(("127.0.0.1", api.port))
            connection.sendall(post(json.dumps(completion(prompt="Hello")).encode()))
            await until(lambda: closed.num_begun == 1)
            connection.close()
            await asyncio.sleep(0.2)
            closed.open()
            await until(lambda: not closed.num_running)
            monkeypatch.undo()
            assert (await api.complete(SAY)).token_ids == [7, 7, 7]

    asyncio.run(check())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_large_texts_are_tokenized_in_order_and_delay_no_other(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with serving(events) as api, gate() as closed:
            monkeypatch.setattr(app, "tokenized", closed.work)
            waiting = [
                asyncio.create_task(ask(api.port, "/tokenize", {"prompt": LARGE}, x_request_timeout="120"))
                for _ in range(5)
            ]
            await until(lambda: closed.num_begun == 1)
            left = socket.create_connection(("127.0.0.1", api.port))
            left.sendall(post(json.dumps({"prompt": LARGE}).encode(), "/tokenize"))
            start_s = time.monotonic()
            assert (await api.complete(SAY)).token_ids == [7, 7, 7]
            late = await ask(api.port, "/tokenize", {"prompt": LARGE}, x_request_timeout="0.3")
            assert (late.status, late.headers["x-should-retry"]) == (504, "false")
            assert time.monotonic() - start_s < 60
            left.close()
            await asyncio.sleep(0.2)
            closed.open()
            assert {reply.status for reply in await asyncio.gather(*waiting)} == {200}
        assert (closed.num_begun, closed.most_running) == (5, 1), "abandoned and late work does not run"

    asyncio.run(check())


def test_grammars_hold_up_only_each_other_and_their_queue_is_bounded(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constrained = completion(prompt=[SAY], max_tokens=3, structured_outputs={"regex": "a"})
    servers: list[Server] = []
    check_open = Server.check_open

    def seen(found: Server) -> None:
        servers[:] = [found]
        check_open(found)

    async def check() -> None:
        async with serving(events) as api, gate() as closed:
            monkeypatch.setattr(server, "grammar_of", closed.work)
            monkeypatch.setattr(Server, "check_open", seen)
            waiting = []
            for _ in range(34):
                connection = socket.create_connection(("127.0.0.1", api.port))
                connection.sendall(post(json.dumps(constrained).encode()))
                waiting.append(connection)
            await until(lambda: closed.num_begun == 2 and servers[0].grammars.num_waiting == 32)
            start_s = time.monotonic()
            full = await ask(api.port, "/v1/completions", constrained)
            assert (full.status, full.body["error"]["code"]) == (503, "queue_full")
            assert int(full.headers["retry-after"]) >= 1
            assert (await api.complete(SAY)).token_ids == [7, 7, 7]
            assert time.monotonic() - start_s < 60
            for connection in waiting:
                connection.close()
            await until(lambda: not servers[0].grammars.num_waiting)
        assert (closed.num_begun, closed.most_running) == (2, 2), "abandoned work never starts"

    asyncio.run(check())


def test_a_process_with_unfinished_work_ends_after_its_exit_handlers() -> None:
    script = """
import asyncio, atexit, sys, time
from importlib import import_module
from longspan.serve.server import WorkerPool
app = import_module("longspan.cli.app")
atexit.register(print, "at exit")
async def begin():
    pool = WorkerPool("test", 1)
    await pool.run(abs, -1)
    task = asyncio.create_task(pool.run(time.sleep, 60))
    await asyncio.sleep(0.1)
def main():
    asyncio.run(begin())
    sys.exit(7)
app.main = main
app.run_process()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30, check=False, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "at exit\n", "")
