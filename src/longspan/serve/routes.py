"""The routes of the HTTP face."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import PlainTextResponse, Response

import longspan
from longspan.serve import wire
from longspan.serve.document import EVENTS
from longspan.serve.errors import error_response
from longspan.serve.respond import json_response
from longspan.serve.server import Server
from longspan.text.input_processor import EngineRequest

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.ErrorBody, "description": words}
    for status, words in {
        400: "The request is wrong; the message says what and how to mend it.",
        401: "A key is needed.",
        404: "There is no such model.",
        408: "The body took too long to come.",
        413: "The body is too large.",
        415: "The body does not say that it is JSON.",
        500: "The engine was lost while it computed this.",
        503: "The queue is full, or the server is starting or stopping; come again after `retry-after` seconds.",
        504: "The request took longer than it may.",
    }.items()
}
_BODIES: tuple[type[BaseModel], ...] = (
    wire.CompletionRequest,
    wire.ChatCompletionRequest,
    wire.TokenizeRequest,
    wire.DetokenizeRequest,
    wire.PolicyUpdate,
)


def routes(server: Server) -> APIRouter:
    """All of them."""
    router = APIRouter()
    _add_state(router, server)
    _add_text(router, server)
    _add_tokens(router, server)
    _add_policy(router, server)
    return router


def _add_state(router: APIRouter, server: Server) -> None:
    @router.get("/live", tags=["state"])
    async def live() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    @router.get("/health", tags=["state"], responses={503: {"model": wire.ErrorBody}}, response_model=None)
    async def health() -> Response | dict[str, str]:
        """The engine computes, and new requests are taken."""
        return _not_serving(server) or {"status": "ok"}

    @router.get("/version", tags=["state"])
    async def version() -> wire.VersionInfo:
        """Of longspan."""
        return wire.VersionInfo(version=longspan.__version__)

    @router.get(
        "/metrics",
        tags=["state"],
        responses={401: _ERRORS[401]},
        response_class=PlainTextResponse,
        response_model=None,
    )
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models", tags=["state"], responses={401: _ERRORS[401]})
    async def models() -> wire.ModelList:
        """The names by which the model goes."""
        return server.models


def _add_text(router: APIRouter, server: Server) -> None:
    @router.post("/v1/completions", **_described(wire.CompletionRequest, wire.CompletionResponse, streams=True))
    async def completions(request: Request) -> Response:
        """Continues prompts."""
        body = await server.parse(request, wire.CompletionRequest)
        engine_requests = partial(wire.completion_requests, body, server)
        return await server.answer(request, body, engine_requests, wire.CompletionAssembler, "cmpl")

    @router.post(
        "/v1/chat/completions", **_described(wire.ChatCompletionRequest, wire.ChatCompletionResponse, streams=True)
    )
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        body = await server.parse(request, wire.ChatCompletionRequest)

        def engine_requests(grammar: str) -> list[EngineRequest]:
            return [wire.chat_request(body, server, grammar)]

        return await server.answer(request, body, engine_requests, wire.ChatAssembler, "chatcmpl")


def _add_tokens(router: APIRouter, server: Server) -> None:
    @router.post("/tokenize", **_described(wire.TokenizeRequest, wire.TokenizeResponse))
    async def tokenize(request: Request) -> Response:
        """A text's or a conversation's token ids."""
        body = await server.parse(request, wire.TokenizeRequest)
        server.check_model(body.model)
        return json_response(await server.in_thread(request, wire.tokenized, body, server))

    @router.post("/detokenize", **_described(wire.DetokenizeRequest, wire.DetokenizeResponse))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await server.parse(request, wire.DetokenizeRequest)
        server.check_model(body.model)
        return json_response(await server.in_thread(request, wire.detokenized, body, server))


def _add_policy(router: APIRouter, server: Server) -> None:
    @router.get(
        "/admin/policy",
        tags=["admin"],
        responses={200: {"model": wire.PolicyInfo}, 401: _ERRORS[401], 503: _ERRORS[503]},
        response_model=None,
    )
    async def policy() -> Response:
        """The policy that decides, and its options as they are in force."""
        settings = server.engine.policy.settings
        if settings is None:
            return error_response(503, f"the engine is {server.engine.state}", retry_after_s=5)
        return json_response(wire.PolicyInfo.of(settings).model_dump())

    if not server.settings.api_keys:
        return  # nobody may change a server without keys; `app.py` says so to those who try

    described = _described(wire.PolicyUpdate, wire.PolicyInfo, tag="admin")
    described["responses"][409] = {"model": wire.ErrorBody, "description": "Only a new start can change this option."}

    @router.post("/admin/policy", **described)
    async def update_policy(request: Request) -> Response:
        """Changes options of the policy between two steps: requests that run go on."""
        body = await server.parse(request, wire.PolicyUpdate)
        if (refusal := _not_serving(server)) is not None:
            return refusal
        settings = await server.update_policy(request, body)
        return json_response(wire.PolicyInfo.of(settings).model_dump())


def _not_serving(server: Server) -> Response | None:
    """The answer while the engine computes nothing, or nothing new is taken; None if neither."""
    if server.draining:
        return error_response(503, "the server is shutting down", retry_after_s=5)
    if server.engine.state != "serving":
        return error_response(503, f"the engine is {server.engine.state}", retry_after_s=5)
    return None


def _described(
    body: type[BaseModel], response: type[BaseModel], *, streams: bool = False, tag: str = "text"
) -> dict[str, Any]:
    """What the schema says of a route that reads its body itself, beside the event loop."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    content = {"text/event-stream": {"schema": EVENTS}} if streams else {}
    return {
        "tags": [tag],
        "response_model": None,
        "responses": {200: {"model": response, "content": content}, **_ERRORS},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


def body_schemas() -> dict[str, Any]:
    """The schemas of all bodies, for the components of the OpenAPI document."""
    wanted = [(body, "validation") for body in _BODIES]
    _, schema = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    found: dict[str, Any] = schema["$defs"]
    return found
