"""The one owner of KV: the blocks of each request, the prefix cache, and the moves between pools.

Engine and policies know this object only. Parts, from the bottom up:

- pool: the blocks of one pool
- account: all pools, and the tables of requests
- lookup: an account that finds prefixes on hosts and disks, too, and checks that a load pays
- copies: in-flight moves between tiers
- offload: from devices to hosts and disks
- loads: from disks and hosts to devices
- swaps: lookup, copies, offload and loads together, None in an engine without host pools
- transfers: from prefill to decode instances, None before the first

A tier is a range of pools. Account, offload and loads use five operations that the pools of all tiers share.

- find, find_common_prefix: look up contents
- place: allocates a block for a content
- publish: completes it
- share, release: make it most recently used
- forget: unpublishes a damaged content
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from longspan.core.blocks import BlockRef, Target
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.counts import TierCounts
from longspan.core.kv.pool import BlockPool
from longspan.core.kv.residency import residency_of
from longspan.core.queues import Queues
from longspan.core.request import Request
from longspan.core.steps import Completion, Content, Forward, MoveKV, Part
from longspan.core.view import ScheduledPart

if TYPE_CHECKING:  # imported on first use
    from longspan.core.config import EngineConfig
    from longspan.core.kv.swaps import Swaps
    from longspan.core.kv.transfers import Transfers


class KvManager:
    """Owns every block of every pool. The engine changes it, and submits the moves that it returns.

    Args:
        number: returns the next step's number.
        saved: the contents of each disk from an earlier run, by block, least recently used first.
        seal_disks: let disks have the `saved` blocks only, and never evict them.

    Attributes:
        counts: the moves between tiers so far.
        account: the pools, and the tables of requests. Policies see it as a `KvView`.
        swaps: the moves between tiers. None without host pools.
        transfers: the transfers to decode instances. None before the first.
        kept: blocks on sealed disks, with one more reference.
    """

    def __init__(
        self,
        config: EngineConfig,
        queues: Queues,
        number: Callable[[], int],
        *,
        saved: Sequence[Iterable[tuple[int, Content]]] = (),
        seal_disks: bool = False,
    ) -> None:
        self._config, self._requests, self._running, self._number = config, queues.requests, queues.running, number
        self.counts, self.kept, self._seal_disks = TierCounts(), list[BlockRef](), seal_disks
        self.swaps: Swaps | None = None
        self.transfers: Transfers | None = None
        if config.cluster.host_blocks and config.prefix_caching:
            from longspan.core.kv.swaps import Swaps  # noqa: PLC0415 - most engines have one tier

            bounds = {"step_tokens": config.max_num_batched_tokens, "max_num_seqs": config.max_num_seqs}
            sizes = {"block_size": config.block_size, **bounds}
            self.swaps = Swaps(self._running, number, counts=self.counts, swap=config.swap, **sizes)
        self._use_pools(config.cluster, None)
        for pool, contents in zip(config.cluster.disk_pools, saved, strict=False):
            self.pool(pool).restore(contents)
        self._seal()

    def _use_pools(self, cluster: Cluster, before: KvAccount | None) -> None:
        """Create the pools of a cluster. Keep the pools `before` on hosts and disks, if given."""
        self._cluster, self.transfers = cluster, None
        if self.swaps is not None:
            self.swaps.regroup(cluster, before)
            self.account: KvAccount = self.swaps.account
            return
        size, caching = self._config.block_size, self._config.prefix_caching
        self.account = KvAccount(cluster.pool_blocks, block_size=size, prefix_caching=caching)

    def _seal(self) -> None:
        disks = self._cluster.disk_pools if self._seal_disks else ()
        self.kept = [BlockRef(disk, block) for disk in disks for block in self.pool(disk).seal()]

    def pool(self, number: int) -> BlockPool:
        return self.account.pool(number)

    # ---------------------------------------------------------------- KV in flight

    @property
    def is_moving(self) -> bool:
        """Whether a move of KV is in flight."""
        return self.is_copying or (self.transfers is not None and self.transfers.in_flight)

    @property
    def is_copying(self) -> bool:
        """Whether a move between tiers is in flight."""
        return self.swaps is not None and bool(self.swaps.copies)

    @property
    def copies_on_devices(self) -> bool:
        """Whether a move between devices and hosts is in flight."""
        return self.swaps is not None and self.swaps.copies.on_devices

    @property
    def can_regroup(self) -> bool:
        """Whether no move from or to a device is in flight."""
        return not (self.copies_on_devices or (self.transfers is not None and self.transfers.in_flight))

    @property
    def expected(self) -> Mapping[int, int]:
        """Blocks that transfers will need, by target. See `ClusterView.expected`."""
        return {} if self.transfers is None else self.transfers.expected

    def startable(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Return the waiting requests in order, up to the first with an offload in flight."""
        if not self.is_copying:
            return waiting
        first = next((place for place, request in enumerate(waiting) if not request.residency.can_start), None)
        return waiting if first is None else waiting[:first]

    def _update(self, request: Request) -> None:
        request.residency = residency_of(request, self.swaps)

    # ---------------------------------------------------------------- admission

    def admit(
        self, hits: Iterable[ScheduledPart], loads: Iterable[ScheduledPart], parts: Iterable[ScheduledPart]
    ) -> list[MoveKV]:
        """Begin and extend the tables of requests as a plan says. Return the moves that load blocks to devices.

        All requests take the blocks of their `hits` first. Each later allocation could evict a hit.
        """
        for scheduled in hits:
            self._take(self._requests[scheduled.request.id], scheduled)
        moves = [move for load in loads for move in self._load(self._requests[load.request.id], load)]
        for scheduled in parts:
            if scheduled.hit is not None or scheduled.block_owners:
                self._extend(self._requests[scheduled.request.id], scheduled)
        return moves

    def _take(self, request: Request, scheduled: ScheduledPart) -> None:
        """Begin the table of a request with the blocks of its hit."""
        hit = scheduled.hit
        assert hit is not None, "an admitted request has a hit, which may be empty"
        self.account.take(request, hit)
        request.num_scheduled, request.group = hit.num_tokens, scheduled.group
        if not hit.waits:
            request.num_computed = hit.num_tokens
        if self.swaps is not None:
            self.swaps.offload.release(request)
            if not hit.waits:
                request.hosted = Counter(ref.pool for ref in hit.refs if ref.pool in self._cluster.host_pools)
                self.swaps.offload.note_peak()

    def _load(self, request: Request, scheduled: ScheduledPart) -> list[MoveKV]:
        """Return moves to devices of the blocks of a hit on hosts and disks."""
        hit = scheduled.hit
        assert hit is not None and self.swaps is not None, "a load has a hit"
        moves = self.swaps.loads.begin(request, hit.num_tokens, scheduled.block_owners, scheduled.targets)
        self.swaps.offload.note_peak()
        self._update(request)
        return moves

    def complete_loads(self) -> list[Request]:
        """Return the requests whose loads are complete. They compute from now on."""
        completed = [] if self.swaps is None else self.swaps.loads.complete()
        for request, targets in completed:
            self._open_transfers(request, targets)
        return [request for request, _ in completed]

    def _extend(self, request: Request, scheduled: ScheduledPart) -> None:
        """Append a part's new blocks to the request's table. First copy a new hit's tail and open transfers."""
        if (hit := scheduled.hit) is not None:
            self.account.copy_last(request, hit)
            self._open_transfers(request, scheduled.targets)
        if scheduled.block_owners:
            self.account.extend(request, scheduled.block_owners)

    def _open_transfers(self, request: Request, targets: Sequence[Target]) -> None:
        if targets:
            if self.transfers is None:
                from longspan.core.kv.transfers import Transfers  # noqa: PLC0415 - most requests stay where they are

                bounds = {"backends": self._cluster.backends, "max_num_seqs": self._config.max_num_seqs}
                self.transfers = Transfers(self.account, self._running, self._number, **bounds)
            self.transfers.open(request, targets)
        self._update(request)

    def rebalance(self, request: Request, scheduled: ScheduledPart) -> MoveKV:
        """Return a move of blocks between the members of a group, or to a request's copy of a shared last block."""
        request.sent_blocks = request.sent_output = 0
        if scheduled.hit is None:
            copies = self.account.relocate(request, scheduled.moves)
        else:
            assert not scheduled.moves, "blocks of a hit are not moved at admission"
            copies = tuple([(old, new) for new, old in request.copying.items()])  # since its admission
        return MoveKV(number=self._number(), request_id=request.id, copies=copies)

    # ---------------------------------------------------------------- computation

    def move_host_blocks(self, waiting: Sequence[Request], device_limit: int) -> list[MoveKV]:
        """Return moves of the oldest blocks of requests above `device_limit` to hosts, or back to devices."""
        if self.swaps is None:
            return []
        return self.swaps.offload.move_to_hosts(waiting, device_limit) or self.swaps.offload.load_back(waiting)

    def computed(self, forward: Forward) -> list[tuple[BlockRef, int]]:
        """Take the completion of a step. Return the copied blocks with KV that is not finite, see `complete_copies`."""
        if self.transfers is not None:
            self.transfers.computed(forward)
        if not forward.rebalances:
            return []
        copied = [(self._requests[move.request_id], move.copies) for move in forward.rebalances]
        return [slot for request, copies in copied for slot in self.account.complete_copies(request, copies)]

    def publish(self, request: Request, start: int, *, is_finite: bool) -> None:
        """Publish the blocks that a part from `start` on has filled. KV that is not finite is never published."""
        if not is_finite and request.non_finite_from is None:
            self.account.withdraw(request, start)
        self.account.publish(request, start)

    def streams(self, parts: Sequence[Part], *, offloads: bool) -> tuple[MoveKV, ...]:
        """Return moves of the blocks that a step fills, to decode instances, or to hosts if it `offloads`."""
        if offloads and self.swaps is not None:
            return self.swaps.offload.streams([(self._requests[part.request_id], part) for part in parts])
        return () if self.transfers is None else self.transfers.streams(parts)

    def pending_transfers(self) -> list[MoveKV]:
        """Return moves to decode instances of blocks that were computed before and are not sent yet."""
        return [] if self.transfers is None else self.transfers.pending_moves()

    @property
    def transfers_changed(self) -> bool:
        """Whether `pending_transfers` may have moves, or `complete_transfers` requests."""
        return self.transfers is not None and self.transfers.dirty

    def complete_transfers(self) -> list[Request]:
        """Move requests whose KV has arrived to their decode instances. Return them."""
        moved = [] if self.transfers is None else self.transfers.complete()
        for request in moved:
            self._update(request)
        return moved

    def free_for_decodes(self, full: Collection[int]) -> None:
        """Free the blocks of transfers for earlier decoding requests, except on `full` instances."""
        if self.transfers is not None:
            self.transfers.free_for_decodes(full)

    def latest_blocked(self) -> Request | None:
        """Return the most recently admitted request that waits for blocks on a decode instance."""
        return None if self.transfers is None else self.transfers.latest_blocked()

    def clearable(self, slots: Iterable[tuple[BlockRef, int]] = ()) -> tuple[tuple[BlockRef, int], ...]:
        """Add slots with KV that is not finite. Return the slots that ranks can clear now, see `Free`."""
        ready = tuple(slots) if self.transfers is None else self.transfers.clearable(slots)
        return ready if self.swaps is None else self.swaps.clearable(ready)

    # ---------------------------------------------------------------- preemption and end

    def offload_and_free(self, request: Request) -> tuple[list[MoveKV], tuple[tuple[BlockRef, int], ...]]:
        """Free all blocks of a request, after an offload of its computed blocks up to the free blocks of hosts.

        Return moves to submit, and slots with KV that is not finite.
        """
        self._cancel_transfers(request)
        moves = [] if self.swaps is None else self.swaps.offload.offload(request)
        slots = request.non_finite_slots()
        self.account.free(request)
        request.lose_kv()
        self._update(request)
        return moves, slots

    def end(self, request: Request) -> None:
        """Cancel the transfers of a request that ends, and leave its offloaded blocks to the cache."""
        self._cancel_transfers(request)
        if self.swaps is not None:
            self.swaps.offload.release(request)
        self._update(request)

    def _cancel_transfers(self, request: Request) -> None:
        if self.transfers is not None:
            self.transfers.cancel(request)

    def release_offloaded(self) -> bool:
        """Leave the offloaded blocks of waiting requests to the cache. Return whether there were any.

        A request that needs all blocks of its host can start then.
        """
        return self.swaps is not None and self.swaps.offload.release_all()

    # ---------------------------------------------------------------- completed moves

    def moved(self, done: Completion) -> list[MoveKV] | None:
        """Take the completion of a move between pools. Return moves to submit, or None for any other step."""
        if self.transfers is not None and self.transfers.moved(done.number):
            return []
        if self.swaps is None or (moved := self.swaps.moved(done)) is None:
            return None
        for loading in self.swaps.loads.waiting:
            self._update(loading)  # its load ends before a block that a disk failed to read
        request = self._requests.get(moved[0])
        if request is not None and not request.group:
            could_start = request.residency.can_start
            self._update(request)
            self.counts.num_offloaded += request.residency.can_start and not could_start
        if self.transfers is not None:
            self.transfers.note_free_blocks()
        return moved[1]

    # ---------------------------------------------------------------- other workers, other clusters

    def restart(self, requests: Collection[Request], *, keep: bool = True) -> None:
        """Continue with empty device pools, since new workers have no KV. `keep`: keep host and disk pools.

        The requests have lost their device blocks.
        """
        if self.swaps is not None:
            self.swaps.forget_copies()
            self.swaps.release_hosted(requests, self._cluster.host_pools)
        self._use_pools(self._cluster, self.account if keep else None)
        if not keep:
            self._seal()
        for request in requests:
            request.lose_kv()
            self._update(request)

    def regroup(self, cluster: Cluster) -> None:
        """Continue with another cluster, which has the same host and disk pools. Its device pools are empty."""
        self._use_pools(cluster, self.account)
