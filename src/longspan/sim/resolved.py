"""The cluster that a simulation or an estimate is of, with all that was derived: devices, links, instances, KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longspan.core.cluster import Cluster
from longspan.core.splits import ParallelSpec
from longspan.cost import catalog
from longspan.cost.topology import Devices


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Devices on hosts, and the precision in which they compute.

    Attributes:
        hardware: the name of a device, or of the machine that was measured.
        gpus_per_host: devices of each host; the last host may have fewer instances on them.
        inside, between: the links in a host and between hosts; None where a profile has measured them, or there is one
            host.
        details: further words for people.
    """

    hardware: str
    hosts: int
    gpus_per_host: int
    dtype: str
    ffn_dtype: str | None = None
    inside: str | None = None
    between: str | None = None
    details: str = ""

    @classmethod
    def of(cls, devices: Devices, *, dtype: str, ffn_dtype: str | None) -> Fleet:
        """Describes devices by their data sheets; the precision auto is 16 bits."""
        speed = "" if devices.link_gbytes_per_s is None else f" at {devices.link_gbytes_per_s:g} GB/s"
        slowest, is_one = f"{devices.slowest_link}{speed}", devices.hosts == 1
        return cls(
            hardware=devices.hardware,
            hosts=devices.hosts,
            gpus_per_host=devices.gpus_per_host,
            dtype="bfloat16" if dtype == "auto" else dtype,
            ffn_dtype=ffn_dtype,
            inside=slowest if is_one else catalog.device(devices.hardware).link,
            between=None if is_one else slowest,
        )

    def __str__(self) -> str:
        links = [f"{self.inside} in a host"] if self.inside else []
        links += [f"{self.between} between hosts"] if self.between else []
        precision = self.dtype if self.ffn_dtype in (None, self.dtype) else f"{self.dtype}, {self.ffn_dtype} FFN"
        devices = f"{self.hosts} {'host' if self.hosts == 1 else 'hosts'} × {self.gpus_per_host} {self.hardware}"
        return ", ".join([devices, *links, precision, *([self.details] if self.details else [])])


@dataclass(frozen=True, kw_only=True)
class ResolvedCluster:
    """A fleet with its instances.

    Attributes:
        clusters: the instances; several where clusters take turns on the same devices.
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
            "dtype": fleet.dtype,
            "ffn_dtype": fleet.ffn_dtype or fleet.dtype,
            "instances": list(self._instances()),
        }

    def __str__(self) -> str:
        """Describes the instances in a few words."""
        found = []
        for kind in self._instances():
            size = "1 device" if kind["parallel"] == "1" else kind["parallel"]
            role = "" if kind["role"] == "all" else f" to {kind['role']}"
            where = "" if kind["num_hosts"] == 1 else f" on {kind['num_hosts']} hosts"
            found.append(f"{kind['number']} of {size}{where}{role}, {kind['kv_tokens']:,} KV tokens each")
        return "; ".join(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Texts of all warnings, for options that are probably not meant so."""
        return tuple(one for one in (self.unused, self.across) if one is not None)

    @property
    def unused(self) -> str | None:
        """A warning, if there are devices that no instance takes."""
        fleet, num_gpus = self.fleet, self._num_gpus
        for one in self.clusters:
            if (num_taken := _num_taken(one)) < num_gpus:
                there = f"hosts({fleet.hosts}) * gpus_per_host({fleet.gpus_per_host}) = {num_gpus} devices"
                return f"{num_gpus - num_taken} of {there} stay unused, since {one} takes {num_taken}"
        return None

    @property
    def across(self) -> str | None:
        """A warning, if the ranks of a stage, which add up their results in every layer, lie on several hosts."""
        for one in self.clusters:
            for instance in one.instances:
                stages = [one.stage_ranks(instance, stage) for stage in range(one.pp(instance))]
                num_hosts = max(len({one.hosts[rank] for rank in ranks}) for ranks in stages)
                if num_hosts > 1:
                    tp, link = one.tp(instance), self.fleet.between or "the link between them"
                    lies = f"instance {instance} of {one} has its tp({tp}) on {num_hosts} hosts"
                    remedy = "give --hosts and --gpus-per-host such that hosts have whole instances, or a smaller tp"
                    return f"{lies}, so every layer waits for sums over {link}: {remedy}"
        return None

    @property
    def _num_gpus(self) -> int:
        return self.fleet.hosts * self.fleet.gpus_per_host

    def _instances(self) -> Iterator[dict[str, Any]]:
        """Yields each kind of instance: by its role and how it is split."""
        roles = ("prefill", "decode") if len(self.clusters) > 1 else ()
        for turn, one in enumerate(self.clusters):
            kinds: Counter[tuple[str, str, int, int]] = Counter()
            for instance in one.instances:
                role = roles[turn] if roles else "all"
                if one.has_roles:
                    role = "decode" if instance in one.decode else "prefill"
                split = str(ParallelSpec(tp=one.tp(instance), pp=one.pp(instance)))
                num_hosts = len({one.hosts[rank] for rank in one.ranks(instance)})
                kinds[role, split, num_hosts, one.num_blocks[instance] * self.block_size] += 1
            for (role, split, num_hosts, tokens), count in kinds.items():
                yield {"role": role, "parallel": split, "number": count, "num_hosts": num_hosts, "kv_tokens": tokens}


def _num_taken(cluster: Cluster) -> int:
    return cluster.num_ranks - cluster.num_spare
