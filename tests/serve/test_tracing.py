"""One span per request for text, a child of the client's, with vLLM's attributes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_server import client_of, fake_of, make_server
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from longspan.serve.errors import EngineLostError, QueueFullError
from longspan.serve.server import Server
from longspan.serve.tracing import open_tracer

BODY = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def server(spans: InMemorySpanExporter) -> Server:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return make_server(tracer=provider.get_tracer("test"), api_keys=("sesame",))


def post(server: Server, body: dict[str, Any], **headers: str) -> Any:
    given = {"authorization": "Bearer sesame", "x-request-id": "r1", **headers}
    return client_of(server).post("/v1/completions", json=body, headers=given)


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    [span] = spans.get_finished_spans()
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_has_vllms_attributes(server: Server, spans: InMemorySpanExporter, stream: bool) -> None:
    assert post(server, BODY | {"stream": stream}).status_code == 200
    span = only(spans)
    attributes = dict(span.attributes or {})
    e2e_s = attributes.pop("gen_ai.latency.e2e")
    assert attributes == {
        "gen_ai.request.id": "r1",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.usage.num_sequences": 4,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 1.0,
        "gen_ai.latency.time_in_model_decode": 0.25,
        "gen_ai.latency.time_in_model_inference": 1.25,
        "http.response.status_code": 200,
    }
    assert (span.name, span.kind, span.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 < e2e_s <= (span.end_time - span.start_time) / 1e9


def test_a_span_is_a_child_of_the_clients(server: Server, spans: InMemorySpanExporter) -> None:
    post(server, BODY, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01", tracestate="vendor=x")
    span = only(spans)
    assert span.parent is not None
    assert trace.format_trace_id(span.context.trace_id) == TRACE_ID
    assert trace.format_span_id(span.parent.span_id) == PARENT_ID
    assert span.context.trace_state.get("vendor") == "x"


@pytest.mark.parametrize("given", ["", "nonsense", f"00-{TRACE_ID}-{'0' * 16}-01"])
def test_a_traceparent_that_is_none_is_ignored(server: Server, spans: InMemorySpanExporter, given: str) -> None:
    assert post(server, BODY, traceparent=given).status_code == 200
    assert only(spans).parent is None


def test_unsampled_traces_are_not_sent(server: Server, spans: InMemorySpanExporter) -> None:
    post(server, BODY, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
    assert not spans.get_finished_spans()


@pytest.mark.parametrize(
    ("failure", "num_sent", "stream", "status"),
    [
        (QueueFullError("2 wait"), 0, False, 503),
        (EngineLostError("gone"), 0, True, 500),
        (EngineLostError("gone"), 1, True, 200),
        (RuntimeError("a mistake of ours"), 0, False, 500),
    ],
)
def test_failures_are_errors(
    server: Server, spans: InMemorySpanExporter, failure: Exception, num_sent: int, stream: bool, status: int
) -> None:
    fake_of(server).failure, fake_of(server).num_sent = failure, num_sent
    assert post(server, BODY | {"stream": stream}).status_code == status
    span = only(spans)
    assert (span.attributes or {})["http.response.status_code"] == status
    assert span.status.status_code == StatusCode.ERROR


def test_a_clients_mistake_is_a_span_without_an_error(server: Server, spans: InMemorySpanExporter) -> None:
    assert post(server, {"prompt": [1000]}).status_code == 400
    assert only(spans).status.status_code == StatusCode.UNSET


def test_other_routes_and_strangers_make_no_spans(server: Server, spans: InMemorySpanExporter) -> None:
    client = client_of(server)
    for path in ("/live", "/health", "/metrics", "/v1/models"):
        client.get(path, headers={"authorization": "Bearer sesame"})
    assert client.post("/v1/completions", json=BODY).status_code == 401
    assert not spans.get_finished_spans()


def test_a_collector_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """By OTLP over HTTP, from a tracer as the command line opens it."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"]
        bodies.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        collector = await asyncio.start_server(collect, "127.0.0.1", 0)
        host, port = collector.sockets[0].getsockname()
        tracer: Any = open_tracer(f"http://{host}:{port}/v1/traces")
        server = make_server(tracer=tracer)
        await asyncio.to_thread(lambda: client_of(server).post("/v1/completions", json=BODY))
        await asyncio.to_thread(tracer.span_processor.force_flush)
        collector.close()

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    asyncio.run(main())
    [sent] = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    [resource] = sent.resource_spans
    assert {"service.name": "longspan"}.items() <= {
        attribute.key: attribute.value.string_value for attribute in resource.resource.attributes
    }.items()
    assert resource.scope_spans[0].spans[0].name == "llm_request"


def test_grpc_is_the_default_protocol_of_a_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter

    opened: list[dict[str, Any]] = []

    class Exporter(trace_exporter.OTLPSpanExporter):
        def __init__(self, **options: Any) -> None:
            opened.append(options)
            super().__init__(**options)

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", Exporter)
    for endpoint in ("http://localhost:4317", "grpc://localhost:4317", "https://localhost:4317"):
        tracer: Any = open_tracer(endpoint)
        tracer.span_processor.shutdown()
    assert [options["insecure"] for options in opened] == [True, True, False]


@pytest.mark.parametrize(
    ("endpoint", "protocol", "words"),
    [("localhost:4317", "grpc", "'localhost:4317'"), ("http://localhost:4317", "carrier-pigeon", "'carrier-pigeon'")],
)
def test_an_endpoint_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, protocol: str, words: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(ValueError, match=words):
        open_tracer(endpoint)
