"""The verb `serve`: runs an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from longspan.args import EngineArgs
from longspan.cli.options import LogSettings, ModelArgument, verb
from longspan.cli.outputs import note
from longspan.core.options import Option
from longspan.errors import ParameterError
from longspan.serve.settings import RequestLimits, ServerSettings

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_log = logging.getLogger("longspan")
_KEY = "LONGSPAN_API_KEY"


@verb
def serve(
    model: ModelArgument = "smollm2-135m",
    *,
    server: ServerSettings = ServerSettings(),
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            "URL of an OpenTelemetry collector for one span per request. Needs longspan[otel].",
            group="Server",
            metavar="URL",
            configures=True,
        ),
    ] = None,
    seed: Annotated[
        int, Option("Seed of requests without a seed, and of dummy weights.", group="Server", configures=True)
    ] = 0,
    engine: EngineArgs = EngineArgs(),
    limits: RequestLimits = RequestLimits(),
    log: LogSettings = LogSettings(),
) -> int:
    """Serve a model to clients of OpenAI's API until SIGTERM or Ctrl-C.

    Every flag can also be given as an environment variable: --max-model-len as LONGSPAN_MAX_MODEL_LEN.
    """
    from longspan.serve import errors, messages, run  # noqa: PLC0415 - other verbs do not wait for FastAPI

    variable = os.environ.pop(_KEY, None)  # read already, and not for child processes
    if not server.api_keys and (variable is not None or not _is_loopback(server.host)):
        words = "there is no --api-key" if variable is None else f"{_KEY} is empty, so there is no key"
        _log.warning("%s: any client that reaches %s port %d can send requests", words, server.host, server.port)
    resolved = engine.resolve()  # raises mistakes here, before the engine core starts
    if server.tune_idle:
        _check_tuning(engine, resolved.cluster.num_instances)
    setup = messages.EngineSetup(
        engine=replace(engine, model=model, seed=seed),
        max_num_queued_reqs=server.max_num_queued_reqs,
        max_num_queued_tokens=server.max_num_queued_tokens,
        engine_timeout_s=server.engine_timeout_s,
        max_worker_restarts=server.max_worker_restarts,
        tune_idle=server.tune_idle,
        log_level=log.log_level,
        log_format=log.log_format,
    )
    tracer = None if otlp_traces_endpoint is None else _tracer(otlp_traces_endpoint)
    settings = replace(server, model_names=server.model_names or (model,), tracer=tracer, limits=limits)
    try:
        return asyncio.run(run.serve(setup, settings))
    except errors.EngineLostError as error:
        note(str(error))
        return 1


def _check_tuning(engine: EngineArgs, num_instances: int) -> None:
    """Raise ParameterError if there are no chains whose partitions can be measured."""
    partition = engine.all_policy_options().get("partition", "auto")
    if engine.policy != "runahead" or num_instances == 1 or partition != "auto":
        given = f"{engine.policy} with partition {partition} on {num_instances} given"
        problem = "needs `policy` runahead with partition auto on 2 instances or more"
        raise ParameterError("tune_idle", f"{problem}, but {given}: leave it out", True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tracer(endpoint: str) -> Tracer:
    try:
        from longspan.serve.tracing import open_tracer  # noqa: PLC0415 - its packages may be missing

        return open_tracer(endpoint)
    except ImportError as error:
        raise ValueError(f"--otlp-traces-endpoint needs {error.name}: run pip install 'longspan[otel]'") from error
