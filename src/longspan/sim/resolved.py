"""The resolved cluster of a simulation or an estimate, for output: devices, links, instances, KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longspan.core.cluster import Cluster
from longspan.core.splits import ParallelSpec
from longspan.cost import catalog
from longspan.cost.precision import Precision
from longspan.cost.topology import Devices


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Devices on hosts, and their precision.

    Attributes:
        hardware: the name of a device, or of the measured machine.
        gpus_per_host: devices of each host. The last host may have unused devices.
        inside, between: the links in a host and between hosts. None for measured profiles. `between` is None for one
            host.
        details: additional text for output.
    """

    hardware: str
    hosts: int
    gpus_per_host: int
    precision: Precision
    inside: str | None = None
    between: str | None = None
    details: str = ""

    @classmethod
    def of(cls, devices: Devices, precision: Precision) -> Fleet:
        """Describe devices by their data sheets."""
        speed = "" if devices.link_gbytes_per_s is None else f" at {devices.link_gbytes_per_s:g} GB/s"
        slowest, is_single = f"{devices.slowest_link}{speed}", devices.hosts == 1
        return cls(
            hardware=devices.hardware,
            hosts=devices.hosts,
            gpus_per_host=devices.gpus_per_host,
            precision=precision,
            inside=slowest if is_single else catalog.device(devices.hardware).link,
            between=None if is_single else slowest,
        )

    def __str__(self) -> str:
        links = [f"{self.inside} in a host"] if self.inside else []
        links += [f"{self.between} between hosts"] if self.between else []
        devices = f"{self.hosts} {'host' if self.hosts == 1 else 'hosts'} × {self.gpus_per_host} {self.hardware}"
        return ", ".join([devices, *links, str(self.precision), *([self.details] if self.details else [])])


@dataclass(frozen=True, kw_only=True)
class ResolvedCluster:
    """A fleet with its instances.

    Attributes:
        clusters: the instances. Several clusters if phases alternate on the same devices.
        block_size: tokens of a KV block.
    """

    fleet: Fleet
    clusters: tuple[Cluster, ...]
    block_size: int

    def as_json(self) -> dict[str, Any]:
        fleet = self.fleet
        return {
            "hardware": fleet.hardware,
            "hosts": fleet.hosts,
            "gpus_per_host": fleet.gpus_per_host,
            "num_gpus": self._num_gpus,
            "num_unused_gpus": self._num_gpus - max(map(_num_taken, self.clusters)),
            "links": {"inside": fleet.inside, "between": fleet.between},
            "dtype": fleet.precision.weights,
            "ffn_dtype": fleet.precision.ffn,
            "kv_cache_dtype": fleet.precision.kv,
            "instances": list(self._instances()),
        }

    def __str__(self) -> str:
        """Describe the instances in one line."""
        texts = []
        for kind in self._instances():
            size = "1 device" if kind["parallel"] == "1" else kind["parallel"]
            role = "" if kind["role"] == "all" else f" to {kind['role']}"
            where = "" if kind["num_hosts"] == 1 else f" on {kind['num_hosts']} hosts"
            texts.append(f"{kind['number']} of {size}{where}{role}, {kind['kv_tokens']:,} KV tokens each")
        return "; ".join(texts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about options that are probably not intended."""
        return tuple(warning for warning in (self.unused, self.across) if warning is not None)

    @property
    def unused(self) -> str | None:
        """A warning, if no instance uses some devices."""
        fleet, num_gpus = self.fleet, self._num_gpus
        for cluster in self.clusters:
            if (num_taken := _num_taken(cluster)) < num_gpus:
                total = f"hosts({fleet.hosts}) * gpus_per_host({fleet.gpus_per_host}) = {num_gpus} devices"
                return f"{num_gpus - num_taken} of {total} stay unused, since {cluster} takes {num_taken}"
        return None

    @property
    def across(self) -> str | None:
        """A warning, if the ranks of a stage, which all-reduce in every layer, are on several hosts."""
        for cluster in self.clusters:
            for instance in cluster.instances:
                stages = [cluster.stage_ranks(instance, stage) for stage in range(cluster.pp(instance))]
                num_hosts = max(len({cluster.hosts[rank] for rank in ranks}) for ranks in stages)
                if num_hosts > 1:
                    tp, link = cluster.tp(instance), self.fleet.between or "the link between them"
                    problem = f"instance {instance} of {cluster} has its tp({tp}) on {num_hosts} hosts"
                    remedy = "give --hosts and --gpus-per-host such that hosts have whole instances, or a smaller tp"
                    return f"{problem}, so every layer waits for sums over {link}: {remedy}"
        return None

    @property
    def _num_gpus(self) -> int:
        return self.fleet.hosts * self.fleet.gpus_per_host

    def _instances(self) -> Iterator[dict[str, Any]]:
        """Yield each kind of instance: its role, split, hosts and KV tokens."""
        roles = ("prefill", "decode") if len(self.clusters) > 1 else ()
        for phase, cluster in enumerate(self.clusters):
            kinds: Counter[tuple[str, str, int, int]] = Counter()
            for instance in cluster.instances:
                role = roles[phase] if roles else "all"
                if cluster.has_roles:
                    role = "decode" if instance in cluster.decode else "prefill"
                split = str(ParallelSpec(tp=cluster.tp(instance), pp=cluster.pp(instance)))
                num_hosts = len({cluster.hosts[rank] for rank in cluster.ranks(instance)})
                kinds[role, split, num_hosts, cluster.num_blocks[instance] * self.block_size] += 1
            for (role, split, num_hosts, tokens), count in kinds.items():
                yield {"role": role, "parallel": split, "number": count, "num_hosts": num_hosts, "kv_tokens": tokens}


def _num_taken(cluster: Cluster) -> int:
    return cluster.num_ranks - cluster.num_spare
