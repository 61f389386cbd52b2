"""The options of an engine, and the values that follow from them on this machine without the model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Concatenate, Literal, ParamSpec, TypeVar

from longspan import limits
from longspan.core.arguments import check_choice, check_types
from longspan.core.cluster import Cluster
from longspan.core.locations import Location
from longspan.core.options import Option, SchedulingArgs, at_least_one, options_of
from longspan.core.parallel_args import ParallelArgs, instance_option, parse_parallel
from longspan.errors import ParameterError
from longspan.policy.registry import check_sparse, phases_of

if TYPE_CHECKING:
    from longspan.core.placement import Placement

AUTO = "auto"
"""The parallel spec for which `longspan.machine` searches the best spec."""
MAX_THREADS_PER_CORE = 16
"""Limit of threads of all ranks per CPU core that this process may use. Above 1, threads wait for each other, which is
acceptable for tests and demonstrations. Ranks on other devices count, too, since their processes launch kernels."""
_HOSTS = "LONGSPAN_HOSTS"
_devices = partial(Option, group="Devices and weights", configures=True)
_memory = partial(Option, group="Scheduling and memory", configures=True)
_file = partial(Option, group="Files at the end", configures=True)

ParametersT = ParamSpec("ParametersT")
SelfT = TypeVar("SelfT")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True)
class DeviceArgs(ParallelArgs):
    """The devices that a model runs on, and its precision and kernels there."""

    instances: Annotated[int | None, instance_option("Copies of the model. 1 if not given.")] = None
    tp: Annotated[int | None, instance_option("Tensor-parallel ranks per instance.")] = None
    pp: Annotated[int | None, instance_option("Pipeline stages per instance.")] = None
    executor: Annotated[
        Literal["local", "ray"], instance_option("Where ranks run: on this host, or on hosts of a Ray cluster.")
    ] = "local"
    ray_address: Annotated[
        str | None,
        instance_option(
            "With ray: its head node.", metavar="HOST:PORT", default="RAY_ADDRESS, a cluster of this host, or a new one"
        ),
    ] = None
    topology: Annotated[
        str | None, instance_option("With ray: hosts of each rack, in place of Ray's names.", metavar="FILE.toml")
    ] = None
    threads_per_rank: Annotated[int | None, _devices("CPU threads of each rank. By default an equal share.")] = None
    device: Annotated[Literal["cpu", "cuda"], _devices("Device that ranks compute on.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _devices("Precision of weights and KV. auto is the precision of the checkpoint."),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "native", "torch"],
        _devices("native: longspan's own kernels, for bfloat16 on CPUs with AVX512_BF16."),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None, _devices("Quantize weights, for longspan's own kernels. None if not given.")
    ] = None
    enforce_eager: Annotated[
        bool, _devices("Compute decode steps layer by layer, without CUDA graphs or whole-step calls on CPUs.")
    ] = False
    load_format: Annotated[Literal["auto", "dummy"], _devices("dummy: random weights from the config.")] = "auto"
    skip_tokenizer_init: Annotated[bool, _devices("Token ids in, token ids out.")] = False
    trust_remote_code: Annotated[bool, _devices("Run Python code that comes with the model.")] = False

    @property
    def required_dtype(self) -> Literal["auto", "float32", "bfloat16"]:
        """bfloat16 instead of auto if the options require longspan's own kernels, which support no other dtype.

        `model.source.prepare` resolves auto to the precision of the checkpoint.
        """
        needs_kernels = self.quantization is not None or self.attention_backend == "native"
        return "bfloat16" if self.dtype == "auto" and needs_kernels else self.dtype


@dataclass(frozen=True)
class EngineArgs(SchedulingArgs, DeviceArgs):
    """Options of an engine, for `LLM`, the command line, the server, configuration files and the environment.

    Attributes:
        model: the alias `smollm2-135m`, a local folder, or a hub id.
        seed: seed of requests without a seed, and of dummy weights.
        record_times: measure the time of workers by kind of work, see `LLM.worker_times`, at a small cost.
    """

    model: str = "smollm2-135m"
    _: KW_ONLY
    kv_cache_memory_bytes: Annotated[int | None, _memory("KV memory of each rank.")] = None
    disk_kv_dir: Annotated[
        str | None, _memory("Folder of the KV on disk, with a folder per model.", default="kv in the cache folder")
    ] = None
    step_timeout_s: Annotated[
        float, _memory("Seconds after which a busy rank without a finished step is lost.", minimum=0.001)
    ] = 300.0
    trace: Annotated[str | None, _file("A trace of the run for Perfetto or Chrome.", metavar="FILE.json")] = None
    report: Annotated[
        str | None, _file("A page with pictures of the run, by longspan[report].", metavar="FILE.html")
    ] = None
    seed: int = 0
    record_times: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if not self.model:
            raise ParameterError("model", "must not be empty: give an alias, a folder or a hub id", self.model)
        super().__post_init__()

    def resolve(self, placement: Placement | None = None) -> ResolvedArgs:
        """Resolve the options without the model. Raise ValueError for invalid options.

        Args:
            placement: the hosts of the ranks. None: this host has all ranks.
        """
        at_least_one(threads_per_rank=self.threads_per_rank, kv_cache_memory_bytes=self.kv_cache_memory_bytes)
        for name, (_, kind) in options_of(DeviceArgs).items():
            check_choice(name, getattr(self, name), kind)
        if not self.step_timeout_s > 0:
            problem = f"must be more than 0, but {self.step_timeout_s} given"
            raise ParameterError("step_timeout_s", problem, self.step_timeout_s)
        if self.trace is not None or self.report is not None:
            from longspan.extras.files import check_recording  # noqa: PLC0415 - few runs are recorded

            check_recording(self.trace, self.report)
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
        clusters = phases_of(self.policy, cluster) or (cluster,)
        if self.executor == "local":
            for phase in clusters:
                self.check_ranks(phase.num_ranks)
        threads = self.threads_per_rank or max(1, limits.cores() // clusters[0].num_ranks)
        if placement is None:
            clusters = tuple(replace(phase, locations=locations(phase.num_ranks)) for phase in clusters)
        else:
            clusters, threads = tuple(map(placement.of, clusters)), placement.threads
        cluster = clusters[0]
        return ResolvedArgs(
            cluster=cluster,
            phases=clusters if len(clusters) > 1 else (),
            threads=threads,
            policy_options=options,
        )

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ParameterError for more ranks, or more threads of them, than `MAX_THREADS_PER_CORE` allows."""
        num_cores, num_threads = limits.cores(), num_ranks * (self.threads_per_rank or 1)
        limit, cores = MAX_THREADS_PER_CORE * num_cores, f"{num_cores} CPU core{'s' * (num_cores > 1)}"
        if num_ranks > limit:
            names = ("parallel", "prefill_parallel", "instances", "tp", "pp")
            name = next((name for name in names if getattr(self, name) is not None), "parallel")
            problem = f"takes {num_ranks} ranks, a process each, but {cores} allow at most {limit}: use fewer"
            raise ParameterError(name, problem, getattr(self, name))
        if num_threads > limit:
            problem = f"{self.threads_per_rank} makes {num_threads} threads, but {cores} allow at most {limit}"
            raise ParameterError("threads_per_rank", f"{problem}: use fewer", self.threads_per_rank)


@dataclass(frozen=True, kw_only=True)
class ResolvedArgs:
    """Values of `EngineArgs` on this machine.

    Attributes:
        cluster: the cluster, without sizes of KV pools, which depend on the model.
        phases: the clusters of all phases on the same devices, `cluster` first. Empty without phases.
        threads: CPU threads of each rank.
        policy_options: all options of the policy, including options with fields of their own.
    """

    cluster: Cluster
    phases: tuple[Cluster, ...]
    threads: int
    policy_options: dict[str, str]


def locations(num_ranks: int) -> tuple[Location, ...]:
    """Return the location of every rank: this host, or the hosts that LONGSPAN_HOSTS imitates."""
    if not (text := os.environ.get(_HOSTS)):
        return tuple(Location(device=rank) for rank in range(num_ranks))
    from longspan.core.imitated_hosts import locations_of_ranks  # noqa: PLC0415 - for tests and demonstrations

    try:
        return locations_of_ranks(num_ranks, text)
    except ValueError as error:
        raise ValueError(f"{_HOSTS}: {error}") from error


def unpacked(
    kind: Callable[ParametersT, ValueT],
) -> Callable[[Callable[[SelfT, ValueT], None]], Callable[Concatenate[SelfT, ParametersT], None]]:
    """Decorate a method that takes a `kind` to take the arguments of the constructor of `kind`."""
    signature = inspect.signature(kind)

    def unpack(method: Callable[[SelfT, ValueT], None]) -> Callable[Concatenate[SelfT, ParametersT], None]:
        @wraps(method)
        def call(self: SelfT, /, *args: ParametersT.args, **kwargs: ParametersT.kwargs) -> None:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                from longspan.names import remedy  # noqa: PLC0415 - an error

                problem = f"{type(self).__name__}() {error}"  # the user has not called `kind`
                known = signature.parameters
                raise TypeError(problem if kwargs.keys() <= known.keys() else problem + remedy(kwargs, known)) from None
            method(self, kind(*args, **kwargs))

        first = next(iter(inspect.signature(method).parameters.values()))
        expanded = signature.replace(parameters=[first, *signature.parameters.values()], return_annotation=None)
        call.__signature__ = expanded  # type: ignore[attr-defined]  # for inspect.signature and help()
        return call

    return unpack
