"""The verb `generate`: completes one prompt, as running text with a table, or as JSON."""

from __future__ import annotations

import errno
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from longspan.args import EngineArgs
from longspan.cli.inputs import STDIN, read_text
from longspan.cli.options import ModelArgument, start, verb
from longspan.cli.outputs import note
from longspan.core.options import Option, id_list
from longspan.core.quantities import seconds
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.errors import ParameterError
from longspan.file_errors import unread

if TYPE_CHECKING:
    from longspan.core.request import RequestMetrics
    from longspan.core.sparse_plan import Savings
    from longspan.llm import LLM
    from longspan.outputs import CompletionOutput, LogprobsOfToken, RequestOutput

_form = partial(Option, group="Structured outputs: give one")
SAMPLING = SamplingParams(temperature=0.0, max_tokens=128, seed=0)
"""The defaults of the command line, unlike in Python and on the server."""


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """The constraint of an output: fields of `StructuredOutputsParams`, as texts or names of files."""

    json_schema: Annotated[
        str | None, _form("The output is JSON that follows this schema.", metavar="FILE_OR_TEXT")
    ] = None
    regex: Annotated[str | None, _form("The whole output matches this regular expression.")] = None
    choice: Annotated[list[str] | None, _form("An allowed output. Repeatable.")] = None
    grammar: Annotated[
        str | None, _form("The output follows this grammar, in Lark's notation.", metavar="FILE_OR_TEXT")
    ] = None

    def params(self) -> StructuredOutputsParams | None:
        """Return the parameter `structured_outputs` of a request."""
        if self == FormOptions():
            return None
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            raise ParameterError(given[0], f"and `{given[1]}` exclude each other: give one of them")
        return StructuredOutputsParams(
            json=None if self.json_schema is None else _schema(self.json_schema),
            regex=self.regex,
            choice=self.choice,
            grammar=None if self.grammar is None else _file_or_text("grammar", self.grammar),
        )


@verb
def generate(
    model: ModelArgument = "smollm2-135m",
    *,
    prompt: Annotated[str | None, Option("The prompt itself, or - to read it from stdin.")] = None,
    prompt_file: Annotated[Path | None, Option("A UTF-8 file that holds the prompt, or - for stdin.")] = None,
    token_ids: Annotated[
        tuple[int, ...] | None, Option("The prompt as token ids.", metavar="1,2,3", read=id_list)
    ] = None,
    as_json: Annotated[bool, Option("Print one JSON object as the last line, and no running text.", name="json")] = (
        False
    ),
    sampling: SamplingParams = SAMPLING,
    form: FormOptions = FormOptions(),
    engine: EngineArgs = EngineArgs(),
) -> None:
    """Complete one prompt and stream the text. For many prompts use longspan batch."""
    given = _prompt(prompt, prompt_file, token_ids)
    params = replace(sampling, structured_outputs=form.params())
    if not as_json and (params.logprobs, params.prompt_logprobs) != (None, None):
        raise ValueError("--logprobs and --prompt-logprobs are part of the JSON output only: add --json")
    with start(model, engine, seed=sampling.seed) as llm:
        output = stream_to_stdout(llm, given, params, as_ids=engine.skip_tokenizer_init, quiet=as_json)
        moved = (llm.bytes_exchanged, llm.bytes_between_hosts)
        csa = llm.sparse_savings(output)
    max_output = llm.max_model_len - len(output.prompt_token_ids)
    if params.max_tokens is not None and params.max_tokens > max_output:
        note(f"--max-tokens {params.max_tokens}: only {max_output} tokens fit after the prompt (--max-model-len)")
    if as_json:
        print(json.dumps(_json_result(output, *moved, csa)))
    elif sys.stderr.isatty():
        Console(stderr=True).print(stats_table(output.metrics, *moved))
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise ValueError(f"output {completion.index} ended early: {completion.stop_reason}")


def _prompt(prompt: str | None, prompt_file: Path | None, token_ids: tuple[int, ...] | None) -> str | list[int]:
    """Read the prompt from its only given source. Without a source, read it from stdin if it is no terminal."""
    given = sum(source is not None for source in (prompt, prompt_file, token_ids))
    if given > 1 or (given == 0 and sys.stdin.isatty()):
        raise ValueError(f"exactly one of --prompt, --prompt-file and --token-ids is needed, but {given} given")
    if token_ids is not None:
        if not token_ids:
            raise ParameterError("token_ids", "must not be empty, but '' given: give at least 1 token id", token_ids)
        return list(token_ids)
    if prompt is not None and prompt != STDIN:
        return prompt
    return read_text(prompt_file or Path(STDIN), "prompt_file")


# ---------------------------------------------------------------- output


def stream_to_stdout(
    llm: LLM, prompt: str | list[int], params: SamplingParams, *, as_ids: bool = False, quiet: bool = False
) -> RequestOutput:
    """Run one request, stream its text or token ids to stdout, and return its last output.

    The texts of several outputs follow at the end, with an empty line between.
    """
    written = ""
    output: RequestOutput | None = None
    for output in llm.stream(prompt, params):
        if not quiet and params.n == 1:
            text = _text(output.outputs[0], as_ids=as_ids)
            _write(text[len(written) :])
            written = text
    assert output is not None, "a stream has at least one output"
    if not quiet:
        _write("\n" if params.n == 1 else "\n\n".join(_text(each, as_ids=as_ids) for each in output.outputs) + "\n")
    return output


def _json_result(
    output: RequestOutput,
    bytes_exchanged: Mapping[str, int],
    bytes_between_hosts: Mapping[str, int],
    csa: Savings | None,
) -> dict[str, object]:
    fields = {**_completion(output.outputs[0]), "prompt_tokens": len(output.prompt_token_ids)}
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [None if token is None else _logprobs(token) for token in output.prompt_logprobs]
    if len(output.outputs) > 1:
        fields["outputs"] = [_completion(completion) for completion in output.outputs]
    return {
        **fields,
        "ttft_s": output.metrics.ttft_s,
        "tbt_s": list(output.metrics.tbt_s),
        "exchange": output.metrics.exchanges,
        "bytes_exchanged": dict(bytes_exchanged),
        "bytes_between_hosts": dict(bytes_between_hosts),
        "kv_tokens_per_instance": list(output.metrics.kv_tokens_per_instance),
        **({} if csa is None else {"csa": asdict(csa)}),
    }


def stats_table(
    metrics: RequestMetrics, bytes_exchanged: Mapping[str, int], bytes_between_hosts: Mapping[str, int]
) -> Table:
    table = Table(show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for instance, num_tokens in enumerate(metrics.kv_tokens_per_instance):
        table.add_row(f"prompt tokens on instance {instance}", f"{num_tokens:,}")
    if metrics.ttft_s is not None:
        table.add_row("time to first token", seconds(metrics.ttft_s))
    if metrics.tbt_s:
        table.add_row("median time between tokens", seconds(statistics.median(metrics.tbt_s)))
    for exchange, num_bytes in sorted(bytes_exchanged.items(), key=lambda item: item[0] == "total"):
        if num_bytes or exchange == "total":
            table.add_row("bytes exchanged" if exchange == "total" else f"bytes by {exchange}", f"{num_bytes:,}")
    if bytes_between_hosts["total"]:
        table.add_row("of these between hosts", f"{bytes_between_hosts['total']:,}")
    return table


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _text(completion: CompletionOutput, *, as_ids: bool) -> str:
    return ",".join(map(str, completion.token_ids)) if as_ids else completion.text


def _completion(completion: CompletionOutput) -> dict[str, object]:
    fields: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [_logprobs(token) for token in completion.logprobs]
    return fields


def _logprobs(token: LogprobsOfToken) -> list[dict[str, object]]:
    return [
        {"token_id": token_id, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
        for token_id, entry in token.items()
    ]


# ---------------------------------------------------------------- files


def _schema(value: str) -> str:
    text = _file_or_text("json_schema", value)
    if not text.lstrip().startswith("{"):
        problem = f"{value!r:.60} is neither a schema (an object such as {{...}}) nor a file with one"
        raise ParameterError("json_schema", problem, value)
    return text


def _file_or_text(name: str, value: str) -> str:
    """Return the text of this file if it exists, or else the value itself."""
    try:
        return Path(value).read_text(encoding="utf-8") if Path(value).is_file() else value
    except (OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:  # the value is a text
            return value
        raise ParameterError(name, unread(value, error), value) from None
