"""The verb `generate`: one prompt, or a file of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longspan.cli import jsonl
from longspan.cli.bundles import bundled
from longspan.cli.options import EngineOptions, ModelArgument, SamplingOptions
from longspan.cli.prompts import STDIN, read_prompt
from longspan.cli.report import json_result, stats_table, stream_to_stdout

_ENGINE = EngineOptions()
_SAMPLING = SamplingOptions()


@bundled()
def generate(
    model: ModelArgument = "smollm2-135m",
    *,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself; - reads it from stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file that holds the prompt; - is stdin.")] = None,
    token_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids.")] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            help="A JSONL file of many prompts; - is stdin. A line has prompt, token_ids or messages, and maybe id and "
            "sampling parameters that count before the options."
        ),
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option(help="Where their outputs go, a JSON line each, in order; - is stdout, the default.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line, and no running text.")
    ] = False,
    sampling: SamplingOptions = _SAMPLING,
    engine: EngineOptions = _ENGINE,
) -> int:
    """Completes one prompt and streams the text, or completes all prompts of a JSONL file.

    With --input-file, a line that cannot be served gets an output line with an error, the others are served, and the
    exit code is 2.
    """
    if input_file is not None:
        if (prompt, prompt_file, token_ids) != (None, None, None):
            raise ValueError("--input-file brings its own prompts: give it, or a single prompt")
        return _generate_file(model, input_file, output_file or Path(STDIN), sampling, engine)
    if output_file is not None:
        raise ValueError("--output-file needs --input-file: the text of a single prompt goes to stdout")
    _generate_one(model, read_prompt(prompt, prompt_file, token_ids), sampling, engine, as_json=as_json)
    return 0


def _generate_one(
    model: str, prompt: str | list[int], sampling: SamplingOptions, engine: EngineOptions, *, as_json: bool
) -> None:
    params = sampling.params()
    if not as_json and (params.logprobs, params.prompt_logprobs) != (None, None):
        raise ValueError("logprobs are part of the JSON output only: add --json")
    with engine.start(model, seed=sampling.seed) as llm:
        output = stream_to_stdout(llm, prompt, params, as_ids=engine.skip_tokenizer_init, quiet=as_json)
        moved = (llm.bytes_exchanged, llm.bytes_between_hosts)
    if as_json:
        typer.echo(json.dumps(json_result(output, *moved)))
    elif sys.stderr.isatty():
        Console(stderr=True).print(stats_table(output.metrics, *moved))
    for one in output.outputs:
        if one.finish_reason == "error":
            raise ValueError(f"output {one.index} ended early: {one.stop_reason}")


def _generate_file(model: str, source: Path, target: Path, sampling: SamplingOptions, engine: EngineOptions) -> int:
    defaults = replace(sampling.params(), seed=None)  # the engine gives each line one of its own
    lines = jsonl.read_lines(source, defaults)
    jsonl.check_different(source, target)
    with jsonl.opened(target) as out, engine.start(model, seed=sampling.seed) as llm:
        num_bad = jsonl.answer(llm, lines, out)
    if num_bad:
        typer.echo(f"longspan: {num_bad} of {len(lines)} lines could not be served: see their errors", err=True)
    return 2 if num_bad else 0
