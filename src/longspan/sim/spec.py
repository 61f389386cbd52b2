"""Descriptions of a simulated experiment: a cluster, its faults, and a service level.

This module imports no numpy, because the command line builds its flags from these classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

from longspan.core.cluster import Cluster
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.core.options import Option, SchedulingArgs, at_least_one, key_values
from longspan.core.parallel_args import ParallelArgs, instance_option, parse_parallel
from longspan.cost.precision import Format
from longspan.errors import ParameterError
from longspan.policy.registry import phases_of
from longspan.sim.noise import NoisyLink


@dataclass(frozen=True, kw_only=True)
class ComparedScheduling(SchedulingArgs):
    """Scheduling options that may name several policies, see `longspan.simulation.each_policy`."""

    policy: Annotated[
        str,
        Option(
            "The policy that plans the steps. Several with commas between are compared, each with the options it has.",
            group="Scheduling and memory",
            read=str,
        ),
    ] = "auto"
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "Maximum tokens of one step on one instance.",
            group="Scheduling and memory",
            default="8192, or the limit by memory where chains have been searched",
        ),
    ] = None


_GPUS_PER_HOST = 8
_RESTART_S = 10.0
_cluster = partial(Option, group="Cluster")
Dtype = Literal["auto", Format]
_faults = partial(Option, group="Faults")
_level = partial(Option, group="Results", metavar="S")
DEFAULT_CLASS = "other"
"""The class of requests in results that are in no class of a service level."""


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """Options that refine data sheets, for computed times.

    Attributes:
        link_gbytes_per_s: the nominal speed of the link, one way, in 10^9 bytes per second.
    """

    link: Annotated[
        str | None,
        _cluster(
            "Link between hosts, or between the devices of a single host.",
            metavar="NAME",
            default="the device's own",
        ),
    ] = None
    link_gbytes_per_s: Annotated[
        float | None,
        _cluster("Instead: its nominal speed, one way, in 10^9 bytes per second.", metavar="X", default="the link's"),
    ] = None
    dtype: Annotated[
        Dtype,
        _cluster(
            "Precision of weights. auto is the precision in the model's config.json, or 16 bits. With fewer bits, KV, "
            "the embedding and the output head stay in bfloat16."
        ),
    ] = "auto"
    ffn_dtype: Annotated[Format | None, _cluster("Precision of the feed-forward weights.", default="as --dtype")] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "fp8"],
        _cluster("Precision of stored keys and values. auto is that of the checkpoint, or of activations."),
    ] = "auto"
    expert_parallel: Annotated[
        bool,
        _cluster(
            "Put whole experts on each tensor-parallel rank, instead of a slice of each. For mixtures of experts."
        ),
    ] = False
    attention: Annotated[
        Literal["flash", "eager"] | None,
        _cluster("Fused, or as Hugging Face's single operators compute it.", default="flash"),
    ] = None
    launch: Annotated[
        Literal["eager", "graph", "compiled"] | None,
        _cluster(
            "How the engine launches operators: one by one, decode steps as recorded graphs, or prompts compiled, too, "
            "as vLLM and TensorRT-LLM do.",
            default="compiled, or eager with --attention eager",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class FleetSpec(ParallelArgs):
    """The number of devices, and the instances on them."""

    parallel: Annotated[
        str | None,
        instance_option(
            "N or [Nx][tpT][ppP]: N instances, each of T * P devices. Together they take all devices.",
            metavar="SPEC",
            default="an instance per device",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        _cluster(
            "A device such as a100-sxm-80g, or a .toml or .json file of one. An unknown name lists all. Or give "
            "--profile.",
            metavar="NAME|FILE",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        _cluster("Instead: a profile that longspan profile measured. Instances are of that machine.", metavar="FILE"),
    ] = None
    hosts: Annotated[int, _cluster("How many hosts there are.")] = 1
    gpus_per_host: Annotated[
        int | None, _cluster("Devices of each host.", default="as many as the instances need, or else 8")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(HardwareSpec, FleetSpec):
    """Describes a cluster by the data sheets of its devices, or by the profile of a machine.

    Raises:
        ParameterError: for an invalid value, or options that exclude each other.
    """

    def __post_init__(self) -> None:
        at_least_one(hosts=self.hosts, gpus_per_host=self.gpus_per_host)
        if self.hardware is not None and self.profile is not None:
            raise ParameterError("hardware", f"{self.hardware} and profile exclude each other: give one of them")
        if self.profile is not None:
            self._check_measured()

    def _check_measured(self) -> None:
        """Raise ParameterError for options of data sheets together with a profile."""
        for name in (
            "link",
            "link_gbytes_per_s",
            "dtype",
            "ffn_dtype",
            "kv_cache_dtype",
            "expert_parallel",
            "launch",
            "attention",
        ):
            if (value := getattr(self, name)) not in (None, False, "auto"):
                problem = f"{value} refines data sheets, but a profile has measured times: leave it out"
                raise ParameterError(name, problem, value)

    def clusters(self, policy: str) -> tuple[Cluster, ...]:
        """Return the cluster on all devices, or the clusters of the policy's alternating phases.

        With data sheets, hosts are filled in order.

        Raises:
            ParameterError: for instances that do not take all devices, or leave a host empty.
        """
        cluster = self._instances
        phases = phases_of(policy, cluster)
        self._check_devices(cluster, phases)
        clusters = phases or (cluster,)
        if self.profile is not None:
            hosts = str(self.hosts)
            return tuple(replace(c, locations=locations_of_ranks(c.num_ranks, hosts)) for c in clusters)
        return tuple(c.on_hosts(self.devices_per_host(c)) for c in clusters)

    def _check_devices(self, cluster: Cluster, phases: tuple[Cluster, ...]) -> None:
        num_ranks = phases[0].num_ranks if phases else cluster.num_ranks
        per_host = self.devices_per_host(phases[0] if phases else cluster)
        if self.gpus_per_host is not None and num_ranks != (total := self.hosts * per_host):
            specs = [cluster.spec] if cluster.decode_spec is None else [cluster.spec, cluster.decode_spec]
            sums = [f"instances({s.instances}) * tp({s.tp})" + f" * pp({s.pp})" * (s.pp > 1) for s in specs]
            taken = f"the larger of {' and '.join(sums)}" if phases else " + ".join(sums)
            problem = f"({per_host}) * hosts({self.hosts}) = {total} devices, but {taken} = {num_ranks} given"
            raise ParameterError("gpus_per_host", problem, per_host)
        if self.profile is None and (taken_hosts := math.ceil(num_ranks / per_host)) < self.hosts:
            problem = f"({self.hosts}) are more than the {taken_hosts} that {num_ranks} devices, {per_host} each, take"
            raise ParameterError("hosts", problem, self.hosts)

    @property
    def _instances(self) -> Cluster:
        specs = (self.parallel, self.prefill_parallel, self.decode_parallel)
        alike = None if any(spec is not None for spec in specs) else self.hosts * (self.gpus_per_host or _GPUS_PER_HOST)
        return parse_parallel(*specs, transfer_backends=self.transfer_backends, instances=alike)

    def devices_per_host(self, cluster: Cluster) -> int:
        """Return the number of devices of the first host. Hosts are filled in order, so the last may have fewer."""
        return self.gpus_per_host or math.ceil(cluster.num_ranks / self.hosts)


def _factors(pairs: Sequence[str]) -> dict[int, float]:
    try:
        return {int(instance): float(factor) for instance, factor in key_values(pairs).items()}
    except ValueError:
        raise ValueError(f"is INSTANCE=FACTOR, such as 3=1.5, but {' '.join(pairs)} given") from None


def _moments(texts: Sequence[str]) -> tuple[float, ...]:
    try:
        return tuple(map(float, texts))
    except ValueError:
        raise ValueError(f"must be a number of seconds, but {' '.join(texts)} given") from None


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Slow instances, noisy links and lost workers.

    Attributes:
        slow: slowdown factors, by slow instance.
        noisy_link: random speeds of links between instances. Policies do not know them.
        lost_at_s: the times when a worker is lost. As in a real engine, all workers are then restarted.
        restart_s: seconds of a restart. 10 if None.

    Raises:
        ParameterError: for a factor or a time out of range.
    """

    slow: Annotated[
        Mapping[int, float],
        _faults(
            "Multiply the step times of an instance, numbered from 0. Repeatable.",
            metavar="INSTANCE=FACTOR",
            repeatable=True,
            read=_factors,
        ),
    ] = field(default_factory=dict)
    noisy_link: Annotated[
        NoisyLink | None,
        _faults(
            "Multiply the speed of each link between instances by a random factor from LOW to HIGH, another in each "
            "step. Needs --hardware.",
            metavar="LOW:HIGH:SEED",
            read=NoisyLink.parse,
        ),
    ] = None
    lost_at_s: Annotated[
        tuple[float, ...],
        _faults(
            "Seconds until a worker is lost. All workers restart, as in an engine. Repeatable.",
            name="lose-worker-at",
            metavar="S",
            repeatable=True,
            read=_moments,
        ),
    ] = ()
    restart_s: Annotated[
        float | None,
        _faults("Seconds that a restart of workers takes.", name="restart-time", metavar="S", default="10"),
    ] = None

    def __post_init__(self) -> None:
        for instance, factor in self.slow.items():
            if instance < 0:
                raise ParameterError("slow", f"must name instances from 0 on, but instance {instance} given", instance)
            if not (factor > 0 and math.isfinite(factor)):
                raise ParameterError("slow", f"of instance {instance} must be above 0, but {factor} given", factor)
        if (noise := self.noisy_link) is not None and not 0 < noise.low <= noise.high < math.inf:
            problem = f"must be finite factors above 0, the lower one first, but {noise} given"
            raise ParameterError("noisy_link", problem, str(noise))
        for name, values in (("lost_at_s", self.lost_at_s), ("restart_s", (self.seconds_to_restart,))):
            for value in values:
                if not (value >= 0 and math.isfinite(value)):
                    raise ParameterError(name, f"must be 0 or more seconds, but {value} seconds given", value)

    @property
    def seconds_to_restart(self) -> float:
        return _RESTART_S if self.restart_s is None else self.restart_s

    def common_factor(self, num_instances: int) -> float:
        """Return the slowdown that all instances have in common: above 1 slow, below 1 fast, 1 if neither.

        A profile measured on such instances would contain this factor, so policies use it.
        """
        factors = [self.slow.get(instance, 1.0) for instance in range(num_instances)]
        return max(1.0, min(factors)) if max(factors) > 1 else max(factors)

    def check(self, num_instances: int) -> None:
        """Raise ParameterError if a slow instance does not exist."""
        for instance in self.slow:
            if instance >= num_instances:
                problem = f": instance {instance} does not exist, there are {num_instances}, counted from 0"
                raise ParameterError("slow", problem, instance)


@dataclass(frozen=True, kw_only=True)
class SloClass:
    """Latency bounds of a class of requests. None bounds nothing.

    Attributes:
        name: its name in results. Requests of a trace may name it.
        max_input_len: unnamed requests with at most this many prompt tokens are of the class.

    Raises:
        ParameterError: for a bound that is not positive and finite.
    """

    name: str
    max_input_len: int | None = None
    slo_ttft: float | None = None
    slo_tbt: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_input_len", "slo_ttft", "slo_tbt"):
            if (value := getattr(self, name)) is not None and not (value > 0 and math.isfinite(value)):
                unit = "tokens" if name == "max_input_len" else "seconds"
                raise ParameterError(name, f"must be above 0 {unit}, but {value} given", value)

    def __str__(self) -> str:
        bounds = (self.max_input_len, self.slo_ttft, self.slo_tbt)
        return ":".join([self.name, *("" if bound is None else f"{bound:g}" for bound in bounds)])

    def met_by(self, *, ttft_s: float, mean_tbt_s: float) -> bool:
        """Return True if a request met all given bounds."""
        bounds = ((ttft_s, self.slo_ttft), (mean_tbt_s, self.slo_tbt))
        return all(bound is None or value <= bound for value, bound in bounds)

    @staticmethod
    def parse(text: str) -> SloClass:
        """Parse `NAME:MAX_INPUT_LEN:TTFT:TBT`, where all but the name may be empty."""
        try:
            name, length, ttft, tbt = text.split(":")
            if not name:
                raise ValueError
            return SloClass(
                name=name,
                max_input_len=int(length) if length else None,
                slo_ttft=float(ttft) if ttft else None,
                slo_tbt=float(tbt) if tbt else None,
            )
        except ParameterError as error:
            raise ValueError(f"{text}: {error}") from None
        except ValueError:
            problem = (
                f"is NAME:MAX_INPUT_LEN:TTFT:TBT, such as chat:4096:1:0.05 or documents::30:, but {text!r:.60} given"
            )
            raise ValueError(problem) from None


def _slo_classes(texts: Sequence[str]) -> tuple[SloClass, ...]:
    return tuple(map(SloClass.parse, texts))


@dataclass(frozen=True, kw_only=True)
class ServiceLevel:
    """Latency bounds of requests, by which policies are compared.

    Attributes:
        classes: classes with bounds of their own. All other requests have `slo_ttft` and `slo_tbt`.

    Raises:
        ParameterError: for a bound that is not positive and finite, or classes of the same name.
    """

    slo_ttft: Annotated[float | None, _level("Count the requests whose TTFT is at most this many seconds.")] = None
    slo_tbt: Annotated[float | None, _level("Count the requests whose mean TBT is at most this many seconds.")] = None
    classes: Annotated[
        tuple[SloClass, ...],
        Option(
            "Instead, for requests that name this class or have at most MAX_INPUT_LEN tokens. Repeatable.",
            group="Results",
            name="slo-class",
            metavar="NAME:MAX_INPUT_LEN:TTFT:TBT",
            repeatable=True,
            read=_slo_classes,
        ),
    ] = ()

    def __post_init__(self) -> None:
        _ = self._default  # checks its bounds
        names = [DEFAULT_CLASS, *(slo_class.name for slo_class in self.classes)]
        for name in names:
            if names.count(name) > 1:
                raise ParameterError(
                    "classes", f"must have different names, none {DEFAULT_CLASS}, but {name} given", name
                )

    @cached_property
    def _default(self) -> SloClass:
        return SloClass(name=DEFAULT_CLASS, slo_ttft=self.slo_ttft, slo_tbt=self.slo_tbt)

    @cached_property
    def _by_length(self) -> list[SloClass]:
        return sorted(self.classes, key=lambda slo_class: slo_class.max_input_len or math.inf)

    @property
    def is_given(self) -> bool:
        return self.slo_ttft is not None or self.slo_tbt is not None or bool(self.classes)

    def of(self, name: str, num_prompt_tokens: int) -> SloClass:
        """Return the class of a request: by its name, or else by length, the class with the lowest maximum first."""
        if name:
            return next((slo_class for slo_class in self.classes if slo_class.name == name), self._default)
        fitting = (c for c in self._by_length if c.max_input_len is None or num_prompt_tokens <= c.max_input_len)
        return next(fitting, self._default)
