"""The cluster as a value: instances, ranks by (instance, stage, shard), their roles, locations and KV pools."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

from longspan.core.locations import Location, hosts_of
from longspan.core.options import at_least_one
from longspan.core.splits import ParallelSpec, split_layers
from longspan.errors import ParameterError

if TYPE_CHECKING:  # types alone
    from longspan.core.blocks import BlockRef

MAX_GROWN_RANKS = 64
"""Largest number of ranks that a fleet may grow to, unless it starts with more."""
Tier = Literal["device", "host", "disk"]
"""The memory that holds the blocks of a pool."""


class RankCoordinate(NamedTuple):
    """The position of one worker process in the grid of ranks."""

    instance: int
    stage: int
    shard: int


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The instances of an engine, with their ranks, roles, locations and KV pools.

    The instances of `spec` have the first numbers. With a `decode_spec` they only prefill, and further instances only
    decode. Ranks are numbered by instance, then stage, then shard.

    Attributes:
        transfer_backends: maximum concurrent transfers to a decode instance. None: the number of prefill instances.
        locations: one per rank. Empty when all ranks share a host.
        num_blocks: the KV blocks of each instance's pool, whose id is the instance. Empty until they are known.
        host_blocks: the KV blocks of the pool in the memory of each host. Empty without such pools.
        disk_blocks: the KV blocks of the pool on the disk of each host. Empty without such pools.
        num_layers: number of layers of the model. 0 until it is known.
        head_layers: weights of the model's output head, as a multiple of a layer's weights.
        num_spare: ranks without an instance. They have the last numbers.
        num_device_pools: pool numbers reserved for instances, so that host pools keep their numbers in a new cluster.
        pool_hosts: the rack and host of each host pool, likewise. Empty: the hosts of `locations`, in their order.
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
    pool_hosts: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.transfer_backends is not None:
            at_least_one(transfer_backends=self.transfer_backends)
            if self.decode_spec is None:
                problem = (
                    f"{self.transfer_backends} is for instances that decode only: give `prefill_parallel` and "
                    "`decode_parallel`, too"
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
        """Return a cluster from parallel specs as users write them."""
        return cls(
            spec=ParallelSpec.parse(spec, "parallel" if decode_spec is None else "prefill_parallel"),
            decode_spec=None if decode_spec is None else ParallelSpec.parse(decode_spec, "decode_parallel"),
            transfer_backends=transfer_backends,
            num_blocks=tuple(num_blocks),
        )

    def on_hosts(self, devices_per_host: int) -> Cluster:
        """Return the cluster with its ranks on hosts of one rack, in order, with `devices_per_host` ranks each."""
        locations = (Location(host=rank // devices_per_host, device=rank) for rank in range(self.num_ranks))
        return replace(self, locations=tuple(locations))

    def with_blocks(self, num_blocks: Sequence[int]) -> Cluster:
        return replace(self, num_blocks=tuple(num_blocks))

    def with_layers(self, num_layers: int, head_layers: float) -> Cluster:
        """Return the cluster with a model. Raise ParameterError for more stages than layers."""
        max_stages = max(map(self.pp, self.instances))
        if max_stages > num_layers:
            problem = f"({max_stages}) stages cannot share {num_layers} layers: use a smaller `pp`"
            raise ParameterError("pp", problem, max_stages)
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
        """Maximum transfers that a decode instance receives at once. Default: the number of prefill instances."""
        return self.spec.instances if self.transfer_backends is None else self.transfer_backends

    # ------------------------------------------------------------ pools

    def tier(self, pool: int) -> Tier:
        """Return the tier of a pool. Pools are numbered in the order of instances, hosts, disks of hosts."""
        if pool < self.host_pools.start:
            return "device"
        return "host" if pool in self.host_pools else "disk"

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """The number of blocks of each pool, by its number. Unused numbers reserved for instances have 0 blocks."""
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
        """Return the pool in the memory of an instance's host, which all instances of that host share."""
        return self.host_pools.start + self.hosts_of_pools.index(self.location(instance).host_id)

    @cached_property
    def hosts_of_pools(self) -> tuple[tuple[int, int], ...]:
        """The rack and host of each host pool. Ranks of a smaller cluster may use some of the pools only."""
        return self.pool_hosts or tuple(dict.fromkeys(place.host_id for place in self.locations or (Location(),)))

    def disk_pool(self, host_pool: int) -> int | None:
        """Return the pool on the disk of the host with this pool, or None."""
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
        """Return the ranks of an instance, ordered by stage, then shard."""
        return range(self._first_ranks[instance], self._first_ranks[instance + 1])

    def stage_ranks(self, instance: int, stage: int) -> range:
        """Return the ranks that share the weights of one stage, in order of their shards."""
        first = self._first_ranks[instance] + stage * self.tp(instance)
        return range(first, first + self.tp(instance))

    @property
    def shard_groups(self) -> list[range]:
        """The ranks of each stage with several shards."""
        split = [instance for instance in self.instances if self.tp(instance) > 1]
        return [self.stage_ranks(instance, stage) for instance in split for stage in range(self.pp(instance))]

    @cached_property
    def rows(self) -> dict[tuple[int, int], int]:
        """The row of each pipeline stage of each instance in timelines."""
        pairs = ((instance, stage) for instance in self.instances for stage in range(self.pp(instance)))
        return {pair: number for number, pair in enumerate(pairs)}

    @property
    def row_names(self) -> list[str]:
        """The names of the rows: the instance, and its stage if there are several."""
        return [f"{i}, stage {stage}" if self.pp(i) > 1 else str(i) for i, stage in self.rows]

    def layers(self, instance: int, stage: int) -> range:
        """Return the layers whose output and KV a stage computes."""
        return self._layers[self.pp(instance)][stage]

    def stage_of(self, instance: int, layer: int) -> int:
        return bisect_right(self._layers[self.pp(instance)], layer, key=lambda layers: layers.start) - 1

    @cached_property
    def _layers(self) -> dict[int, tuple[range, ...]]:
        assert self.num_layers, f"the number of layers of {self} is not set"
        return {spec.pp: split_layers(self.num_layers, spec.pp, self.head_layers) for spec in self._specs}

    def are_alike(self, instance: int, other: int) -> bool:
        """Return whether two instances have equal splits: equal weights and heads in each stage and shard."""
        mine, theirs = self._specs[instance], self._specs[other]
        return (mine.tp, mine.pp) == (theirs.tp, theirs.pp)

    def rank(self, instance: int, stage: int = 0, shard: int = 0) -> int:
        return self.stage_ranks(instance, stage)[shard]

    def is_spare(self, rank: int) -> bool:
        return rank >= self._first_ranks[-1]

    def at(self, rank: int) -> RankCoordinate:
        assert not self.is_spare(rank), f"rank {rank} is a spare of {self}"
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
