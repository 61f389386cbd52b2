"""What `bench serve` does with its options."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from longspan.cli.bench import INPUT_LEN, NUM_PROMPTS, OUTPUT_LEN, LoadOptions, ResultOptions, ServerOptions
from longspan.loadgen.client import Client
from longspan.loadgen.metrics import Slo, summarise
from longspan.loadgen.plot import check_plot, save_plot
from longspan.loadgen.prompts import PromptMaker
from longspan.loadgen.report import as_json, tables
from longspan.loadgen.results import Run
from longspan.loadgen.runner import Load, Progress
from longspan.loadgen.target import Target
from longspan.loadgen.traces import read_trace
from longspan.loadgen.workload import Arrivals, Ask, random_asks

_INTERRUPTED = 130


def run_bench(server: ServerOptions, load: LoadOptions, results: ResultOptions) -> int:
    """Runs the load, prints and writes what it showed, and returns the exit code.

    Raises:
        ValueError: for a value that is not possible, a bad trace, or a server that is not there.
    """
    target, asks = target_of(server), asks_of(load)
    slo = Slo(ttft_ms=results.slo_ttft, tbt_ms=results.slo_tbt)
    prompts = PromptMaker(seed=load.seed, vocab_size=load.random_vocab_size, prefix_len=load.random_prefix_len or 0)
    _check_files(results)
    target, run = asyncio.run(_run(target, asks, prompts, load.max_concurrency))
    summary = summarise(run, slo)
    Console().print(tables(run, summary, slo, max_concurrency=load.max_concurrency))
    if results.output_json is not None:
        _write(results.output_json, as_json(run, summary, _settings(target, load, len(asks))))
    if results.plot is not None:
        save_plot(results.plot, run)
    if run.interrupted:
        return _INTERRUPTED
    return 0 if summary.completed else 1


def target_of(options: ServerOptions) -> Target:
    """The server, maybe without a model yet.

    Raises:
        ValueError: for a value that is not possible.
    """
    return Target(
        base_url=options.base_url,
        endpoint=options.endpoint,
        model=options.model or "",
        api_key=options.api_key,
        ignore_eos=options.ignore_eos,
        continuous_usage_stats=options.continuous_usage_stats,
        extra_body=_json_object("--extra-body", options.extra_body),
        timeout_s=options.request_timeout,
    )


def asks_of(load: LoadOptions) -> list[Ask]:
    """The requests.

    Raises:
        ValueError: for a value that is not possible, options that exclude each other, or a bad trace.
    """
    if load.max_concurrency is not None and load.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, but {load.max_concurrency} given")
    if load.seed < 0:
        raise ValueError(f"--seed must be at least 0, but {load.seed} given")
    if load.trace is not None:
        return _asks_of_trace(load, load.trace)
    _refuse(load, "needs --trace", "trace_speed")
    asks = random_asks(
        NUM_PROMPTS if load.num_prompts is None else load.num_prompts,
        input_len=INPUT_LEN if load.random_input_len is None else load.random_input_len,
        output_len=OUTPUT_LEN if load.random_output_len is None else load.random_output_len,
        range_ratio=load.random_range_ratio or 0.0,
        prefix_len=load.random_prefix_len or 0,
        seed=load.seed,
    )
    return _arrivals(load).timed(asks, load.seed)


def _asks_of_trace(load: LoadOptions, trace: Path) -> list[Ask]:
    lengths = ("random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len")
    _refuse(load, "contradicts --trace, which brings its own lengths", *lengths)
    asks = read_trace(trace, num=load.num_prompts, speed=1.0 if load.trace_speed is None else load.trace_speed)
    if asks[0].due_s is None:
        _refuse(load, f"needs times, but {str(trace)!r} has none; give --request-rate instead", "trace_speed")
        return _arrivals(load).timed(asks, load.seed)
    own = f"contradicts --trace {str(trace)!r}, which brings its own times; see --trace-speed"
    _refuse(load, own, "request_rate", "burstiness")
    return asks


def _arrivals(load: LoadOptions) -> Arrivals:
    rate = math.inf if load.request_rate is None else load.request_rate
    return Arrivals(
        request_rate=rate,
        burstiness=1.0 if load.burstiness is None else load.burstiness,
        closed_loop=load.max_concurrency is not None and math.isinf(rate),
    )


def _refuse(load: LoadOptions, reason: str, *names: str) -> None:
    for name in names:
        if getattr(load, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(load, name)} {reason}")


def _check_files(results: ResultOptions) -> None:
    """Whether they can be written, before the run."""
    if results.output_json is not None and not results.output_json.parent.is_dir():
        raise ValueError(f"--output-json: the folder {str(results.output_json.parent)!r} is not there")
    if results.plot is not None:
        check_plot(results.plot)


async def _run(
    target: Target, asks: Sequence[Ask], prompts: PromptMaker, max_concurrency: int | None
) -> tuple[Target, Run]:
    async with Client(target) as client:
        if not target.model:
            target = replace(target, model=await client.first_model())
        bodies = target.bodies(asks, prompts)
        with _bar(len(asks)) as watch:
            return target, await Load(client, asks, bodies, max_concurrency=max_concurrency, watch=watch).run()


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr, if it is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    note = TextColumn("{task.fields[note]}")
    with Bar(*columns, note, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("requests", total=total, note="")

        def watch(progress: Progress) -> None:
            note = f"{progress.num_running} under way, {progress.num_failed} failed"
            bar.update(task, completed=len(progress.results), note=note)

        yield watch


def _settings(target: Target, load: LoadOptions, num_prompts: int) -> dict[str, Any]:
    """What the run was, for its JSON."""
    rate = "inf" if load.request_rate is None or math.isinf(load.request_rate) else load.request_rate
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if target.endpoint.endswith("/chat/completions") else "openai",
        "base_url": target.base_url,
        "endpoint": target.endpoint,
        "model_id": target.model,
        "num_prompts": num_prompts,
        "request_rate": rate if load.trace is None or load.request_rate is not None else "trace",
        "burstiness": 1.0 if load.burstiness is None else load.burstiness,
        "max_concurrency": load.max_concurrency,
        "trace": None if load.trace is None else load.trace.name,
        "trace_speed": load.trace_speed,
        "seed": load.seed,
        "ignore_eos": target.ignore_eos,
    }


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} is no JSON ({error}): {text!r:.80}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} must be a JSON object, but {text!r:.80} given")
    return found


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(found, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output-json {str(path)!r} cannot be written: {error.strerror}") from None
