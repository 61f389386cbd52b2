"""A proxy in front of the server that keeps the requests of clients and the status of each answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

KEPT_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta")
"""Headers that a recording keeps. All other headers name machines, keys, versions or lengths."""
_HOP_HEADERS = {"connection", "content-length", "date", "server", "transfer-encoding"}
_CHUNK_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request and the status of its answer. `error` is the body of an answer with a status of 400 or more."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the request without its answer."""
        return {"method": self.method, "path": self.path, "headers": self.headers, "body": self.body}

    @property
    def form(self) -> frozenset[str]:
        """The paths of all fields, each with the type of its value. Items of a list share a path."""
        return frozenset([f"{self.method} {self.path}", *_paths(self.body, "")])


def _paths(value: object, path: str) -> Iterator[str]:
    match value:
        case dict():
            for name, item in value.items():
                yield from _paths(item, f"{path}.{name}")
        case list():
            for item in value:
                yield from _paths(item, f"{path}[]")
        case str() if path.endswith((".type", ".role")):
            yield f"{path}={value}"
        case _:
            yield f"{path}:{type(value).__name__}"


def distinct(exchanges: list[Exchange]) -> list[Exchange]:
    """Return the served requests whose form is not contained in the form of another request."""
    served = {exchange.form: exchange for exchange in exchanges if exchange.status < 400}
    return [exchange for form, exchange in served.items() if not any(form < other for other in served)]


@dataclass(kw_only=True)
class Recorder:
    """The address of the proxy, and the exchanges since the last `take`."""

    url: str
    _exchanges: list[Exchange] = field(default_factory=list)

    def add(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)

    def take(self) -> list[Exchange]:
        """Return the exchanges since the last call."""
        taken, self._exchanges = self._exchanges, []
        return taken


@contextmanager
def recording(server_url: str) -> Iterator[Recorder]:
    """Run a proxy in front of a server for the duration of the block."""
    target = urlsplit(server_url)
    assert target.hostname is not None and target.port is not None, "the server prints both"
    place = (target.hostname, target.port)

    class Handler(BaseHTTPRequestHandler):
        """Passes a request on, and the answer back as it arrives."""

        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            length = int(self.headers.get("content-length", "0"))
            data = self.rfile.read(length)
            connection = HTTPConnection(*place)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body=data or None, headers=headers)
            answer = connection.getresponse()
            self.close_connection = True
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP_HEADERS:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            error = answer.read() if answer.status >= 400 else b""
            kept = {name: self.headers[name] for name in KEPT_HEADERS if name in self.headers}
            recorder.add(
                Exchange(
                    method=self.command,
                    path=self.path,
                    headers=kept,
                    body=json.loads(data) if data else None,
                    status=answer.status,
                    error=error.decode(errors="replace"),
                )
            )
            self.wfile.write(error)
            while chunk := answer.read1(_CHUNK_BYTES):
                self.wfile.write(chunk)
                self.wfile.flush()
            connection.close()

        do_GET = do_POST = _pass_on  # noqa: N815 - names of BaseHTTPRequestHandler

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - a name of BaseHTTPRequestHandler
            """Leave out the line of each request. The table prints errors itself."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    recorder = Recorder(url=f"http://127.0.0.1:{proxy.server_port}")
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        proxy.shutdown()
        proxy.server_close()
