"""The instances of `longspan simulate`, as its options have them."""

from __future__ import annotations

import math

from longspan.cli.simulate import ClusterOptions
from longspan.core.cluster import Cluster, ParallelSpec

_GPUS_PER_HOST = 8


def instances_of(options: ClusterOptions) -> Cluster:
    """All instances, on as many devices as there are.

    Raises:
        ValueError: for specs that cannot be read or do not fit the devices, or options that exclude each other.
    """
    if options.prefill_parallel is None and options.decode_parallel is None:
        if options.transfer_backends is not None:
            raise ValueError(
                f"--transfer-backends {options.transfer_backends} is for KV that is sent to instances which decode "
                "only: give --prefill-parallel and --decode-parallel, or leave it out"
            )
        return Cluster(spec=_alike(options))
    if options.prefill_parallel is None or options.decode_parallel is None:
        raise ValueError(
            "instances that prefill need others that decode: give --prefill-parallel and --decode-parallel"
        )
    if options.parallel is not None:
        raise ValueError(
            f"--parallel {options.parallel} has all instances do both, but --prefill-parallel "
            f"{options.prefill_parallel} has some prefill only: give one of them"
        )
    prefill, decode = ParallelSpec.parse(options.prefill_parallel), ParallelSpec.parse(options.decode_parallel)
    _check_devices(options, {"--prefill-parallel": prefill, "--decode-parallel": decode})
    backends = options.transfer_backends
    if backends is not None and backends < 1:
        raise ValueError(f"--transfer-backends must be at least 1, but {backends} given")
    return Cluster(spec=prefill, decode_spec=decode, transfer_backends=backends)


def _alike(options: ClusterOptions) -> ParallelSpec:
    """Instances that all do the same."""
    if options.parallel is None:
        return ParallelSpec(instances=options.hosts * (options.gpus_per_host or _GPUS_PER_HOST))
    spec = ParallelSpec.parse(options.parallel)
    _check_devices(options, {"--parallel": spec})
    return spec


def devices_per_host(options: ClusterOptions, num_ranks: int) -> int:
    """Of each host but perhaps the last, which are filled one after the other."""
    return options.gpus_per_host or math.ceil(num_ranks / options.hosts)


def _check_devices(options: ClusterOptions, specs: dict[str, ParallelSpec]) -> None:
    """Raises ValueError unless these instances take all devices, and no host is left empty."""
    needed = sum(spec.num_ranks for spec in specs.values())
    per_host = devices_per_host(options, needed)
    if options.gpus_per_host is not None and needed != (there := options.hosts * per_host):
        given = ", ".join(f"{flag} {spec}" for flag, spec in specs.items())
        sums = " + ".join(f"instances({spec.instances}) * tp({spec.tp})" for spec in specs.values())
        raise ValueError(
            f"{given}: {sums} = {needed} devices, but --hosts {options.hosts} * --gpus-per-host {per_host} = {there}: "
            "make them equal"
        )
    if options.profile is None and (taken := math.ceil(needed / per_host)) < options.hosts:
        raise ValueError(
            f"{needed} devices, {per_host} to a host, take {taken} hosts, but --hosts {options.hosts} given: give "
            f"--hosts {taken}, or as many devices as fill them"
        )
