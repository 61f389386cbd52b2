"""Checks of every request before its route: HTTP/1.1, request id, key, sizes.

The middlewares are plain ASGI, so that streams stay streams. All scopes are HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import sys
import time
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from math import inf
from urllib.parse import quote

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from longspan.serve.errors import error_response

OPEN_PATHS = frozenset({"/live", "/health", "/version"})
"""The only routes that need no key."""
PROBE_PATHS = frozenset({"/live", "/health", "/version", "/metrics"})
"""Routes that monitoring requests every few seconds. The access log omits their successes."""

CONNECTIONS_LOG = "longspan.connections"
"""The logger of events that any client can cause at any rate without a request."""

_log, _connections_log = logging.getLogger("longspan.access"), logging.getLogger(CONNECTIONS_LOG)
LARGE_BODY_BYTES = 128 * 1024
"""Below this size, reading or tokenizing a body takes less than about 0.1 s."""
_DRAINING_S = 1.0
"""Timeout of a body, in seconds, if its request arrives while the server drains."""
_MAX_DIGITS = 20
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def path_of(scope: Scope) -> str:
    """Return a request's path without the prefix of a proxy."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class Intake:
    """Requests that a server has received and not answered yet. While it drains, it accepts no new requests.

    Attributes:
        open_requests: an element for each request, from its head to the last byte of its response.
        unread: deadlines of the bodies that are being read.
    """

    def __init__(self) -> None:
        self.draining = False
        self.open_requests: set[object] = set()
        self.unread: set[asyncio.Timeout] = set()

    def drain(self) -> None:
        """Accept nothing new, not even the rest of a body: a slow client must not delay the end."""
        self.draining = True
        for deadline in self.unread:
            if not deadline.expired():
                deadline.reschedule(0)


class RequestContext:
    """Gives each request an id, from its `x-request-id` or a new one, returns it in the response, and logs a line.

    The access log omits successful probes of the server's state, and all requests without `logs_access`.
    It also sets the scope's `root_path`, the prefix that a proxy removes. HEAD is answered as GET: the protocol sends
    no body.
    """

    def __init__(self, app: ASGIApp, root_path: str, intake: Intake, *, logs_access: bool = True) -> None:
        self._app, self._root_path, self._intake, self._logs_access = app, root_path, intake, logs_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        begin_s, entry = time.monotonic(), object()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        as_get = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        self._intake.open_requests.add(entry)
        try:
            await self._app(as_get, receive, send_with_id)
        finally:
            self._intake.open_requests.remove(entry)
            if self._logs_access:
                _log_access(scope, state.get("status"), time.monotonic() - begin_s, request_id)


def _log_access(scope: Scope, status: int | None, spent_s: float, request_id: str) -> None:
    if path_of(scope) in PROBE_PATHS and status is not None and status < HTTPStatus.BAD_REQUEST:
        return
    path = quote(scope["path"])  # a path with line breaks must not forge lines of the log
    shown = {"method": scope["method"], "path": path, "status": status, "duration_s": round(spent_s, 3)}
    words = (scope["method"], path, "-" if status is None else status, spent_s, request_id)
    _log.info("%s %s %s %.3f s %s", *words, extra={"fields": {**shown, "request_id": request_id}})


class Gate:
    """Checks the head of a request.

    It answers 431 if the head is too large, and 400 if the end of the body is ambiguous. If there are keys, and
    neither the bearer token nor `x-api-key` is one of them, it answers 401.
    """

    def __init__(self, app: ASGIApp, max_header_bytes: int, keys: Sequence[str]) -> None:
        self._app, self._max_header_bytes = app, max_header_bytes
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The protocol bounds a head that arrives in pieces, but not a head in one piece.
        size = len(scope["path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        app = self._app
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # RFC 9112 6.1: a proxy may have read another body than this server would.
            app = error_response(400, "content-length and transfer-encoding exclude each other: send one of them")
            app.headers["connection"] = "close"
        elif size > self._max_header_bytes:
            words = f"the headers have {size} bytes, of at most {self._max_header_bytes}"
            app = error_response(431, f"{words} (--h11-max-incomplete-event-size)")
        elif self._digests and not self._may_pass(scope):
            app = error_response(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            app.headers["www-authenticate"] = "Bearer"
        await app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if path_of(scope) in OPEN_PATHS:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        tokens = [token.strip()] if scheme.lower() == "bearer" else []
        tokens += headers.getlist("x-api-key")[:1]  # of Anthropic's clients
        given = [_digest(text.encode("latin-1")) for text in tokens]  # the bytes that were sent
        # Each key is compared in constant time, so that the time reveals nothing about a guess.
        matches = [hmac.compare_digest(text, digest) for text in given for digest in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Bounds the size of bodies and the time in which they arrive.

    It answers 413 to bodies of more than `max_bytes` without reading on, and 408 to slow bodies. Bodies that are
    incomplete when the server drains are answered 503. The bodies of all open requests have at most `max_total_bytes`
    together, or else 503 is answered. Bodies above `LARGE_BODY_BYTES`, or of unknown length, leave an eighth of this
    sum to smaller bodies, so that endless uploads do not block other requests. A single body may use all of the sum.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int, timeout_s: float, intake: Intake) -> None:
        self._app, self._max_total_bytes = app, max_total_bytes
        self._max_bytes, self._flag = min((max_bytes, "--max-body-bytes"), (max_total_bytes, "--max-total-body-bytes"))
        self._timeout_s, self._intake = timeout_s, intake
        self._total_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "")
        is_known = length.isdecimal()
        if is_known and (len(length) > _MAX_DIGITS or int(length) > self._max_bytes):
            await self._too_large()(scope, receive, send)
            return
        kept_free = 0 if is_known and int(length) <= LARGE_BODY_BYTES else self._max_total_bytes // 8
        chunks: list[bytes] = []
        try:
            refusal = await self._read(receive, chunks, kept_free)
            if refusal is None:
                chunks[:] = [b"".join(chunks)]  # keep one copy
                whole: list[Message] = [{"type": "http.request", "body": chunks[0], "more_body": False}]

                async def receive_whole() -> Message:
                    return whole.pop() if whole else await receive()

                await self._app(scope, receive_whole, send)
            else:
                await refusal(scope, receive, send)
        except _GoneError:  # the client has disconnected
            return
        finally:
            self._total_bytes -= sum(map(len, chunks))

    async def _read(self, receive: Receive, chunks: list[bytes], kept_free: int) -> Response | None:
        """Read the whole body into `chunks`. Return an error response if it cannot be served.

        Unless it is the only body, it leaves `kept_free` bytes to other bodies.
        """
        size, more = 0, True
        deadline = asyncio.timeout(min(self._timeout_s, _DRAINING_S) if self._intake.draining else self._timeout_s)
        self._intake.unread.add(deadline)
        try:
            async with deadline:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    is_alone = self._total_bytes == size
                    size += len(chunk)
                    if size > self._max_bytes:
                        return self._too_large()
                    num_free = self._max_total_bytes - self._total_bytes - (0 if is_alone else kept_free)
                    if chunk and len(chunk) > num_free:
                        words = f"open requests have bodies of {self._max_total_bytes} bytes together"
                        return error_response(503, f"{words} (--max-total-body-bytes)", retry_after_s=1)
                    chunks.append(chunk)
                    self._total_bytes += len(chunk)
        except TimeoutError:
            if self._intake.draining:
                answer = error_response(503, "the server is shutting down", retry_after_s=5)
            else:
                answer = error_response(408, f"the body did not come within {self._timeout_s:g} s (--body-timeout)")
            answer.headers["connection"] = "close"  # do not read on from a slow client
            return answer
        finally:
            self._intake.unread.discard(deadline)
        return None

    def _too_large(self) -> Response:
        return error_response(413, f"the body has more than {self._max_bytes} bytes ({self._flag})")


class _GoneError(Exception):
    """The client has disconnected before the end of its request."""


_MAX_AHEAD_BYTES = 64 * 1024


class HttpProtocol(H11Protocol):
    """Answers 4xx, with an error body, to bytes that are no request, and closes the connection.

    Pipelined requests wait for the previous response. Reading goes on up to a limit, since a disconnect is noticed only
    by reading.

    With uvicorn's `limit_concurrency` N, at most N - 1 connections are open: the next is answered 503 and closed. While
    more than half of them are open, idle connections are closed early.

    Attributes:
        head_timeout_s: seconds in which a request line and its headers must arrive.
        crowded_timeout_s: the same while many connections are open, also between requests.
    """

    head_timeout_s = 60.0
    crowded_timeout_s = 5.0
    _head_timer: asyncio.TimerHandle | None = None
    _idle_since_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) >= limit:
            self.connections.discard(self)  # uvicorn would refuse requests of the open connections
            _connections_log.warning("%d connections are open, the maximum: more are answered 503", limit - 1)
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE.value, "too many connections are open: try again later")
        else:
            self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._is_kept_alive:
            self._stop_timer()  # the timeout of a head begins with its first byte
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= _MAX_AHEAD_BYTES:
            self.flow.resume_reading()
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that uvicorn cannot parse. uvicorn calls this while it handles the parser's error."""
        error = sys.exception()
        status, reason = HTTPStatus.BAD_REQUEST.value, msg
        if isinstance(error, h11.RemoteProtocolError):
            reason = f"this is not a request in HTTP/1.1: {error}"
            if error.error_status_hint < HTTPStatus.INTERNAL_SERVER_ERROR:
                status = error.error_status_hint
        self._refuse(status, reason)

    @property
    def _is_kept_alive(self) -> bool:
        """Whether the connection is idle after a response. uvicorn bounds that time, too."""
        return self.timeout_keep_alive_task is not None

    def _watch_head(self) -> None:
        """Start the timeout of a request's head, at its first byte or the connection's beginning."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._head_timer is None:
            self._idle_since_s = self.loop.time()
            self._look_after()

    def _look_after(self) -> None:
        """Close the connection if it has been idle for too long, or check again later."""
        spent_s = self.loop.time() - self._idle_since_s
        limit_s = inf if self._is_kept_alive else self.head_timeout_s
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency // 2:
            limit_s = min(limit_s, self.crowded_timeout_s)
        if spent_s < limit_s:
            wait_s = min(limit_s - spent_s, self.crowded_timeout_s)
            self._head_timer = self.loop.call_later(wait_s, self._look_after)
        elif self._is_kept_alive:
            self.transport.close()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT.value, f"no request came within {limit_s:g} s")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless a response has begun, and close the connection."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            response = error_response(status, message, retry_after_s=1 if status == 503 else None)
            headers = [*response.raw_headers, (b"connection", b"close")]
            reason = HTTPStatus(status).phrase.encode()
            head = self.conn.send(h11.Response(status_code=status, headers=headers, reason=reason))
            self.transport.write(head + response.body)
        self.transport.close()
