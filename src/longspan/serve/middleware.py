"""Layers that every request passes before a route sees it: HTTP/1.1, request id, key, sizes.

The middlewares are plain ASGI, so that streams stay streams. All scopes are HTTP: the server has no other ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
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

from longspan.serve.errors import error_body, error_response

OPEN_PATHS = frozenset({"/live", "/health", "/version"})
"""The only routes that need no key."""

CONNECTIONS_LOG = "longspan.connections"
"""The log of what anybody can cause as often as they like, without a request."""

_log, _connections_log = logging.getLogger("longspan.access"), logging.getLogger(CONNECTIONS_LOG)
LARGE_BODY_BYTES = 128 * 1024
"""Below this, reading or tokenizing a body takes less than about a tenth of a second."""
_DRAINING_S = 1.0
"""The seconds that a body may take to come when its request comes while the server drains."""
_MAX_DIGITS = 20
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def path_of(scope: Scope) -> str:
    """Returns a request's path, without the prefix that a proxy in front may have left on it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class Intake:
    """Requests that a server has taken and not answered yet; once it drains, it takes nothing new.

    Attributes:
        open_requests: an element for each, from its head to the last byte of its answer.
        unread: deadlines of the bodies that are coming.
    """

    def __init__(self) -> None:
        self.draining = False
        self.open_requests: set[object] = set()
        self.unread: set[asyncio.Timeout] = set()

    def drain(self) -> None:
        """Takes nothing new, not even the rest of a body: who sends it slowly need not be waited for."""
        self.draining = True
        for deadline in self.unread:
            if not deadline.expired():
                deadline.reschedule(0)


class RequestContext:
    """Gives each request the id of its `x-request-id`, or a new one, tells it in the answer, and logs a line.

    It also says which prefix a proxy in front takes off, as a server would that knows it. HEAD is answered as GET; the
    protocol, which knows better, sends no body.
    """

    def __init__(self, app: ASGIApp, root_path: str, intake: Intake) -> None:
        self._app, self._root_path, self._intake = app, root_path, intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        begin_s, place = time.monotonic(), object()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        self._intake.open_requests.add(place)
        try:
            await self._app(asked, receive, send_with_id)
        finally:
            self._intake.open_requests.remove(place)
            spent_s = time.monotonic() - begin_s
            path = quote(scope["path"])  # so that nobody writes lines of their own into the log
            _log.info("%s %s %s %.3f s %s", scope["method"], path, state.get("status", "-"), spent_s, request_id)


class Gate:
    """Looks at the head of a request: answers 431 when it is too large, 401 unless the bearer token is one of the keys,
    and 400 when it does not tell where its body ends.

    Without keys, everybody may ask.
    """

    def __init__(self, app: ASGIApp, max_header_bytes: int, keys: Sequence[str]) -> None:
        self._app, self._max_header_bytes = app, max_header_bytes
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The protocol bounds a head that comes in pieces, but not one that comes as a whole.
        size = len(scope["path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        app = self._app
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # RFC 9112 6.1: whoever is in front of us may have read another body than we would.
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
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(token.strip().encode("latin-1"))  # the bytes that were sent
        # All are compared, each in constant time: time tells nothing of how near a guess was, nor to which key.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Answers 413 to bodies of more than `max_bytes` without reading on, and 408 to those that are too slow; those that
    have not come when the server drains are answered 503.

    The bodies of all open requests have `max_total_bytes` together; what would be more is answered 503. Those above
    `LARGE_BODY_BYTES`, or of unknown length, leave an eighth of it to smaller ones: large uploads that do not end turn
    nobody else away. Only a body that comes when there is no other may take all, so that none is turned away for ever.
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
                chunks[:] = [b"".join(chunks)]  # it is kept once
                whole: list[Message] = [{"type": "http.request", "body": chunks[0], "more_body": False}]

                async def receive_whole() -> Message:
                    return whole.pop() if whole else await receive()

                await self._app(scope, receive_whole, send)
            else:
                await refusal(scope, receive, send)
        except _GoneError:  # nobody is left who could be answered
            return
        finally:
            self._total_bytes -= sum(map(len, chunks))

    async def _read(self, receive: Receive, chunks: list[bytes], kept_free: int) -> Response | None:
        """Reads the whole body into `chunks`; returns why it cannot be served, if so.

        Beside other bodies it leaves `kept_free` bytes to them.
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
                    room = self._max_total_bytes - self._total_bytes - (0 if is_alone else kept_free)
                    if chunk and len(chunk) > room:
                        words = f"open requests have bodies of {self._max_total_bytes} bytes together"
                        return error_response(503, f"{words} (--max-total-body-bytes)", retry_after_s=1)
                    chunks.append(chunk)
                    self._total_bytes += len(chunk)
        except TimeoutError:
            if self._intake.draining:
                answer = error_response(503, "the server is shutting down", retry_after_s=5)
            else:
                answer = error_response(408, f"the body did not come within {self._timeout_s:g} s (--body-timeout)")
            answer.headers["connection"] = "close"  # who is slow need not be listened to any longer
            return answer
        finally:
            self._intake.unread.discard(deadline)
        return None

    def _too_large(self) -> Response:
        return error_response(413, f"the body has more than {self._max_bytes} bytes ({self._flag})")


class _GoneError(Exception):
    """The client has left before the end of its request."""


_MAX_AHEAD_BYTES = 64 * 1024


class HttpProtocol(H11Protocol):
    """Answers 4xx, with an error body, to what cannot be read as a request, and closes the connection.

    Requests that are sent ahead of an answer wait for it. Reading goes on meanwhile, up to a limit: otherwise nobody
    would notice that a client has left which has sent as much as a byte too many.

    With uvicorn's `limit_concurrency` N, at most N - 1 connections are open: the next is answered 503 and closed. When
    more than half of them are, no connection may wait long for its next request.

    Attributes:
        head_timeout_s: within this time a request line and its headers must have come.
        crowded_timeout_s: the same while many connections are open, also between requests.
    """

    head_timeout_s = 60.0
    crowded_timeout_s = 5.0
    _head_timer: asyncio.TimerHandle | None = None
    _idle_since_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        most = self.limit_concurrency
        if most is not None and len(self.connections) >= most:
            self.connections.discard(self)  # uvicorn would refuse requests of those that may stay
            _connections_log.warning(
                "%d connections are open, the most there may be: others are answered 503", most - 1
            )
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE.value, "too many connections are open: come again later")
        else:
            self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._is_kept_alive:
            self._stop_timer()  # the time of a head begins with its first byte
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
        """Answers what uvicorn cannot read; it calls this while it handles the error that says why."""
        error = sys.exception()
        status, reason = HTTPStatus.BAD_REQUEST.value, msg
        if isinstance(error, h11.RemoteProtocolError):
            reason = f"this is not a request in HTTP/1.1: {error}"
            if error.error_status_hint < HTTPStatus.INTERNAL_SERVER_ERROR:
                status = error.error_status_hint
        self._refuse(status, reason)

    @property
    def _is_kept_alive(self) -> bool:
        """Whether a request was answered and nothing has come since; uvicorn bounds that time, too."""
        return self.timeout_keep_alive_task is not None

    def _watch_head(self) -> None:
        """Bounds how long a request's head may take, from its first byte, or the connection's beginning."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._head_timer is None:
            self._idle_since_s = self.loop.time()
            self._look_after()

    def _look_after(self) -> None:
        """Closes the connection if it has been idle for too long, and otherwise looks again."""
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
        """Answers with an error, unless an answer has begun, and closes the connection."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = json.dumps(error_body(status, message)).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
                *([("retry-after", "1")] if status == HTTPStatus.SERVICE_UNAVAILABLE else []),
            ]
            reason = HTTPStatus(status).phrase.encode()
            head = self.conn.send(h11.Response(status_code=status, headers=headers, reason=reason))
            self.transport.write(head + body)
        self.transport.close()
