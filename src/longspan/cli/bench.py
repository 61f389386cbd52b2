"""The verb `bench serve`: load for a server that speaks OpenAI's protocol. `bench_run` does it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.bundles import bundled

_server = partial(typer.Option, rich_help_panel="Server")
_arrivals = partial(typer.Option, rich_help_panel="When requests are sent")
_lengths = partial(typer.Option, rich_help_panel="What they ask for")
_results = partial(typer.Option, rich_help_panel="Results")

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 1000, 1024, 128

bench = typer.Typer(help="Measures a server.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where requests go, and what they have in common."""

    base_url: Annotated[str, _server(help="The server, without the endpoint.")] = "http://127.0.0.1:8000"
    endpoint: Annotated[str, _server(help="/v1/completions sends token ids, /v1/chat/completions words.")] = (
        "/v1/completions"
    )
    model: Annotated[str | None, _server(help="The first that the server lists if not given.")] = None
    api_key: Annotated[
        str | None, _server(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
    ] = None
    ignore_eos: Annotated[bool, _server("--ignore-eos", help="Answers go on to their full length (vLLM's field).")] = (
        False
    )
    continuous_usage_stats: Annotated[
        bool,
        _server(
            "--continuous-usage-stats/--no-continuous-usage-stats",
            help="Ask how many tokens each chunk has (vLLM's field); without, chunks get equal shares.",
        ),
    ] = True
    extra_body: Annotated[
        str | None, _server(metavar="JSON", help='Further fields of every request, such as {"temperature": 0}.')
    ] = None
    request_timeout: Annotated[float, _server(metavar="S", help="A request that takes longer has failed.")] = 21600.0


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When requests are sent, and what they ask for."""

    num_prompts: Annotated[
        int | None, _arrivals(help="Requests in all.", show_default=f"{NUM_PROMPTS}; all of a trace")
    ] = None
    request_rate: Annotated[
        float | None, _arrivals(help="Requests per second, a Poisson process.", show_default="inf: all at once")
    ] = None
    burstiness: Annotated[
        float | None,
        _arrivals(help="Shape of the gamma distribution of gaps: below 1 in bursts, above steadier.", show_default="1"),
    ] = None
    max_concurrency: Annotated[
        int | None,
        _arrivals(help="Most requests at once. Without a rate, one is due whenever another has ended (closed loop)."),
    ] = None
    trace: Annotated[
        Path | None,
        _arrivals(
            metavar="FILE", help="Times and lengths from a trace: Mooncake, Azure, BurstGPT; CSV or JSONL, maybe .gz."
        ),
    ] = None
    trace_speed: Annotated[
        float | None, _arrivals(help="So many times faster than it was recorded.", show_default="1")
    ] = None
    random_input_len: Annotated[
        int | None, _lengths(help="Prompt tokens, besides the prefix.", show_default=str(INPUT_LEN))
    ] = None
    random_output_len: Annotated[int | None, _lengths(help="Output tokens.", show_default=str(OUTPUT_LEN))] = None
    random_range_ratio: Annotated[
        float | None, _lengths(help="Lengths from (1 - ratio) to (1 + ratio) times that.", show_default="0")
    ] = None
    random_prefix_len: Annotated[
        int | None, _lengths(help="Tokens at the start that all prompts share.", show_default="0")
    ] = None
    random_vocab_size: Annotated[int, _lengths(help="Token ids are drawn from below this.")] = 30000
    seed: Annotated[int, _lengths(help="Of times, lengths and prompts.")] = 0


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """What becomes of the results."""

    slo_ttft: Annotated[
        float | None, _results(metavar="MS", help="A request is good if its TTFT is within this: see goodput.")
    ] = None
    slo_tbt: Annotated[
        float | None, _results(metavar="MS", help="... and if the mean of its times between tokens is within this.")
    ] = None
    output_json: Annotated[Path | None, _results(metavar="FILE", help="All numbers, with vLLM's names.")] = None
    plot: Annotated[Path | None, _results(metavar="FILE.png", help="A picture; needs longspan\\[plot].")] = None


_SERVER, _LOAD, _RESULTS = ServerOptions(), LoadOptions(), ResultOptions()


@bench.command()
@bundled()
def serve(server: ServerOptions = _SERVER, load: LoadOptions = _LOAD, results: ResultOptions = _RESULTS) -> int:
    """Sends requests to any OpenAI-compatible server and reports rates, goodput, and times.

    Times count from when a request was due, not from when it could be sent. Ctrl-C reports what there is (exit code
    130). Exit code 1: no request succeeded.
    """
    from longspan.cli.bench_run import run_bench  # noqa: PLC0415  # numpy and HTTP, which no other verb waits for

    return run_bench(server, load, results)
