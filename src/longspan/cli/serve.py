"""The verb `serve`: runs an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from longspan.args import EngineArgs
from longspan.cli.options import ModelArgument, verb
from longspan.core.options import Option
from longspan.serve.settings import RequestLimits

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_server = partial(Option, group="Server")
_LIMITS = RequestLimits()
_ENGINE = EngineArgs()


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options that say how the server is reached, and how many requests it lets wait."""

    host: Annotated[str, _server("Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1"
    port: Annotated[int, _server("0 takes a free one.")] = 8000
    api_key: Annotated[
        list[str] | None,
        _server("Clients need this key; repeatable, any of them will do.", default=""),
    ] = field(default=None, repr=False)
    served_model_name: Annotated[
        list[str] | None, _server("The name clients ask for; repeatable. The model's own if not given.")
    ] = None
    root_path: Annotated[str, _server("The prefix that a proxy in front takes off.")] = ""
    max_num_queued_reqs: Annotated[
        int, _server("Requests that may wait for room; more are answered 503.", minimum=1)
    ] = 1024
    max_num_queued_tokens: Annotated[
        int, _server("Tokens of all requests that wait; one request may wait whatever its length.", minimum=1)
    ] = 8_000_000
    engine_timeout: Annotated[
        float, _server("Seconds of silence after which the engine process is taken for lost.", minimum=10)
    ] = 60.0
    request_timeout: Annotated[
        float | None, _server("Seconds that a request may take; x-request-timeout can only shorten it.", minimum=0.001)
    ] = None
    body_timeout: Annotated[float, _server("Seconds that a request's body may take to come.", minimum=0.001)] = 60.0
    max_total_body_bytes: Annotated[
        int, _server("Most bytes of the bodies of all open requests; more are answered 503.", minimum=1)
    ] = 2**28
    h11_max_incomplete_event_size: Annotated[
        int, _server("Most bytes of a request's line and headers.", minimum=1024)
    ] = 64 * 1024
    stream_keep_alive: Annotated[
        float, _server("Seconds that a stream may be silent before a comment is sent.", minimum=0.001)
    ] = 10.0
    reader_timeout: Annotated[
        float, _server("Seconds after which a client that takes nothing of its answer is let go.", minimum=0.001)
    ] = 60.0
    shutdown_timeout: Annotated[
        float, _server("Seconds that requests under way have after SIGTERM; a second signal ends at once.", minimum=0)
    ] = 30.0
    metrics_prefix: Annotated[str, _server("Of metric names; vllm: for dashboards made for vLLM.")] = "longspan:"
    otlp_traces_endpoint: Annotated[
        str | None,
        _server("Of an OpenTelemetry collector, which gets a span per request; needs longspan[otel].", metavar="URL"),
    ] = None
    seed: Annotated[int, _server("Of requests that bring none, and of dummy weights.")] = 0


_SERVER = ServerOptions()


@verb(configurable=True)
def serve(
    model: ModelArgument = "smollm2-135m",
    *,
    server: ServerOptions = _SERVER,
    engine: EngineArgs = _ENGINE,
    limits: RequestLimits = _LIMITS,
) -> int:
    """Serves a model to clients of OpenAI's API until SIGTERM or Ctrl-C.

    Every flag can also be given as an environment variable: --max-model-len as LONGSPAN_MAX_MODEL_LEN.
    """
    from longspan.serve import errors, messages, run, settings  # noqa: PLC0415 - other verbs do not wait for FastAPI
    from longspan.serve.server import end_process_if_busy  # noqa: PLC0415

    os.environ.pop("LONGSPAN_API_KEY", None)  # it was read; processes that are started from here on need not know it
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("longspan").setLevel(logging.INFO)
    engine.resolve()  # mistakes end it here, not in the engine core
    setup = messages.EngineSetup(
        model=model,
        arguments={**{name: value for name, value in vars(engine).items() if name != "model"}, "seed": server.seed},
        max_num_queued_reqs=server.max_num_queued_reqs,
        max_num_queued_tokens=server.max_num_queued_tokens,
        engine_timeout_s=server.engine_timeout,
    )
    server_settings = settings.ServerSettings(
        model_names=tuple(server.served_model_name or (model,)),
        api_keys=tuple(server.api_key or ()),
        root_path=server.root_path,
        request_timeout_s=server.request_timeout,
        body_timeout_s=server.body_timeout,
        max_total_body_bytes=server.max_total_body_bytes,
        max_header_bytes=server.h11_max_incomplete_event_size,
        keep_alive_s=server.stream_keep_alive,
        reader_timeout_s=server.reader_timeout,
        shutdown_timeout_s=server.shutdown_timeout,
        max_num_queued_reqs=server.max_num_queued_reqs,
        max_num_queued_tokens=server.max_num_queued_tokens,
        metrics_prefix=server.metrics_prefix,
        tracer=None if server.otlp_traces_endpoint is None else _tracer(server.otlp_traces_endpoint),
        limits=limits,
    )
    try:
        code = asyncio.run(run.serve(setup, server_settings, server.host, server.port))
    except errors.EngineLostError as error:
        print(f"longspan: {error}", file=sys.stderr)
        code = 1
    end_process_if_busy(code)
    return code


def _tracer(endpoint: str) -> Tracer:
    try:
        from longspan.serve.tracing import open_tracer  # noqa: PLC0415 - its packages may be missing

        return open_tracer(endpoint)
    except ImportError as error:
        raise ValueError(f"--otlp-traces-endpoint needs {error.name}: run pip install 'longspan[otel]'") from error
