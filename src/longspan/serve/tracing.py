"""OpenTelemetry spans, one per request for text, with vLLM's names. This module needs the extra `otel`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from longspan.errors import ParameterError
from longspan.serve.middleware import path_of
from longspan.serve.output_queue import OutputQueue

_TRACED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
_SERVER_ERROR = 500
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def open_tracer(endpoint: str) -> Tracer:
    """Return a tracer that sends spans to an OTLP collector in batches, the last batch when the process exits.

    As with vLLM, `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` chooses between `grpc`, the default, and `http/protobuf`.

    Raises:
        ValueError: the endpoint is no URL, or the protocol is unknown.
    """
    if not urlsplit(endpoint).netloc:
        problem = f"must be a URL such as http://localhost:4317, but {endpoint!r} given"
        raise ParameterError("otlp_traces_endpoint", problem, endpoint)
    resource = Resource({"service.name": "longspan"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    return provider.get_tracer("longspan")


def _exporter(endpoint: str) -> SpanExporter:
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - large

        return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https:"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415 - one of two exporters

        return trace_exporter.OTLPSpanExporter(endpoint=endpoint)
    raise ValueError(f"{_PROTOCOL} must be grpc or http/protobuf, but {protocol!r} given")


class Tracing:
    """Makes the span of a request for text when the last byte of its response is sent, or sending fails."""

    def __init__(self, app: ASGIApp, tracer: Tracer, model_name: str) -> None:
        self._app, self._tracer, self._model_name = app, tracer, model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if path_of(scope) not in _TRACED:
            await self._app(scope, receive, send)
            return
        begin_ns = time.time_ns()
        try:
            await self._app(scope, receive, send)
        finally:
            self._make_span(scope, begin_ns)

    def _make_span(self, scope: Scope, begin_ns: int) -> None:
        """Make the span of one request, as a child of the client's `traceparent` if there is one."""
        status = scope["state"].get("status", _SERVER_ERROR)  # an exception is answered with this status
        outputs: OutputQueue | None = scope["state"].get("outputs")
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            start_time=begin_ns,
            attributes={
                "gen_ai.request.id": scope["state"]["request_id"],
                "gen_ai.response.model": self._model_name,
                "http.response.status_code": status,
            },
        )
        if outputs is not None:
            span.set_attributes(dict(_attributes(outputs)))
            span.set_attribute("gen_ai.latency.e2e", (time.time_ns() - begin_ns) / 1e9)
        if status >= _SERVER_ERROR:
            span.set_status(StatusCode.ERROR, f"answered {status}")
        elif outputs is not None and len(outputs.finished) < _num_choices(outputs):
            span.set_status(StatusCode.ERROR, "the answer is not complete")
        span.end()


def _num_choices(outputs: OutputQueue) -> int:
    return sum(engine_request.params.n for engine_request in outputs.engine_requests)


def _attributes(outputs: OutputQueue) -> Iterator[tuple[str, float]]:
    """Yield the parameters of a request, its tokens and its times. With several choices, the longest times count."""
    params, finished = outputs.engine_requests[0].params, [choice for _, choice in outputs.finished]
    yield "gen_ai.request.n", params.n
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.usage.num_sequences", _num_choices(outputs)
    yield "gen_ai.usage.prompt_tokens", sum(len(engine_request.token_ids) for engine_request in outputs.engine_requests)
    yield "gen_ai.usage.completion_tokens", sum(choice.num_output_tokens for choice in finished)
    if ttfts_s := [choice.ttft_s for choice in finished if choice.ttft_s is not None]:
        yield "gen_ai.latency.time_to_first_token", min(ttfts_s)
    if queues_s := [choice.queue_s for choice in finished if choice.queue_s is not None]:
        yield "gen_ai.latency.time_in_queue", max(queues_s)
    if computed := [(c.prefill_s or 0.0, c.decode_s or 0.0) for c in finished if c.ttft_s is not None]:
        yield "gen_ai.latency.time_in_model_prefill", max(prefill_s for prefill_s, _ in computed)
        yield "gen_ai.latency.time_in_model_decode", max(decode_s for _, decode_s in computed)
        yield "gen_ai.latency.time_in_model_inference", max(map(sum, computed))
