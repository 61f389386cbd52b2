"""The verb `generate`: one prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longspan.cli.bundles import bundled
from longspan.cli.options import EngineOptions, ModelArgument, SamplingOptions
from longspan.cli.prompts import read_prompt
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line, and no running text.")
    ] = False,
    sampling: SamplingOptions = _SAMPLING,
    engine: EngineOptions = _ENGINE,
) -> None:
    """Completes one prompt and streams the text. For many prompts there is longspan batch."""
    given = read_prompt(prompt, prompt_file, token_ids)
    params = sampling.params()
    if not as_json and (params.logprobs, params.prompt_logprobs) != (None, None):
        raise ValueError("logprobs are part of the JSON output only: add --json")
    with engine.start(model, seed=sampling.seed) as llm:
        output = stream_to_stdout(llm, given, params, as_ids=engine.skip_tokenizer_init, quiet=as_json)
        moved = (llm.bytes_exchanged, llm.bytes_between_hosts)
    if as_json:
        typer.echo(json.dumps(json_result(output, *moved)))
    elif sys.stderr.isatty():
        Console(stderr=True).print(stats_table(output.metrics, *moved))
    for one in output.outputs:
        if one.finish_reason == "error":
            raise ValueError(f"output {one.index} ended early: {one.stop_reason}")
