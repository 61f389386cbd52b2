"""KV between devices, hosts and disks: copies, offloads and loads of a cluster that has such tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.copies import Copies
from longspan.core.kv.counts import TierCounts
from longspan.core.kv.loads import Loads
from longspan.core.kv.lookup import Lookup, SwapPrices
from longspan.core.kv.offload import Offload
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.steps import Completion, Content, Forward, MoveKV

Pools = Mapping[int, Iterable[tuple[int, Content]]]
"""The contents of pools, by their numbers: pairs of block and content, least recently used first."""


class Swaps:
    """Begins moves between tiers, and takes their completions. `regroup` sets the cluster.

    Args:
        number: returns the next step's number.
        step_tokens, max_num_seqs: the bounds of a step on one instance.
        swap: costs of copies on a cluster. None: every copy pays.
    """

    def __init__(
        self,
        running: Running,
        number: Callable[[], int],
        *,
        block_size: int,
        step_tokens: int,
        max_num_seqs: int,
        counts: TierCounts,
        swap: SwapPrices | None,
    ) -> None:
        self._block_size, self._swap, self._counts = block_size, swap, counts
        self._uncleared: dict[BlockRef, int] = {}  # blocks with KV that is not finite, and its first slot
        self.copies = Copies(number)
        self.account: Lookup
        self.loads = Loads(self.copies, counts)
        bounds = {"step_tokens": step_tokens, "max_num_seqs": max_num_seqs}
        self.offload = Offload(self.copies, running, counts=counts, **bounds)

    def regroup(self, cluster: Cluster, before: KvAccount | None) -> None:
        """Continue with a cluster, and with the pools `before` on hosts and disks, or empty ones."""
        self._uncleared.clear()
        prices = None if self._swap is None else self._swap(cluster)
        self.account = Lookup(cluster, self.copies, block_size=self._block_size, swap=prices)
        if before is not None:
            self.account.keep_pools(before, cluster.host_pools.start)
        self.loads.regroup(self.account, cluster)
        self.offload.regroup(self.account, cluster)

    def forget_copies(self) -> None:
        """Forget in-flight copies, since the workers are lost. Other contents of hosts and disks stay."""
        lost = self.copies.clear()
        for copy in lost:
            self.account.unpin(copy.pinned)
            self.account.release(reversed(copy.owned))
            self.account.release(reversed([source for source, _, _ in copy.followers]))
        self.offload.restart(lost)

    def moved(self, done: Completion) -> tuple[int, list[MoveKV]] | None:
        """Take the completion of a move between tiers. Return None for any other step.

        Blocks that a disk failed to read are unpublished.

        Returns:
            The id of the request whose KV was moved, and moves to submit.
        """
        if (copy := self.copies.get(done.number)) is None:
            return None
        if not copy.is_computed:
            copy.arrived = done
            return copy.move.request_id, []
        self.copies.end(done.number)
        move, account, counts = copy.move, self.account, self._counts
        failed = done.failed if copy.is_finite else range(len(move.copies))
        counts.num_swapped_blocks += len(move.copies) if move.way in ("out", "in") else 0
        for index, ((source, target), content) in enumerate(zip(move.copies, copy.contents, strict=True)):
            if index not in failed:
                account.pool(target.pool).publish(target.block, content)
                counts.num_disk_hits += len(content.tokens) if move.way == "load" else 0
            elif move.way == "load":
                account.pool(source.pool).forget(source.block)
        is_offload = move.way == "out" or copy.owner is not None
        moves = self.offload.moved(copy) if is_offload else []
        moves += self.loads.moved(copy, failed)
        if not is_offload:
            account.unpin(reversed(copy.pinned))
            account.release(reversed(copy.owned))
        return move.request_id, moves

    def computed(self, forward: Forward, non_finite: Collection[int]) -> list[Completion]:
        """Take the completion of a step. Return the completions of its streams that arrived before it."""
        self.offload.computed(forward.number)
        streams = [copy for move in forward.streams if (copy := self.copies.get(move.number)) is not None]
        for copy in streams:
            copy.is_computed, copy.is_finite = True, copy.move.request_id not in non_finite
        return [copy.arrived for copy in streams if copy.arrived is not None]

    def clearable(self, slots: Iterable[tuple[BlockRef, int]]) -> tuple[tuple[BlockRef, int], ...]:
        """Add slots with KV that is not finite. Return those in blocks that no copy reads, earlier slots included."""
        self._uncleared.update(slots)
        if not self._uncleared:
            return ()
        read = {ref for copy in self.copies for ref in copy.pinned}
        ready = [ref for ref in self._uncleared if ref not in read]
        return tuple([(ref, self._uncleared.pop(ref)) for ref in ready])

    def release_hosted(self, requests: Iterable[Request], hosts: range) -> None:
        """Release the host blocks of requests that have lost their device blocks."""
        for request in requests:
            self.account.release([ref for ref in reversed(request.table) if ref.pool in hosts])

    def replace_pools(self, lost: Pools, kept: Sequence[BlockRef], *, seal: Collection[int]) -> list[BlockRef]:
        """Replace the pools of lost hosts by new ones with the given contents. Return the blocks of sealed disks.

        The offloaded blocks of waiting requests become cached blocks on all hosts.
        """
        self.offload.release_all()
        self.account.release([ref for ref in kept if ref.pool in lost])
        new = list[BlockRef]()
        for pool, contents in lost.items():
            self.account.replace_pool(pool, contents)
            if pool in seal:
                new += [BlockRef(pool, block) for block in self.account.pool(pool).seal()]
        return [*(ref for ref in kept if ref.pool not in lost), *new]
