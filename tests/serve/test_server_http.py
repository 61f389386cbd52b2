"""Invalid requests on the wire: 4xx with an error body, never a hang, and no effect on other clients."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import server_client
from engines import Row, pairwise
from server_client import Client, Reply, Wire, num_ended
from server_process import ServerProcess

MAX_BODY_BYTES = 200_000
MAX_HEADER_BYTES = 64 * 1024
GOOD = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 2, "return_token_ids": True}


KEY = b"authorization: Bearer sesame\r\n"


@pytest.fixture(scope="module")
def client(tetris_server: ServerProcess) -> Client:
    return tetris_server.client


def post(body: bytes, path: str = "/v1/completions", headers: bytes = b"content-type: application/json\r\n") -> bytes:
    return server_client.post(body, path, KEY + headers)


@pytest.fixture(scope="module")
def usual_answer(client: Client) -> list[int]:
    return client.good_answer()


@pytest.fixture(autouse=True)
def good_request_afterwards(client: Client, usual_answer: list[int]) -> Iterator[None]:
    """After every test, other clients are served as before."""
    yield
    assert client.good_answer() == usual_answer


def ask(client: Client, *data: bytes, has_body: bool = True) -> Reply:
    with Wire(client) as wire:
        return wire.send(*data).answer(has_body=has_body)


def check_error(answer: Reply, *statuses: int) -> dict[str, Any]:
    """It is refused as OpenAI's clients expect, with a remedy."""
    assert 400 <= answer.status < 500, answer
    assert not statuses or answer.status in statuses, answer
    assert answer.headers["content-type"] == "application/json"
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and "Traceback" not in error["message"]
    return dict(error)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" + KEY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
NO_HTTP = {
    "no version": b"GET /live\r\n\r\n",
    "two spaces": b"GET  /live HTTP/1.1\r\nhost: a\r\n\r\n",
    "no target": b"GET HTTP/1.1\r\nhost: a\r\n\r\n",
    "lower case": b"GET /live http/1.1\r\nhost: a\r\n\r\n",
    "bytes in the target": b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n",
    "a zero byte": b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "binary": bytes(range(256)) + b"\r\n\r\n",
    "no host": b"GET /live HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /live HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "a space before the colon": b"GET /live HTTP/1.1\r\nhost : a\r\n\r\n",
    "no colon": b"GET /live HTTP/1.1\r\nhost: a\r\nnonsense\r\n\r\n",
    "a folded first line": b"GET /live HTTP/1.1\r\n host: a\r\n\r\n",
    "a zero byte in a header": b"GET /live HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    "a method with a zero byte": b"G\x00T /live HTTP/1.1\r\nhost: a\r\n\r\n",
    "negative length": HEAD + b"content-length: -1\r\n\r\n{}",
    "a word for a length": HEAD + b"content-length: two\r\n\r\n{}",
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "a length of 5,000 digits": HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n{}",
    "unknown coding": HEAD + b"transfer-encoding: gzip\r\n\r\n{}",
    "chunks in gzip": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding given twice": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length and a coding": HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a word for a chunk's size": CHUNKED + b"two\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    "a huge chunk": CHUNKED + b"f" * 30 + b"\r\n{}\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
}


def test_invalid_http_gets_an_error_and_a_closed_connection(client: Client) -> None:
    for what, data in NO_HTTP.items():
        with Wire(client) as wire:
            answer = wire.send(data).answer()
            check_error(answer, 400)
            assert answer.headers["connection"] == "close", what
            assert wire.rest() == b"", what


def test_headers_that_are_too_large(client: Client) -> None:
    begin = b"GET /live HTTP/1.1\r\nhost: a\r\nx: "
    with Wire(client) as wire:  # not a byte more: with unread bytes the system would drop the answer
        check_error(wire.send(begin.ljust(MAX_HEADER_BYTES + 1, b"x")).answer(), 431)
        assert wire.rest() == b""
    with Wire(client) as wire:
        try:
            seen = wire.send(begin, b"x" * 2**22, b"\r\n\r\n").rest()
        except (BrokenPipeError, ConnectionResetError):
            return
        assert not seen or seen.startswith(b"HTTP/1.1 4"), seen[:100]


BAD_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "blanks": b" \n\t ",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "a text": b'"prompt"',
    "cut off": b'{"prompt": "a"',
    "cut off in a text": b'{"prompt": "a',
    "two": b'{"prompt": "a"}{"prompt": "a"}',
    "something behind": b'{"prompt": "a"} x',
    "single quotes": b"{'prompt': 'a'}",
    "a comment": b'{"prompt": "a" /* */}',
    "a last comma": b'{"prompt": "a",}',
    "bare words": b"{prompt: a}",
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "invalid UTF-8 in a key": b'{"prompt": "a", "\xc3\x28": 1}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "a lone surrogate": rb'{"prompt": "\ud800"}',
    "a lone low surrogate": rb'{"prompt": "\udc00 a"}',
    "two high surrogates": rb'{"prompt": "\ud800\ud800"}',
    "a lone surrogate in a key": rb'{"prompt": "a", "\ud800": 1}',
    "a line break in a text": b'{"prompt": "a\nb"}',
    "a zero byte in a text": b'{"prompt": "a\x00b"}',
    "a zero byte behind": b'{"prompt": "a"}\x00',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "minus Infinity": b'{"prompt": "a", "presence_penalty": -Infinity}',
    "NaN in an unknown field": b'{"prompt": "a", "other": NaN}',
    "1e999": b'{"prompt": "a", "temperature": 1e999}',
    "-1e999": b'{"prompt": "a", "presence_penalty": -1e999}',
    "1e999 for a whole number": b'{"prompt": "a", "max_tokens": 1e999}',
    "1e999 in a schema": b'{"prompt": "a", "structured_outputs": {"json": {"maximum": 1e999}}}',
    "a number of 5,000 digits": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "a seed of 5,000 digits": b'{"prompt": "a", "seed": -' + b"9" * 5000 + b"}",
    "leading zeros": b'{"prompt": "a", "max_tokens": 01}',
    "hexadecimal": b'{"prompt": "a", "max_tokens": 0x1}',
    "10,000 lists": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "10,000 lists, open": b'{"prompt": ' + b"[" * 10_000,
    "10,000 objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "10,000 objects in an unknown field": b'{"prompt": "a", "other": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "100 lists": b'{"prompt": "a", "other": ' + b"[" * 100 + b"]" * 100 + b"}",
    "100,000 wrong items": b'{"prompt": [' + b"-1," * 60_000 + b"-1]}",
    "a text for a number": b'{"prompt": "a", "max_tokens": "1"}',
    "a key of 100,000 letters": b'{"' + b"a" * 100_000 + b'": 1}',
}
UNKNOWN_TO_TOKENIZE = {
    *("1e999", "-1e999", "1e999 for a whole number", "1e999 in a schema", "a text for a number"),
    *("a number of 5,000 digits", "a seed of 5,000 digits"),
}
"""Numbers that are JSON, in fields that the route does not know and so ignores."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(client: Client, path: str) -> None:
    """All over one connection, which can be used on."""
    with Wire(client) as wire:
        for what, body in BAD_BODIES.items():
            answer = wire.send(post(body, path)).answer()
            if path == "/tokenize" and answer.status == 200:
                assert what in UNKNOWN_TO_TOKENIZE
                continue
            error = check_error(answer, 400)
            assert len(error["message"]) < 500, "the error does not repeat the request"


def test_the_last_of_two_equal_keys_counts(client: Client) -> None:
    once = ask(client, post(json.dumps(GOOD).encode())).token_ids
    twice = json.dumps(GOOD).replace("{", '{"prompt": [9, 9, 9], "max_tokens": -1, ', 1).encode()
    assert ask(client, post(twice)).token_ids == once


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"content-type:\r\n",
        b"content-type: text/plain\r\n",
        b"content-type: application/x-www-form-urlencoded\r\n",
        b"content-type: multipart/form-data; boundary=a\r\n",
        b"content-type: application/jsonx\r\n",
        b"content-type: \xff\xfe\r\n",
    ],
)
def test_bodies_that_do_not_say_they_are_json(client: Client, given: bytes) -> None:
    error = check_error(ask(client, post(json.dumps(GOOD).encode(), headers=given)), 415)
    assert "application/json" in error["message"]


@pytest.mark.parametrize("given", [b"Application/JSON", b"application/json; charset=utf-8", b"application/json;"])
def test_json_has_several_spellings(client: Client, given: bytes) -> None:
    answer = ask(client, post(json.dumps(GOOD).encode(), headers=b"content-type: " + given + b"\r\n"))
    assert len(answer.token_ids) == 2


def test_methods_that_a_route_does_not_have(client: Client) -> None:
    routes = client.ask("GET", "/openapi.json").body["paths"]
    assert len(routes) >= 9
    for path, operations in routes.items():
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "get", "HEAD"):
            if method.lower() in operations and method != "get":
                continue
            if method == "HEAD" and "get" in operations:
                continue
            asked = f"{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n".encode() + KEY + b"\r\n{}"
            answer = ask(client, asked, has_body=method != "HEAD")
            assert answer.status == 405, (method, path, answer)
            assert answer.headers["allow"].lower() in operations
            if path.startswith("/v1/messages"):  # errors of this API have another form
                assert method == "HEAD" or answer.body["error"]["type"] == "invalid_request_error"
            elif method != "HEAD":
                check_error(answer)


@pytest.mark.parametrize(
    "target",
    [
        b"/nothing",
        b"//",
        b"*",
        b"http://other/live",
        b"other:443",
        b"/../../etc/passwd",
        b"/%2e%2e/%2e%2e/etc/passwd",
        b"/v1/completions/",
        b"/live%00",
        b"/live%0a%0d",
        b"/%ff%fe",
        b"/" + b"a" * 60_000,
    ],
)
def test_paths_that_are_no_route(client: Client, target: bytes) -> None:
    check_error(ask(client, b"GET " + target + b" HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n"), 404)


@pytest.mark.parametrize("host", [b"", b"[", b"a:b:c", b"\xff", b"http://x", b"a/../b?c#d"])
def test_odd_host_headers_are_accepted(client: Client, host: bytes) -> None:
    assert ask(client, b"GET /live HTTP/1.1\r\nhost: " + host + b"\r\n\r\n").status == 200


@pytest.mark.parametrize("given", [b"0", b"-1", b"nan", b"inf", b"1e999", b"soon", b"\xff", b"1" * 5000])
def test_odd_timeouts_are_refused(client: Client, given: bytes) -> None:
    headers = b"content-type: application/json\r\nx-request-timeout: " + given + b"\r\n"
    error = check_error(ask(client, post(json.dumps(GOOD).encode(), headers=headers)), 400)
    assert "x-request-timeout" in error["message"] and len(error["message"]) < 500


def test_a_body_in_chunks_is_a_body(client: Client) -> None:
    body = json.dumps(GOOD).encode()
    expected = ask(client, post(body)).token_ids
    for size in (1, 7, 1000):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        chunks = [b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
        assert ask(client, CHUNKED, *chunks, b"0\r\nx-trailer: a\r\n\r\n").token_ids == expected
    whole = post(body)
    assert ask(client, *(whole[at : at + 1] for at in range(len(whole)))).token_ids == expected


def test_requests_sent_ahead_are_answered_in_order(client: Client) -> None:
    live, nothing = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n", b"GET /nothing HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n"
    good = post(json.dumps(GOOD).encode())
    with Wire(client) as wire:
        wire.send(live + good + nothing + post(b"{") + good + live + b"nonsense\r\n\r\n")
        assert [wire.answer().status for _ in range(6)] == [200, 200, 404, 400, 200, 200]
        check_error(wire.answer(), 400)
        assert wire.rest() == b""


def test_a_client_that_asks_before_it_sends_a_body(client: Client) -> None:
    body = json.dumps(GOOD).encode()
    with Wire(client) as wire:
        wire.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert wire.answer().status == 100
        assert len(wire.send(body).answer().token_ids) == 2


def test_bodies_that_are_too_large_are_refused_before_they_have_come(client: Client) -> None:
    with Wire(client) as wire:
        error = check_error(wire.send(HEAD + b"content-length: %d\r\n\r\n{" % 10**12).answer(), 413)
        assert "--max-body-bytes" in error["message"]
    with Wire(client) as wire:
        piece = b"%x\r\n%s\r\n" % (1000, b" " * 1000)
        check_error(wire.send(CHUNKED, piece * (MAX_BODY_BYTES // 1000 + 1)).answer(), 413)
        wire.send(b"nonsense\r\n")
        assert wire.rest() == b"", "it is hung up on: one answer is enough"
    within = json.dumps(GOOD).encode().ljust(MAX_BODY_BYTES)
    assert len(ask(client, post(within)).token_ids) == 2


@pytest.mark.parametrize("reset", [False, True])
def test_clients_that_leave_before_they_have_said_all(client: Client, reset: bool) -> None:
    whole = post(json.dumps(GOOD).encode())
    completed = num_ended(client.metrics(), "length")
    for cut in (0, 1, 10, len(HEAD), len(whole) - 20, len(whole) - 1):
        with Wire(client) as wire:
            wire.send(whole[:cut])
            if reset:
                wire.reset_on_close()
    assert num_ended(client.wait_until_idle(), "length") == completed, "half a request was served"
    assert len(ask(client, whole).token_ids) == 2


AHEAD = {"nothing": b"", "a byte": b"G", "a request": b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n"}
LEFT = {"stream": (False, True), "ahead": tuple(AHEAD), "reset": (False, True)}


@pytest.mark.parametrize("row", pairwise(LEFT))
def test_work_for_clients_that_have_left_ends(client: Client, row: Row) -> None:
    stream, ahead, reset = row["stream"], AHEAD[row["ahead"]], row["reset"]
    before = client.wait_until_idle()
    with Wire(client) as wire:
        wire.send(post(json.dumps({**GOOD, "max_tokens": 4000, "ignore_eos": True, "stream": stream}).encode()))
        client.wait_until_running(1)
        for at in range(len(ahead)):
            wire.send(ahead[at : at + 1])
        if reset:
            wire.reset_on_close()
    after = client.wait_until_idle()
    assert num_ended(after, "abort") == num_ended(before, "abort") + 1
    assert num_ended(after, "length") == num_ended(before, "length")


@pytest.mark.parametrize("data", [b"", b"GET /live HTTP/1.1\r\n", b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n", CHUNKED])
def test_a_client_that_closes_its_half_has_left(client: Client, data: bytes) -> None:
    with Wire(client) as wire:
        wire.send(data).socket.shutdown(socket.SHUT_WR)
        seen = wire.rest()
        assert not seen or seen.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), seen
