"""The cluster as a value: instances, ranks by (instance, stage, shard), their heads, roles, locations and KV pools."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from longspan.core.options import Option, at_least_one
from longspan.errors import ParameterError

if TYPE_CHECKING:  # types alone
    from longspan.core.blocks import BlockRef

_MAX_RANKS = 2**12
MOST_GROWN = 64
"""The ranks that a fleet may grow to, unless it has more from the start."""
Tier = Literal["device", "host", "disk"]
"""The place that the blocks of a pool lie in."""

_HEAD_SHARE = 1 / 16
"""The part of all work that is of tokens which need the output head, too: those of outputs, and one of each prompt."""
_SPEC = re.compile(r"(?:(?P<n>\d+)(?:x(?=[tp]))?)?(?:tp(?P<tp>\d+))?(?:pp(?P<pp>\d+))?")


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """`instances` copies of the model, each on `tp * pp` ranks."""

    instances: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        at_least_one(instances=self.instances, tp=self.tp, pp=self.pp)
        if self.num_ranks > _MAX_RANKS:
            raise ValueError(
                f"instances({self.instances}) * tp({self.tp}) * pp({self.pp}) = {self.num_ranks:,} ranks, but at most "
                f"{_MAX_RANKS:,} can be planned: use fewer"
            )

    @classmethod
    def parse(cls, spec: str) -> ParallelSpec:
        """Reads `N` or `[Nx][tpT][ppP]`: `4`, `tp2pp2`, `2xtp2`.

        Raises:
            ValueError: when `spec` is not of that form.
        """
        match = _SPEC.fullmatch(spec.strip())
        if match is None or not spec.strip():
            raise ValueError(f"parallel spec {spec!r} is neither N nor [Nx][tpT][ppP], such as 4, tp2pp2 or 2xtp2")
        degrees = {name: int(match[name] or 1) for name in ("n", "tp", "pp")}
        return cls(instances=degrees["n"], tp=degrees["tp"], pp=degrees["pp"])

    @property
    def num_ranks(self) -> int:
        return self.instances * self.tp * self.pp

    def __str__(self) -> str:
        tp = f"tp{self.tp}" if self.tp > 1 else ""
        pp = f"pp{self.pp}" if self.pp > 1 else ""
        if not (tp or pp):
            return str(self.instances)
        return f"{self.instances}x{tp}{pp}" if self.instances > 1 else f"{tp}{pp}"


@dataclass(frozen=True, order=True, slots=True)
class Location:
    """A device by rack, host in the rack, and number. In ascending order neighbours are near (CSPS §3.2.4)."""

    rack: int = 0
    host: int = 0
    device: int = 0

    @property
    def host_id(self) -> tuple[int, int]:
        """The rack and the host in it, which together name a host."""
        return self.rack, self.host


class RankCoordinate(NamedTuple):
    """One worker process, by its place in the grid."""

    instance: int
    stage: int
    shard: int


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The instances of an engine, with their ranks, roles, locations and KV pools.

    The instances of `spec` come first. With a `decode_spec` they only prefill, and those of `decode_spec` only decode.
    Ranks are numbered by instance, then stage, then shard.

    Attributes:
        transfer_backends: how many transfers of KV a decode instance receives at once, each of which needs buffers
            there; None for as many as there are prefill instances.
        locations: one per rank; empty when all ranks share a host.
        num_blocks: the KV blocks of each instance's pool, whose id is the instance. Empty until they are known.
        host_blocks: the KV blocks of the pool in the memory of each host; empty without such pools.
        disk_blocks: those of the pool on the disk of each host; empty without such pools.
        num_layers: of the model; 0 until it is known.
        head_layers: how many times the weights of a layer the model's output head has.
        num_spare: ranks behind those of the instances, which have no part in this cluster.
        num_device_pools: so many numbers are left to the pools of instances, if that is more than there are, such that
            pools on hosts keep theirs when another cluster takes the place of this one.
    """

    spec: ParallelSpec
    decode_spec: ParallelSpec | None = None
    transfer_backends: int | None = None
    locations: tuple[Location, ...] = ()
    num_blocks: tuple[int, ...] = ()
    host_blocks: tuple[int, ...] = ()
    disk_blocks: tuple[int, ...] = ()
    num_layers: int = 0
    head_layers: float = 0.0
    num_spare: int = 0
    num_device_pools: int = 0

    def __post_init__(self) -> None:
        if self.transfer_backends is not None:
            at_least_one(transfer_backends=self.transfer_backends)
            if self.decode_spec is None:
                problem = (
                    f"{self.transfer_backends} is for instances that decode only: give prefill_parallel and "
                    "decode_parallel, too"
                )
                raise ParameterError("transfer_backends", problem, self.transfer_backends)
        assert len(self.locations) in (0, self.num_ranks), f"{self} has one location per rank"
        assert len(self.num_blocks) in (0, self.num_instances), f"{self} has one pool per instance"

    @classmethod
    def of(
        cls,
        spec: str,
        decode_spec: str | None = None,
        *,
        transfer_backends: int | None = None,
        num_blocks: Sequence[int] = (),
    ) -> Cluster:
        """Makes a cluster from parallel specs as users write them."""
        return cls(
            spec=ParallelSpec.parse(spec),
            decode_spec=None if decode_spec is None else ParallelSpec.parse(decode_spec),
            transfer_backends=transfer_backends,
            num_blocks=tuple(num_blocks),
        )

    def in_turns(self) -> tuple[Cluster, Cluster]:
        """Returns the clusters of a role each, of one with both, that take turns on the same devices.

        Raises:
            ParameterError: when the instances have no roles, or those of both are split alike.
        """
        if self.decode_spec is None:
            problem = "is one of two specs of instances, which prefill and decode by turns: give both"
            raise ParameterError("prefill_parallel", problem)
        if self.decode_spec == self.spec:
            problem = f"{self.spec} is what prefill_parallel is, too: give another, or parallel and another policy"
            raise ParameterError("decode_parallel", problem, str(self.spec))
        specs = self.spec, self.decode_spec
        num_ranks, num_pools = max(spec.num_ranks for spec in specs), max(spec.instances for spec in specs)
        first, second = (
            Cluster(spec=spec, num_spare=num_ranks - spec.num_ranks, num_device_pools=num_pools) for spec in specs
        )
        return first, second

    def on_hosts(self, devices_per_host: int) -> Cluster:
        """Returns the cluster with its ranks on hosts of one rack, which are filled one after the other."""
        locations = (Location(host=rank // devices_per_host, device=rank) for rank in range(self.num_ranks))
        return replace(self, locations=tuple(locations))

    def with_blocks(self, num_blocks: Sequence[int]) -> Cluster:
        return replace(self, num_blocks=tuple(num_blocks))

    def with_tiers(self, block_bytes: float, *, host_kv_gib: float, disk_kv_gib: float) -> Cluster:
        """Returns the cluster with pools of so many GiB in the memory, and on the disk, of each host; 0 for none.

        Raises:
            ParameterError: when no block fits, or there is a disk only, which is reached by way of the memory.
        """
        blocks = []
        for name, gib in (("host_kv_gib", host_kv_gib), ("disk_kv_gib", disk_kv_gib)):
            if not gib >= 0:
                raise ParameterError(name, f"must be at least 0, but {gib:g} given", gib)
            if gib and not gib * 2**30 >= block_bytes:
                raise ParameterError(name, f"{gib:g} holds no block of {block_bytes:,.0f} bytes: allow more", gib)
            blocks.append((int(gib * 2**30 // block_bytes),) * (max(self.hosts) + 1) if gib else ())
        if disk_kv_gib and not host_kv_gib:
            problem = f"{disk_kv_gib:g} is reached by way of the host's memory: give that some, too"
            raise ParameterError("disk_kv_gib", problem, disk_kv_gib)
        # Pools of hosts keep their numbers, however many instances there come to be.
        num_device_pools = max(self.num_device_pools, self.num_ranks, MOST_GROWN) if host_kv_gib else 0
        return replace(self, host_blocks=blocks[0], disk_blocks=blocks[1], num_device_pools=num_device_pools)

    def with_layers(self, num_layers: int, head_layers: float) -> Cluster:
        """Returns the cluster with a model; raises ParameterError for more stages than it has layers."""
        most = max(map(self.pp, self.instances))
        if most > num_layers:
            problem = f"({most}) stages cannot share {num_layers} layers: use a smaller pp"
            raise ParameterError("pp", problem, most)
        return replace(self, num_layers=num_layers, head_layers=head_layers)

    # ------------------------------------------------------------ instances and their roles

    @property
    def num_instances(self) -> int:
        return len(self._specs)

    @property
    def instances(self) -> range:
        return range(self.num_instances)

    @property
    def has_roles(self) -> bool:
        return self.decode_spec is not None

    @cached_property
    def has_stages(self) -> bool:
        """Whether any instance has more than one pipeline stage."""
        return any(spec.pp > 1 for spec in self._specs)

    @property
    def prefill(self) -> range:
        return range(self.spec.instances)

    @property
    def decode(self) -> range:
        return range(self.spec.instances, self.num_instances)

    @property
    def backends(self) -> int:
        """Transfers that an instance which decodes receives at once: by default, one from each that prefills."""
        return self.spec.instances if self.transfer_backends is None else self.transfer_backends

    # ------------------------------------------------------------ pools

    def tier(self, pool: int) -> Tier:
        """Tells where a pool lies. Those of instances come first, then those of hosts, then those of their disks."""
        if pool < self.host_pools.start:
            return "device"
        return "host" if pool in self.host_pools else "disk"

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """The blocks of each pool, by its number; none of the numbers that are left to instances."""
        unused = self.host_pools.start - len(self.num_blocks)
        return (*self.num_blocks, *(0,) * unused, *self.host_blocks, *self.disk_blocks)

    @cached_property
    def host_pools(self) -> range:
        first = max(self.num_instances, self.num_device_pools)
        return range(first, first + len(self.host_blocks))

    @cached_property
    def disk_pools(self) -> range:
        first = self.host_pools.stop
        return range(first, first + len(self.disk_blocks))

    def host_pool(self, instance: int) -> int:
        """Returns the pool in the memory of an instance's host, which all instances of that host share."""
        return self.host_pools.start + self.hosts[self.rank(instance)]

    def disk_pool(self, host_pool: int) -> int | None:
        """Returns the pool on the disk of the host whose pool this is, if there is one."""
        return host_pool + len(self.host_blocks) if self.disk_blocks else None

    def load_pools(self, instance: int) -> tuple[int, int | None]:
        """Return the pools that an instance loads KV from: of its host, and of the host's disk if there is one."""
        host = self.host_pool(instance)
        return host, self.disk_pool(host)

    def load_owners(self, refs: Iterable[BlockRef], free: dict[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the index of each block on a host or disk, and the member near it with most free blocks.

        Args:
            free: number of free blocks of each member of a group. Each yielded block is subtracted after the yield.
        """
        pools = {member: self.load_pools(member) for member in free}
        for index, ref in enumerate(refs):
            if self.tier(ref.pool) != "device":
                owner = max((member for member in free if ref.pool in pools[member]), key=free.__getitem__)
                yield index, owner
                free[owner] -= 1

    # ------------------------------------------------------------ ranks

    @property
    def num_ranks(self) -> int:
        return self._first_ranks[-1] + self.num_spare

    @cached_property
    def _specs(self) -> tuple[ParallelSpec, ...]:
        decode = () if self.decode_spec is None else (self.decode_spec,) * self.decode_spec.instances
        return (self.spec,) * self.spec.instances + decode

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        return tuple(accumulate((spec.tp * spec.pp for spec in self._specs), initial=0))

    def tp(self, instance: int) -> int:
        return self._specs[instance].tp

    def pp(self, instance: int) -> int:
        return self._specs[instance].pp

    def ranks(self, instance: int) -> range:
        """Numbers the ranks of an instance: all shards of its first stage, then those of the next."""
        return range(self._first_ranks[instance], self._first_ranks[instance + 1])

    def stage_ranks(self, instance: int, stage: int) -> range:
        """Numbers the ranks that share the weights of one stage, in order of their shards."""
        first = self._first_ranks[instance] + stage * self.tp(instance)
        return range(first, first + self.tp(instance))

    @property
    def shard_groups(self) -> list[range]:
        """The ranks of each stage of which more than one share its weights."""
        split = [instance for instance in self.instances if self.tp(instance) > 1]
        return [self.stage_ranks(instance, stage) for instance in split for stage in range(self.pp(instance))]

    @cached_property
    def rows(self) -> dict[tuple[int, int], int]:
        """Numbers the pipeline stages of all instances: a row each in pictures of what they do."""
        pairs = ((instance, stage) for instance in self.instances for stage in range(self.pp(instance)))
        return {pair: number for number, pair in enumerate(pairs)}

    @property
    def row_names(self) -> list[str]:
        """Names these rows after instance and, where there are several, stage."""
        return [f"{i}, stage {stage}" if self.pp(i) > 1 else str(i) for i, stage in self.rows]

    def layers(self, instance: int, stage: int) -> range:
        """Returns the layers that a stage computes, and has the KV of."""
        return self._layers[self.pp(instance)][stage]

    def stage_of(self, instance: int, layer: int) -> int:
        return bisect_right(self._layers[self.pp(instance)], layer, key=lambda layers: layers.start) - 1

    @cached_property
    def _layers(self) -> dict[int, tuple[range, ...]]:
        assert self.num_layers, f"the layers of {self} are not known yet"
        return {spec.pp: split_layers(self.num_layers, spec.pp, self.head_layers) for spec in self._specs}

    def are_alike(self, instance: int, other: int) -> bool:
        """Tells whether two instances are split alike, so that ranks of the same stage and shard have the same."""
        mine, theirs = self._specs[instance], self._specs[other]
        return (mine.tp, mine.pp) == (theirs.tp, theirs.pp)

    def rank(self, instance: int, stage: int = 0, shard: int = 0) -> int:
        return self.stage_ranks(instance, stage)[shard]

    def is_spare(self, rank: int) -> bool:
        return rank >= self._first_ranks[-1]

    def at(self, rank: int) -> RankCoordinate:
        assert not self.is_spare(rank), f"rank {rank} has no part in {self}"
        instance = bisect_right(self._first_ranks, rank) - 1
        stage, shard = divmod(rank - self._first_ranks[instance], self.tp(instance))
        return RankCoordinate(instance, stage, shard)

    # ------------------------------------------------------------ locations

    def location(self, instance: int) -> Location:
        return self.locations[self.rank(instance)] if self.locations else Location(device=instance)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        return hosts_of(self.locations) if self.locations else (0,) * self.num_ranks

    def __str__(self) -> str:
        return str(self.spec) if self.decode_spec is None else f"{self.spec} prefill + {self.decode_spec} decode"


instance_option = partial(Option, group="Instances", configures=True)


@dataclass(frozen=True, kw_only=True)
class ParallelArgs:
    """The instances of a cluster as users write them; `parse_parallel` reads them."""

    parallel: Annotated[
        str | None,
        instance_option("N or [Nx][tpT][ppP]: N instances, each of T * P ranks.", metavar="SPEC", default="one rank"),
    ] = None
    prefill_parallel: Annotated[
        str | None,
        instance_option(
            "Instead: instances that only prefill, on the first devices; with policy seesaw, on all by turns.",
            metavar="SPEC",
        ),
    ] = None
    decode_parallel: Annotated[
        str | None,
        instance_option(
            "With it: instances that only decode, with the KV that is sent to them, or comes from hosts by turns.",
            metavar="SPEC",
        ),
    ] = None
    transfer_backends: Annotated[
        int | None,
        instance_option(
            "Transfers of KV that each of these receives at once.", metavar="N", default="one per prefill instance"
        ),
    ] = None


def parse_parallel(
    parallel: str | None = None,
    prefill_parallel: str | None = None,
    decode_parallel: str | None = None,
    *,
    transfer_backends: int | None = None,
    **degrees: int | None,
) -> Cluster:
    """Reads the instances of a cluster from whichever of their spellings is given; without any there is one rank.

    Args:
        parallel: the spec of instances that all do the same.
        prefill_parallel, decode_parallel: instead, the specs of instances that only prefill, and only decode.
        transfer_backends: see `Cluster`.
        degrees: instead, `instances`, `tp` and `pp` by name.

    Raises:
        ParameterError: for two spellings, a role without the other, or a degree that is not possible.
    """
    spellings = (
        {"parallel": parallel},
        degrees,
        {"prefill_parallel": prefill_parallel, "decode_parallel": decode_parallel},
    )
    given = [[name for name, value in spelling.items() if value is not None] for spelling in spellings]
    if len(names := [found[0] for found in given if found]) > 1:
        raise ParameterError(names[0], f"and {names[1]} exclude each other: give one of them")
    if (prefill_parallel is None) != (decode_parallel is None):
        name, other, spec = "prefill_parallel", "decode_parallel", prefill_parallel
        if prefill_parallel is None:
            name, other, spec = other, name, decode_parallel
        raise ParameterError(name, f"{spec!r} needs {other}, too: who prefills for others does not decode", spec)
    if (text := prefill_parallel if parallel is None else parallel) is not None:
        return Cluster.of(text, decode_parallel, transfer_backends=transfer_backends)
    alike = ParallelSpec(**{name: degree for name, degree in degrees.items() if degree is not None})
    return Cluster(spec=alike, transfer_backends=transfer_backends)


_RACK_AND_HOST = re.compile(r"([0-9]+)-([0-9]+)")


def locations_of_ranks(num_ranks: int, hosts: str) -> tuple[Location, ...]:
    """Locates every rank as a text says.

    Args:
        hosts: on how many hosts of one rack the ranks lie, neighbours together and as evenly as possible: `2`. Or rack
            and host of every rank: `0-0,0-1,1-0`.
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


def hosts_of(locations: Sequence[Location]) -> tuple[int, ...]:
    """Numbers the hosts of these locations in order of appearance."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(one.host_id for one in locations))}
    return tuple(numbers[one.host_id] for one in locations)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads of one member and the KV heads that these read; both or neither may be empty."""

    heads: range
    kv_heads: range


def split_heads(num_heads: int, num_kv_heads: int, num_members: int) -> tuple[HeadShare, ...]:
    """Splits query heads over members, each to one, in order.

    KV heads are split as evenly as possible, each with all query heads that read it. Where members outnumber them,
    KV heads share out the members instead: those of one KV head share its query heads as evenly as possible, and each
    reads a copy of it. With more members than query heads some have none.
    """
    readers = _readers(num_heads, num_kv_heads, num_members)
    if num_members <= num_kv_heads:
        return tuple(
            HeadShare(range(first * readers, last * readers), range(first, last))
            for first, last in cut_evenly(num_kv_heads, num_members)
        )
    return tuple(
        HeadShare(range(head * readers + first, head * readers + last), range(head, head + (last > first)))
        for head, (first_member, last_member) in enumerate(cut_evenly(num_members, num_kv_heads))
        for first, last in cut_evenly(readers, last_member - first_member)
    )


@lru_cache(maxsize=1024)
def spread_heads(num_heads: int, num_kv_heads: int, num_members: int) -> tuple[HeadShare, ...]:
    """Splits query heads over members as evenly as possible, in order; KV heads go to all who read them."""
    readers = _readers(num_heads, num_kv_heads, num_members)
    return tuple(
        HeadShare(
            range(first, last), range(first // readers, -(-last // readers) if last > first else first // readers)
        )
        for first, last in cut_evenly(num_heads, num_members)
    )


def uniform_pieces(share: HeadShare, readers: int) -> list[HeadShare]:
    """Cuts a share so that in each piece all KV heads have equally many readers; a KV head has `readers` in all."""
    first, last = share.heads.start, share.heads.stop
    borders = (-(-first // readers) * readers, last // readers * readers)
    cuts = sorted({first, last, *(border for border in borders if first < border < last)})
    return [
        HeadShare(range(start, stop), range(start // readers, -(-stop // readers))) for start, stop in pairwise(cuts)
    ]


def _readers(num_heads: int, num_kv_heads: int, num_members: int) -> int:
    """Returns the query heads per KV head; raises ValueError when that is no whole number."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads or num_members < 1:
        raise ValueError(
            f"{num_heads} query heads on {num_kv_heads} KV heads cannot be split over {num_members} members"
        )
    return num_heads // num_kv_heads


def split_layers(num_layers: int, num_stages: int, head_layers: float) -> tuple[range, ...]:
    """Splits layers over pipeline stages, so that the slowest is as quick as can be; each has one at least.

    The last computes the output head, too, which has as many weights as `head_layers` layers; an embedding costs next
    to nothing. Of equals the split with the most layers in the last stage is chosen.
    """
    if num_stages == 1:
        return (range(num_layers),)

    def slowest(last: int) -> float:
        return max(-(-(num_layers - last) // (num_stages - 1)), last + _HEAD_SHARE * head_layers)

    last = min(range(num_layers - num_stages + 1, 0, -1), key=slowest)
    cuts = [*cut_evenly(num_layers - last, num_stages - 1), (num_layers - last, num_layers)]
    return tuple(range(first, stop) for first, stop in cuts)


def cut_evenly(total: int, num_pieces: int) -> list[tuple[int, int]]:
    return list(pairwise(-(-total * index // num_pieces) for index in range(num_pieces + 1)))
