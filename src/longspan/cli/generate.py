"""The verb `generate`: completes one prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.console import Console

from longspan.args import EngineArgs
from longspan.cli.options import SAMPLING, STDIN, FormOptions, ModelArgument, read_text, start, verb
from longspan.cli.output import json_result, stats_table, stream_to_stdout
from longspan.core.options import Option, id_list
from longspan.core.sampling import SamplingParams

_FORM, _ENGINE = FormOptions(), EngineArgs()


@verb(configurable=True)
def generate(
    model: ModelArgument = "smollm2-135m",
    *,
    prompt: Annotated[str | None, Option("The prompt itself; - reads it from stdin.")] = None,
    prompt_file: Annotated[Path | None, Option("A UTF-8 file that holds the prompt; - is stdin.")] = None,
    token_ids: Annotated[
        tuple[int, ...] | None, Option("The prompt as token ids.", metavar="1,2,3", read=id_list)
    ] = None,
    as_json: Annotated[bool, Option("Print one JSON object as the last line, and no running text.", name="json")] = (
        False
    ),
    sampling: SamplingParams = SAMPLING,
    form: FormOptions = _FORM,
    engine: EngineArgs = _ENGINE,
) -> None:
    """Completes one prompt and streams the text. For many prompts there is longspan batch."""
    given = _prompt(prompt, prompt_file, token_ids)
    params = replace(sampling, structured_outputs=form.params())
    if not as_json and (params.logprobs, params.prompt_logprobs) != (None, None):
        raise ValueError("logprobs are part of the JSON output only: add --json")
    with start(model, engine, seed=sampling.seed) as llm:
        output = stream_to_stdout(llm, given, params, as_ids=engine.skip_tokenizer_init, quiet=as_json)
        moved = (llm.bytes_exchanged, llm.bytes_between_hosts)
    if as_json:
        print(json.dumps(json_result(output, *moved)))
    elif sys.stderr.isatty():
        Console(stderr=True).print(stats_table(output.metrics, *moved))
    for one in output.outputs:
        if one.finish_reason == "error":
            raise ValueError(f"output {one.index} ended early: {one.stop_reason}")


def _prompt(prompt: str | None, prompt_file: Path | None, token_ids: tuple[int, ...] | None) -> str | list[int]:
    """Reads the prompt from whichever of its sources was given; from stdin, if none was and it is no terminal.

    Raises:
        ValueError: when several were given, or none, or it cannot be read.
    """
    given = sum(source is not None for source in (prompt, prompt_file, token_ids))
    if given > 1 or (given == 0 and sys.stdin.isatty()):
        raise ValueError(f"exactly one of --prompt, --prompt-file and --token-ids is needed, but {given} given")
    if token_ids is not None:
        return list(token_ids)
    if prompt is not None and prompt != STDIN:
        return prompt
    return read_text(prompt_file or Path(STDIN), "prompt file")
