"""Access: keys, request ids, sizes and times of bodies, and the contents of errors."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from fake_server import client_of, fake_of, make_server, routes_of
from openapi_spec_validator import validate
from starlette.types import Message, Receive, Scope, Send

from longspan.errors import ParameterError
from longspan.serve.app import make_app
from longspan.serve.errors import EngineLostError, QueueFullError
from longspan.serve.middleware import OPEN_PATHS, BodyLimit, Intake
from longspan.serve.settings import RequestLimits, ServerSettings

BODY = {"prompt": [1, 2, 3], "max_tokens": 2}
KEY = {"authorization": "Bearer sesame"}
JSON = {"content-type": "application/json"}


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error of an answer, which has the form that OpenAI's clients read."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_every_route_needs_the_key_except_three() -> None:
    server = make_server(api_keys=("sesame",))
    client, routes = client_of(server), routes_of(make_app(server))
    assert {"/v1/models", "/v1/completions", "/tokenize", "/metrics", "/openapi.json"} <= {path for _, path in routes}
    for method, path in routes:
        status = client.request(method, path).status_code
        assert (status == 401) == (path not in OPEN_PATHS), (method, path, status)
        assert client.request(method, path, headers=KEY).status_code != 401
    assert {"/live", "/health", "/version"} == OPEN_PATHS


@pytest.mark.parametrize("path", ["/nothing", "/live/", "/live/x", "/%6cive%00", "/livex", "/LIVE"])
def test_unknown_routes_need_the_key_too(path: str) -> None:
    client = client_of(make_server(api_keys=("sesame",)))
    assert client.get(path, follow_redirects=False).status_code == 401
    assert client.get(path, headers=KEY, follow_redirects=False).status_code != 401


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer one", 200),
        ("Bearer two", 200),
        ("bearer two", 200),
        ("Bearer  two ", 200),
        ("Bearer three", 401),
        ("Bearer on", 401),
        ("Bearer one two", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        ("Basic one", 401),
        ("one", 401),
        ("", 401),
    ],
)
def test_any_of_several_keys_will_do_and_only_as_a_bearer_token(header: str, status: int) -> None:
    response = client_of(make_server(api_keys=("one", "two"))).get("/v1/models", headers={"authorization": header})
    assert response.status_code == status
    if status == 401:
        error = error_of(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert "one" not in error["message"]


def test_a_key_may_be_any_text_without_spaces() -> None:
    client = client_of(make_server(api_keys=("schlüssel",)))
    given = {b"authorization": "Bearer schlüssel".encode()}
    assert client.get("/v1/models", headers=given).status_code == 200
    assert client.get("/v1/models", headers=KEY).status_code == 401


def test_without_keys_every_client_is_served() -> None:
    assert client_of(make_server()).get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_keys": ("good", "")}, "api_keys"),
        ({"api_keys": ("two words",)}, "api_keys"),
        ({"api_keys": ("line\nbreak",)}, "api_keys"),
        ({"root_path": "api"}, "'api'"),
        ({"root_path": "/api/"}, "'/api/'"),
        ({"metrics_prefix": "my-metrics:"}, "'my-metrics:'"),
        ({"metrics_prefix": ""}, "metrics_prefix"),
        ({"model_names": ("",)}, "model_names"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        ServerSettings(**{"model_names": ("m",), **settings})
    assert [caught.value.parameter] == [*settings]
    assert "two words" not in str(caught.value)


def test_keys_are_not_in_the_text_of_settings() -> None:
    assert "sesame" not in repr(ServerSettings(model_names=("m",), api_keys=("sesame",)))


def test_a_request_id_is_returned_and_names_the_answer() -> None:
    client = client_of(make_server())
    response = client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine-7"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("mine-7", "cmpl-mine-7")
    streamed = client.post("/v1/completions", json=BODY | {"stream": True}, headers={"x-request-id": "mine-8"})
    assert streamed.headers["x-request-id"] == "mine-8"
    assert json.loads(streamed.text.partition("data: ")[2].partition("\n")[0])["id"] == "cmpl-mine-8"


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "\x7f"])
def test_a_request_without_a_usable_id_gets_one(given: str | None) -> None:
    client = client_of(make_server())
    ids = {
        client.get(path, headers={} if given is None else {"x-request-id": given}).headers["x-request-id"]
        for path in ("/live", "/nothing", "/v1/models")
    }
    assert len(ids) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", id_) for id_ in ids)


def test_refusals_carry_the_request_id_too() -> None:
    client = client_of(make_server(api_keys=("sesame",)))
    assert client.get("/v1/models", headers={"x-request-id": "mine-9"}).headers["x-request-id"] == "mine-9"


def test_clients_cannot_forge_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="longspan.access"):
        client_of(make_server(api_keys=("sesame",))).get("/a%0a2026 forged", headers=KEY)
    assert "\n" not in caplog.records[-1].getMessage()
    assert "sesame" not in caplog.text


@pytest.mark.parametrize(("path", "is_logged"), {"/live": False, "/metrics": False, "/v1/models": True}.items())
def test_access_log_omits_successful_probes(path: str, is_logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="longspan.access"):
        assert client_of(make_server()).get(path).status_code == 200
    assert [record.fields["path"] for record in caplog.records] == [path] * is_logged  # type: ignore[attr-defined]


def test_access_log_has_refused_probes_and_can_be_disabled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="longspan.access"):
        client_of(make_server(api_keys=("sesame",))).get("/metrics")
        client_of(make_server(access_log=False)).get("/v1/models")
    [record] = caplog.records
    assert record.fields | {"duration_s": 0} == {  # type: ignore[attr-defined]
        "method": "GET",
        "path": "/metrics",
        "status": 401,
        "duration_s": 0,
        "request_id": record.fields["request_id"],  # type: ignore[attr-defined]
    }


def test_unknown_routes_and_methods_are_openai_errors() -> None:
    client = client_of(make_server())
    assert error_of(client.get("/v1/nothing"), 404)["type"] == "not_found_error"
    response = client.get("/v1/completions")
    assert error_of(response, 405)["type"] == "invalid_request_error"
    assert response.headers["allow"] == "POST"


def test_a_model_that_is_not_served_is_404() -> None:
    client = client_of(make_server(model_names=("tiny", "alias")))
    assert client.post("/v1/completions", json=BODY | {"model": "alias"}).json()["model"] == "alias"
    error = error_of(client.post("/v1/completions", json=BODY | {"model": "other"}), 404)
    assert error["param"] == "model"
    assert "'other'" in error["message"]
    cards = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "alias"]
    assert error["code"] == error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert [client.get(f"/v1/models/{name}").json() for name in ("tiny", "alias")] == cards


def test_a_model_whose_name_is_a_path_is_found_by_it() -> None:
    client = client_of(make_server(model_names=("HuggingFaceTB/SmolLM2-135M", "/models/tiny")))
    for name in ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB%2FSmolLM2-135M", "/models/tiny"):
        assert client.get(f"/v1/models/{name}").json()["id"] == name.replace("%2F", "/")


def test_whole_answers_have_null_for_unrequested_prompt_fields() -> None:
    client = client_of(make_server())
    [choice] = client.post("/v1/completions", json=BODY).json()["choices"]
    assert (choice["prompt_logprobs"], choice["prompt_token_ids"]) == (None, None)
    [choice] = client.post("/v1/completions", json=BODY | {"return_token_ids": True}).json()["choices"]
    assert choice["prompt_token_ids"] == [1, 2, 3]


def test_several_greedy_choices_are_served() -> None:
    answer = client_of(make_server()).post("/v1/completions", json=BODY | {"n": 3, "temperature": 0})
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("path", ["/live", "/health", "/version", "/metrics", "/v1/models", "/openapi.json"])
def test_head_equals_get(path: str) -> None:
    client = client_of(make_server(api_keys=("sesame",)))
    head, get = client.head(path, headers=KEY), client.get(path, headers=KEY)
    assert head.status_code == get.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]
    assert client.head(path).status_code == (200 if path in OPEN_PATHS else 401)
    assert client.head("/v1/completions", headers=KEY).status_code == 405


def test_web_pages_of_allowed_origins_may_ask() -> None:
    page = {"origin": "https://page.example"}
    wants = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    client = client_of(make_server(api_keys=("sesame",), allowed_origins=("https://page.example",)))
    leave = client.options("/v1/completions", headers=page | wants)
    assert leave.status_code == 200, "a browser asks without the key"
    assert leave.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in leave.headers["access-control-allow-headers"].lower()
    for key, status in ((KEY, 200), ({}, 401)):
        answer = client.post("/v1/completions", json=BODY, headers=page | key)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    other = client.options("/v1/completions", headers=wants | {"origin": "https://other.example"})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    everybody = client_of(make_server(allowed_origins=("*",)))
    assert everybody.get("/v1/models", headers=page).headers["access-control-allow-origin"] == "*"
    nobody = client_of(make_server())
    assert nobody.options("/v1/completions", headers=page | wants).status_code == 405
    assert "access-control-allow-origin" not in nobody.get("/v1/models", headers=page).headers


def test_bodies_above_the_limit_are_413_with_and_without_a_length() -> None:
    client = client_of(make_server(limits=RequestLimits(max_body_bytes=100)))
    text = json.dumps(BODY).encode()
    assert client.post("/v1/completions", content=text.ljust(100), headers=JSON).status_code == 200
    error = error_of(client.post("/v1/completions", content=text.ljust(101), headers=JSON), 413)
    assert "--max-body-bytes" in error["message"]
    told_less = {"content-length": "9" * 5000, **JSON}
    assert client.post("/v1/completions", content=text, headers=told_less).status_code == 413


def test_headers_above_the_limit_are_431() -> None:
    client = client_of(make_server(max_header_bytes=2000))
    assert client.get("/v1/models", headers={"x-filler": "x" * 1500}).status_code == 200
    for large in ({"x-filler": "x" * 2000}, {f"x-filler-{i}": "x" * 10 for i in range(100)}):
        assert "--h11-max-incomplete-event-size" in error_of(client.get("/v1/models", headers=large), 431)["message"]
    assert client.get("/v1/models", params={"q": "x" * 2000}).status_code == 431


def ask(server: Any, messages: list[Message], *, end: str = "wait") -> list[Message]:
    """Return the response to a client whose body has these messages, after which it waits or leaves."""
    sent: list[Message] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
    }

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        if end == "leave":
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        async with asyncio.timeout(60):
            await make_app(server)(scope, receive, send)

    asyncio.run(run())
    return sent


def piece(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_in_pieces_is_read_no_further_than_the_limit() -> None:
    server = make_server(limits=RequestLimits(max_body_bytes=100))
    messages = [piece(b" " * 60) for _ in range(10)]
    assert ask(server, messages)[0]["status"] == 413
    assert len(messages) == 8


def test_the_bodies_of_open_requests_are_bounded_together() -> None:
    sent: list[Message] = []
    reached = asyncio.Event()

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        assert (await receive())["body"] == b"x" * 60
        reached.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        return piece(b"x" * 60, more=False)

    async def send(message: Message) -> None:
        sent.append(message)

    async def check() -> None:
        limit, scope = (
            BodyLimit(app, max_bytes=100, max_total_bytes=100, timeout_s=10.0, intake=Intake()),
            {"type": "http", "headers": []},
        )
        for _ in range(2):
            first = asyncio.create_task(limit(scope, receive, send))
            await reached.wait()
            await limit(scope, receive, send)
            assert sent[0]["status"] == 503
            assert b"(--max-total-body-bytes)" in sent[1]["body"]
            first.cancel()  # its bytes are free for the next one
            await asyncio.wait({first})
            sent.clear()
            reached.clear()

    asyncio.run(check())


@pytest.mark.parametrize("sent_bytes", [64 * 1024, 2**20])
@pytest.mark.parametrize("headers", [[(b"content-length", b"1048576")], [(b"transfer-encoding", b"chunked")]])
def test_large_uploads_that_do_not_end_do_not_block_small_bodies(
    headers: list[tuple[bytes, bytes]], sent_bytes: int
) -> None:
    statuses: list[int] = []

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Message) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    def body_of(num_bytes: int, *, ends: bool) -> Receive:
        begun = asyncio.Event()

        async def receive() -> Message:
            if begun.is_set():
                await asyncio.Event().wait()
            begun.set()
            return piece(b"x" * num_bytes, more=not ends)

        return receive

    async def check() -> None:
        small = {"type": "http", "headers": [(b"content-length", b"131072")]}
        limit = BodyLimit(app, max_bytes=2**20, max_total_bytes=16 * 2**20, timeout_s=60.0, intake=Intake())
        number = 16 * 2**20 // sent_bytes
        uploads = [
            asyncio.create_task(limit({"type": "http", "headers": headers}, body_of(sent_bytes, ends=False), send))
            for _ in range(number)
        ]
        await asyncio.wait(uploads, timeout=0.1)
        assert statuses == [503] * (number // 8), "of the uploads over the limit"
        await limit(small, body_of(128 * 1024, ends=True), send)
        assert statuses[number // 8 :] == [200]
        for upload in uploads:
            upload.cancel()
        await asyncio.wait(uploads)

    asyncio.run(check())


@pytest.mark.parametrize(("num_bytes", "status"), [(2**20, 200), (2**20 + 1, 413)])
def test_the_only_body_may_take_all_bytes_and_a_larger_one_never_fits(num_bytes: int, status: int) -> None:
    server = make_server(max_total_body_bytes=2**20)
    whole = json.dumps(BODY).encode().ljust(num_bytes)
    start, body = ask(server, [piece(whole[: 2**19]), piece(whole[2**19 :], more=False)])[:2]
    assert start["status"] == status
    assert (b"(--max-total-body-bytes)" in body["body"]) == (status == 413)


def test_a_server_may_begin_to_drain_while_a_body_times_out() -> None:
    sent: list[Message] = []
    intake = Intake()

    async def app(_: Scope, __: Receive, ___: Send) -> None:
        raise AssertionError

    async def receive() -> Message:
        try:
            return await asyncio.Event().wait() and {}
        except asyncio.CancelledError:  # the deadline is expiring
            intake.drain()
            raise

    async def send(message: Message) -> None:
        sent.append(message)

    limit = BodyLimit(app, max_bytes=100, max_total_bytes=100, timeout_s=0.01, intake=intake)
    asyncio.run(limit({"type": "http", "headers": []}, receive, send))
    assert sent[0]["status"] == 503


def test_a_slow_body_is_408_and_the_connection_ends() -> None:
    [start, body] = ask(make_server(body_timeout_s=0.05), [piece(b'{"prompt":')])
    assert start["status"] == 408
    assert dict(start["headers"])[b"connection"] == b"close"
    assert json.loads(body["body"])["error"]["message"] == "the body did not come within 0.05 s (--body-timeout)"


def test_half_a_body_of_a_client_that_has_left_is_not_served() -> None:
    server = make_server()
    whole = json.dumps(BODY).encode()
    assert ask(server, [piece(whole, more=True)], end="leave") == []
    assert ask(server, [piece(whole, more=False)])[0]["status"] == 200


@pytest.mark.parametrize("path", ["/live", "/api/live"])
def test_the_prefix_of_a_proxy_may_have_been_taken_off_or_not(path: str) -> None:
    server = make_server(root_path="/api", api_keys=("sesame",))
    client = client_of(server)
    assert client.get(path).status_code == 200
    for closed in ("/v1/models", "/api/v1/models"):
        assert client.get(closed).status_code == 401
        assert client.get(closed, headers=KEY).status_code == 200
    assert client.get("/apilive").status_code == 401
    assert client.get("/openapi.json", headers=KEY).json()["servers"] == [{"url": "/api"}]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_reveals_no_internals(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server()
    fake_of(server).failure, fake_of(server).num_sent = RuntimeError("secret of /usr/lib/secret.py"), 0
    response = client_of(server).post("/v1/completions", json=BODY | {"stream": stream}, headers={"x-request-id": "r1"})
    error = error_of(response, 500)
    assert (error["type"], response.headers["x-request-id"]) == ("server_error", "r1")
    assert "r1" in error["message"]
    assert not re.search(r"secret|Traceback|RuntimeError|\.py|/", response.text)
    assert any("r1" in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"null", b'{"prompt": [1], "x": ' + b"[" * 100 + b"]" * 100 + b"}", b"\xff", b"", b'"\xed\xa0\x80"'],
)
def test_a_body_that_is_no_request_is_400(body: bytes) -> None:
    response = client_of(make_server()).post("/v1/completions", content=body, headers=JSON)
    assert not re.search(r"Traceback|\.py|site-packages", error_of(response, 400)["message"])


def test_a_full_queue_says_when_to_come_again() -> None:
    server = make_server()
    fake_of(server).failure, fake_of(server).num_sent = QueueFullError("2 requests are waiting"), 0
    response = client_of(server).post("/v1/completions", json=BODY)
    assert error_of(response, 503)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1


def test_a_lost_engine_is_500_before_the_stream_and_an_event_in_it() -> None:
    server = make_server()
    fake_of(server).failure, fake_of(server).num_sent = EngineLostError("rank 1 is gone"), 0
    for stream in (False, True):
        response = client_of(server).post("/v1/completions", json=BODY | {"stream": stream})
        assert "rank 1" in error_of(response, 500)["message"]
    fake_of(server).num_sent = 1
    events = client_of(server).post("/v1/completions", json=BODY | {"stream": True, "return_token_ids": True})
    assert events.status_code == 200
    first, last = (json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: "))
    assert first["choices"][0]["token_ids"] == [5]
    assert (last["error"]["code"], last["error"]["type"]) == ("500", "server_error")


def test_health_reports_whether_requests_are_served() -> None:
    server = make_server()
    client = client_of(server)
    assert client.get("/health").json() == {"status": "ok"}
    fake_of(server).state = "restarting"
    assert "restarting" in error_of(client.get("/health"), 503)["message"]
    fake_of(server).state = "serving"
    server.intake.drain()
    for response in (client.get("/health"), client.post("/v1/completions", json=BODY)):
        assert "shutting down" in error_of(response, 503)["message"]
        assert "retry-after" in response.headers
    assert client.get("/live").status_code == 200


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_a_deadline_must_be_a_time(given: str) -> None:
    response = client_of(make_server()).post("/v1/completions", json=BODY, headers={"x-request-timeout": given})
    assert repr(given) in error_of(response, 400)["message"]


@pytest.mark.parametrize("settings", [{}, {"api_keys": ("sesame",)}, {"root_path": "/api"}])
def test_the_openapi_document_is_valid_and_has_every_route(settings: dict[str, Any]) -> None:
    server = make_server(**settings)
    document = client_of(server).get("/openapi.json", headers=KEY).json()
    validate(document)
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    routes = {(method, path.replace(":path", "")) for method, path in routes_of(make_app(server)) if method != "HEAD"}
    missing = routes - described
    assert missing == {("GET", "/openapi.json")}
    assert ("securitySchemes" in document["components"]) == ("api_keys" in settings)
    for path, methods in document["paths"].items():
        for method in methods.values():
            needs_key = path not in OPEN_PATHS
            assert ("401" in method["responses"]) == needs_key, path
            assert ("api_keys" not in settings) or (method.get("security") == []) != needs_key, path


@pytest.mark.parametrize(
    ("bound", "prompts", "flag"),
    [
        ({"max_num_queued_reqs": 2}, [[1]] * 3, "--max-num-queued-reqs"),
        ({"max_num_queued_tokens": 5}, [[1] * 3] * 2, "--max-num-queued-tokens"),
    ],
)
def test_a_request_larger_than_the_queue_has_no_retry_header(
    bound: dict[str, int], prompts: list[list[int]], flag: str
) -> None:
    client = client_of(make_server(**bound))
    response = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 2})
    error = error_of(response, 400)
    assert error["param"] == "prompt"
    assert flag in error["message"]
    assert "retry-after" not in response.headers
    for within in (prompts[1:], [[1] * 9]):
        assert client.post("/v1/completions", json={"prompt": within, "max_tokens": 2}).status_code == 200
