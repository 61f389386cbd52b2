"""The options of an engine, and their meaning on this machine as far as it does not depend on the model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial, wraps
from typing import Annotated, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin

from longspan import limits
from longspan.core.checks import check_text
from longspan.core.cluster import Cluster, Location, ParallelArgs, instance_option, locations_of_ranks, parse_parallel
from longspan.core.options import Option, SchedulingArgs, at_least_one, options_of
from longspan.errors import ParameterError
from longspan.policy.registry import check_sparse, turns_of

AUTO = "auto"
"""Stands in place of a parallel spec for the best one, where `longspan.planning` looks for it first."""
MAX_THREADS_PER_CORE = 16
"""Threads of all ranks per CPU core that this process may use. Above one per core they wait for each other; tests and
demonstrations do with some more. Ranks on other devices need cores, too: each is a process that launches kernels."""
_HOSTS = "LONGSPAN_HOSTS"
_devices = partial(Option, group="Devices and weights", configures=True)
_memory = partial(Option, group="Scheduling and memory", configures=True)

ParametersT = ParamSpec("ParametersT")
SelfT = TypeVar("SelfT")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True)
class DeviceArgs(ParallelArgs):
    """The devices that a model runs on, and its form there."""

    instances: Annotated[int | None, instance_option("Copies of the model; 1 if not given.")] = None
    tp: Annotated[int | None, instance_option("Tensor-parallel ranks per instance.")] = None
    pp: Annotated[int | None, instance_option("Pipeline stages per instance.")] = None
    threads_per_rank: Annotated[int | None, _devices("CPU threads of each rank; an equal share if not given.")] = None
    device: Annotated[Literal["cpu", "cuda"], _devices("Device that ranks compute on.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _devices("Precision of weights and KV; auto: the precision of the checkpoint."),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "native", "torch"],
        _devices("native: kernels of our own, for bfloat16 on CPUs with AVX512_BF16."),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None, _devices("Weights in fewer bits, for kernels of our own; none if not given.")
    ] = None
    enforce_eager: Annotated[
        bool, _devices("Compute decode steps layer by layer: without CUDA graphs, or whole steps on CPUs.")
    ] = False
    load_format: Annotated[Literal["auto", "dummy"], _devices("dummy: random weights from the config.")] = "auto"
    skip_tokenizer_init: Annotated[bool, _devices("Token ids in, token ids out.")] = False
    trust_remote_code: Annotated[bool, _devices("Run Python code that comes with the model.")] = False

    @property
    def required_dtype(self) -> Literal["auto", "float32", "bfloat16"]:
        """Return bfloat16 instead of auto if the options require kernels of our own, which support no other dtype.

        `model.source.prepare` resolves auto to the precision of the checkpoint.
        """
        needs_kernels = self.quantization is not None or self.attention_backend == "native"
        return "bfloat16" if self.dtype == "auto" and needs_kernels else self.dtype


@dataclass(frozen=True)
class EngineArgs(SchedulingArgs, DeviceArgs):
    """The only list of an engine's options: `LLM`, the command line, the server, a file and the environment read it.

    Attributes:
        model: the alias `smollm2-135m`, a local folder, or a hub id.
        seed: seeds the random numbers of requests that bring no seed, and dummy weights.
        record_times: measure where workers spend their time, see `LLM.worker_times`; costs a little.
    """

    model: str = "smollm2-135m"
    _: KW_ONLY
    kv_cache_memory_bytes: Annotated[int | None, _memory("KV memory of each rank.")] = None
    disk_kv_dir: Annotated[
        str | None, _memory("Folder of the KV on disk, with a folder per model.", default="kv in the cache folder")
    ] = None
    step_timeout_s: Annotated[
        float,
        _memory(
            "Seconds without a step done after which a busy rank is taken for lost.", name="step-timeout", minimum=0.001
        ),
    ] = 300.0
    seed: int = 0
    record_times: bool = False

    def resolve(self) -> ResolvedArgs:
        """Check the options as far as that needs no model.

        Raises:
            ValueError: for an option that is out of range, or options that exclude each other.
        """
        at_least_one(threads_per_rank=self.threads_per_rank)
        for name, (_, kind) in options_of(DeviceArgs).items():
            value, choices = getattr(self, name), get_args(kind)
            if get_origin(kind) is Literal and value not in choices:
                one_of = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ParameterError(name, f"must be {one_of}, but {value!r} given", value)
        if not self.step_timeout_s > 0:
            problem = f"must be more than 0, but {self.step_timeout_s} given"
            raise ParameterError("step_timeout_s", problem, self.step_timeout_s)
        for name in ("parallel", "prefill_parallel", "decode_parallel"):
            check_text(name, getattr(self, name))
        cluster = parse_parallel(
            self.parallel,
            self.prefill_parallel,
            self.decode_parallel,
            transfer_backends=self.transfer_backends,
            instances=self.instances,
            tp=self.tp,
            pp=self.pp,
        )
        options = self.all_policy_options()
        if "csa" in options:
            from longspan.csa_file import csa_settings  # noqa: PLC0415 - only some policies have the option

            check_sparse(self.policy, options)
            options["csa"] = csa_settings(options["csa"], self.model)
        turns = turns_of(self.policy, cluster)
        for one in turns or (cluster,):
            self.check_ranks(one.num_ranks)
        cluster, *others = (replace(one, locations=locations(one.num_ranks)) for one in turns or (cluster,))
        return ResolvedArgs(
            cluster=cluster,
            turns=(cluster, *others) if others else (),
            threads=self.threads_per_rank or max(1, limits.cores() // cluster.num_ranks),
            policy_options=options,
        )

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ParameterError for more ranks, or more threads of them, than `MAX_THREADS_PER_CORE` allows."""
        num_cores = limits.cores()
        most, cores = MAX_THREADS_PER_CORE * num_cores, f"{num_cores} CPU core{'s' * (num_cores > 1)}"
        if num_ranks > most:
            names = ("parallel", "prefill_parallel", "instances", "tp", "pp")
            name = next((name for name in names if getattr(self, name) is not None), "parallel")
            problem = f"takes {num_ranks} ranks, a process each, but {cores} are here for at most {most}: use fewer"
            raise ParameterError(name, problem, getattr(self, name))
        if num_ranks * (self.threads_per_rank or 1) > most:
            problem = (
                f"{self.threads_per_rank} makes {num_ranks * (self.threads_per_rank or 1)} threads, but {cores} are "
                f"here for at most {most}: use fewer"
            )
            raise ParameterError("threads_per_rank", problem, self.threads_per_rank)


@dataclass(frozen=True, kw_only=True)
class ResolvedArgs:
    """The meaning of `EngineArgs` on this machine.

    Attributes:
        cluster: its KV pools have no sizes yet, since these depend on the model.
        turns: the clusters that take turns on the same devices, this one first; empty when it stays.
        threads: CPU threads of each rank.
        policy_options: all options of the policy, also those that are options of their own.
    """

    cluster: Cluster
    turns: tuple[Cluster, ...]
    threads: int
    policy_options: dict[str, str]


def locations(num_ranks: int) -> tuple[Location, ...]:
    """Locate every rank on this host, or where LONGSPAN_HOSTS pretends, see `locations_of_ranks`."""
    try:
        return locations_of_ranks(num_ranks, os.environ.get(_HOSTS) or "1")
    except ValueError as error:
        raise ValueError(f"{_HOSTS}: {error}") from error


def unpacked(
    kind: Callable[ParametersT, ValueT],
) -> Callable[[Callable[[SelfT, ValueT], None]], Callable[Concatenate[SelfT, ParametersT], None]]:
    """Decorate a method that takes a `kind`, so that it takes the arguments of its constructor."""
    signature = inspect.signature(kind)

    def unpack(method: Callable[[SelfT, ValueT], None]) -> Callable[Concatenate[SelfT, ParametersT], None]:
        @wraps(method)
        def taking_all(self: SelfT, /, *args: ParametersT.args, **kwargs: ParametersT.kwargs) -> None:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}() {error}") from None  # and not of `kind`, which nobody called
            method(self, kind(*args, **kwargs))

        itself = next(iter(inspect.signature(method).parameters.values()))
        shown = signature.replace(parameters=[itself, *signature.parameters.values()], return_annotation=None)
        taking_all.__signature__ = shown  # type: ignore[attr-defined]  # read by inspect
        return taking_all

    return unpack
