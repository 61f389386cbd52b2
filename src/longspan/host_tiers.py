"""The KV pools of a service in the memory and on the disks of hosts. Few services have them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.args import EngineArgs
from longspan.core.cluster import Cluster
from longspan.core.kv_record import KvRecord
from longspan.model.files import ModelFiles, cache_root
from longspan.model.store import DTYPES
from longspan.runtime.host_pool import HostMemory, map_blocks

if TYPE_CHECKING:  # types alone
    from longspan.runtime.disk_pool import DiskPool


def map_hosts(cluster: Cluster, block_bytes: int, acquired: ExitStack) -> list[HostMemory]:
    """Map the memory of the KV pool of each host."""
    return [acquired.enter_context(closing(HostMemory(num_blocks * block_bytes))) for num_blocks in cluster.host_blocks]


def open_disks(
    given: EngineArgs,
    files: ModelFiles,
    record: KvRecord,
    cluster: Cluster,
    host_memory: Sequence[HostMemory],
    acquired: ExitStack,
) -> dict[int, DiskPool]:
    """Open the pool on the disk of each host, by its number. Each model, block size and host has its own folder."""
    if not cluster.disk_blocks:
        return {}
    from longspan.runtime.disk_pool import DiskPool  # noqa: PLC0415 - needed with a disk tier only

    model, dtype = f"{files.weights.parent.name}-{given.block_size}", DTYPES[files.dtype]
    folder = cache_root() / "kv" if given.disk_kv_dir is None else Path(given.disk_kv_dir).expanduser()
    disks = {}
    for host, (pool, num_blocks) in enumerate(zip(cluster.disk_pools, cluster.disk_blocks, strict=True)):
        size, memory = cluster.host_blocks[host], host_memory[host].path
        blocks = map_blocks(memory, record, num_blocks=size, block_size=given.block_size, dtype=dtype)
        path = folder / model / f"host-{host}"
        disks[pool] = acquired.enter_context(closing(DiskPool(path, model, num_blocks=num_blocks, host=blocks)))
    return disks
