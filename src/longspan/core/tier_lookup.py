"""Finds the beginnings of requests on devices, hosts and disks, and tells whether they are worth their way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from longspan.core.account import KvAccount
from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.request import Request


class SwapCost(Protocol):
    """Says whether KV on a host or its disk is worth its way back.

    Attributes:
        block_s: seconds in which a block comes from the host to an instance.
        load_s: seconds in which one comes from a disk to its host.
    """

    @property
    def block_s(self) -> float: ...

    @property
    def load_s(self) -> float: ...

    def recompute_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Returns the seconds in which an instance computes tokens behind others whose KV it has."""


@dataclass(kw_only=True)
class Found:
    """The beginning of a request as devices of a group, their hosts and the disks of these have it.

    Attributes:
        cached: its blocks on devices.
        stored: the others that hosts have.
        saved: those that only disks have.
        num_tokens: how many tokens all of these hold, and of them devices `num_cached`.
        num_blocks: blocks of the whole request.
        num_asked: free blocks that it needs with those.
    """

    group: tuple[int, ...]
    cached: list[BlockRef] = field(default_factory=list)
    stored: list[BlockRef] = field(default_factory=list)
    saved: list[BlockRef] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    num_blocks: int = 0
    num_asked: int = 0

    @property
    def num_missing(self) -> int:
        return self.num_blocks - len(self.cached) - len(self.stored)


SwapPrices = Callable[[Cluster], SwapCost | None]
"""Says what copies cost on a cluster; None when they always pay."""


class TierLookup:
    """Finds the beginnings of requests in all pools of a cluster.

    Args:
        swap: prices; None when a copy always pays.

    Attributes:
        host_of: the pool of the host, by that of its disk.
    """

    def __init__(self, account: KvAccount, cluster: Cluster, swap: SwapCost | None) -> None:
        self._account, self._cluster, self._swap = account, cluster, swap
        hosts = {cluster.host_pool(instance) for instance in cluster.instances} if cluster.host_blocks else set()
        self.host_of = {disk: host for host in hosts if (disk := cluster.disk_pool(host)) is not None}

    def find(self, request: Request, group: tuple[int, ...], *, on_disks: bool) -> Found:
        """Follows the prefix keys of a request through devices of a group, their hosts, and their disks if asked."""
        account, size = self._account, request.block_size
        limit = 0 if request.scores_prompt else request.num_tokens - 1  # logprobs of a prompt need all of it computed
        hosts = sorted({self._cluster.host_pool(instance) for instance in group})
        found = Found(group=group, num_blocks=request.blocks_for(request.num_tokens))
        pools = (*group, *hosts, *(disk for disk, host in self.host_of.items() if on_disks and host in hosts))
        index = 0
        while (index + 1) * size <= limit:
            if (ref := account.find(request.parent_key(index + 1), pools)) is None:
                break
            self._add(found, ref, size)
            index += 1
        rest = tuple(request.tokens(index * size, min(limit, (index + 1) * size)))
        ref, length = account.find_begun(request.parent_key(index), rest, pools)
        if length:
            self._add(found, ref, length)
        in_use = sum(account.pool(ref.pool).references(ref.block) > 0 for ref in found.cached)
        found.num_asked = found.num_blocks - in_use
        return found

    def _add(self, found: Found, ref: BlockRef, num_tokens: int) -> None:
        found.num_tokens += num_tokens
        match self._cluster.tier(ref.pool):
            case "device":
                found.cached.append(ref)
                found.num_cached += num_tokens
            case "host":
                found.stored.append(ref)
            case "disk":
                found.saved.append(ref)

    def pays(self, found: Found) -> bool:
        """Tells whether what hosts and disks have is quicker to copy than to compute; members of a group share both."""
        if self._swap is None:
            return True
        copy_s = (len(found.stored) + len(found.saved)) * self._swap.block_s / len(found.group)
        copy_s += len(found.saved) * self._swap.load_s
        recompute_s = self._swap.recompute_s(found.num_tokens - found.num_cached, found.num_cached)
        return copy_s < recompute_s / len(found.group)
