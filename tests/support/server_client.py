"""A plain client of servers on this machine, and just enough of one to be rude to them."""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

from openai import OpenAI

_OCCUPIED = re.compile(r"num_requests_(running|waiting)|kv_cache_usage_perc|instance_kv_blocks_used")
_POLL_S = 0.02
_WIRE_TIMEOUT_S = 30
"""No answer takes so long: a hang fails."""

Metrics = Mapping[str, float]
"""By name with labels, but without that of the model: `kv_blocks_used{instance="0"}`."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer to a request. The names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """Of a stream: the JSON of all its events, without the last `[DONE]`."""
        lines = [line.removeprefix(b"data: ") for line in self.data.split(b"\n\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def token_ids(self) -> list[int]:
        """Of the only choice of a completion that asked for them, streamed or not."""
        assert self.status == 200, self
        bodies = self.events if self.headers["content-type"].startswith("text/event-stream") else [self.body]
        return [token for body in bodies for choice in body["choices"] for token in choice["token_ids"]]


@dataclass(frozen=True, kw_only=True)
class Client:
    """Asks a server."""

    port: int
    api_key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, api_key: str | None = None) -> OpenAI:
        """The official client, which tries nothing twice."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key or self.api_key, max_retries=0)

    def ask(self, method: str, path: str, body: object = None, *, timeout_s: float = 60, **headers: str) -> Reply:
        """Sends the body as JSON, and closes the connection after the answer.

        Raises:
            OSError: or HTTPException, when there is no whole answer.
        """
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)) as connection:
            data = None if body is None else json.dumps(body)
            key = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
            sent = {"content-type": "application/json", **key, **headers}
            connection.request(method, path, data, {name.replace("_", "-"): text for name, text in sent.items()})
            reply = connection.getresponse()
            found = {name.lower(): text for name, text in reply.getheaders()}
            return Reply(status=reply.status, headers=found, data=reply.read())

    def complete(self, *, timeout_s: float = 200, **fields: object) -> Reply:
        return self.ask("POST", "/v1/completions", completion(**fields), timeout_s=timeout_s)

    def good_answer(self) -> list[int]:
        """Token ids of the answer to a request that is always the same."""
        ids = self.complete(prompt="Once upon a time", ignore_eos=False, max_tokens=4, timeout_s=60).token_ids
        assert len(ids) == 4
        return ids

    def leave_after(self, seconds: float, **fields: object) -> None:
        """Asks for a completion and disconnects, with or without an answer."""
        with closing(send_completion(self.port, **fields)):
            time.sleep(seconds)

    def metrics(self) -> Metrics:
        found = {}
        for line in self.ask("GET", "/metrics").data.decode().splitlines():
            if line.startswith("longspan:"):
                name, _, value = line.removeprefix("longspan:").rpartition(" ")
                found[re.sub(r',?(?:model_name|engine)="[^"]*",?', "", name).removesuffix("{}")] = float(value)
        return found

    def wait_until_idle(self) -> Metrics:
        """Wait until no request runs, waits, or holds a block. Return the metrics."""
        return self._wait_for(lambda metrics: not any(metrics[name] for name in metrics if _OCCUPIED.match(name)), 60)

    def wait_for_more(self, name: str, before: Metrics) -> Metrics:
        """Wait until a counter, reported twice a second, has risen and nothing runs. Return the metrics."""
        self._wait_for(lambda metrics: metrics[name] > before[name], 60)
        return self.wait_until_idle()

    def wait_until_running(self, number: int) -> None:
        """Wait until at least this many requests run."""
        self._wait_for(lambda metrics: metrics["num_requests_running"] >= number, 60)

    def wait_for_health(self, status: int, timeout_s: float) -> None:
        """Until `/health` has that status."""
        deadline_s = time.monotonic() + timeout_s
        while self.ask("GET", "/health", timeout_s=5).status != status:
            assert time.monotonic() < deadline_s, f"/health is not {status} after {timeout_s} s"
            time.sleep(_POLL_S)

    def _wait_for(self, true: Callable[[Metrics], bool], timeout_s: float) -> Metrics:
        deadline_s = time.monotonic() + timeout_s
        while not true(metrics := self.metrics()):
            assert time.monotonic() < deadline_s, metrics
            time.sleep(_POLL_S)
        return metrics


class Wire:
    """A connection to which anything can be written."""

    def __init__(self, client: Client) -> None:
        self.socket = socket.create_connection(("127.0.0.1", client.port), timeout=_WIRE_TIMEOUT_S)
        self._file: BinaryIO = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, *data: bytes) -> Self:
        for piece in data:
            self.socket.sendall(piece)
        return self

    def answer(self, *, has_body: bool = True) -> Reply:
        """The next one."""
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), f"{line!r} instead of an answer"
        headers: dict[str, str] = {}
        while (field := self._file.readline().strip()) != b"":
            name, _, value = field.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", "0")) if has_body else 0
        return Reply(status=int(line.split()[1]), headers=headers, data=self._file.read(length))

    def reset_on_close(self) -> None:
        """Leave as a process that is killed with data unread does, not by saying so."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        return self._file.read()


def completion(**fields: object) -> dict[str, object]:
    """Return a greedy completion of this length, as token ids."""
    return {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}


def post(body: bytes, path: str = "/v1/completions", headers: bytes = b"content-type: application/json\r\n") -> bytes:
    """A request as it goes over the wire."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


def send_completion(port: int, **fields: object) -> socket.socket:
    """A connection on which a completion has been asked for."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(post(json.dumps(completion(**fields)).encode()))
    return connection


def num_ended(metrics: Metrics, reason: str = "") -> float:
    """Requests that have ended for a reason, or at all."""
    prefix = f'request_success_total{{finished_reason="{reason}'
    found = [value for name, value in metrics.items() if name.startswith(prefix)]
    assert found, reason
    return sum(found)
