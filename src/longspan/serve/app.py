"""The ASGI app of the API server: its routes, its errors and its OpenAPI document."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

import longspan
from longspan.names import closest
from longspan.serve import chat_requests, requests, schemas
from longspan.serve.convert import detokenized, tokenized
from longspan.serve.errors import (
    ClientGoneError,
    EngineLostError,
    QueueFullError,
    ServeError,
    WireError,
    error_response,
    shortened,
)
from longspan.serve.middleware import OPEN_PATHS, BodyLimit, Gate, RequestContext, path_of
from longspan.serve.server import Server

_log = logging.getLogger("longspan")
_NOT_FOUND, _NOT_ALLOWED = 404, 405
_ADMIN = "/admin/"


def make_app(server: Server) -> FastAPI:
    """Return the app of a server whose engine runs."""
    settings = server.settings
    app = FastAPI(
        title="longspan",
        version=longspan.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    _add_state(app, server)
    _add_text(app, server)
    _add_admin(app, server)
    _describe(app, server)
    _handle_errors(app, server)
    # A request passes the middlewares in reverse order.
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.limits.max_body_bytes,
        max_total_bytes=settings.max_total_body_bytes,
        timeout_s=settings.body_timeout_s,
        intake=server.intake,
    )
    if settings.tracer is not None:
        from longspan.serve.tracing import Tracing  # noqa: PLC0415 - it needs the extra `otel`

        app.add_middleware(Tracing, tracer=settings.tracer, model_name=settings.model_names[0])
    app.add_middleware(Gate, max_header_bytes=settings.max_header_bytes, keys=settings.api_keys)
    if settings.allowed_origins:  # before the gate: preflight requests of browsers have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-should-retry", "retry-after", "x-expected-ttft"),
        )
    app.add_middleware(
        RequestContext, root_path=settings.root_path, intake=server.intake, logs_access=settings.access_log
    )
    return app


def _describe(app: FastAPI, server: Server) -> None:
    """Add the schemas of bodies, which routes parse themselves, and this server's bounds to the OpenAPI document."""
    make_document, settings, input_processor = app.openapi, server.settings, server.served.input_processor

    @lru_cache(maxsize=1)  # another fleet changes both arguments
    def document_for(max_model_len: int, changeable: tuple[str, ...]) -> dict[str, Any]:
        app.openapi_schema = None  # where FastAPI caches its own document
        document = make_document()
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(body_schemas())
        if settings.api_keys:
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            document["security"] = [{"key": []}, {"x-api-key": []}]
            for operation in (operation for path in OPEN_PATHS for operation in document["paths"][path].values()):
                operation["security"] = []
        write_bounds(document, settings.model_names, input_processor.vocab_size, max_model_len)
        [name] = document["paths"]["/v1/models/{model}"]["get"]["parameters"]
        name["schema"]["enum"] = list(settings.model_names)
        update = components["schemas"]["PolicyUpdate"]
        update["properties"] = dict.fromkeys(changeable, update["additionalProperties"])
        update["additionalProperties"] = False
        return settings.limits.narrowed(document)

    app.openapi = lambda: document_for(input_processor.max_model_len, server.engine.policy.changeable)  # type: ignore[method-assign]  # as in FastAPI's documentation


def body_schemas() -> dict[str, Any]:
    """Return the schemas of all request bodies, for the components of the OpenAPI document.

    Those of translated APIs include answers.
    """
    bodies: tuple[type[BaseModel], ...] = (
        requests.CompletionRequest,
        chat_requests.ChatCompletionRequest,
        chat_requests.TokenizeRequest,
        requests.DetokenizeRequest,
        requests.PolicyUpdate,
        requests.Parallel,
        requests.Recording,
    )
    from longspan.serve.apis import messages_requests, responses_requests  # noqa: PLC0415 - loaded on first use

    bodies = (
        *bodies,
        *(responses_requests.ResponsesRequest, responses_requests.ResponsesAnswer),
        *(messages_requests.MessagesRequest, messages_requests.MessagesAnswer),
        *(messages_requests.CountTokensRequest, messages_requests.CountTokensAnswer),
    )
    inputs: Any = [(body, "validation") for body in bodies]
    _, schema = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    definitions: dict[str, Any] = schema["$defs"]
    return definitions


def write_bounds(document: dict[str, Any], model_names: tuple[str, ...], vocab_size: int, max_model_len: int) -> None:
    """Write the names of the model and the bounds of token ids and outputs into a document's schemas."""
    components: dict[str, Any] = document["components"]["schemas"]
    for name in ("TokenIds", "StopTokens"):
        components[name]["items"]["maximum"] = vocab_size - 1
    for schema in components.values():
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            field = schema.get("properties", {}).get(name, {})
            for option in field.get("anyOf", (field,)):
                if option.get("type") == "integer":
                    option["maximum"] = max_model_len - 1  # after a prompt of one token
        model = schema.get("properties", {}).get("model", {})
        for option in model.get("anyOf", ()):  # it may be null in requests, but not in responses
            if option.get("type") == "string":
                option["enum"] = list(model_names)


def _handle_errors(app: FastAPI, server: Server) -> None:
    @app.exception_handler(ServeError)
    async def refused(_: Request, error: ServeError) -> Response:
        match error:
            case ClientGoneError():
                return Response(status_code=error.status)
            case QueueFullError():
                words, retry_after_s = f"the queue is full: {error}", server.retry_after_s()
                return error_response(error.status, words, code="queue_full", retry_after_s=retry_after_s)
            case EngineLostError():
                return error_response(503 if server.intake.draining else error.status, str(error), retry_after_s=5)
        response = error_response(error.status, str(error), param=error.param, code=error.code)
        if not isinstance(error, WireError):
            response.headers["x-should-retry"] = "false"
        return response

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        path, code = shortened(path_of(request.scope)), None
        words = str(error.detail)
        if error.status_code == _NOT_FOUND:
            similar = closest(path, app.openapi()["paths"])
            words = f"there is no {path}: " + ("/openapi.json lists all paths" if similar is None else f"use {similar}")
        elif error.status_code == _NOT_ALLOWED:
            words = (
                f"{path} does not allow {request.method}: use {Headers(error.headers).get('allow', 'another method')}"
            )
        wants_admin = request.method == "POST" and path_of(request.scope).startswith(_ADMIN)
        if error.status_code == _NOT_ALLOWED and wants_admin and not server.settings.api_keys:
            words = "clients cannot change a server without keys: start it with --api-key, and send the key"
            code = "no_api_key"
        response = error_response(error.status_code, words, code=code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        request_id = request.state.request_id
        _log.error("request %s failed by %s", request_id, type(error).__name__)  # uvicorn logs the traceback
        response = error_response(500, f"internal error; the server's log has more about request {request_id}")
        response.headers["x-request-id"] = request_id  # this response passes no middleware
        return response


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorBody, "description": words}
    for status, words in {
        400: "The request has a mistake. The message names the mistake and a remedy.",
        401: "A key is needed.",
        404: "There is no such model.",
        408: "The body took too long to arrive.",
        413: "The body is too large.",
        415: "The content type of the body is not JSON.",
        500: "The engine was lost while it computed this request.",
        503: "The queue is full, or the server is starting or stopping. Try again after `retry-after` seconds.",
        504: "The request took longer than its timeout.",
    }.items()
}
_SECONDS = {
    "name": "seconds",
    "in": "query",
    "description": "The trace has the last seconds of the recording.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "default": 60},
}
_MESSAGES_ERRORS = {status: {**error, "model": schemas.MessagesErrorBody} for status, error in _ERRORS.items()}
_EVENTS = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON. The last is [DONE]."}},
}
"""The schema of an event of a stream."""
_NAMED_EVENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "description": "JSON of this type."}},
}
"""The schema of an event of a stream whose events have names."""


def _add_state(app: FastAPI, server: Server) -> None:
    keyed: dict[int | str, dict[str, Any]] = {401: _ERRORS[401]}

    @app.get("/live", tags=["state"])
    async def live() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    @app.get("/health", tags=["state"], responses={503: {"model": schemas.ErrorBody}}, response_model=None)
    async def health() -> dict[str, str]:
        """Return 200 if the engine computes and the server accepts new requests, else 503."""
        server.check_serving()
        return {"status": "ok"}

    @app.get("/version", tags=["state"])
    async def version() -> schemas.VersionInfo:
        """Return the version of longspan."""
        return schemas.VersionInfo(version=longspan.__version__)

    @app.get("/metrics", tags=["state"], responses=keyed, response_class=PlainTextResponse, response_model=None)
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", tags=["state"], responses=keyed)
    async def models() -> schemas.ModelList:
        """List the names of the model."""
        return server.models

    @app.get("/v1/models/{model:path}", tags=["state"], responses=keyed | {404: _ERRORS[404]})
    async def model_by_name(model: str) -> schemas.ModelCard:
        """Return the model's entry under one of its names."""
        server.served.check_name(model)
        return next(card for card in server.models.data if card.id == model)


def _add_text(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", **_described(requests.CompletionRequest, schemas.CompletionResponse, streams=True))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        return await server.answer(request, await server.parse(request, requests.CompletionRequest))

    @app.post(
        "/v1/chat/completions",
        **_described(chat_requests.ChatCompletionRequest, schemas.ChatCompletionResponse, streams=True),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await server.answer(request, await server.parse(request, chat_requests.ChatCompletionRequest))

    @app.post("/v1/responses", **_described_by_name("ResponsesRequest", "ResponsesAnswer", streams=True))
    async def responses(request: Request) -> Response:
        """Answer a conversation, as OpenAI's Responses API without stored responses."""
        from longspan.serve.apis import responses_api  # noqa: PLC0415 - loaded on first use

        return await responses_api.answer(server, request)

    @app.post("/v1/messages", **_described_by_name("MessagesRequest", "MessagesAnswer", streams=True))
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic's Messages API."""
        from longspan.serve.apis import messages_api  # noqa: PLC0415 - loaded on first use

        return await messages_api.answer(server, request)

    @app.post("/v1/messages/count_tokens", **_described_by_name("CountTokensRequest", "CountTokensAnswer"))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        from longspan.serve.apis import messages_api  # noqa: PLC0415 - loaded on first use

        return await messages_api.count_tokens(server, request)

    @app.post("/tokenize", **_described(chat_requests.TokenizeRequest, schemas.TokenizeResponse))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        body = await server.parse(request, chat_requests.TokenizeRequest)
        return _json(await server.in_thread(request, tokenized, body))

    @app.post("/detokenize", **_described(requests.DetokenizeRequest, schemas.DetokenizeResponse))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        body = await server.parse(request, requests.DetokenizeRequest)
        return _json(await server.in_thread(request, detokenized, body))


def _add_admin(app: FastAPI, server: Server) -> None:
    @app.get("/admin/policy", **_read_only(requests.PolicyInfo))
    async def policy() -> Response:
        """Return the policy and its options in force."""
        return _json(requests.PolicyInfo.of(server.engine.policy).model_dump())

    @app.get("/admin/parallel", **_read_only(requests.Parallel))
    async def parallel() -> Response:
        """Return the parallel spec of the instances that serve."""
        return _json({"parallel": server.engine.parallel})

    recorded = _read_only(dict[str, Any]) | {"openapi_extra": {"parameters": [_SECONDS]}}
    recorded["responses"] |= {
        400: _ERRORS[400],
        409: {"model": schemas.ErrorBody, "description": "Nothing is recorded."},
    }

    @app.get("/admin/timeline", **recorded)
    async def timeline(request: Request) -> Response:
        """Return a Perfetto trace of the last seconds, if requests and steps are recorded."""
        server.check_serving()
        return Response(await server.timeline(request), media_type="application/json")

    if not server.settings.api_keys:
        return  # clients cannot change a server without keys, see the message in `_handle_errors`

    settled = {"model": schemas.ErrorBody, "description": "This option can only change at a new start."}
    described = _described(requests.PolicyUpdate, requests.PolicyInfo, tag="admin")
    described["responses"][409] = settled

    @app.post("/admin/policy", **described)
    async def update_policy(request: Request) -> Response:
        """Change options of the policy between two steps. Running requests go on."""
        body = await server.parse(request, requests.PolicyUpdate)
        server.check_serving()
        return _json(requests.PolicyInfo.of(await server.update_policy(request, body)).model_dump())

    @app.post("/admin/parallel", **_described(requests.Parallel, requests.Parallel, tag="admin"))
    async def reshard(request: Request) -> Response:
        """Change the parallel spec, to fewer or more ranks or the same number. Running requests go on."""
        body = await server.parse(request, requests.Parallel)
        server.check_serving()
        return _json((await server.reshard(request, body)).model_dump())

    @app.post("/admin/timeline", **_described(requests.Recording, requests.Recording, tag="admin"))
    async def set_recording(request: Request) -> Response:
        """Start or stop to record requests and steps of the engine."""
        body = await server.parse(request, requests.Recording)
        server.check_serving()
        return _json((await server.set_recording(request, body)).model_dump())


def _read_only(model: type[Any]) -> dict[str, Any]:
    """Return the description of a route that returns settings or a recording of the engine."""
    responses = {200: {"model": model}, 401: _ERRORS[401], 503: _ERRORS[503]}
    return {"tags": ["admin"], "responses": responses, "response_model": None}


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _described(
    body: type[BaseModel], response: type[BaseModel], *, streams: bool = False, tag: str = "text"
) -> dict[str, Any]:
    """Return the description of a route that parses its body itself, in a thread."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    content = {"text/event-stream": {"schema": _EVENTS}} if streams else {}
    return {
        "tags": [tag],
        "response_model": None,
        "responses": {200: {"model": response, "content": content}, **_ERRORS},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


def _described_by_name(body: str, answer: str, *, streams: bool = False) -> dict[str, Any]:
    """Return the description of a route whose models are loaded with the OpenAPI document."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
    if streams:
        content["text/event-stream"] = {"schema": _NAMED_EVENTS}
    schema = {"$ref": f"#/components/schemas/{body}"}
    errors = _MESSAGES_ERRORS if body in ("MessagesRequest", "CountTokensRequest") else _ERRORS
    return {
        "tags": ["text"],
        "response_model": None,
        "responses": {200: {"description": "The answer.", "content": content}, **errors},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }
