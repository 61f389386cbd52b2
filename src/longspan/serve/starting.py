"""What the HTTP face answers before there is an engine to ask."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from longspan.serve.errors import error_response
from longspan.serve.middleware import RequestIds, RootPath, Tally, path_of

_RETRY_AFTER_S = 5


class Face:
    """An ASGI app in place of `app`: while that is not made yet, `/live` is answered 200, everything else 503."""

    def __init__(self, root_path: str) -> None:
        self.app: ASGIApp = RootPath(RequestIds(_starting, Tally()), root_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await self.app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    if path_of(scope) == "/live":
        response = JSONResponse({"status": "ok"})
    else:
        response = error_response(503, "the engine is starting", retry_after_s=_RETRY_AFTER_S)
    await response(scope, receive, send)
