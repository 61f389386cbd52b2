"""Counts of blocks in pools, and of what has moved between devices, hosts and disks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """Blocks of some pools: all, those in use, and the free ones that are cached."""

    num_blocks: int
    num_used: int
    num_cached: int


@dataclass(kw_only=True)
class TierCounts:
    """Counts of an engine, over all its clusters.

    Attributes:
        num_hits: tokens that were found on hosts or disks. `num_disk_hits`: those that came from disks.
        num_offloaded: how often all that a waiting request gave up had come to hosts, so that it could start.
        num_swapped_blocks: blocks that were copied from devices to hosts and back.
        peak_host_blocks: the most blocks of all hosts that were in use at once.
    """

    num_hits: int = 0
    num_disk_hits: int = 0
    num_offloaded: int = 0
    num_swapped_blocks: int = 0
    peak_host_blocks: int = 0
