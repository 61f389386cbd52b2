"""The one owner of KV: which blocks a request has, what others can reuse, and what is on its way between pools.

Engine and policies know this object only. Parts, from the ground up:

    pool        the blocks of one pool
    account     all pools, and the tables of requests
    lookup      an account that finds what hosts and disks have, too, and whether it pays to load it
    copies      moves between tiers that are under way
    offload     from devices to hosts and disks
    loads       from disks and hosts to devices
    swaps       the four of them together; an engine without pools on hosts has none
    transfers   from instances that prefill to those that decode; none before the first

A tier is a range of pools. What all tiers have in common are five operations on a pool, by which account, offload and
loads work: `find` and `find_begun` look up what it holds; `place` prepares a block for a content; `publish` completes
it; `share` and `release` touch it, so that it is evicted last; `forget` tells that a content is damaged. A device's
blocks are also `allocate`d for what is to be computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from longspan.core.blocks import BlockRef, PrefixHit, Target
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.counts import PoolUsage, TierCounts
from longspan.core.kv.pool import BlockPool
from longspan.core.kv.residency import residency_of
from longspan.core.queues import Queues
from longspan.core.request import Request
from longspan.core.steps import Completion, Content, Forward, MoveKV, Part
from longspan.core.view import KvView, ScheduledPart

if TYPE_CHECKING:  # those who need them import them
    from longspan.core.config import EngineConfig
    from longspan.core.kv.swaps import Swaps
    from longspan.core.kv.transfers import Transfers


class KvManager:
    """Owns every block of every pool. The engine changes it, and submits the moves that it returns.

    Args:
        queues: all requests, who runs on each instance, and what they still need.
        number: gives the next step's number.
        saved: what each disk has from an earlier run, by block, the least recently used first.

    Attributes:
        counts: the moves between tiers so far.
        swaps: the moves between tiers that are in flight; None without pools on hosts.
    """

    def __init__(
        self,
        config: EngineConfig,
        queues: Queues,
        number: Callable[[], int],
        *,
        saved: Sequence[Iterable[tuple[int, Content]]] = (),
    ) -> None:
        self._config, self._requests, self._running, self._number = config, queues.requests, queues.running, number
        self.counts = TierCounts()
        self.swaps: Swaps | None = None
        self._transfers: Transfers | None = None
        if config.cluster.host_blocks and config.prefix_caching:
            from longspan.core.kv.swaps import Swaps  # noqa: PLC0415 - most engines have one tier

            bounds = {"step_tokens": config.max_num_batched_tokens, "max_num_seqs": config.max_num_seqs}
            sizes = {"block_size": config.block_size, **bounds}
            self.swaps = Swaps(self._running, number, counts=self.counts, swap=config.swap, **sizes)
        self._use_pools(config.cluster, None)
        for pool, contents in zip(config.cluster.disk_pools, saved, strict=False):
            self.pool(pool).restore(contents)

    def _use_pools(self, cluster: Cluster, before: KvAccount | None) -> None:
        """Makes empty pools of a cluster, on devices only if there are others `before` to go on with."""
        self._cluster, self._transfers = cluster, None
        if self.swaps is not None:
            self.swaps.regroup(cluster, before)
            self.account = self.swaps.account
            return
        size, caching = self._config.block_size, self._config.prefix_caching
        self.account = KvAccount(cluster.pool_blocks, block_size=size, prefix_caching=caching)

    @property
    def view(self) -> KvView:
        """The pools as policies see them."""
        return self.account

    def pool(self, number: int) -> BlockPool:
        return self.account.pool(number)

    def usage(self, pools: Iterable[int]) -> PoolUsage:
        """Return how full some pools are together."""
        return self.account.usage(pools)

    # ---------------------------------------------------------------- KV in flight

    @property
    def is_moving(self) -> bool:
        """Whether any KV is on its way."""
        return self.is_copying or (self._transfers is not None and self._transfers.in_flight)

    @property
    def is_copying(self) -> bool:
        """Whether any KV is on its way between tiers."""
        return self.swaps is not None and bool(self.swaps.copies)

    @property
    def copies_on_devices(self) -> bool:
        """Whether any KV is on its way from devices to hosts, or back."""
        return self.swaps is not None and self.swaps.copies.on_devices

    @property
    def can_regroup(self) -> bool:
        """Whether no KV is on its way from a device or to one."""
        return not (self.copies_on_devices or (self._transfers is not None and self._transfers.in_flight))

    @property
    def expected(self) -> Mapping[int, int]:
        """Blocks that transfers will need, by target; see `ClusterView`."""
        return {} if self._transfers is None else self._transfers.expected

    def startable(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Returns those that can start, first come: up to the first whose KV is still on its way to hosts."""
        return waiting if self.swaps is None else self.swaps.startable(waiting)

    @property
    def in_transfer(self) -> Transfers | None:
        """KV on its way to instances that decode. None before the first."""
        return self._transfers

    def _update(self, request: Request) -> None:
        """Update the residency of a request."""
        request.residency = residency_of(request, self.swaps)

    # ---------------------------------------------------------------- requests come

    def admit(self, loads: Iterable[ScheduledPart], parts: Iterable[ScheduledPart]) -> list[MoveKV]:
        """Begin and extend the tables of requests as a plan says. Return the moves that load blocks to devices.

        All requests take the blocks of their hits first. Each later allocation could evict a hit.
        """
        for scheduled in (*loads, *parts):
            if scheduled.hit is not None:
                self._take(self._requests[scheduled.request.id], scheduled, scheduled.hit)
        moves = [move for one in loads for move in self._load(self._requests[one.request.id], one)]
        for scheduled in parts:
            if scheduled.hit is not None or scheduled.block_owners:
                self._extend(self._requests[scheduled.request.id], scheduled)
        return moves

    def _take(self, request: Request, scheduled: ScheduledPart, hit: PrefixHit) -> None:
        """Begin the table of a request with the blocks of its hit."""
        self.account.take(request, hit)
        request.num_scheduled, request.group = hit.num_tokens, scheduled.group
        if not hit.waits:
            request.num_computed = hit.num_tokens
        if self.swaps is not None:
            self.swaps.offload.release(request)
            if not hit.waits:
                request.hosted = Counter(ref.pool for ref in hit.refs if ref.pool in self._cluster.host_pools)
                self.swaps.offload.read(request)

    def _load(self, request: Request, scheduled: ScheduledPart) -> list[MoveKV]:
        """Makes moves to devices of what a request has taken on hosts and disks."""
        hit = scheduled.hit
        assert hit is not None and self.swaps is not None, "a hit says what to load"
        moves = self.swaps.loads.begin(request, hit.num_tokens, scheduled.block_owners, scheduled.targets)
        self.swaps.offload.note_peak()
        self._update(request)
        return moves

    def loaded(self) -> list[Request]:
        """Returns the requests that have waited for their KV, and compute from now on."""
        found = [] if self.swaps is None else self.swaps.loads.complete()
        for request, targets in found:
            self._open(request, targets)
        return [request for request, _ in found]

    def _extend(self, request: Request, scheduled: ScheduledPart) -> None:
        """Append the blocks that a part asks for to the table of the request."""
        if (hit := scheduled.hit) is not None:
            self.account.copy_last(request, hit)
            self._open(request, scheduled.targets)
        if scheduled.block_owners:
            self.account.extend(request, scheduled.block_owners)

    def _open(self, request: Request, targets: Sequence[Target]) -> None:
        if targets:
            if self._transfers is None:
                from longspan.core.kv.transfers import Transfers  # noqa: PLC0415 - most requests stay where they are

                bounds = {"backends": self._cluster.backends, "max_num_seqs": self._config.max_num_seqs}
                self._transfers = Transfers(self.account, self._running, self._number, **bounds)
            self._transfers.open(request, targets)
        self._update(request)

    def rebalance(self, request: Request, scheduled: ScheduledPart) -> MoveKV:
        """Makes a move of blocks between the members of a group, and of a last one that others have, too."""
        request.sent_blocks = request.sent_output = 0
        if scheduled.hit is None:
            copies = self.account.relocate(request, scheduled.moves)
        else:
            assert not scheduled.moves, "what is admitted goes where its hit lies"
            copies = tuple([(old, new) for new, old in request.copying.items()])  # begun when it was admitted
        return MoveKV(number=self._number(), request_id=request.id, copies=copies)

    # ---------------------------------------------------------------- requests compute

    def spill(self, waiting: Sequence[Request], device_limit: int) -> list[MoveKV]:
        """Makes moves to hosts of the oldest blocks of requests beyond the limit, which are read there, and back."""
        if self.swaps is None:
            return []
        return self.swaps.offload.spill(waiting, device_limit) or self.swaps.offload.bring_back(waiting)

    def computed(self, forward: Forward) -> list[tuple[BlockRef, int]]:
        """Take the completion of a step. Return the copied blocks with KV that is not finite, see `complete_copies`."""
        if self._transfers is not None:
            self._transfers.computed(forward)
        if self.swaps is not None:
            self.swaps.offload.computed(forward.number)
        copied = [(self._requests[move.request_id], move.copies) for move in forward.rebalances]
        return [slot for request, copies in copied for slot in self.account.complete_copies(request, copies)]

    def publish(self, request: Request, start: int, *, is_finite: bool) -> None:
        """Publish the blocks that a part from `start` on has filled. KV that is not finite is never published."""
        if not is_finite and request.non_finite_from is None:
            self.account.withdraw(request, start)
        self.account.publish(request, start)

    def streams(self, parts: Sequence[Part]) -> tuple[MoveKV, ...]:
        """Makes moves, to the instances that decode, of what a step computes."""
        return () if self._transfers is None else self._transfers.streams(parts)

    def transfers(self) -> list[MoveKV]:
        """Makes moves, to the instances that decode, of what was computed before and is not sent yet."""
        return [] if self._transfers is None else self._transfers.by_themselves()

    @property
    def has_news(self) -> bool:
        """Whether anything has happened by which there could be `transfers`, or requests to `hand_over`."""
        return self._transfers is not None and self._transfers.dirty

    def hand_over(self) -> list[Request]:
        """Gives requests to the instances that decode them, where all of their KV is; returns them."""
        found = [] if self._transfers is None else self._transfers.hand_over()
        for request in found:
            self._update(request)
        return found

    def make_room(self, full: Collection[int]) -> None:
        """Takes blocks back from transfers, for those that decode and came before; not on `full` instances."""
        if self._transfers is not None:
            self._transfers.make_room(full)

    def stuck(self) -> Request | None:
        """Returns the last admitted request that has no room where it is to decode."""
        return None if self._transfers is None else self._transfers.stuck()

    def clearable(self, slots: Iterable[tuple[BlockRef, int]] = ()) -> tuple[tuple[BlockRef, int], ...]:
        """Takes slots with KV that is not finite; returns those that ranks can clear now, see `Free`."""
        return tuple(slots) if self._transfers is None else self._transfers.clearable(slots)

    # ---------------------------------------------------------------- requests go

    def give_up(self, request: Request) -> tuple[list[MoveKV], tuple[tuple[BlockRef, int], ...]]:
        """Takes all of its blocks from a request; what it computed is copied to hosts as far as they have room.

        Returns moves to submit, and slots with KV that is not finite.
        """
        self._give_up_transfer(request)
        moves = [] if self.swaps is None else self.swaps.offload.leave(request)
        slots = request.non_finite_slots()
        self.account.release(request)
        request.lose_kv()
        self._update(request)
        return moves, slots

    def end(self, request: Request) -> None:
        """Stops what is on its way for a request that ends, and leaves what it gave up to the cache."""
        self._give_up_transfer(request)
        if self.swaps is not None:
            self.swaps.offload.release(request)
        self._update(request)

    def _give_up_transfer(self, request: Request) -> None:
        if self._transfers is not None:
            self._transfers.give_up(request)

    def relent(self) -> bool:
        """Leaves to the cache what waiting requests gave up, so that one which needs all of its host can have it.

        Returns whether there was any.
        """
        return self.swaps is not None and self.swaps.offload.relent()

    # ---------------------------------------------------------------- moves are done

    def moved(self, done: Completion) -> list[MoveKV] | None:
        """Takes the completion of a move between pools; returns moves to submit, None for any other step."""
        if self._transfers is not None and self._transfers.moved(done.number):
            return []
        if self.swaps is None or (moved := self.swaps.moved(done)) is None:
            return None
        for loading in self.swaps.loads.waiting:
            self._update(loading)  # what a disk could not give is not loaded
        request = self._requests.get(moved[0])
        if request is not None and not request.group:
            could_start = request.residency.can_start
            self._update(request)
            self.counts.num_offloaded += request.residency.can_start and not could_start
        if self._transfers is not None:
            self._transfers.note_free_blocks()
        return moved[1]

    # ---------------------------------------------------------------- other workers, other clusters

    def restart(self, requests: Collection[Request], *, keep: bool = True) -> None:
        """Goes on with empty pools on devices: new workers remember nothing. Hosts and disks are kept, if asked.

        The requests have lost what devices had of them.
        """
        if self.swaps is not None:
            self.swaps.lose()
            self.swaps.give_back_hosted(requests, self._cluster.host_pools)
        self._use_pools(self._cluster, self.account if keep else None)
        for request in requests:
            request.lose_kv()
            self._update(request)

    def regroup(self, cluster: Cluster) -> None:
        """Goes on with another cluster, which has the same pools on hosts and disks; devices hold nothing."""
        self._use_pools(cluster, self.account)
