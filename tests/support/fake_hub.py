"""A server of this machine that plays the Hugging Face hub: one repository, and failures on demand."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

MODEL, COMMIT = "owner/model", "0123456789abcdef0123456789abcdef01234567"


@dataclass(kw_only=True)
class Hub:
    """The files of the repository `MODEL`, the answer to each request, and the requests so far.

    Attributes:
        failure: status and headers of every answer, as the hub sends them.
        lost: file names whose contents end early, with a closed connection.
        silent: answer no request in time.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    failure: tuple[int, dict[str, str]] | None = None
    lost: set[str] = field(default_factory=set)
    silent: bool = False
    page: bytes | None = None
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def fetched(self) -> list[str]:
        return sorted(line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "resolve" in line)


@contextmanager
def serve_hub(folder: Path | None = None) -> Iterator[Hub]:
    """Serve the files of a folder."""
    hub = Hub()
    for path in sorted(folder.rglob("*")) if folder else ():
        if path.is_file():
            hub.files[str(path.relative_to(folder))] = path.read_bytes()  # type: ignore[arg-type]  # there is a folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        if MODEL in path:  # huggingface_hub also sends requests of its own
            hub.tokens.add(self.headers.get("Authorization"))
        if hub.silent:
            time.sleep(1.5)
            self.close_connection = True
        elif hub.failure is not None:
            self._send(hub.failure[0], b"{}", hub.failure[1])
        elif hub.page is not None:
            self._send(200, hub.page, {"Content-Type": "text/html"})
        elif path in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/main"):
            siblings = [{"rfilename": name} for name in hub.files]
            self._send_json({"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/{MODEL}/tree/{COMMIT}":
            kinds = {"type": "file", "oid": "0" * 40}
            self._send_json([{**kinds, "path": name, "size": len(data)} for name, data in hub.files.items()])
        elif (name := path.removeprefix(f"/{MODEL}/resolve/{COMMIT}/")) in hub.files or (
            name := path.removeprefix(f"/{MODEL}/resolve/main/")
        ) in hub.files:
            self._send_file(name, hub.files[name])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, data: bytes) -> None:
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if name in self.hub.lost and self.command == "GET":
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        self._send(200, data, headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
