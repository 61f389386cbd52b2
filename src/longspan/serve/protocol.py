"""HTTP/1.1 on one connection: uvicorn's protocol, but what is no HTTP gets an error body, and waiting has an end."""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from longspan.serve.errors import error_body

_MAX_AHEAD_BYTES = 64 * 1024


class HttpProtocol(H11Protocol):
    """Answers 4xx, with an error body, to what cannot be read as a request, and closes the connection.

    Requests that are sent ahead of an answer wait for it. Reading goes on meanwhile, up to a limit: otherwise nobody
    would notice that a client has left which has sent as much as a byte too many.

    Attributes:
        head_timeout_s: within this time a request line and its headers must have come.
    """

    head_timeout_s = 60.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= _MAX_AHEAD_BYTES:
            self.flow.resume_reading()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers what uvicorn cannot read; it calls this while it handles the error that says why."""
        error = sys.exception()
        status, reason = HTTPStatus.BAD_REQUEST.value, msg
        if isinstance(error, h11.RemoteProtocolError):
            reason = f"this is not a request in HTTP/1.1: {error}"
            if error.error_status_hint < HTTPStatus.INTERNAL_SERVER_ERROR:
                status = error.error_status_hint
        self._refuse(status, reason)

    def _watch_head(self) -> None:
        """Bounds how long a request's head may take, from its first byte, or the connection's beginning."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT.value, f"no request came within {self.head_timeout_s:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error, unless an answer has begun, and closes the connection."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = json.dumps(error_body(status, message)).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            reason = HTTPStatus(status).phrase.encode()
            head = self.conn.send(h11.Response(status_code=status, headers=headers, reason=reason))
            self.transport.write(head + body)
        self.transport.close()
