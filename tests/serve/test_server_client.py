"""The API server's side of the engine core: nothing is lost, told twice, waited for in vain or left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from fake_engine import (
    BEGIN,
    DIE,
    DIE_ONCE,
    ENDS_AT_ONCE,
    IS_KILLED,
    NEVER_STARTS,
    SAY,
    SAY_AND_DIE_ONCE,
    SILENT,
    UNACCEPTED,
    WRONG,
)
from fake_engine_install import told, until
from msgspec.structs import replace

from longspan import SamplingParams, limits
from longspan.args import EngineArgs
from longspan.serve import core_process, run
from longspan.serve.client import EngineClient
from longspan.serve.errors import EngineLostError, QueueFullError
from longspan.serve.messages import Delta, EngineSetup
from longspan.serve.output_queue import Output, OutputQueue
from longspan.text.input_processor import EngineRequest


def engine_request(what: int, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(text=None, token_ids=(what,), params=SamplingParams(max_tokens=max_tokens))


def has_requests(client: EngineClient) -> bool:
    """Return True if the client would repeat a request in a new engine core."""
    return bool(client._waiting)


@asynccontextmanager
async def started(
    events: Path, max_engine_requests: int = 1024, most_tokens: int = 2**20, engine_timeout_s: float = 60.0
) -> AsyncIterator[EngineClient]:
    """Yield a client whose engine runs. Its requests, processes and tasks must be gone afterwards."""
    client = EngineClient(
        EngineSetup(
            engine=EngineArgs(str(events)),
            max_num_queued_reqs=max_engine_requests,
            max_num_queued_tokens=most_tokens,
            engine_timeout_s=engine_timeout_s,
        )
    )
    try:
        await client.start()
        yield client
    finally:
        await client.close()
        assert not has_requests(client)
        assert not [child for child in psutil.Process().children() if "fake_engine" in child.cmdline()]
        assert asyncio.all_tasks() == {asyncio.current_task()}


def num_tokens(outputs: list[Output]) -> int:
    return sum(len(delta.token_ids) for _, delta in outputs)


async def streamed(answer: OutputQueue, found: list[Output] | None = None) -> list[Output]:
    found = [] if found is None else found
    while outputs := await answer.get():
        found += outputs
    return found


async def kill_engine(client: EngineClient, number: signal.Signals = signal.SIGKILL) -> None:
    core = client._core
    assert core is not None
    os.kill(core.pid, number)


@pytest.mark.parametrize("kind", [WRONG, ENDS_AT_ONCE])
def test_a_start_that_nothing_waits_for_any_more_may_fail(events: Path, kind: str) -> None:
    """No exception of it is left over, see `every_exception_is_retrieved`."""

    async def check() -> None:
        engine = EngineArgs(str(events.with_name(kind)))
        client = EngineClient(EngineSetup(engine=engine, max_num_queued_reqs=1, max_num_queued_tokens=100))
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait_for(client.down.wait(), 60)
        await client.close()

    asyncio.run(check())


def test_a_task_that_fails_while_it_is_cancelled_leaves_no_exception_over() -> None:
    async def fail() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise EngineLostError("it is lost")

    async def check() -> None:
        assert await run._first_of(fail(), asyncio.sleep(0.01, 7)) == 7
        await asyncio.sleep(0.01)

    asyncio.run(check())


def test_a_request_is_streamed_or_taken_whole(events: Path) -> None:
    async def check() -> None:
        async with started(events) as client:
            assert num_tokens(await streamed(await client.submit([engine_request(SAY), engine_request(SAY, 2)]))) == 5
            assert num_tokens(await (await client.submit([engine_request(SAY), engine_request(SAY, 2)])).get_all()) == 5
            assert not has_requests(client)

    asyncio.run(check())
    assert not told(events, "Cancel")


def test_a_request_without_output_is_computed_by_the_next_engine_and_keeps_its_place(events: Path) -> None:
    async def check() -> None:
        async with started(events, max_engine_requests=10) as client:
            assert num_tokens(await streamed(await client.submit([engine_request(DIE_ONCE)]))) == 3
            assert client.state == "serving"

    asyncio.run(check())
    assert [event["is_accepted"] for event in told(events, "Add")] == [False, True]
    assert len(told(events, "start")) == 2


def test_a_request_that_was_not_accepted_must_be_accepted_by_the_next_engine(events: Path) -> None:
    async def check() -> None:
        async with started(events) as client:
            submitting = asyncio.create_task(client.submit([engine_request(UNACCEPTED), engine_request(SAY)]))
            await until(lambda: len(told(events, "Add")) == 2)
            await kill_engine(client)
            await until(lambda: len(told(events, "Add")) == 3)  # the other has ended
            assert not submitting.done()
            submitting.cancel()

    asyncio.run(check())
    assert not any(event["is_accepted"] for event in told(events, "Add"))


def test_a_stream_with_output_fails_but_a_whole_answer_is_recomputed(events: Path) -> None:
    async def check() -> None:
        async with started(events) as client:
            stream, whole = await asyncio.gather(
                client.submit([engine_request(BEGIN), engine_request(SAY)]),
                client.submit([engine_request(SAY, 2), engine_request(SAY_AND_DIE_ONCE, 4)]),
            )
            found: list[Output] = []
            with pytest.raises(EngineLostError, match="was lost"):
                await streamed(stream, found)
            assert num_tokens(found) == 1 + 3
            assert num_tokens(await whole.get_all()) == 2 + 4, "each token once"

    asyncio.run(check())


def test_a_request_that_ends_two_engines_is_not_sent_to_a_third(events: Path) -> None:
    async def check() -> None:
        async with started(events) as client:
            answer = await client.submit([engine_request(DIE)])
            with pytest.raises(EngineLostError, match="was lost"):
                await answer.get_all()
            assert num_tokens(await (await client.submit([engine_request(SAY)])).get_all()) == 3

    asyncio.run(check())
    assert len(told(events, "start")) == 3
    assert len(told(events, "Add")) == 3


def test_a_request_that_comes_while_an_engine_ends_is_answered_by_the_next(events: Path) -> None:
    async def check() -> None:
        async with started(events) as client:
            await kill_engine(client)
            for _ in range(20):  # some before the end is noticed, some after
                answer = asyncio.create_task(client.submit([engine_request(SAY)]))
                await asyncio.sleep(0.01)
            assert num_tokens(await (await asyncio.wait_for(answer, 60)).get_all()) == 3
            await until(lambda: not has_requests(client))

    asyncio.run(check())


def test_the_queue_is_bounded_while_there_is_no_engine(events: Path) -> None:
    async def check() -> None:
        async with started(events, max_engine_requests=2) as client:
            await kill_engine(client)
            await until(lambda: client.state == "restarting")
            two = [asyncio.create_task(client.submit([engine_request(SAY)])) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="3 requests would wait for the engine, of at most 2"):
                await client.submit([engine_request(SAY)])
            for answer in await asyncio.gather(*two):
                assert num_tokens(await answer.get_all()) == 3

    asyncio.run(check())


def test_an_engine_that_hangs_is_replaced_and_its_requests_are_not_lost(events: Path) -> None:
    async def check() -> None:
        async with started(events, engine_timeout_s=1.5) as client:
            await asyncio.sleep(2)  # that it is idle is no reason
            assert client.state == "serving"
            await kill_engine(client, signal.SIGSTOP)
            start_s = time.monotonic()
            losses: list[int] = []
            client.on_loss = lambda: losses.append(1)
            assert num_tokens(await (await client.submit([engine_request(SAY)])).get_all()) == 3
            assert losses == [1]
            assert time.monotonic() - start_s > 0.5

    asyncio.run(check())
    assert len(told(events, "start")) == 2


def test_an_api_server_that_was_stopped_does_not_take_its_engine_for_lost(events: Path) -> None:
    async def check() -> None:
        async with started(events, engine_timeout_s=1.5) as client:
            for _ in range(2):
                await asyncio.sleep(0.05)
                time.sleep(2)  # noqa: ASYNC251 - nothing runs meanwhile
            await asyncio.sleep(0.5)
            assert client.state == "serving"

    asyncio.run(check())
    assert len(told(events, "start")) == 1


def test_requests_that_an_engine_has_not_accepted_are_bounded(events: Path) -> None:
    """A hanging engine, for example. Its steps (2 requests, 128 tokens) count in addition to its queue."""

    async def check() -> None:
        async with started(events, max_engine_requests=3, most_tokens=30) as client:
            await kill_engine(client, signal.SIGSTOP)
            waiting = [asyncio.create_task(client.submit([engine_request(SAY)])) for _ in range(5)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match=r"6 requests .* of at most 5 \(--max-num-queued-reqs\)"):
                await client.submit([engine_request(SAY)])
            waiting[0].cancel()
            await asyncio.sleep(0)
            long = EngineRequest(text=None, token_ids=(SAY,) * 155, params=SamplingParams(max_tokens=1))
            with pytest.raises(QueueFullError, match=r"159 tokens .* of at most 158 \(--max-num-queued-tokens\)"):
                await client.submit([long])
            await kill_engine(client, signal.SIGCONT)
            for answer in await asyncio.gather(*waiting[1:]):
                assert num_tokens(await answer.get_all()) == 3

    asyncio.run(check())


def test_no_message_is_missed_while_messages_are_sent(events: Path) -> None:
    """A send on the socket must not swallow the wake-up of a message that arrives concurrently."""

    async def ask(client: EngineClient) -> int:
        total = 0
        for _ in range(20):
            total += num_tokens(await (await client.submit([engine_request(SAY, 1)])).get_all())
            await asyncio.sleep(0)
        return total

    async def check() -> None:
        async with started(events) as client:
            for _ in range(3):
                assert await asyncio.wait_for(asyncio.gather(*(ask(client) for _ in range(30))), 60) == [20] * 30
                await asyncio.sleep(0.1)

    asyncio.run(check())


@pytest.mark.parametrize("what", [SILENT, UNACCEPTED, BEGIN])
def test_a_client_that_disconnects_cancels_its_request(events: Path, what: int) -> None:
    async def check() -> None:
        async with started(events) as client:
            task = asyncio.create_task(_read(client, what))
            await until(lambda: len(told(events, "Add")) == 2)
            await asyncio.sleep(0.05)
            task.cancel()
            await until(lambda: len(told(events, "Cancel")) == 2)
            assert not has_requests(client)

    asyncio.run(check())


async def _read(client: EngineClient, what: int) -> None:
    answer = await client.submit([engine_request(what), engine_request(what)])
    try:
        await streamed(answer)
    finally:
        answer.close()


def test_whatever_fails_after_acceptance_reaches_the_reader() -> None:
    async def check() -> None:
        answer = OutputQueue([engine_request(SAY)], lambda _: None)
        answer.accept(0)
        answer.fail(QueueFullError("full"))
        for reading in (answer.get(), answer.get_all()):
            with pytest.raises(QueueFullError, match="full"):
                await asyncio.wait_for(reading, 1)

    asyncio.run(check())


def test_an_error_before_acceptance_reaches_submit_and_stream() -> None:
    async def check() -> None:
        answer = OutputQueue([engine_request(SAY)], lambda _: None)
        answer.fail(QueueFullError("full"))
        for waiting in (answer.accepted, answer.get()):
            with pytest.raises(QueueFullError, match="full"):
                await asyncio.wait_for(waiting, 1)

    asyncio.run(check())


def test_nothing_is_submitted_where_no_engine_will_be(tmp_path: Path) -> None:
    """After a client was closed."""

    async def check() -> None:
        setup = EngineSetup(engine=EngineArgs(str(tmp_path)), max_num_queued_reqs=9, max_num_queued_tokens=99)
        client = EngineClient(setup)
        await client.close()
        with pytest.raises(EngineLostError, match="the engine is down"):
            await client.submit([engine_request(SAY)])
        assert not has_requests(client)

    asyncio.run(check())


def test_an_engine_whose_process_cannot_be_made_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_child(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    async def check() -> None:
        monkeypatch.setattr(core_process, "start_child", start_child)
        setup = EngineSetup(engine=EngineArgs(str(tmp_path)), max_num_queued_reqs=9, max_num_queued_tokens=99)
        engine = EngineClient(setup)
        with pytest.raises(EngineLostError, match=r"the engine core cannot be started \(no more processes\)"):
            await engine.start()
        assert engine.state == "down"
        await engine.close()

    asyncio.run(check())


def test_only_unfinished_requests_without_output_are_repeated() -> None:
    async def check() -> None:
        begun = Delta(id=0, choice=0, text="", token_ids=[], logprobs=None, finish_reason=None, stop_reason=None)
        done = replace(begun, finish_reason="length")
        answer = OutputQueue([engine_request(SAY), engine_request(SAY)], lambda _: None)
        answer.put(0, done)
        assert await answer.get() == [(0, done)]
        answer.put(1, begun)
        assert answer.repeat(), "only the job that is finished was told of"
        answer.put(1, done)
        assert await answer.get_all() == [(1, done)]
        assert not answer.repeat(), "twice"

    asyncio.run(check())


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [(WRONG, ValueError, "a wrong setup"), (ENDS_AT_ONCE, EngineLostError, "ended with code 3")],
)
def test_an_engine_that_cannot_start_states_the_cause(
    events: Path, name: str, error: type[Exception], message: str
) -> None:
    async def check() -> None:
        with pytest.raises(error, match=message):
            async with started(events.with_name(name)):
                pass

    asyncio.run(check())


@pytest.mark.parametrize("num_kills", [[3, 3], [3, 4, 4]], ids=["by a user", "for lack of memory"])
def test_an_engine_that_is_killed_for_lack_of_memory_says_so(
    events: Path, num_kills: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts the processes that it kills for that."""
    count = iter(num_kills)
    monkeypatch.setattr(limits, "num_oom_kills", lambda: next(count, num_kills[-1]))

    async def check() -> str:
        with pytest.raises(EngineLostError, match="ended with code -9") as lost:
            async with started(events.with_name(IS_KILLED)):
                pass
        return str(lost.value)

    said = asyncio.run(check())
    assert ("memory" in said and "--kv-cache-memory-bytes" in said) == (num_kills[0] < num_kills[-1])


def test_a_start_can_be_aborted(events: Path) -> None:
    async def check() -> None:
        before_s = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), started(events.with_name(NEVER_STARTS)):
                pass
        assert time.monotonic() - before_s < 60

    asyncio.run(check())
