"""Finds the beginning of a request on devices, hosts and disks, and tells whether it is worth its way to a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from longspan.core.blocks import BlockRef, PrefixHit
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.copies import Copies
from longspan.core.view import RequestView


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


SwapPrices = Callable[[Cluster], SwapCost | None]
"""Says what copies cost on a cluster; None when they always pay."""


@dataclass(kw_only=True)
class _Found:
    """The blocks of a beginning, in order of position, and how many of them are on hosts and on disks."""

    refs: list[BlockRef]
    num_tokens: int = 0
    num_stored: int = 0
    num_saved: int = 0


class Lookup(KvAccount):
    """An account that finds the beginnings of requests on hosts and disks, too.

    Args:
        copies: under way. A block that one of them fills is found like one that is filled.
        swap: prices; None when a copy always pays.
    """

    def __init__(self, cluster: Cluster, copies: Copies, *, block_size: int, swap: SwapCost | None) -> None:
        super().__init__(cluster.pool_blocks, block_size=block_size)
        self._cluster, self._copies, self._swap = cluster, copies, swap

    def match(self, request: RequestView, group: Sequence[int]) -> PrefixHit:
        """Finds the longest beginning of a request on `group`, or on its hosts and disks if it pays to load that."""
        hit = super().match(request, group)
        if request.scores_prompt or hit.num_tokens >= request.num_tokens - 1:
            return hit
        hosts = sorted({self._cluster.host_pool(instance) for instance in group})
        all_disks = [disk for host in hosts if (disk := self._cluster.disk_pool(host)) is not None]
        for disks in (all_disks, []) if all_disks else ([],):
            found = self._find(request, group, hosts, disks)
            if found.num_tokens > hit.num_tokens and self._pays(found, hit, len(group)):
                return PrefixHit(
                    refs=tuple(found.refs),
                    num_tokens=found.num_tokens,
                    num_loaded=found.num_stored + found.num_saved,
                    waits=True,
                )
        return hit

    def hit_cost(self, hit: PrefixHit, claimed: AbstractSet[BlockRef]) -> Counter[int]:
        if hit.num_loaded:  # what is loaded costs new blocks
            hit = replace(hit, refs=tuple([ref for ref in hit.refs if self._cluster.tier(ref.pool) == "device"]))
        return super().hit_cost(hit, claimed)

    def _find(self, request: RequestView, group: Sequence[int], hosts: Sequence[int], disks: Sequence[int]) -> _Found:
        """Follows the prefix keys of a request through devices of a group, hosts and disks."""
        coming, size, found = self._copies.coming, request.block_size, _Found(refs=[])
        limit, index = request.num_tokens - 1, 0
        while (index + 1) * size <= limit:
            key = request.parent_key(index + 1)
            ref = self.find(key, group) or coming(key, group) or self.find(key, hosts) or coming(key, hosts)
            ref = ref or self.find(key, disks)
            if ref is None:
                break
            self._add(found, ref, size)
            index += 1
        rest = tuple(request.tokens(index * size, min(limit, (index + 1) * size)))
        ref, length = self.find_begun(request.parent_key(index), rest, (*hosts, *disks))
        if length and (length == len(self.pool(ref.pool).content(ref.block).tokens) or self.is_worth_a_copy(length)):
            self._add(found, ref, length)
        return self._with_room(found, group, size)

    def _with_room(self, found: _Found, group: Sequence[int], size: int) -> _Found:
        """Cut a hit before the first block that no member on its host could hold, even with empty pools."""
        cluster, on_devices = self._cluster, Counter(ref.pool for ref in found.refs)
        room = {i: self.num_blocks(i) - on_devices[i] for i in group}
        near = {i: (host := cluster.host_pool(i), cluster.disk_pool(host)) for i in group}
        for index, ref in enumerate(found.refs):
            if cluster.tier(ref.pool) == "device":
                continue
            most = max((i for i in group if ref.pool in near[i]), key=room.__getitem__)
            if room[most] <= 0:
                cut = _Found(refs=[])
                for one in found.refs[:index]:
                    self._add(cut, one, size)
                return cut
            room[most] -= 1
        return found

    def _add(self, found: _Found, ref: BlockRef, num_tokens: int) -> None:
        found.refs.append(ref)
        found.num_tokens += num_tokens
        tier = self._cluster.tier(ref.pool)
        found.num_stored += tier == "host"
        found.num_saved += tier == "disk"

    def _pays(self, found: _Found, hit: PrefixHit, members: int) -> bool:
        """Tells whether what hosts and disks have is quicker to copy than to compute; members of a group share both."""
        if self._swap is None:
            return True
        copy_s = (found.num_stored + found.num_saved) * self._swap.block_s / members
        copy_s += found.num_saved * self._swap.load_s
        return copy_s < self._swap.recompute_s(found.num_tokens - hit.num_tokens, hit.num_tokens) / members
