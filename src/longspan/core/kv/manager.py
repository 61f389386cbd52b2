"""The one owner of KV: which blocks a request has, what others can reuse, and what is on its way between pools.

Engine and policies know this object only. Parts, from the ground up:

    pool        the blocks of one pool
    account     all pools, and the tables of requests
    copies      moves between tiers that are under way
    lookup      what there is of a request on devices, hosts and disks, and whether it pays to load it
    offload     from devices to hosts and disks
    loads       from disks and hosts to devices
    transfers   from instances that prefill to those that decode

A tier is a range of pools. What all tiers have in common are five operations on a pool, by which account, offload and
loads work: `find` and `find_begun` look up what it holds; `place` prepares a block for a content; `publish` completes
it; `share` and `release` touch it, so that it is evicted last; `forget` tells that a content is damaged. A device's
blocks are also `allocate`d for what is to be computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from longspan.core.blocks import BlockRef, PrefixHit, Target
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.copies import Copies
from longspan.core.kv.loads import Loads
from longspan.core.kv.lookup import Lookup, SwapPrices
from longspan.core.kv.offload import Offload
from longspan.core.kv.pool import BlockPool
from longspan.core.kv.residency import OFFLOADED, OFFLOADING, RESIDENT, TRANSFERRING, WAITING, Loading, Residency
from longspan.core.kv.transfers import Transfers
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.steps import Completion, Forward, MoveKV, Part
from longspan.core.view import RequestView, ScheduledPart


class KvManager:
    """Owns every block of every pool. The engine changes it, and submits the moves that it returns.

    Args:
        running: who runs on each instance, and what they still need.
        number: gives the next step's number.
        step_tokens, max_num_seqs: the bounds of a step on one instance.
        swap: prices of copies on a cluster; None when a copy always pays.

    Attributes:
        num_offloaded: how often a request could be admitted again, since all that it gave up was on hosts.
        num_disk_hits: tokens that came from disks.
        num_swapped_blocks: blocks that were copied from devices to hosts and back.
    """

    def __init__(
        self,
        cluster: Cluster,
        running: Running,
        number: Callable[[], int],
        *,
        block_size: int,
        prefix_caching: bool,
        step_tokens: int,
        max_num_seqs: int,
        swap: SwapPrices | None = None,
    ) -> None:
        self._cluster, self._running, self._number, self._swap = cluster, running, number, swap
        self._block_size, self._prefix_caching, self._max_num_seqs = block_size, prefix_caching, max_num_seqs
        self._copies = Copies(number)
        self._targets: dict[int, tuple[Target, ...]] = {}  # of requests that load
        self._use_pools(cluster)
        self._loads = Loads(self.account, cluster, self._copies)
        bounds = {"step_tokens": step_tokens, "max_num_seqs": max_num_seqs}
        self._offload = Offload(self.account, cluster, self._copies, running, **bounds)
        self.num_offloaded = self.num_disk_hits = self.num_swapped_blocks = 0

    def _use_pools(self, cluster: Cluster, before: KvAccount | None = None) -> None:
        """Makes empty pools of a cluster, on devices only if there are others `before` to go on with."""
        self._cluster = cluster
        size, caching = self._block_size, self._prefix_caching
        self.account = KvAccount(cluster.pool_blocks, block_size=size, prefix_caching=caching)
        if before is not None:
            self.account.keep_pools(before, cluster.host_pools.start)
        self._transfers = Transfers(
            *(self.account, self._running, self._number), backends=cluster.backends, max_num_seqs=self._max_num_seqs
        )
        has_tiers = bool(cluster.host_blocks) and caching
        prices = None if self._swap is None or not has_tiers else self._swap(cluster)
        self._lookup = Lookup(self.account, cluster, self._copies, swap=prices, has_tiers=has_tiers)

    # ---------------------------------------------------------------- what policies see, see `KvView`

    def num_blocks(self, instance: int) -> int:
        return self.account.num_blocks(instance)

    def num_free(self, instance: int) -> int:
        return self.account.num_free(instance)

    def num_leaving(self, instance: int) -> int:
        return self.account.num_leaving(instance)

    def num_allocated(self, instance: int) -> int:
        return self.account.num_allocated(instance)

    def outgrows(self, request: RequestView, instance: int) -> bool:
        return self.account.outgrows(request, instance)

    def changes(self, instances: Iterable[int]) -> int:
        return self.account.changes(instances)

    def match(self, request: RequestView, group: Sequence[int]) -> PrefixHit:
        return self._lookup.match(request, group)

    def match_beside(self, request: RequestView, instance: int, host: int, most: int) -> PrefixHit:
        return self.account.match_beside(request, instance, host, most)

    def hit_cost(self, hit: PrefixHit, claimed: AbstractSet[BlockRef]) -> Counter[int]:
        if hit.num_loaded:  # what is loaded costs new blocks
            hit = replace(hit, refs=tuple([ref for ref in hit.refs if self._cluster.tier(ref.pool) == "device"]))
        return self.account.hit_cost(hit, claimed)

    def reclaimable(self, request: RequestView) -> Counter[int]:
        return self.account.reclaimable(request)

    @property
    def expected(self) -> Mapping[int, int]:
        return self._transfers.expected

    # ---------------------------------------------------------------- state

    def pool(self, number: int) -> BlockPool:
        return self.account.pool(number)

    @property
    def num_host_hits(self) -> int:
        """Tokens that were found on hosts and disks."""
        return self._loads.num_hits

    @property
    def used_host_blocks(self) -> int:
        """Blocks of all hosts that are in use."""
        return self._offload.used_host_blocks

    @property
    def peak_host_blocks(self) -> int:
        """The most blocks of all hosts that were in use at once."""
        return self._offload.peak_host_blocks

    @property
    def is_moving(self) -> bool:
        """Whether any KV is on its way."""
        return self._transfers.in_flight or bool(self._copies)

    @property
    def is_copying(self) -> bool:
        """Whether any KV is on its way between tiers."""
        return bool(self._copies)

    @property
    def copies_on_devices(self) -> bool:
        """Whether any KV is on its way from devices to hosts, or back."""
        return self._copies.on_devices

    @property
    def can_regroup(self) -> bool:
        """Whether no KV is on its way from a device or to one."""
        return not (self._copies.on_devices or self._transfers.in_flight)

    def startable(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Returns those that can start, first come: up to the first whose KV is still on its way to hosts."""
        if not self._copies:
            return waiting
        first = next((place for place, one in enumerate(waiting) if not one.residency.can_start), None)
        return waiting if first is None else waiting[:first]

    def _update(self, request: Request) -> None:
        """Sets where the KV of a request is."""
        request.residency = self._residency(request)

    def _residency(self, request: Request) -> Residency:
        if request.group:
            if (num_tokens := self._loads.num_tokens(request)) is not None:
                return Loading(num_tokens=num_tokens)
            return TRANSFERRING if request.targets else RESIDENT
        if not self._offload.has_given_up(request):
            return WAITING
        return OFFLOADING if self._offload.is_leaving(request) else OFFLOADED

    # ---------------------------------------------------------------- requests come

    def take(self, request: Request, scheduled: ScheduledPart) -> None:
        """Begins the table of a request that is admitted with what it hits.

        When all of a plan have taken theirs, call `load` or `extend` for each: these take room, and could evict what
        others have hit.
        """
        hit = scheduled.hit
        assert hit is not None, "who is admitted has looked for its beginning"
        self.account.take(request, hit)
        self._offload.release(request)
        request.num_scheduled = hit.num_tokens
        if not hit.waits:
            request.num_computed = hit.num_tokens
            request.num_hosted = sum(self._cluster.tier(ref.pool) == "host" for ref in hit.refs)
        request.group = scheduled.group

    def load(self, request: Request, scheduled: ScheduledPart) -> list[MoveKV]:
        """Makes moves to devices of what a request has taken on hosts and disks."""
        assert scheduled.hit is not None
        moves = self._loads.begin(request, scheduled.hit.num_tokens, scheduled.block_owners)
        if scheduled.targets:
            self._targets[request.id] = scheduled.targets
        self._offload.note_peak()
        self._update(request)
        return moves

    def loaded(self) -> list[Request]:
        """Returns the requests that had waited for their KV, and compute from now on."""
        found = []
        for request, num_tokens in self._loads.arrived():
            request.num_computed = request.num_scheduled = num_tokens
            self.account.publish(request, 0)
            self._open(request, self._targets.pop(request.id, ()))
            found.append(request)
        return found

    def extend(self, request: Request, scheduled: ScheduledPart) -> None:
        """Appends the blocks that a part asks for to the request's table."""
        if (hit := scheduled.hit) is not None:
            self.account.copy_last(request, hit)
            self._open(request, scheduled.targets)
        if scheduled.block_owners:
            self.account.extend(request, scheduled.block_owners)

    def _open(self, request: Request, targets: Sequence[Target]) -> None:
        if targets:
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

    def rebalanced(self, request: Request, move: MoveKV) -> list[tuple[BlockRef, int]]:
        """Takes such a move that is done; returns slots with KV that is not finite, see `clearable`."""
        return self.account.complete_copies(request, move.copies)

    # ---------------------------------------------------------------- requests compute

    def publish(self, request: Request, start: int) -> None:
        """Offers others what a request has computed from `start` on."""
        self.account.publish(request, start)

    def withdraw(self, request: Request, position: int) -> None:
        """Offers nobody what a request holds from a position on, which is not finite."""
        self.account.withdraw(request, position)

    def spill(self, waiting: Sequence[Request]) -> list[MoveKV]:
        """Makes moves to hosts of the oldest blocks of requests that outgrow their device, which stay in use there."""
        return self._offload.spill(waiting)

    def computed(self, forward: Forward) -> None:
        """Takes the completion of a step."""
        self._transfers.computed(forward)
        self._offload.computed(forward.number)

    def streams(self, parts: Sequence[Part]) -> tuple[MoveKV, ...]:
        """Makes moves, to the instances that decode, of what a step computes."""
        return self._transfers.streams(parts)

    def transfers(self) -> list[MoveKV]:
        """Makes moves, to the instances that decode, of what was computed before and is not sent yet."""
        return self._transfers.by_themselves()

    @property
    def has_news(self) -> bool:
        """Whether anything has happened by which there could be `transfers`, or requests to `hand_over`."""
        return self._transfers.dirty

    def hand_over(self) -> list[Request]:
        """Gives requests to the instances that decode them, where all of their KV is; returns them."""
        found = []
        for shares in self._transfers.arrived():
            request = shares[0].request
            self.account.hand_over(request, [ref for share in shares for ref in share.blocks])
            request.move_to(*[share.target for share in shares])
            self._update(request)
            found.append(request)
        return found

    def make_room(self, full: Collection[int]) -> None:
        """Takes blocks back from transfers, for those that decode and came before; not on `full` instances."""
        self._transfers.make_room(full)

    def stuck(self) -> Request | None:
        """Returns the last admitted request that has no room where it is to decode."""
        return self._transfers.stuck()

    def clearable(self, slots: Iterable[tuple[BlockRef, int]] = ()) -> tuple[tuple[BlockRef, int], ...]:
        """Takes slots with KV that is not finite; returns those that ranks can clear now, see `Free`."""
        return self._transfers.clearable(slots)

    # ---------------------------------------------------------------- requests go

    def give_up(self, request: Request) -> tuple[list[MoveKV], tuple[tuple[BlockRef, int], ...]]:
        """Takes all of its blocks from a request; what it computed is copied to hosts as far as they have room.

        Returns moves to submit, and slots with KV that is not finite.
        """
        self._transfers.give_up(request)
        moves, slots = self._offload.leave(request), request.non_finite_slots()
        self.account.release(request)
        request.lose_kv()
        self._update(request)
        return moves, slots

    def end(self, request: Request) -> None:
        """Stops what is on its way for a request that ends, and leaves what it gave up to the cache."""
        self._transfers.give_up(request)
        self._offload.release(request)
        self._update(request)

    def relent(self) -> bool:
        """Leaves to the cache what waiting requests gave up, so that one which needs all of its host can have it.

        Returns whether there was any.
        """
        return self._offload.relent()

    # ---------------------------------------------------------------- moves are done

    def moved(self, done: Completion, requests: Mapping[int, Request]) -> list[MoveKV] | None:
        """Takes the completion of a move between pools; returns moves to submit, None for any other step.

        What a disk could not give is offered no more.
        """
        if self._transfers.moved(done.number):
            return []
        if (copy := self._copies.end(done.number)) is None:
            return None
        move, account = copy.move, self.account
        self.num_swapped_blocks += len(move.copies) if move.way in ("out", "in") else 0
        for index, ((source, target), content) in enumerate(zip(move.copies, copy.contents, strict=True)):
            if index not in done.failed:
                account.pool(target.pool).publish(target.block, content)
                self.num_disk_hits += len(content.tokens) if move.way == "load" else 0
            elif move.way == "load":
                account.pool(source.pool).forget(source.block)
        if move.way == "out":
            moves = [*self._offload.moved(copy), *self._loads.moved(copy, done.failed)]
            request = requests.get(move.request_id)
            if request is not None and not request.group:
                could_start = request.residency.can_start
                self._update(request)
                self.num_offloaded += request.residency.can_start and not could_start
        else:
            moves = self._loads.moved(copy, done.failed)
            account.let_go(reversed(copy.held))
            account.give_back(reversed(copy.kept))
        self._transfers.dirty = True  # blocks that were copied out are free
        return moves

    # ---------------------------------------------------------------- other workers, other clusters

    def restart(self, requests: Iterable[Request], *, keep: bool = True) -> None:
        """Goes on with empty pools on devices: new workers remember nothing. Hosts and disks are kept, if asked.

        The requests have lost what devices had of them.
        """
        before, lost = self.account, self._copies.clear()
        for copy in lost:
            before.let_go(copy.held)
            before.give_back(reversed(copy.kept))
            before.give_back(reversed([above for above, _, _ in copy.behind]))
        self._offload.restart(lost)
        for request in requests:
            before.give_back([ref for ref in reversed(request.table) if self._cluster.tier(ref.pool) == "host"])
            request.lose_kv()
        self._targets.clear()
        self._regroup(self._cluster, before if keep else None)
        for request in requests:
            self._update(request)

    def regroup(self, cluster: Cluster) -> None:
        """Goes on with another cluster, which has the same pools on hosts and disks; devices hold nothing."""
        self._regroup(cluster, self.account)

    def _regroup(self, cluster: Cluster, before: KvAccount | None) -> None:
        self._use_pools(cluster, before)
        self._loads.restart(self.account, cluster)
        self._offload.regroup(self.account, cluster)
