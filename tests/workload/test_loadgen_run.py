"""A run of the load generator in virtual time: when requests are sent, what is measured, what counts as a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from fake_openai import DONE, FakeServer, chunk, event, load, usage
from virtual_time import run_virtually

from longspan.loadgen.metrics import Slo, answers_of, failures_of, summarise
from longspan.loadgen.results import Run
from longspan.loadgen.workload import Ask


def asks(*due_s: float | None, output_len: int = 3) -> list[Ask]:
    return [Ask(due_s=due, input_len=4, output_len=output_len) for due in due_s]


def test_requests_are_sent_at_their_times_whatever_became_of_others() -> None:
    server = FakeServer(ttft_s=100.0)
    run = run_virtually(load(server, asks(0.0, 0.25, 1.0, 1.0)))
    assert server.times_s == pytest.approx([0.0, 0.25, 1.0, 1.0])
    assert run.max_concurrent == server.most_running == 4
    assert run.duration_s == pytest.approx(101.2)
    assert [result.late_s for result in run.results] == [0.0] * 4


def test_times_of_one_request() -> None:
    run = run_virtually(load(FakeServer(ttft_s=0.5, tbt_s=0.1), asks(2.0, output_len=5)))
    [one] = answers_of(run.results)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tbt_s == pytest.approx([0.1] * 4)
    assert one.e2el_s == pytest.approx(0.9)
    assert one.tpot_s == pytest.approx(0.1)
    assert (one.num_prompt_tokens, one.num_output_tokens, one.finish_reason) == (4, 5, "length")


def test_under_a_cap_times_count_from_when_a_request_was_due() -> None:
    """No coordinated omission: the wait for a slot is the server's fault and is in TTFT."""
    server = FakeServer(ttft_s=1.0, tbt_s=0.0)
    run = run_virtually(load(server, asks(0.0, 0.1, 0.2, output_len=1), max_concurrency=1))
    assert server.times_s == pytest.approx([0.0, 1.0, 2.0])
    assert [one.ttft_s for one in answers_of(run.results)] == pytest.approx([1.0, 1.9, 2.8])
    assert [result.late_s for result in run.results] == pytest.approx([0.0, 0.9, 1.8])
    assert summarise(run, Slo()).spreads["client_queue_time"].mean == pytest.approx(900.0)  # type: ignore[union-attr]


def test_in_a_closed_loop_a_request_is_due_when_a_slot_is_free() -> None:
    run = run_virtually(load(FakeServer(ttft_s=1.0, tbt_s=0.0), asks(*[None] * 6), max_concurrency=2))
    assert [result.due_s for result in run.results] == pytest.approx([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    assert [one.ttft_s for one in answers_of(run.results)] == pytest.approx([1.0] * 6)


@pytest.mark.parametrize("cap", [1, 3, 7])
@pytest.mark.parametrize("due", [None, 0.0])
def test_the_cap_is_reached_and_never_exceeded(cap: int, due: float | None) -> None:
    def answer(number: int, _: dict[str, Any]) -> httpx2.Response | Sequence[tuple[float, bytes | Exception]]:
        if number % 5 == 4:
            return httpx2.Response(503, json={"error": {"message": "full"}})
        return [(0.1 * (1 + number % 3), chunk("x", "stop")), (0.0, usage(1) + DONE)]

    server = FakeServer(answer=answer)
    run = run_virtually(load(server, asks(*[due] * 40), max_concurrency=cap))
    assert server.most_running == run.max_concurrent == cap
    assert (len(answers_of(run.results)), len(failures_of(run.results))) == (32, 8)


GOOD = [(1.0, chunk("a", None, 1)), (1.0, chunk("b", "stop", 2)), (0.0, usage(2)), (0.0, DONE)]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (httpx2.Response(500, json={"error": {"message": "it broke", "code": 500}}), "HTTP 500", "it broke"),
        (httpx2.Response(429, text="slow down"), "HTTP 429", "slow down"),
        (httpx2.Response(404, json={"detail": "Not Found"}), "HTTP 404", "Not Found"),
        ([*GOOD[:1], (0.0, httpx2.ReadError("reset by peer"))], "ReadError", "reset by peer"),
        ([*GOOD[:1], (0.0, event({"error": {"message": "worker lost"}}))], "error in stream", "worker lost"),
        ([(0.0, b"data: {oops}\n\n"), *GOOD], "malformed", "oops"),
        ([(0.0, b"data: \xff\xfe\n\n"), *GOOD], "malformed", "no chunk"),
        ([(0.0, event({"choices": "none"})), *GOOD], "malformed", "choices"),
        ([(0.0, chunk("x", None, 3)), (0.0, chunk("x", None, 2)), *GOOD[2:]], "malformed", "went back by 1"),
        (GOOD[:3], "incomplete", "without [DONE]"),
        (GOOD[:1] + GOOD[2:], "incomplete", "without a finish_reason"),
        ([(0.0, chunk("a", "stop")), (0.0, DONE)], "no usage", "include_usage"),
        ([(0.0, chunk("", "stop")), (0.0, usage(0) + DONE)], "no token", "no token"),
        ([(0.0, DONE)], "incomplete", "finish_reason"),
        ([], "incomplete", "[DONE]"),
        ([*GOOD[:2], (50.0, b"")], "timeout", "no end after 10 s"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure(answer: Any, kind: str, words: str) -> None:
    server = FakeServer(answer=lambda number, _: answer if number == 1 else GOOD)
    run = run_virtually(load(server, asks(0.0, 0.0, 0.0), timeout_s=10.0))
    [(result, failure)] = failures_of(run.results)
    assert (result.index, failure.kind) == (1, kind)
    assert words in failure.message
    assert len(answers_of(run.results)) == 2, "the others are served"
    assert summarise(run, Slo()).failures == {kind: 1}


def test_nobody_answers() -> None:
    def refuse(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    run = run_virtually(load(refuse, asks(0.0)))  # type: ignore[arg-type]
    assert [failure.kind for _, failure in failures_of(run.results)] == ["ConnectError"]


def test_an_interrupted_run_returns_what_there_is() -> None:
    server = FakeServer(ttft_s=1.0, tbt_s=1.0)

    async def interrupted() -> Run:
        task = asyncio.ensure_future(load(server, asks(0.0, 0.5, 9.0), max_concurrency=1))
        await asyncio.sleep(4.0)  # the first is done, the second under way, the third not sent
        task.cancel()
        return await task

    run = run_virtually(interrupted())
    assert run.interrupted
    assert [result.index for result in run.results] == [0]
    summary = summarise(run, Slo())
    assert (summary.completed, summary.failed, summary.unfinished) == (1, 0, 2)
    assert run.duration_s == pytest.approx(4.0)
    assert server.num_running == 0, "the answer under way was closed"


def test_requests_that_do_not_fit_into_memory_are_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.loadgen.runner._AHEAD_BYTES", 100)
    server = FakeServer()
    run = run_virtually(load(server, asks(*[0.1 * index for index in range(20)])))
    assert len(answers_of(run.results)) == len(server.bodies) == 20
