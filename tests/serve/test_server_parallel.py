"""GET and POST /admin/parallel: access, refusals, and requests during a change."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import SAY
from fake_engine_install import told, until
from fake_server import client_of, fake_of, make_server
from oracle import Oracle
from starlette.testclient import TestClient
from test_changing_fleet import wait_for
from test_server_access import error_of
from test_server_client import engine_request, kill_engine, num_tokens, started, streamed
from thread_server import thread_server

from longspan.args import EngineArgs
from longspan.serve.errors import EngineLostError
from longspan.serve.server import Server

# ---------------------------------------------------------------- the API server


def test_the_spec_is_reported_and_changed(client: TestClient) -> None:
    assert client.get("/admin/parallel").json() == {"parallel": "2"}
    answer = client.post("/admin/parallel", json={"parallel": "3"})
    assert (answer.status_code, answer.json()) == (200, {"parallel": "3"})
    assert client.get("/admin/parallel").json() == {"parallel": "3"}


@pytest.mark.parametrize("body", [{}, {"parallel": None}, {"parallel": 3}, {"parallel": "x" * 5000}, []])
def test_a_spec_that_is_no_text_never_reaches_the_engine(client: TestClient, body: Any) -> None:
    error_of(client.post("/admin/parallel", json=body), 400)
    assert client.get("/admin/parallel").json() == {"parallel": "2"}


def test_refusals_by_the_engine_are_400_with_its_message(client: TestClient, server: Server) -> None:
    fake_of(server).failure = ValueError("parallel 9x is no spec")
    error = error_of(client.post("/admin/parallel", json={"parallel": "9x"}), 400)
    assert (error["message"], error["param"]) == ("parallel 9x is no spec", "parallel")


def test_only_a_server_with_keys_is_changed(server: Server) -> None:
    for method in ("GET", "POST"):
        error_of(client_of(server).request(method, "/admin/parallel", json={"parallel": "3"}), 401)
    client = client_of(make_server())
    assert client.get("/admin/parallel").json() == {"parallel": "2"}
    assert error_of(client.post("/admin/parallel", json={"parallel": "3"}), 405)["code"] == "no_api_key"


# ---------------------------------------------------------------- engine cores


def test_a_new_engine_core_takes_the_spec_too(events: Path) -> None:
    async def check() -> None:
        async with started(events) as client:
            assert client.parallel == "1"
            assert await client.reshard("3") == client.parallel == "3"
            await kill_engine(client)
            await until(lambda: len(told(events, "SetParallel")) == 2)
            assert num_tokens(await streamed(await client.submit([engine_request(SAY)]))) == 3
            assert client.parallel == "3"
            with pytest.raises(EngineLostError, match="the engine core was lost"):
                await client.reshard("die")

    asyncio.run(check())
    assert [event["parallel"] for event in told(events, "SetParallel")][:3] == ["3", "3", "die"]


# ---------------------------------------------------------------- all of it


def test_a_fleet_grows_and_shrinks_while_it_serves(tiny: Path, oracle: Oracle) -> None:
    """The workers are threads. `test_fleet_grows.py` counts worker processes."""
    given = EngineArgs(str(tiny), parallel="1", policy="chunked", skip_tokenizer_init=True, threads_per_rank=1)
    prompts = [[3 + (index * 37 + at * (index + 5)) % 190 for at in range(40 + 90 * index)] for index in range(4)]
    expected = [oracle.complete(prompt, 60).token_ids for prompt in prompts]
    with thread_server(given) as server:
        done = threading.Event()

        def ask(number: int) -> None:
            while not done.is_set():
                reply = server.complete(prompt=prompts[number % 4], max_tokens=60, stream=number >= 4)
                assert reply.token_ids == expected[number % 4]

        with ThreadPoolExecutor(8) as threads:
            asking = [threads.submit(ask, number) for number in range(8)]
            try:
                for spec in ("3", "pp2", "1", "2xpp2"):
                    wait_for(server, lambda engine: engine.load().num_running >= 2)
                    assert server.ask("POST", "/admin/parallel", {"parallel": spec}).body == {"parallel": spec}
            finally:
                done.set()
        for one in asking:
            one.result()
        for spec, words in (("13xpp5", "a fleet grows to at most 64"), ("x", "neither N nor [Nx][tpT][ppP]")):
            refused = server.ask("POST", "/admin/parallel", {"parallel": spec})
            assert refused.status == 400
            assert words in refused.body["error"]["message"]
        assert server.complete(prompt=prompts[3], max_tokens=60).token_ids == expected[3]
