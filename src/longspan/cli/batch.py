"""The verb `batch`: a file of requests in OpenAI's batch format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from longspan.cli.batch_file import (
    BatchLine,
    answered_in,
    appended,
    keys_in,
    read_batch,
    write_answer,
    write_error,
)
from longspan.cli.bundles import bundled
from longspan.cli.options import EngineOptions, ModelArgument

if TYPE_CHECKING:
    from longspan.llm import LLM

_MOST_AT_ONCE = 512
Answers = Callable[[Iterator[BatchLine]], Iterator[tuple[BatchLine, int, dict[str, Any]]]]
"""Answers requests, in any order: the request, the HTTP status, the body."""


@dataclass(frozen=True, kw_only=True)
class BatchEngineOptions(EngineOptions):
    """As for other verbs, but -o is the output file, as in vLLM's `run-batch`."""

    policy_option: Annotated[
        list[str] | None,
        typer.Option(
            "--policy-option",
            metavar="KEY=VALUE",
            help="An option of the policy; repeatable.",
            rich_help_panel="Scheduling and memory",
        ),
    ] = None


_ENGINE = BatchEngineOptions()


@bundled()
def batch(
    model: ModelArgument = "smollm2-135m",
    *,
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", help="Requests: custom_id, method, url and body in each line.")
    ],
    output_file: Annotated[
        Path, typer.Option("--output-file", "-o", help="Answers, appended as they get done; those there are kept.")
    ],
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What requests may call the model besides its own name; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of requests without a seed, and of dummy weights.")] = 0,
    engine: BatchEngineOptions = _ENGINE,
) -> int:
    """Answers the requests of a batch file, as OpenAI's batch service does.

    Run it again after it was stopped: requests with an answer in the output file are not run again. With requests that
    could not be served, the exit code is 2, and their answers say why.
    """
    if input_file.exists() and output_file.exists() and input_file.samefile(output_file):
        raise ValueError(f"--output-file {str(output_file)!r} is the input file: give another one")
    keys = keys_in(input_file)
    with appended(output_file) as out:
        answered = answered_in(output_file)
        num_new = len(keys - answered)
        if not num_new:
            typer.echo("longspan: every request has an answer already", err=True)
            return 0
        lines = (line for line in read_batch(input_file) if line.key not in answered)
        with (
            engine.start(model, seed=seed) as llm,
            tqdm(total=num_new, desc="requests", unit="request", dynamic_ncols=True, disable=None) as bar,
        ):
            num_bad = run_lines(lines, out, _answers(llm, model, served_model_name or [], engine), bar.update)
    if num_bad:
        typer.echo(f"longspan: {num_bad} of {num_new} requests could not be served: see {output_file}", err=True)
    return 2 if num_bad else 0


def run_lines(lines: Iterator[BatchLine], out: IO[bytes], answers: Answers, done: Callable[[], object]) -> int:
    """Writes an answer for each line as soon as there is one, calls `done`, and returns how many are no success."""
    num_bad = 0

    def requests() -> Iterator[BatchLine]:
        nonlocal num_bad
        for line in lines:
            if line.error is None:
                yield line
            else:
                num_bad += 1
                write_error(out, line)
                done()

    for line, status, body in answers(requests()):
        num_bad += status != 200
        write_answer(out, line, status, body)
        done()
    return num_bad


def _answers(llm: LLM, model: str, names: list[str], engine: EngineOptions) -> Answers:
    from longspan.serve.batch import BatchModel, BatchRequest, answer_each  # noqa: PLC0415  # loads transformers

    names_of_it = tuple(dict.fromkeys([*names, model, llm.files.name]))
    served = BatchModel(input_processor=llm.input_processor, names=names_of_it)
    most = min(2 * engine.max_num_seqs, _MOST_AT_ONCE)

    def answers(lines: Iterator[BatchLine]) -> Iterator[tuple[BatchLine, int, dict[str, Any]]]:
        requests = (BatchRequest(tag=line, url=line.url, body=line.body) for line in lines)
        for answer in answer_each(llm, served, requests, most=most):
            yield answer.tag, answer.status, answer.body

    return answers
