"""The verb `profile`: how fast this machine is with a model."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from longspan.cli.bundles import bundled
from longspan.cli.options import EngineOptions, ModelArgument, id_list
from longspan.core.cluster import ParallelSpec

if TYPE_CHECKING:
    from longspan.llm import LLM

_ENGINE = EngineOptions()


@bundled()
def profile(
    model: ModelArgument = "smollm2-135m",
    *,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Prompt lengths; if not given, 512, 1024 and so on up to the longest."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="How often everything is measured; the quickest exchange of each prompt twice as often."
        ),
    ] = 3,
    partitions: Annotated[
        bool, typer.Option("--partitions", help="Also search how chains cut prompts, for the policy runahead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no tables.")] = False,
    engine: EngineOptions = _ENGINE,
) -> int:
    """Measures how fast this machine is with a model, alone and in groups, so that policies choose by it.

    Prompts are timed on one instance and on groups of two and more, with every exchange. Each time is kept in the cache
    folder at once: run it again after it was stopped, and it goes on. What was measured is not measured again. The
    speeds of links between ranks are measured, too.
    """
    from longspan.cli import profile_partitions, profile_report, profile_run  # noqa: PLC0415 - other verbs need no numpy

    _check(engine)
    spec = ParallelSpec.parse(engine.arguments()["parallel"])
    if partitions and spec.instances == 1:
        raise ValueError("--partitions are of prompts over several instances, but there is 1: give --parallel")
    wanted = None if lengths is None else id_list("--lengths", lengths)
    start = partial(_start, model, engine, spec)
    found = profile_run.measure(start, spec.instances, wanted, repeats)
    found = profile_run.measure_links(found, spec.instances)
    if partitions:
        table = profile_partitions.search_partitions(start, found, spec.instances, wanted, repeats)
    else:
        table = profile_partitions.known_partitions(found)
    if as_json:
        typer.echo(json.dumps(profile_report.as_fields(found, table)))
    else:
        for one in profile_report.tables(found, table):
            Console().print(one)
    return 0


def _check(engine: EngineOptions) -> None:
    if (engine.policy, engine.exchange, engine.layout, engine.fractions) != ("auto", "auto", "auto", None):
        raise ValueError("profile tries the exchanges itself: leave out --policy, --exchange, --layout and --fractions")
    if (engine.prefill_parallel, engine.decode_parallel, engine.transfer_backends) != (None, None, None):
        raise ValueError("profile measures instances that are split alike: give --parallel, and no roles to instances")
    if engine.policy_option:
        raise ValueError(f"profile sets options of policies itself: leave out -o {engine.policy_option[0]}")
    if not engine.enable_prefix_caching:
        raise ValueError("profile measures prompts behind cached ones: leave out --no-enable-prefix-caching")


def _start(model: str, engine: EngineOptions, spec: ParallelSpec, instances: int) -> LLM:
    """With as many threads per rank as all instances would have, and no need of a tokenizer."""
    from longspan.args import threads_per_rank  # noqa: PLC0415 - loads torch

    options = replace(
        engine,
        parallel=str(replace(spec, instances=instances)),
        instances=None,
        tp=None,
        pp=None,
        threads_per_rank=threads_per_rank(engine.threads_per_rank, spec.num_ranks),
        skip_tokenizer_init=True,
    )
    return options.start(model, seed=0)
