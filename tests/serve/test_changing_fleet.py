"""Requests during and after a change of the fleet: their bounds, their settings, and the reports of the server."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from oracle import Oracle
from server_client import Reply
from test_every_policy import DROPPING, SHORT, Case
from thread_server import ThreadServer, thread_server

from longspan.core.cluster import Cluster
from longspan.core.engine import Engine
from longspan.runtime.rank import Rank
from longspan.runtime.worker import Worker

PROMPTS = [[3 + (at * 37 + seed * at * at) % 190 for at in range(300)] for seed in (1, 2, 3)]
SPARSE = Case(name="csps", engine={"parallel": "2"}, options={"threshold": "30", "csa": DROPPING})


def length_in(server: ThreadServer) -> int:
    [card] = server.ask("GET", "/v1/models").body["data"]
    return int(card["max_model_len"])


def wait_for(server: ThreadServer, is_true: object) -> None:
    deadline_s = time.monotonic() + 60
    while not is_true(server.service.engine):  # type: ignore[operator]
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def is_regrouping(engine: Engine) -> bool:
    return engine.is_regrouping


def is_running(engine: Engine) -> bool:
    return engine.load().num_running > 0


def begin_change(server: ThreadServer, threads: ThreadPoolExecutor, spec: str) -> tuple[Future[Reply], Future[Reply]]:
    """Request another fleet while a request runs. Return the pending answers."""
    running = threads.submit(partial(server.complete, prompt=SHORT, max_tokens=400, ignore_eos=True))
    wait_for(server, is_running)
    change = threads.submit(partial(server.ask, "POST", "/admin/parallel", {"parallel": spec}))
    wait_for(server, is_regrouping)
    return change, running


@pytest.fixture
def slow_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks take a place in another cluster slowly."""
    take_place = Rank._take_place

    def slowly(self: Rank, cluster: Cluster) -> tuple[Worker | None, int]:
        time.sleep(0.3)
        return take_place(self, cluster)

    monkeypatch.setattr(Rank, "_take_place", slowly)


def test_sparse_attention_that_was_turned_off_stays_off_after_the_engine_core_is_killed(
    tiny: Path, oracle: Oracle
) -> None:
    """The new engine core takes the fleet and the options first, and then the requests."""
    expected = [oracle.complete(prompt, 24).token_ids for prompt in PROMPTS]
    with thread_server(SPARSE.args(tiny)) as server, ThreadPoolExecutor(3) as threads:
        dropped = [server.complete(prompt=prompt, max_tokens=24, ignore_eos=True).token_ids for prompt in PROMPTS]
        assert dropped != expected
        assert server.ask("POST", "/admin/policy", {"csa": "off"}).status == 200
        assert server.ask("POST", "/admin/parallel", {"parallel": "3"}).status == 200
        answers = [
            threads.submit(partial(server.complete, prompt=prompt, max_tokens=24, ignore_eos=True))
            for prompt in PROMPTS
        ]
        wait_for(server, is_running)
        server.kill("engine")
        assert [answer.result().token_ids for answer in answers] == expected


@pytest.mark.usefixtures("slow_change")
def test_sparse_attention_is_off_from_the_answer_on_also_during_a_change_of_the_fleet(
    tiny: Path, oracle: Oracle
) -> None:
    with thread_server(SPARSE.args(tiny)) as server, ThreadPoolExecutor(5) as threads:
        change, running = begin_change(server, threads, "3")
        assert server.ask("POST", "/admin/policy", {"csa": "off"}).status == 200
        assert server.service.engine.is_regrouping
        asking = partial(server.complete, max_tokens=24, ignore_eos=True)
        answers = [threads.submit(partial(asking, prompt=prompt)) for prompt in PROMPTS]
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.result().token_ids == oracle.complete(prompt, 24).token_ids
        assert (change.result().status, running.result().status) == (200, 200)


@pytest.mark.usefixtures("slow_change")
@pytest.mark.parametrize("policy", ["context", "loongserve"])
def test_the_longest_request_follows_the_fleet(tiny: Path, oracle: Oracle, policy: str) -> None:
    """It does so from the beginning of a change on, and in a new engine core."""
    case = Case(name=policy, engine={"parallel": "1"})
    prompt = [3 + at * 37 % 190 for at in range(1200)]
    with thread_server(case.args(tiny)) as server, ThreadPoolExecutor(5) as threads:
        complete = partial(server.complete, prompt=prompt, max_tokens=4)
        assert complete().body["error"]["code"] == "context_length_exceeded"
        change, running = begin_change(server, threads, "4")
        while length_in(server) != 4 * 960:
            time.sleep(0.001)
        assert server.service.engine.is_regrouping
        expected = oracle.complete(prompt, 4).token_ids
        assert complete().token_ids == expected
        assert (change.result().status, running.result().status) == (200, 200)
        assert "3839" in str(server.ask("GET", "/openapi.json").body["components"]["schemas"]["CompletionRequest"])
        answer = threads.submit(complete)
        server.kill("engine")
        assert answer.result().token_ids == complete().token_ids == expected
        change, running = begin_change(server, threads, "1")
        refused = complete()
        assert (refused.status, refused.body["error"]["code"]) == (400, "context_length_exceeded")
        assert refused.body["error"]["param"] == "prompt"
        assert (change.result().status, running.result().status) == (200, 200)
        assert (complete().body["error"]["code"], length_in(server)) == ("context_length_exceeded", 960)


@pytest.mark.usefixtures("slow_change")
def test_a_new_engine_core_serves_once_it_has_taken_earlier_changes(tiny: Path) -> None:
    """While it changes the fleet, its health is 503."""
    with thread_server(SPARSE.args(tiny)) as server, ThreadPoolExecutor(1) as threads:
        server.ask("POST", "/admin/policy", {"csa": "off"})
        server.ask("POST", "/admin/parallel", {"parallel": "3"})
        first, killed = server.service, threads.submit(server.kill, "engine")
        while not killed.done():
            parallel, policy, health = (
                server.ask("GET", path) for path in ("/admin/parallel", "/admin/policy", "/health")
            )
            if health.status == 200 and server.service is not first:
                parallel, policy = (server.ask("GET", path) for path in ("/admin/parallel", "/admin/policy"))
                assert (parallel.body["parallel"], policy.body["options"]["csa"]) == ("3", "off")
        killed.result()


def test_options_survive_a_fleet_that_a_new_engine_core_refuses(
    tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with thread_server(SPARSE.args(tiny)) as server:
        server.ask("POST", "/admin/policy", {"csa": "off"})
        server.ask("POST", "/admin/parallel", {"parallel": "3"})

        def refuse(*_: object) -> None:
            raise ValueError("no memory")

        monkeypatch.setattr("longspan.service.Service.reshard", refuse)
        server.kill("engine")
        assert server.ask("GET", "/admin/parallel").body == {"parallel": "2"}
        reply = server.complete(prompt=PROMPTS[0], max_tokens=24, ignore_eos=True)
        assert reply.token_ids == oracle.complete(PROMPTS[0], 24).token_ids
