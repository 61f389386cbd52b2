"""The cluster: parallel specs, the instances and ranks that they name, roles, and where each rank is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from longspan.errors import ParameterError

_SPEC = re.compile(r"(?:(?P<n>\d+)(?:x(?=[tp]))?)?(?:tp(?P<tp>\d+))?(?:pp(?P<pp>\d+))?")


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """`instances` copies of the model, each on `tp * pp` ranks.

    Raises:
        ValueError: when a degree is below 1, or not supported yet.
    """

    instances: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, degree in (("instances", self.instances), ("tp", self.tp), ("pp", self.pp)):
            if degree < 1:
                raise ParameterError(name, f"must be at least 1, but {degree} given", degree)
        if self.pp > 1:
            raise ParameterError(
                "pp",
                f"({self.pp}) pipeline stages per instance, but only 1 works so far: use tp to split the weights, or "
                f"--parallel {self.instances * self.tp * self.pp} to spread prompts over that many instances",
                self.pp,
            )

    @classmethod
    def parse(cls, spec: str) -> ParallelSpec:
        """Reads `[N][xtpT][ppP]`: `4`, `tp2pp2`, `2xtp2`.

        Raises:
            ValueError: when `spec` is not of that form.
        """
        match = _SPEC.fullmatch(spec.strip())
        if match is None or not spec.strip():
            raise ValueError(f"parallel spec {spec!r} is not of the form [N][xtpT][ppP], such as 4, tp2pp2 or 2xtp2")
        degrees = {name: int(match[name] or 1) for name in ("n", "tp", "pp")}
        return cls(instances=degrees["n"], tp=degrees["tp"], pp=degrees["pp"])

    @property
    def num_ranks(self) -> int:
        """Worker processes in all."""
        return self.instances * self.tp * self.pp

    def __str__(self) -> str:
        tp = f"tp{self.tp}" if self.tp > 1 else ""
        pp = f"pp{self.pp}" if self.pp > 1 else ""
        return f"{self.instances}{'x' if tp or pp else ''}{tp}{pp}"


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Instances that prefill only, and others that decode only: the first `num_prefill` do the one, the rest the other.

    Attributes:
        backends: how many transfers of KV a decode instance receives at once; each needs buffers there.

    Raises:
        ValueError: when a role has no instance, or nothing can be received.
    """

    num_prefill: int
    num_decode: int
    backends: int

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "backends"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but {getattr(self, name)} given")

    @property
    def prefill(self) -> range:
        """The instances that prefill."""
        return range(self.num_prefill)

    @property
    def decode(self) -> range:
        """The instances that decode."""
        return range(self.num_prefill, self.num_prefill + self.num_decode)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Instances in order, those of `spec` first; with `decode_spec` these prefill, and those of `decode_spec` decode.

    Ranks are numbered in the same order: those of an instance follow each other, in order of their place in it.
    """

    spec: ParallelSpec
    decode_spec: ParallelSpec | None = None

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """Ranks of each instance."""
        decode = () if self.decode_spec is None else (self.decode_spec.tp,) * self.decode_spec.instances
        return (self.spec.tp,) * self.spec.instances + decode

    @property
    def num_instances(self) -> int:
        """Copies of the model."""
        return len(self.tps)

    @property
    def num_ranks(self) -> int:
        """Worker processes in all."""
        return sum(self.tps)

    def ranks(self, instance: int) -> range:
        """Of one instance."""
        first = self._first_ranks[instance]
        return range(first, first + self.tps[instance])

    def place(self, rank: int) -> tuple[int, int]:
        """The instance of a rank, and its place in it."""
        instance = next(i for i in range(self.num_instances) if rank in self.ranks(i))
        return instance, rank - self._first_ranks[instance]

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        return tuple(sum(self.tps[:instance]) for instance in range(self.num_instances))

    def __str__(self) -> str:
        return str(self.spec) if self.decode_spec is None else f"{self.spec} prefill + {self.decode_spec} decode"


_RACK_AND_HOST = re.compile(r"([0-9]+)-([0-9]+)")


@dataclass(frozen=True, order=True, slots=True)
class Location:
    """A device by rack, host in the rack, and number. In ascending order neighbours are near (CSPS §3.2.4)."""

    rack: int = 0
    host: int = 0
    device: int = 0

    @property
    def host_id(self) -> tuple[int, int]:
        """Names the host in all racks."""
        return self.rack, self.host


def locations_of_ranks(num_ranks: int, hosts: str) -> tuple[Location, ...]:
    """The place of each rank.

    Args:
        hosts: on how many hosts of one rack the ranks lie, neighbours together and as evenly as possible: `2`. Or rack
            and host of every rank: `0-0,0-1,1-0`.

    Raises:
        ValueError: for neither, more hosts than ranks, or not one host for each rank.
    """
    if hosts.isascii() and hosts.strip().isdecimal():
        num_hosts = int(hosts)
        if not 1 <= num_hosts <= num_ranks:
            raise ValueError(f"{num_ranks} ranks lie on 1 to {num_ranks} hosts, but {num_hosts} given")
        return tuple(Location(host=rank * num_hosts // num_ranks, device=rank) for rank in range(num_ranks))
    found = [_RACK_AND_HOST.fullmatch(one.strip()) for one in hosts.split(",")]
    if len(found) != num_ranks or not all(found):
        raise ValueError(
            f"the hosts of {num_ranks} ranks are a number of hosts, or for each rank its rack and host, as in "
            f"{','.join(f'0-{rank}' for rank in range(num_ranks))}; but {hosts!r} given"
        )
    return tuple(Location(int(one[1]), int(one[2]), rank) for rank, one in enumerate(found) if one is not None)


def hosts_of(places: Sequence[Location]) -> tuple[int, ...]:
    """A number for the host of each place, the same for the same host."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(place.host_id for place in places))}
    return tuple(numbers[place.host_id] for place in places)


def coupled_instances(groups: Iterable[Collection[int]]) -> list[frozenset[int]]:
    """The smallest sets of the instances of these groups such that no group reaches across two."""
    coupled_with: dict[int, set[int]] = {}
    for group in groups:
        met = {id(coupled_with[i]): coupled_with[i] for i in group if i in coupled_with}
        joined = set(group).union(*met.values())
        if any(len(coupled) == len(joined) for coupled in met.values()):
            continue  # one of them has all of it
        coupled_with.update(dict.fromkeys(joined, joined))
    return sorted(map(frozenset, {id(coupled): coupled for coupled in coupled_with.values()}.values()), key=min)
