"""KV pools in the memory and on the disk of hosts. Their process outlives the workers, so their KV does, too."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import msgspec

from longspan import limits
from longspan.core.cluster import Cluster
from longspan.core.kv_record import KvRecord
from longspan.core.steps import Content, MoveKV
from longspan.errors import ParameterError

if TYPE_CHECKING:
    from longspan.core.kv.manager import KvManager
    from longspan.core.kv.swaps import Pools
    from longspan.model.files import ModelFiles
    from longspan.runtime.disk_pool import DiskPool
    from longspan.runtime.executor.channel import Channel
    from longspan.runtime.executor.ray_hosts import RayHosts


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The pools of one host.

    Attributes:
        host: its number, by which its folder on the disk is named.
        record, block_size, dtype: of the blocks.
        num_blocks: of the pool in memory.
        disk_pool: the number of the pool on the disk.
        num_disk_blocks: 0 without a disk.
        model: the name of the folder with the KV of the model, see `disk_pool.name_of_kv`.
        kv_dir: the folder of all models. None: in the cache of the host.
    """

    host: int
    record: KvRecord
    block_size: int
    dtype: str
    num_blocks: int
    disk_pool: int = 0
    num_disk_blocks: int = 0
    model: str = ""
    kv_dir: str | None = None


def open_tiers(
    cluster: Cluster,
    record: KvRecord,
    files: ModelFiles,
    block_size: int,
    *,
    kv_dir: str | None,
    hosts: RayHosts | None,
) -> HostTiers:
    """Open the pools of all hosts of a cluster, which are `hosts`, or all this machine.

    Raises:
        ParameterError: memory or space for a pool is missing, or its folder cannot be used.
    """
    model, disks = "", [(0, 0)] * len(cluster.host_blocks)
    if cluster.disk_blocks:
        from longspan.runtime.disk_pool import name_of_kv  # noqa: PLC0415 - needed with a disk tier only

        model, disks = name_of_kv(files, block_size), [*zip(cluster.disk_pools, cluster.disk_blocks, strict=True)]
    plans = [
        PoolPlan(
            host=host,
            record=record,
            block_size=block_size,
            dtype=files.dtype,
            num_blocks=num_blocks,
            disk_pool=disk_pool,
            num_disk_blocks=num_disk_blocks,
            model=model,
            kv_dir=kv_dir,
        )
        for host, (num_blocks, (disk_pool, num_disk_blocks)) in enumerate(zip(cluster.host_blocks, disks, strict=True))
    ]
    return LocalTiers(plans) if hosts is None else hosts.open_tiers(plans, cluster)


def check_hosts(gib: float, cluster: Cluster) -> None:
    """Raise ParameterError if an instance spans several hosts, or if a host has no pool of `gib` GiB."""
    for instance in cluster.instances:
        if len({cluster.hosts[rank] for rank in cluster.ranks(instance)}) > 1:
            problem = f"needs each instance on one host, but instance {instance} has ranks on several: leave it out"
            raise ParameterError("host_kv_gib", problem, gib)
    num_hosts = len(cluster.hosts_of_pools)
    if {location.host_id for location in cluster.locations} - {*cluster.hosts_of_pools}:
        problem = f"{gib:g} gives pools to the first {num_hosts} hosts only: start a new engine for more"
        raise ParameterError("host_kv_gib", problem, gib)


def check_host_memory(gib: float, cluster: Cluster) -> None:
    """Raise ParameterError when host pools of this size exceed the available memory. They are not allocated yet."""
    from longspan.runtime.pool import PROCESS_BYTES  # noqa: PLC0415 - the rest of this module needs no PyTorch

    needed, available = gib * (max(cluster.hosts) + 1), (limits.memory().available - PROCESS_BYTES) / 2**30
    if needed > available:
        problem = f"{gib:g} needs {needed:.1f} GiB, but {max(0.0, available):.1f} are available: allow less"
        raise ParameterError("host_kv_gib", problem, gib)


class DiskLink(Protocol):
    """Executes moves to and from disks for one executor, to whose channel it reports them."""

    def put(self, move: MoveKV) -> None:
        """Begin a move without waiting."""

    def close(self) -> None:
        """Drop the copies that have not started, and wait for the current one."""


class HostTiers(ABC):
    """The pools of all hosts.

    Attributes:
        memory: of the pool of each host, as a path on that host.
        are_kept: whether the disks are read-only, see `DiskPool.is_kept`.
        lost_hosts: the numbers of hosts whose pools were lost or are new since the latest `lost_pools`.
    """

    memory: tuple[Path, ...]
    are_kept = False

    def __init__(self) -> None:
        self.lost_hosts = set[int]()

    @abstractmethod
    def link(self, channel: Channel, cluster: Cluster) -> DiskLink | None:
        """Serve an executor of this cluster. None if it needs nothing."""

    @abstractmethod
    def saved(self, hosts: Collection[int]) -> dict[int, Iterable[tuple[int, Content]]]:
        """Return the contents of the disks of some hosts, by the numbers of their pools."""

    @abstractmethod
    def renew(self, cluster: Cluster) -> None:
        """Open the pools of the hosts of a cluster that have none, before it starts. Adds to `lost_hosts`."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all blocks from disks."""

    @abstractmethod
    def close(self) -> None:
        """Release the pools."""

    def contents(self, cluster: Cluster) -> list[Iterable[tuple[int, Content]]]:
        """Return the contents of all disks at the start of an engine."""
        saved = self.saved(range(len(cluster.disk_blocks)))
        self.lost_hosts.clear()
        return [saved[pool] for pool in cluster.disk_pools]

    def lost_pools(self, cluster: Cluster) -> Pools:
        """Return the pools of lost hosts, with the contents of the disks that were opened again. Forget the loss."""
        hosts = {*self.lost_hosts}
        pools = [pools[host] for host in hosts for pools in (cluster.host_pools, cluster.disk_pools) if pools]
        lost: dict[int, Iterable[tuple[int, Content]]] = dict.fromkeys(pools, ())
        lost |= self.saved(hosts)
        self.lost_hosts.clear()
        return lost

    def replace_pools(self, lost: Pools, kv: KvManager, *, cluster: Cluster) -> None:
        """Forget the KV of `lost_pools`, after a restart of the engine."""
        assert kv.swaps is not None, "hosts have pools"
        kv.kept = kv.swaps.replace_pools(lost, kv.kept, seal=cluster.disk_pools if self.are_kept else ())


class HostMemory:
    """Shared memory that other processes open by `path`. It is freed on `close`, or when its process ends in any way.

    Pages are zero and take no memory until they are written.
    """

    def __init__(self, num_bytes: int) -> None:
        self._file: IO[bytes]
        with ExitStack() as acquired:
            if hasattr(os, "memfd_create"):
                self._file = acquired.enter_context(os.fdopen(os.memfd_create("longspan-kv"), "r+b"))
                self.path = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
            else:
                self._file = acquired.enter_context(tempfile.NamedTemporaryFile(prefix="longspan-kv-"))
                self.path = Path(self._file.name)
            try:
                self._file.truncate(num_bytes)
            except OSError as error:
                problem = f"needs {num_bytes / 2**30:.1f} GiB that cannot be allocated ({error.strerror}): allow less"
                raise ParameterError("host_kv_gib", problem) from error
            acquired.pop_all()  # `close` owns the file from now on

    def close(self) -> None:
        self._file.close()


class LocalTiers(HostTiers):
    """The pools of hosts that are all this machine.

    Raises:
        ParameterError: memory or space for a pool is missing, or its folder cannot be used.
    """

    def __init__(self, plans: Sequence[PoolPlan]) -> None:
        super().__init__()
        self._disks: dict[int, DiskPool] = {}
        self._pool_of_host: dict[int, int] = {}
        with ExitStack() as acquired:
            sizes = (plan.num_blocks * plan.record.block_bytes for plan in plans)
            memory = [acquired.enter_context(closing(HostMemory(size))) for size in sizes]
            self.memory = tuple(each.path for each in memory)
            for plan, path in zip(plans, self.memory, strict=True):
                if plan.num_disk_blocks:
                    from longspan.runtime.disk_pool import open_disk  # noqa: PLC0415 - needed with a disk tier only

                    disk = acquired.enter_context(closing(open_disk(plan, path)))
                    self._disks[plan.disk_pool], self._pool_of_host[plan.host] = disk, plan.disk_pool
            self.are_kept = any(disk.is_kept for disk in self._disks.values())
            self._acquired = acquired.pop_all()

    def link(self, channel: Channel, cluster: Cluster) -> DiskLink | None:  # noqa: ARG002 - one process has all pools
        if not self._disks:
            return None
        from longspan.runtime.disk_pool import DiskLane  # noqa: PLC0415 - only with a disk tier

        stored = channel.reporter()
        return DiskLane(self._disks, lambda report: stored.send(msgspec.msgpack.encode(report)))

    def saved(self, hosts: Collection[int]) -> dict[int, Iterable[tuple[int, Content]]]:
        pools = [self._pool_of_host[host] for host in hosts if host in self._pool_of_host]
        return {pool: self._disks[pool].contents() for pool in pools}

    def renew(self, cluster: Cluster) -> None:
        """Do nothing, since the pools are lost with the engine only."""

    def clear(self) -> None:
        for disk in self._disks.values():
            disk.clear()

    def close(self) -> None:
        self._acquired.close()
