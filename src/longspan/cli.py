"""The command ``longspan``: one function per verb.

The options that verbs have in common are the `Annotated` names at the top. Numbers are checked where they are used
(`LLM`, `SamplingParams`, `ParallelSpec`), not here; this file turns what they raise into one line and an exit code:
0 done, 1 a worker was lost (or the reader of stdout left), 2 a mistake of the user, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

import longspan
from longspan.core.errors import WorkerLostError
from longspan.core.parallel import ParallelSpec
from longspan.core.sampling import SamplingParams

if TYPE_CHECKING:
    from longspan.core.request import RequestMetrics
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput

app = typer.Typer(
    name="longspan",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# ---- options that every verb which runs a model has -----------------------------------------------------------------
ModelArgument = Annotated[
    str, typer.Argument(help="An alias (smollm2-135m), a local folder, or a Hugging Face hub id.", show_default=True)
]
_DEVICES = "Devices and weights"
Parallel = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC", help=r"\[N]\[xtpT]\[ppP]: N instances, each of T * P ranks.", rich_help_panel=_DEVICES
    ),
]
Instances = Annotated[int | None, typer.Option(help="Copies of the model; 1 if not given.", rich_help_panel=_DEVICES)]
Tp = Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks per instance.", rich_help_panel=_DEVICES)]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline stages per instance.", rich_help_panel=_DEVICES)]
ThreadsPerRank = Annotated[
    int | None, typer.Option(help="CPU threads of each rank; an equal share if not given.", rich_help_panel=_DEVICES)
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(rich_help_panel=_DEVICES)]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(rich_help_panel=_DEVICES)]
LoadFormat = Annotated[
    Literal["auto", "dummy"], typer.Option(help="dummy: random weights from the config.", rich_help_panel=_DEVICES)
]
SkipTokenizerInit = Annotated[
    bool,
    typer.Option("--skip-tokenizer-init", help="Token ids in, token ids out.", rich_help_panel=_DEVICES),
]

_SCHEDULING = "Scheduling and memory"
Policy = Annotated[
    str, typer.Option(help="Who decides the steps: auto, chunked or context.", rich_help_panel=_SCHEDULING)
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option("-o", metavar="KEY=VALUE", help="An option of the policy; repeatable.", rich_help_panel=_SCHEDULING),
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus output, in tokens.", rich_help_panel=_SCHEDULING)
]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=_SCHEDULING)]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(help="Most tokens of one step on one instance.", rich_help_panel=_SCHEDULING)
]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests that run at once.", rich_help_panel=_SCHEDULING)]
KvCacheMemoryBytes = Annotated[int | None, typer.Option(help="KV memory of each rank.", rich_help_panel=_SCHEDULING)]
NumGpuBlocksOverride = Annotated[
    int | None, typer.Option(help="KV blocks of each rank, whatever memory there is.", rich_help_panel=_SCHEDULING)
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse the KV of prompts that begin alike.",
        rich_help_panel=_SCHEDULING,
    ),
]
_SAMPLING = "Sampling"


# ---- verbs ----------------------------------------------------------------------------------------------------------
@app.callback(invoke_without_command=True)
def longspan_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Serves one long prompt over several devices, exactly."""
    if version:
        typer.echo(f"longspan {longspan.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def generate(
    model: ModelArgument = "smollm2-135m",
    *,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file that holds the prompt.")] = None,
    token_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line, and no running text.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(rich_help_panel=_SAMPLING)] = 128,
    min_tokens: Annotated[int, typer.Option(rich_help_panel=_SAMPLING)] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)] = 0.0,
    top_k: Annotated[int, typer.Option(help="-1 or 0 keeps all.", rich_help_panel=_SAMPLING)] = -1,
    top_p: Annotated[float, typer.Option(rich_help_panel=_SAMPLING)] = 1.0,
    seed: Annotated[int, typer.Option(rich_help_panel=_SAMPLING)] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the output; repeatable.", rich_help_panel=_SAMPLING)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=_SAMPLING)] = False,
    parallel: Parallel = None,
    instances: Instances = None,
    tp: Tp = None,
    pp: Pp = None,
    threads_per_rank: ThreadsPerRank = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    load_format: LoadFormat = "auto",
    skip_tokenizer_init: SkipTokenizerInit = False,
    policy: Policy = "auto",
    policy_option: PolicyOption = None,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    max_num_seqs: MaxNumSeqs = 128,
    kv_cache_memory_bytes: KvCacheMemoryBytes = None,
    num_gpu_blocks_override: NumGpuBlocksOverride = None,
    enable_prefix_caching: EnablePrefixCaching = True,
) -> None:
    """Completes one prompt and streams the text."""
    request = _read_prompt(prompt, prompt_file, token_ids)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    spec = _parallel_spec(parallel, instances, tp, pp)
    policy_options = _key_values(policy_option or ())
    with longspan.LLM(
        model,
        parallel=spec,
        threads_per_rank=threads_per_rank,
        dtype=dtype,
        device=device,
        policy=policy,
        policy_options=policy_options,
        seed=seed,
        skip_tokenizer_init=skip_tokenizer_init,
        load_format=load_format,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=num_gpu_blocks_override,
        enable_prefix_caching=enable_prefix_caching,
    ) as llm:
        output = stream_to_stdout(llm, request, params, as_ids=skip_tokenizer_init, quiet=as_json)
        bytes_exchanged = dict(llm.bytes_exchanged)
    if as_json:
        typer.echo(json.dumps(_result(output, bytes_exchanged)))
    elif sys.stderr.isatty():
        Console(stderr=True).print(stats_table(output.metrics, bytes_exchanged))


# ---- input ----------------------------------------------------------------------------------------------------------
def _read_prompt(prompt: str | None, prompt_file: Path | None, token_ids: str | None) -> str | list[int]:
    """Returns the prompt from whichever of its three sources was given.

    Raises:
        ValueError: unless exactly one was given and it can be read.
    """
    given = sum(source is not None for source in (prompt, prompt_file, token_ids))
    if given != 1:
        raise ValueError(f"exactly one of --prompt, --prompt-file and --token-ids is needed, but {given} given")
    if token_ids is not None:
        try:
            return [int(part) for part in token_ids.split(",")] if token_ids.strip() else []
        except ValueError:
            raise ValueError(
                f"--token-ids must be whole numbers with commas between, but {token_ids!r} given"
            ) from None
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"prompt file {str(prompt_file)!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt file {str(prompt_file)!r} is not UTF-8: {error}") from None
    assert prompt is not None, "counted above"
    return prompt


def _parallel_spec(parallel: str | None, instances: int | None, tp: int | None, pp: int | None) -> str:
    """Returns the parallel spec from whichever of its two spellings was used.

    Raises:
        ValueError: when both were, or the degrees are not possible.
    """
    degrees = {"instances": instances, "tp": tp, "pp": pp}
    given = {name: degree for name, degree in degrees.items() if degree is not None}
    if parallel is None:
        return str(ParallelSpec(**given))
    if given:
        raise ValueError(f"--parallel {parallel} and --{next(iter(given))} say the same thing: give one of them")
    return str(ParallelSpec.parse(parallel))


def _key_values(pairs: Sequence[str]) -> dict[str, str]:
    """Returns `-o key=value` options as a mapping.

    Raises:
        ValueError: for one without a key or `=`, or a key given twice.
    """
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"-o {pair} is not of the form key=value")
        if key in options:
            raise ValueError(f"-o {key} is given twice: {options[key]!r} and {value!r}")
        options[key] = value
    return options


# ---- output ---------------------------------------------------------------------------------------------------------
def stream_to_stdout(
    llm: LLM, prompt: str | list[int], params: SamplingParams, *, as_ids: bool = False, quiet: bool = False
) -> RequestOutput:
    """Runs one request, writes its text (or its token ids) to stdout as they are made, and returns its last output."""
    written = 0
    output: RequestOutput | None = None
    for output in llm.stream(prompt, params):
        if quiet:
            continue
        completion = output.outputs[0]
        text = ",".join(map(str, completion.token_ids)) if as_ids else completion.text
        sys.stdout.write(text[written:])
        sys.stdout.flush()
        written = len(text)
    assert output is not None, "a stream has at least one output"
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return output


def _result(output: RequestOutput, bytes_exchanged: Mapping[str, int]) -> dict[str, object]:
    """Returns what `--json` prints."""
    completion = output.outputs[0]
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "ttft_s": output.metrics.ttft_s,
        "tbt_s": list(output.metrics.tbt_s),
        "bytes_exchanged": dict(bytes_exchanged),
        "kv_tokens_per_instance": list(output.metrics.kv_tokens_per_instance),
    }


def stats_table(metrics: RequestMetrics, bytes_exchanged: Mapping[str, int]) -> Table:
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
        table.add_row("bytes exchanged" if exchange == "total" else f"bytes by {exchange}", f"{num_bytes:,}")
    return table


# ---- exit codes -----------------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits; never shows a stack trace for what a user can cause."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background starts us with it ignored
    try:
        returned = app(args=arguments, prog_name="longspan", standalone_mode=False)
    except typer.TyperException as error:
        _fail(error.format_message(), code=2)
    except ValueError as error:
        _fail(str(error), code=2)
    except WorkerLostError as error:
        _fail(str(error), code=1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(returned if isinstance(returned, int) else 0)


def _fail(message: str, *, code: int) -> NoReturn:
    typer.echo(f"longspan: {' '.join(message.split())}", err=True)
    sys.exit(code)


def _on_signal(number: int, _: object) -> NoReturn:
    """Unwinds the stack, so that the workers are shut down on the way, and does it once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
