"""Metrics of an engine: its present load, and its counts so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import get_args

from longspan.core.cluster import Cluster
from longspan.core.exchange import shown_names
from longspan.core.kv.manager import KvManager
from longspan.core.queues import Queues
from longspan.core.steps import Link


def _no_bytes() -> Counter[tuple[str, Link]]:
    return Counter(dict.fromkeys(product(shown_names(), get_args(Link)), 0))


@dataclass(frozen=True, kw_only=True)
class Load:
    """The present load of an engine.

    Attributes:
        num_waiting: requests that could run if there were free blocks.
        used_blocks: KV blocks in use, per instance.
        host_blocks, disk_blocks: KV blocks in use or cached in the pools of hosts and of disks.
        busy_s: seconds in which each instance had a step in flight, since the start of the engine.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    used_blocks: list[int]
    host_blocks: int
    disk_blocks: int
    busy_s: list[float]

    @classmethod
    def of(cls, queues: Queues, kv: KvManager, cluster: Cluster, now_s: float) -> Load:
        waiting, usage = queues.waiting.runnable(), kv.account.usage
        hosts, disks = usage(cluster.host_pools), usage(cluster.disk_pools)
        return cls(
            num_running=len(queues.running),
            num_waiting=len(waiting),
            num_waiting_tokens=sum(request.num_known for request in waiting),
            used_blocks=[usage((instance,)).num_used for instance in cluster.instances],
            host_blocks=hosts.num_used + hosts.num_cached,
            disk_blocks=disks.num_used + disks.num_cached,
            busy_s=queues.occupancy.busy_s(now_s),
        )


@dataclass(kw_only=True)
class Counts:
    """Counts since the start of the engine.

    Attributes:
        num_preemptions: preemptions that freed blocks for other requests.
        num_prefix_queries, num_prefix_hits: prompt tokens looked up, and found, in the prefix cache.
        num_external_queries: tokens looked up on hosts, too.
        bytes_sent: by exchange and link.
    """

    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_external_queries: int = 0
    bytes_sent: Counter[tuple[str, Link]] = field(default_factory=_no_bytes)
