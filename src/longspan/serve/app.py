"""The HTTP face as an ASGI app."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

import longspan
from longspan.serve import wire
from longspan.serve.answer import EngineLostError, QueueFullError, RequestFailedError
from longspan.serve.document import name_options, name_what_is_there
from longspan.serve.errors import error_response
from longspan.serve.middleware import OPEN_PATHS, ApiKeys, BodyLimit, HeaderLimit, RequestIds, RootPath, path_of
from longspan.serve.respond import ClientGoneError, DeadlineError
from longspan.serve.routes import body_schemas, routes
from longspan.serve.server import Server

_log = logging.getLogger("longspan")
_CLIENT_GONE = 499
_NOT_ALLOWED = 405
_ADMIN = "/admin/"


def make_app(server: Server) -> FastAPI:
    """The app over a running engine."""
    settings = server.settings
    app = FastAPI(
        title="longspan",
        version=longspan.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.include_router(routes(server))
    _describe(app, server)
    _handle_errors(app, server)
    # The last that is added is the first to see a request.
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.limits.max_body_bytes,
        max_total_bytes=settings.max_total_body_bytes,
        timeout_s=settings.body_timeout_s,
    )
    if settings.tracer is not None:
        from longspan.serve.tracing import Tracing  # noqa: PLC0415 - it needs the extra `otel`

        app.add_middleware(Tracing, tracer=settings.tracer, model_name=settings.model_names[0])
    app.add_middleware(ApiKeys, keys=settings.api_keys)
    app.add_middleware(HeaderLimit, max_bytes=settings.max_header_bytes)
    app.add_middleware(RequestIds, tally=server.tally)
    app.add_middleware(RootPath, root_path=settings.root_path)
    return app


def _describe(app: FastAPI, server: Server) -> None:
    """Bodies are read by the routes themselves: their schemas are added to what FastAPI finds."""
    find, settings = app.openapi, server.settings

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = find()
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(body_schemas())
            if settings.api_keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
                for operation in (operation for path in OPEN_PATHS for operation in schema["paths"][path].values()):
                    operation["security"] = []
            name_what_is_there(
                schema, settings.model_names, server.input_processor.vocab_size, server.input_processor.max_model_len
            )
            if server.engine.policy.settings is not None:
                name_options(schema, server.engine.policy.settings)
            app.openapi_schema = settings.limits.narrowed(schema)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it


def _handle_errors(app: FastAPI, server: Server) -> None:
    @app.exception_handler(wire.WireError)
    async def refused(_: Request, error: wire.WireError) -> Response:
        return error_response(error.status, error.message, param=error.param)

    @app.exception_handler(QueueFullError)
    async def full(_: Request, error: QueueFullError) -> Response:
        return error_response(
            503, f"the queue is full: {error}", code="queue_full", retry_after_s=server.retry_after_s()
        )

    @app.exception_handler(RequestFailedError)
    async def failed(_: Request, error: RequestFailedError) -> Response:
        response = error_response(error.status, str(error), param=error.param)
        response.headers["x-should-retry"] = "false"
        return response

    @app.exception_handler(EngineLostError)
    async def lost(_: Request, error: EngineLostError) -> Response:
        return error_response(503 if server.draining else 500, str(error), retry_after_s=5)

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(DeadlineError)
    async def late(_: Request, error: DeadlineError) -> Response:
        response = error_response(504, str(error))
        response.headers["x-should-retry"] = "false"
        return response

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        words, code = str(error.detail), None
        if (
            error.status_code == _NOT_ALLOWED
            and request.method == "POST"
            and path_of(request.scope).startswith(_ADMIN)
            and not server.settings.api_keys
        ):
            words = "a server without keys is not changed by its clients: start it with --api-key, and send the key"
            code = "no_api_key"
        response = error_response(error.status_code, words, code=code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        request_id = request.state.request_id
        _log.error("request %s failed by %s", request_id, type(error).__name__)  # uvicorn logs where
        response = error_response(500, f"internal error; the server's log has more about request {request_id}")
        response.headers["x-request-id"] = request_id  # this answer is made outside of all middleware
        return response
