"""Printed outputs: running text, tables, and JSON."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from longspan.core.sampling import SamplingParams

if TYPE_CHECKING:
    from longspan.core.request import RequestMetrics
    from longspan.llm import LLM
    from longspan.outputs import CompletionOutput, LogprobsOfToken, RequestOutput


def stream_to_stdout(
    llm: LLM, prompt: str | list[int], params: SamplingParams, *, as_ids: bool = False, quiet: bool = False
) -> RequestOutput:
    """Runs one request, writes its text (or its token ids) to stdout as they are made, and returns its last output.

    Of several outputs, the texts follow at the end, with an empty line between.
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
        _write("\n" if params.n == 1 else "\n\n".join(_text(one, as_ids=as_ids) for one in output.outputs) + "\n")
    return output


def json_fields(output: RequestOutput) -> dict[str, object]:
    """Returns the fields that all JSON forms share: the first of the outputs, and all if there are several."""
    found = {**_completion(output.outputs[0]), "prompt_tokens": len(output.prompt_token_ids)}
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None if token is None else _logprobs(token) for token in output.prompt_logprobs]
    if len(output.outputs) > 1:
        found["outputs"] = [_completion(completion) for completion in output.outputs]
    return found


def json_result(
    output: RequestOutput, bytes_exchanged: Mapping[str, int], bytes_between_hosts: Mapping[str, int]
) -> dict[str, object]:
    """Returns what `--json` prints: `json_fields` and measurements."""
    return {
        **json_fields(output),
        "ttft_s": output.metrics.ttft_s,
        "tbt_s": list(output.metrics.tbt_s),
        "exchange": output.metrics.exchanges,
        "bytes_exchanged": dict(bytes_exchanged),
        "bytes_between_hosts": dict(bytes_between_hosts),
        "kv_tokens_per_instance": list(output.metrics.kv_tokens_per_instance),
    }


def stats_table(
    metrics: RequestMetrics, bytes_exchanged: Mapping[str, int], bytes_between_hosts: Mapping[str, int]
) -> Table:
    """Returns the table that ends a run: tokens per instance, TTFT, median TBT, bytes per exchange."""
    table = Table(show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for instance, num_tokens in enumerate(metrics.kv_tokens_per_instance):
        table.add_row(f"prompt tokens on instance {instance}", f"{num_tokens:,}")
    if metrics.ttft_s is not None:
        table.add_row("time to first token", f"{metrics.ttft_s:.2f} s")
    if metrics.tbt_s:
        table.add_row("median time between tokens", f"{statistics.median(metrics.tbt_s) * 1e3:.1f} ms")
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
    found: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        found["cumulative_logprob"] = completion.cumulative_logprob
        found["logprobs"] = [_logprobs(token) for token in completion.logprobs]
    return found


def _logprobs(token: LogprobsOfToken) -> list[dict[str, object]]:
    return [
        {"token_id": token_id, "token": one.decoded_token, "logprob": one.logprob, "rank": one.rank}
        for token_id, one in token.items()
    ]
