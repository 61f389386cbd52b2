"""Lookup of prefixes on devices, hosts and disks, with a check that a load costs less than recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from longspan.core.blocks import BlockRef, PrefixHit
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.copies import Copies
from longspan.core.kv.pool import BlockPool
from longspan.core.steps import Content
from longspan.core.view import RequestView


class SwapCost(Protocol):
    """The cost of loading KV from a host or its disk, and of recomputing it.

    Attributes:
        block_s: seconds to copy a block from the host to an instance.
        load_s: seconds to copy a block from a disk to its host.
    """

    @property
    def block_s(self) -> float: ...

    @property
    def load_s(self) -> float: ...

    def recompute_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the seconds in which an instance computes `new_tokens` after a prefix of `cached_tokens`."""


SwapPrices = Callable[[Cluster], SwapCost | None]
"""Returns the costs of copies on a cluster. None: every copy pays."""


@dataclass(kw_only=True)
class _TieredHit:
    """The blocks of a prefix on all tiers, in order of position, with their numbers on hosts and disks."""

    refs: list[BlockRef]
    num_tokens: int = 0
    num_on_hosts: int = 0
    num_on_disks: int = 0


class Lookup(KvAccount):
    """An account that finds prefixes on hosts and disks, too.

    Args:
        copies: in flight. Blocks that they fill count as cached.
        swap: costs of copies. None: every copy pays.
    """

    def __init__(self, cluster: Cluster, copies: Copies, *, block_size: int, swap: SwapCost | None) -> None:
        super().__init__(cluster.pool_blocks, block_size=block_size)
        self._cluster, self._copies, self._swap = cluster, copies, swap

    def replace_pool(self, number: int, contents: Iterable[tuple[int, Content]]) -> None:
        """Replace an unused pool by a new one of its size with these contents, see `BlockPool.restore`."""
        assert not self._pools[number].in_use, "no block of a replaced pool is in use"
        self._pools[number] = BlockPool(num_blocks=self._cluster.pool_blocks[number], block_size=self.block_size)
        self._pools[number].restore(contents)

    def match(self, request: RequestView, group: Sequence[int]) -> PrefixHit:
        """Return the longest prefix on `group`, or on its hosts and disks if a load costs less than recomputation."""
        hit = super().match(request, group)
        if hit.num_tokens >= request.max_cached:
            return hit
        hosts = sorted({self._cluster.host_pool(instance) for instance in group})
        all_disks = [disk for host in hosts if (disk := self._cluster.disk_pool(host)) is not None]
        for disks in (all_disks, []) if all_disks else ([],):
            tiered = self._find(request, group, hosts, disks)
            if tiered.num_tokens > hit.num_tokens and self._pays(tiered, hit, len(group)):
                return PrefixHit(
                    refs=tuple(tiered.refs),
                    num_tokens=tiered.num_tokens,
                    num_loaded=tiered.num_on_hosts + tiered.num_on_disks,
                    waits=True,
                )
        return hit

    def hit_cost(self, hit: PrefixHit, claimed: AbstractSet[BlockRef]) -> Counter[int]:
        if hit.num_loaded:  # loaded blocks need new device blocks
            hit = replace(hit, refs=tuple([ref for ref in hit.refs if self._cluster.tier(ref.pool) == "device"]))
        return super().hit_cost(hit, claimed)

    def _find(
        self, request: RequestView, group: Sequence[int], hosts: Sequence[int], disks: Sequence[int]
    ) -> _TieredHit:
        """Follow the prefix keys of a request through devices of a group, hosts and disks."""
        coming = partial(self._copies.find_in_flight, computed=True)
        size, hit = request.block_size, _TieredHit(refs=[])
        limit, index = request.max_cached, 0
        while (index + 1) * size <= limit:
            key = request.parent_key(index + 1)
            ref = self.find(key, group) or coming(key, group) or self.find(key, hosts) or coming(key, hosts)
            ref = ref or self.find(key, disks)
            if ref is None:
                break
            self._add(hit, ref, size)
            index += 1
        rest = tuple(request.tokens(index * size, min(limit, (index + 1) * size)))
        ref, length = self.find_common_prefix(request.parent_key(index), rest, (*hosts, *disks))
        if length and (length == len(self.pool(ref.pool).content(ref.block).tokens) or self.is_worth_a_copy(length)):
            self._add(hit, ref, length)
        return self._cut_to_capacity(hit, group, size)

    def _cut_to_capacity(self, hit: _TieredHit, group: Sequence[int], size: int) -> _TieredHit:
        """Cut a hit before the first block that no member on its host could hold, even with empty pools."""
        on_devices = Counter(ref.pool for ref in hit.refs)
        free = {i: self.num_blocks(i) - on_devices[i] for i in group}
        for index, owner in self._cluster.load_owners(hit.refs, free):
            if free[owner] <= 0:
                cut = _TieredHit(refs=[])
                for ref in hit.refs[:index]:
                    self._add(cut, ref, size)
                return cut
        return hit

    def _add(self, hit: _TieredHit, ref: BlockRef, num_tokens: int) -> None:
        hit.refs.append(ref)
        hit.num_tokens += num_tokens
        tier = self._cluster.tier(ref.pool)
        hit.num_on_hosts += tier == "host"
        hit.num_on_disks += tier == "disk"

    def _pays(self, tiered: _TieredHit, hit: PrefixHit, members: int) -> bool:
        """Return whether copying the prefix takes less time than computing it. Members of a group share both."""
        if self._swap is None:
            return True
        copy_s = (tiered.num_on_hosts + tiered.num_on_disks) * self._swap.block_s / members
        copy_s += tiered.num_on_disks * self._swap.load_s
        return copy_s < self._swap.recompute_s(tiered.num_tokens - hit.num_tokens, hit.num_tokens) / members
