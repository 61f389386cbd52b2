"""GET and POST /admin/policy: access, refusals and their status. Changes outlive an engine core."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import SAY
from fake_engine_install import told, until
from fake_server import client_of, fake_of, make_server
from server_client import Client, Wire, completion, post
from server_process import ServerProcess
from starlette.testclient import TestClient
from test_server_access import error_of
from test_server_client import engine_request, kill_engine, num_tokens, started, streamed

from longspan.serve.errors import EngineLostError
from longspan.serve.server import Server

# ---------------------------------------------------------------- the API server


def test_the_policy_is_told_and_changed(client: TestClient, server: Server) -> None:
    before = {
        "policy": "tetris",
        "options": {"improvement_rate": "auto", "chunking": True, "min_chunk": 256, "sp_sizes": "1,2"},
        "changeable": ["improvement_rate", "chunking", "min_chunk"],
    }
    assert client.get("/admin/policy").json() == before
    answer = client.post("/admin/policy", json={"improvement_rate": 0.3, "chunking": False, "min_chunk": 64})
    assert answer.status_code == 200
    assert fake_of(server).updates == [{"improvement_rate": "0.3", "chunking": "false", "min_chunk": "64"}]
    assert answer.json() == client.get("/admin/policy").json() != before
    assert client.post("/admin/policy", json={"improvement_rate": "auto"}).status_code == 200
    assert client.post("/admin/policy", json={"improvement_rate": None}).status_code == 200, "null takes it back"
    assert fake_of(server).updates[1:] == [{"improvement_rate": "auto"}, {"improvement_rate": None}]


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"rate": 1}, 400, "rate", "policy tetris has no option 'rate'; its options that may change"),
        ({"x" * 5000: 1}, 400, "x" * 60, "has no option 'xxx"),
        (
            {"sp_sizes": "1,4"},
            409,
            "sp_sizes",
            "restart, and give policy option sp_sizes=VALUE; options that may change",
        ),
        ({"min_chunk": 1, "sp_sizes": "1"}, 409, "sp_sizes", "cannot change while it serves"),
        ({"improvement_rate": [0.3]}, 400, "improvement_rate", "improvement_rate"),
        ({"improvement_rate": {"a": 1}}, 400, "improvement_rate", "improvement_rate"),
        ({"improvement_rate": "x" * 5000}, 400, "improvement_rate", "at most 4096 characters"),
        ({"min_chunk": 10**400}, 400, "min_chunk", "at most"),
        ([], 400, None, "must be a JSON object"),
        ({}, 400, None, "give an option of policy tetris that is to change, and its value: improvement_rate, chunking"),
    ],
)
def test_an_update_refused_by_the_api_server_never_reaches_the_engine(
    client: TestClient, server: Server, body: Any, status: int, param: str | None, words: str
) -> None:
    error = error_of(client.post("/admin/policy", json=body), status)
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 500
    assert not fake_of(server).updates


def test_an_update_refused_by_the_engine_is_400_with_its_message(client: TestClient, server: Server) -> None:
    fake_of(server).failure = ValueError("min_chunk must be at least 1, but 0 given")
    error = error_of(client.post("/admin/policy", json={"min_chunk": 0}), 400)
    assert (error["message"], error["param"]) == ("min_chunk must be at least 1, but 0 given", "min_chunk")


def test_without_the_key_it_is_neither_told_nor_changed(server: Server) -> None:
    client = client_of(server)
    for method in ("GET", "POST"):
        error_of(client.request(method, "/admin/policy", json={"min_chunk": 1}), 401)
    assert not fake_of(server).updates


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_a_server_without_keys_tells_but_is_not_changed(root_path: str) -> None:
    server = make_server(root_path=root_path)
    client = client_of(server)
    assert client.get("/admin/policy").status_code == 200
    for prefix in {"", root_path}:
        error = error_of(client.post(f"{prefix}/admin/policy", json={"min_chunk": 1}), 405)
        assert error["code"] == "no_api_key"
        assert "--api-key" in error["message"]
    assert not fake_of(server).updates
    assert set(client.get("/openapi.json").json()["paths"]["/admin/policy"]) == {"get"}


def test_a_page_in_a_browser_cannot_send_it(client: TestClient, server: Server) -> None:
    response = client.post("/admin/policy", content=b'{"min_chunk": 1}', headers={"content-type": "text/plain"})
    assert "application/json" in error_of(response, 415)["message"]
    assert not fake_of(server).updates


@pytest.mark.parametrize(("state", "draining"), [("restarting", False), ("serving", True)])
def test_nothing_is_changed_while_nothing_is_served(
    client: TestClient, server: Server, state: Any, draining: bool
) -> None:
    fake_of(server).state, server.intake.draining = state, draining
    response = client.post("/admin/policy", json={"min_chunk": 1})
    error_of(response, 503)
    assert response.headers["retry-after"] == "5"
    assert client.get("/admin/policy").status_code == 200, "the policy in force can still be read"


def test_the_document_has_the_options_that_may_change(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["PolicyUpdate"]
    assert set(schema["properties"]) == {"improvement_rate", "chunking", "min_chunk"}
    assert schema["additionalProperties"] is False
    assert {"200", "400", "401", "409", "503"} <= set(document["paths"]["/admin/policy"]["post"]["responses"])


# ---------------------------------------------------------------- engine cores


def test_changes_reach_the_engine_and_the_next_one(events: Path) -> None:
    async def check() -> None:
        async with started(events) as client:
            settings = client.policy
            assert settings is not None
            assert settings.options["rate"] == 0.5
            assert (await client.update_policy({"rate": "0.1"})).options["rate"] == "0.1"
            with pytest.raises(ValueError, match="rate refuse is not possible"):
                await client.update_policy({"rate": "refuse"})
            await kill_engine(client)
            await until(lambda: len(told(events, "SetPolicy")) == 3)
            assert num_tokens(await streamed(await client.submit([engine_request(SAY)]))) == 3
            assert client.policy is not None
            assert client.policy.options["rate"] == "0.1", "a new engine core is set as the last one was"

    asyncio.run(check())
    assert [event["options"] for event in told(events, "SetPolicy")] == [
        {"rate": "0.1"},
        {"rate": "refuse"},
        {"rate": "0.1", "cut": None},
    ]


def test_a_new_engine_that_refuses_the_changes_is_told_of(events: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with started(events) as client:
            await client.update_policy({"rate": "once"})
            await kill_engine(client)
            await until(lambda: "made before the restart: rate once" in caplog.text)
            assert client.policy is not None
            assert client.policy.options["rate"] == 0.5

    asyncio.run(check())


def test_an_update_does_not_wait_for_a_lost_engine(events: Path) -> None:
    async def check() -> None:
        async with started(events) as client:
            with pytest.raises(EngineLostError, match="the engine core was lost"):
                await client.update_policy({"rate": "die"})
            await until(lambda: client.state == "serving")
        with pytest.raises(EngineLostError):
            await client.update_policy({"rate": "0.1"})

    asyncio.run(check())
    assert not [event for event in told(events, "SetPolicy") if event["options"] != {"rate": "die"}]


# ---------------------------------------------------------------- a real server


def num_losses(server: ServerProcess) -> int:
    """Return the number of losses that the API server has logged. No request runs until lost processes are replaced."""
    return len(
        re.findall(
            "new workers are being started|the other instances continue|starting another engine core", server.text()
        )
    )


def rate_of(client: Client) -> object:
    return client.ask("GET", "/admin/policy").body["options"]["improvement_rate"]


def test_a_policy_changes_while_requests_run_and_they_stay_as_they_are(tetris_server: ServerProcess) -> None:
    client = tetris_server.client
    prompt = [n % 50 for n in range(300)]
    usual = client.complete(prompt=prompt, max_tokens=60).token_ids
    asked = []

    def change(rate: float) -> None:
        reply = client.ask("POST", "/admin/policy", {"improvement_rate": rate, "chunking": False})
        assert reply.status == 200, reply
        assert reply.body["options"]["improvement_rate"] == rate
        asked.append(client.metrics()["num_requests_running"])

    headers = b"content-type: application/json\r\nauthorization: Bearer sesame\r\n"
    long = json.dumps(completion(prompt=[1, 2, 3], max_tokens=4000)).encode()
    with Wire(client) as wire, ThreadPoolExecutor(4) as threads:
        wire.send(post(long, headers=headers))  # it runs until its client leaves
        answers = [threads.submit(client.complete, prompt=prompt, max_tokens=60) for _ in range(4)]
        client.wait_until_running(1)
        for rate in (0.3, 0.6):
            change(rate)
    assert min(asked) > 0, "something ran meanwhile"
    assert all(answer.result().token_ids == usual for answer in answers)
    assert rate_of(client) == 0.6
    refused = client.ask("POST", "/admin/policy", {"improvement_rate": 7})
    assert (refused.status, refused.body["error"]["param"]) == (400, "improvement_rate")
    assert rate_of(client) == 0.6


@pytest.mark.parametrize("what", ["worker", pytest.param("engine", marks=pytest.mark.attack)])
def test_changed_options_outlive_lost_processes(tetris_server: ServerProcess, what: str) -> None:
    client = tetris_server.client
    client.ask("POST", "/admin/policy", {"improvement_rate": 0.45})
    num_before = num_losses(tetris_server)
    tetris_server.kill(what)
    deadline_s = time.monotonic() + 60
    while num_losses(tetris_server) == num_before:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    client.wait_for_health(200, 60)
    assert rate_of(client) == 0.45
    assert len(client.good_answer()) == 4
