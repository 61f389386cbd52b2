"""Counts of blocks in pools, and of KV moved between devices, hosts and disks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """Blocks of some pools: all, in use, and cached (free blocks with a known content)."""

    num_blocks: int
    num_used: int
    num_cached: int


@dataclass(kw_only=True)
class TierCounts:
    """Counts of an engine, over all its clusters.

    Attributes:
        num_hits: tokens found on hosts or disks. `num_disk_hits`: tokens loaded from disks.
        num_offloaded: number of times that all offloads of a waiting request were complete, so that it could start.
        num_swapped_blocks: blocks copied from devices to hosts and back.
        peak_host_blocks: maximum blocks in use at once, over all hosts.
    """

    num_hits: int = 0
    num_disk_hits: int = 0
    num_offloaded: int = 0
    num_swapped_blocks: int = 0
    peak_host_blocks: int = 0
