"""KV pools in the memory and on the disk of hosts. Their process outlives the workers, so their KV does, too."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import msgspec

from longspan.core.cluster import Cluster
from longspan.core.kv_record import KvRecord
from longspan.core.steps import Content, MoveKV
from longspan.errors import ParameterError

if TYPE_CHECKING:
    from longspan.runtime.disk_pool import DiskPool
    from longspan.runtime.executor.channel import Channel
    from longspan.runtime.executor.control_plane import WorkerExecutor

Saved = Iterable[tuple[int, Content]]
"""The contents of a disk by block, the least recently used first."""


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


def pool_plans(
    cluster: Cluster, record: KvRecord, *, block_size: int, dtype: str, model: str, kv_dir: str | None
) -> list[PoolPlan]:
    """Return the plan of each host with pools."""
    disks = [*zip(cluster.disk_pools, cluster.disk_blocks, strict=True)] or [(0, 0)] * len(cluster.host_blocks)
    return [
        PoolPlan(
            host=host,
            record=record,
            block_size=block_size,
            dtype=dtype,
            num_blocks=num_blocks,
            disk_pool=disk_pool,
            num_disk_blocks=num_disk_blocks,
            model=model,
            kv_dir=kv_dir,
        )
        for host, (num_blocks, (disk_pool, num_disk_blocks)) in enumerate(zip(cluster.host_blocks, disks, strict=True))
    ]


class DiskLink(Protocol):
    """Executes moves to and from disks for one executor, to whose channel it reports them."""

    def put(self, move: MoveKV) -> None:
        """Begin a move without waiting."""

    def close(self) -> None:
        """Drop the copies that have not started, and wait for the others."""


class HostTiers(Protocol):
    """The pools of all hosts.

    Attributes:
        memory: of the pool of each host, as a path on that host.
        are_kept: whether the disks are read-only, see `DiskPool.is_kept`.
        lost_hosts: the numbers of hosts whose pools were lost or are new. Its user clears it.
    """

    memory: tuple[Path, ...]
    are_kept: bool
    lost_hosts: set[int]

    def link(self, channel: Channel, cluster: Cluster) -> DiskLink | None:
        """Serve an executor of this cluster. None if it needs nothing."""

    def saved(self, executor: WorkerExecutor, hosts: Collection[int]) -> dict[int, Saved]:
        """Return the contents of the disks of some hosts, by the numbers of their pools."""

    def renew(self, cluster: Cluster) -> None:
        """Open the pools of the hosts of a cluster that have none, before it starts. Adds to `lost_hosts`."""

    def clear(self) -> None:
        """Remove all blocks from disks."""

    def close(self) -> None:
        """Release the pools."""


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


class LocalTiers:
    """The pools of hosts that are all this machine.

    Raises:
        ParameterError: memory or space for a pool is missing, or its folder cannot be used.
    """

    are_kept = False

    def __init__(self, plans: Sequence[PoolPlan]) -> None:
        self._disks: dict[int, DiskPool] = {}
        self._pool_of_host: dict[int, int] = {}
        self.lost_hosts = set[int]()
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

    def saved(self, executor: WorkerExecutor, hosts: Collection[int]) -> dict[int, Saved]:  # noqa: ARG002 - see `link`
        pools = [self._pool_of_host[host] for host in hosts if host in self._pool_of_host]
        return {pool: self._disks[pool].contents() for pool in pools}

    def renew(self, cluster: Cluster) -> None:
        """Do nothing, since the pools are lost with the engine only."""

    def clear(self) -> None:
        for disk in self._disks.values():
            disk.clear()

    def close(self) -> None:
        self._acquired.close()
