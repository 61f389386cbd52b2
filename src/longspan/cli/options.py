"""The options of verbs that run a model: how it is set up, and how tokens are chosen."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import longspan
from longspan.cli.pairs import key_values
from longspan.cli.scheduling import SHARING, SchedulingOptions
from longspan.core.cluster import ParallelSpec
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.runtime.executor.forkserver import start_server

if TYPE_CHECKING:
    from longspan.llm import LLM

ModelArgument = Annotated[
    str, typer.Argument(help="An alias (smollm2-135m), a local folder, or a Hugging Face hub id.")
]

_devices = partial(typer.Option, rich_help_panel="Devices and weights")
_scheduling = partial(typer.Option, rich_help_panel="Scheduling and memory")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_ending = partial(typer.Option, rich_help_panel="Length and end")
_form = partial(typer.Option, rich_help_panel="Structured outputs: give one")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What a model runs on, and in which form."""

    parallel: Annotated[
        str | None, _devices(metavar="SPEC", help=r"\[N]\[xtpT]\[ppP]: N instances, each of T * P ranks.")
    ] = None
    prefill_parallel: Annotated[
        str | None, _devices(metavar="SPEC", help="Instances that only prefill; others decode, see --decode-parallel.")
    ] = None
    decode_parallel: Annotated[
        str | None, _devices(metavar="SPEC", help="Instances that only decode, with the KV that is sent to them.")
    ] = None
    transfer_backends: Annotated[
        int | None,
        _devices(
            help="Transfers of KV that each of these receives at once; as many as instances prefill if not given."
        ),
    ] = None
    instances: Annotated[int | None, _devices(help="Copies of the model; 1 if not given.")] = None
    tp: Annotated[int | None, _devices("--tp", help="Tensor-parallel ranks per instance.")] = None
    pp: Annotated[int | None, _devices("--pp", help="Pipeline stages per instance.")] = None
    threads_per_rank: Annotated[int | None, _devices(help="CPU threads of each rank; an equal share if not given.")] = (
        None
    )
    device: Annotated[Literal["cpu", "cuda"], _devices(help="What ranks compute on.")] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16"], _devices(help="Of weights and KV.")] = "float32"
    attention_backend: Annotated[
        Literal["auto", "native", "torch"],
        _devices(help="native: our own kernel, for bfloat16 on CPUs with AVX512_BF16."),
    ] = "auto"
    load_format: Annotated[Literal["auto", "dummy"], _devices(help="dummy: random weights from the config.")] = "auto"
    skip_tokenizer_init: Annotated[bool, _devices("--skip-tokenizer-init", help="Token ids in, token ids out.")] = False
    trust_remote_code: Annotated[
        bool, _devices("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SchedulingOptions, DeviceOptions):
    """How a model is set up: the arguments of `LLM` by the same names, except where the command line is shorter."""

    kv_cache_memory_bytes: Annotated[int | None, _scheduling(help="KV memory of each rank.")] = None
    step_timeout: Annotated[
        float, _scheduling(min=0.001, help="Seconds without a step done after which a busy rank is taken for lost.")
    ] = 300.0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`.

        Raises:
            ValueError: for degrees that are not possible or given twice, or a policy option not of the form key=value.
        """
        shorter = ("instances", "tp", "pp", "policy_option", "step_timeout", *SHARING)
        same = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in shorter}
        return {
            **same,
            "parallel": self._parallel_spec(),
            "policy_options": self.policy_options(),
            "step_timeout_s": self.step_timeout,
        }

    def start(self, model: str, *, seed: int) -> LLM:
        """Starts the model's workers."""
        arguments = self.arguments()
        start_server()  # it imports beside us
        return longspan.LLM(model, seed=seed, **arguments)

    def _parallel_spec(self) -> str | None:
        """None where instances have roles."""
        degrees = {"instances": self.instances, "tp": self.tp, "pp": self.pp}
        given = {name: degree for name, degree in degrees.items() if degree is not None}
        roles = [name for name in ("prefill_parallel", "decode_parallel") if getattr(self, name) is not None]
        if roles:
            other = next((name for name in ("parallel", *given) if getattr(self, name) is not None), None)
            if other is not None:
                raise ValueError(f"--{other} and --{roles[0].replace('_', '-')} exclude each other: give one of them")
            return None
        if self.parallel is None:
            return str(ParallelSpec(**given))
        if given:
            raise ValueError(
                f"--parallel {self.parallel} and --{next(iter(given))} say the same thing: give one of them"
            )
        return str(ParallelSpec.parse(self.parallel))


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, when an output ends and what form it has: the fields of `SamplingParams`."""

    temperature: Annotated[float, _sampling(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling(help="Keep the k most likely tokens; -1 or 0 keeps all.")] = -1
    top_p: Annotated[float, _sampling(help="Keep the most likely tokens that reach this probability together.")] = 1.0
    min_p: Annotated[float, _sampling(help="Least probability, as a share of the most likely token's.")] = 0.0
    repetition_penalty: Annotated[float, _sampling(help="Above 1: tokens of prompt and output become less likely.")] = (
        1.0
    )
    presence_penalty: Annotated[float, _sampling(help="Subtracted from the logits of tokens in the output.")] = 0.0
    frequency_penalty: Annotated[float, _sampling(help="As before, for each time that they are in it.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, _sampling(metavar="ID=VALUE", help="Added to the logit of a token id; repeatable.")
    ] = None
    seed: Annotated[int, _sampling(help="Of all random numbers, those of dummy weights too.")] = 0
    n: Annotated[int, _sampling("--n", help="Outputs per prompt.")] = 1
    logprobs: Annotated[
        int | None, _sampling(help="Report the logprobs of output tokens and so many most likely ones.")
    ] = None
    prompt_logprobs: Annotated[int | None, _sampling(help="The same for the tokens of the prompt.")] = None
    max_tokens: Annotated[
        int | None, _ending(help="Most output tokens; if there is no default, what the context has left.")
    ] = 128
    min_tokens: Annotated[int, _ending(help="The output does not end before so many.")] = 0
    stop: Annotated[list[str] | None, _ending(help="A string that ends the output; repeatable.")] = None
    stop_token_ids: Annotated[str | None, _ending(metavar="1,2,3", help="Token ids that end the output.")] = None
    ignore_eos: Annotated[bool, _ending("--ignore-eos", help="Go on past end-of-sequence tokens.")] = False
    json_schema: Annotated[
        str | None, _form(metavar="FILE_OR_TEXT", help="The output is JSON that this schema describes.")
    ] = None
    regex: Annotated[str | None, _form(help="The whole output matches this regular expression.")] = None
    choice: Annotated[list[str] | None, _form(help="A text that the output may be; repeatable.")] = None
    grammar: Annotated[
        str | None, _form(metavar="FILE_OR_TEXT", help="The output follows this grammar, in Lark's notation.")
    ] = None

    def params(self) -> SamplingParams:
        """The parameters of a request.

        Raises:
            ValueError: for a value that cannot be read or is out of range.
        """
        read = {
            "logit_bias": _biases(self.logit_bias) if self.logit_bias else None,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": () if self.stop_token_ids is None else id_list("--stop-token-ids", self.stop_token_ids),
            "structured_outputs": self._form(),
        }
        forms = ("json_schema", "regex", "choice", "grammar")
        same = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in forms}
        return SamplingParams(**same | read)

    def _form(self) -> StructuredOutputsParams | None:
        schema, regex, choice, grammar = self.json_schema, self.regex, self.choice, self.grammar
        if schema is None and regex is None and not choice and grammar is None:
            return None
        return StructuredOutputsParams(
            json=None if schema is None else _schema(schema),
            regex=regex,
            choice=choice or None,
            grammar=None if grammar is None else _file_or_text("--grammar", grammar),
        )


def id_list(flag: str, text: str) -> list[int]:
    """Token ids with commas between.

    Raises:
        ValueError: when one is no whole number.
    """
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(f"{flag} must be whole numbers with commas between, but {text!r} given") from None


def _schema(value: str) -> str:
    text = _file_or_text("--json-schema", value)
    if not text.lstrip().startswith("{"):
        raise ValueError(
            f"--json-schema {value!r:.60} is neither a schema (an object such as {{...}}) nor a file with one"
        )
    return text


def _file_or_text(flag: str, value: str) -> str:
    """The text of the file of this name, if there is one, or else the value itself."""
    try:
        return Path(value).read_text(encoding="utf-8") if Path(value).is_file() else value
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: file {value!r} is not UTF-8: {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # so it is a text
            return value
        raise ValueError(f"{flag}: file {value!r} cannot be read: {error.strerror}") from None


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in key_values("--logit-bias", pairs).items()}
    except ValueError as error:
        raise ValueError(f"--logit-bias must be a token id, = and a number: {error}") from None
