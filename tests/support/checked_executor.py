"""An executor that checks all that ranks rely on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster_setup import Setup, invented_token, rank_requests

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster, Tier
from longspan.core.exchange import CHAIN, LOCAL, RING_Q
from longspan.core.hosts import shares_of_hosts
from longspan.core.kv.pool import BlockPool
from longspan.core.owners import Rotation
from longspan.core.request import Request
from longspan.core.steps import UNKNOWN, Completion, Forward, Free, MoveKV, Part, Reshard, Step
from longspan.sim.executor import SimExecutor

NON_FINITE = -1
"""The name of a slot that holds NaN."""


@dataclass(kw_only=True)
class Moving:
    """A move in flight, the contents of its sources when it was emitted, and its request."""

    move: MoveKV
    held: list[list[int]]
    live: _Live


@dataclass(kw_only=True)
class Slots:
    """Where the tokens of a request lie, told by counting them one by one.

    Attributes:
        of: block and offset of each token up to the end of its latest part.
        held: tokens of each instance.
    """

    size: int
    of: list[tuple[BlockRef, int]] = field(default_factory=list)
    held: Counter[int] = field(default_factory=Counter)

    def move(self, table: Sequence[BlockRef]) -> None:
        """All blocks lie elsewhere, in the same order."""
        self.of = [(table[index // self.size], offset) for index, (_, offset) in enumerate(self.of)]
        self.held = Counter(ref.instance for ref, _ in self.of)

    def follow(self, part: Part, table: Sequence[BlockRef]) -> None:
        """Counts the tokens that are new since the part before."""
        rotates_from = part.stop if part.rotation is None else part.rotation.start
        for position in range(len(self.of), part.stop):
            if position < rotates_from:
                ref, offset = table[position // self.size], position % self.size
            else:
                home = min(part.group, key=lambda instance: self.held[instance])  # of equals the first
                own = [ref for ref in table if ref.instance == home]
                ref, offset = own[self.held[home] // self.size], self.held[home] % self.size
            self.of.append((ref, offset))
            self.held[ref.instance] += 1


class CheckedExecutor:
    """Passes steps on to a `SimExecutor` after checking every law that ranks rely on.

    It keeps the content of each KV slot, as ranks would. The content is a name of all tokens up to the slot, the rotary
    length and the cache salt.

    Attributes:
        cluster: gives each rank its place. A `Reshard` replaces it.
        pool: of an instance, as the engine knows it.
        reservation: of a request whose KV is on its way, and a target: another object when the blocks of the one before
            were taken.
        damaged: copies of a move that a disk cannot make, by index.
        poison: tokens for which ranks compute NaN. KV of a request is not finite from the first of them on.
    """

    pool: Callable[[int], BlockPool]
    reservation: Callable[[int, int], object]

    def __init__(self, inner: SimExecutor, setup: Setup, cluster: Cluster | None = None) -> None:
        self._inner, self._setup, self.cluster = inner, setup, cluster or setup.cluster
        self._regrouping: Reshard | None = None
        self.steps: list[Step] = []
        self.requests: dict[int, Request] = {}
        self.in_flight: dict[int, Forward] = {}
        self.live: dict[int, _Live] = {}
        self._ranks = [rank_requests() for _ in self.cluster.instances]
        self.slots: dict[BlockRef, list[int]] = defaultdict(lambda: [0] * setup.block_size)
        self._owners: dict[BlockRef, set[int]] = defaultdict(set)
        self._reads: dict[int, set[BlockRef]] = defaultdict(set)
        self.moving: dict[int, Moving] = {}
        self.damaged: Callable[[MoveKV], tuple[int, ...]] = lambda _: ()
        self.poison: Collection[int] = ()

    def submit(self, step: Step) -> None:
        """Checks a step and passes it on."""
        assert not self.steps or step.number > self.steps[-1].number, "steps are numbered in order"
        assert self._regrouping is None or not self._uses_devices(step), "ranks are on their way to other places"
        self.steps.append(step)
        self._take_over()
        if isinstance(step, Free):
            self._free(step)
        elif isinstance(step, MoveKV) and step.way != "across":
            self._swap(step)
        elif isinstance(step, MoveKV):
            self._meet(self.requests[step.request_id])
            self._check_computed(step)
            self._move(step)
        elif isinstance(step, Reshard):
            self._reshard(step)
        else:
            self._forward(step)
        self._inner.submit(step)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """The simulation's completions."""
        completions = self._inner.poll(timeout_s)
        for completion in completions:
            if self._regrouping is not None and completion.number == self._regrouping.number:
                self._regroup(self._regrouping.cluster)
                continue
            if completion.number in self.moving:
                moving = self.moving.pop(completion.number)
                completion.failed = self.damaged(moving.move) if moving.move.contents else ()
                self._end_move(moving, completion.failed)
                continue
            forward = self.in_flight.pop(completion.number)
            completion.non_finite = tuple(
                part.request_id
                for part in forward.parts
                if NON_FINITE in self._names(part.request_id)[part.start : part.stop]
            )
            for source, target in (pair for move in forward.rebalances for pair in move.copies):
                if source.instance != target.instance:
                    self._owners[source].remove(-forward.number)
        return completions

    def _uses_devices(self, step: Step) -> bool:
        if isinstance(step, MoveKV):
            return any(self.cluster.tier(ref.pool) == "device" for pair in step.copies for ref in pair)
        return isinstance(step, (Forward, Reshard))

    def _reshard(self, step: Reshard) -> None:
        """Check that devices are idle, that no request has KV there, and that hosts and disks keep their pools."""
        before, after = self.cluster, step.cluster
        assert not self.in_flight and not any(self._uses_devices(moving.move) for moving in self.moving.values())
        assert not self.live, "ranks were told that no request has KV on devices"
        assert (before.host_pools, before.disk_pools) == (after.host_pools, after.disk_pools)
        assert before.num_ranks == after.num_ranks, "tests start no further ranks"
        self._regrouping = step

    def _regroup(self, cluster: Cluster) -> None:
        """Give each instance of a cluster an empty pool. Contents of hosts and disks stay."""
        self.cluster, self._regrouping = cluster, None
        self._ranks = [rank_requests() for _ in cluster.instances]
        for ref in [ref for ref in self.slots if cluster.tier(ref.pool) == "device"]:
            assert not self._owners[ref], "no request has KV on devices"
            del self.slots[ref]

    def _free(self, step: Free) -> None:
        for request_id in step.request_ids:
            named = {part.request_id for forward in self.in_flight.values() for part in forward.parts}
            assert request_id not in named, "freed while a step in flight names it"
            for ref in self.live.pop(request_id).table:
                self._owners[ref].remove(request_id)
        for ref, first in step.cleared:
            assert ref not in self._named, "no move in flight names a cleared block"
            users = [self.live[number].slots.of for number in self._owners[ref] if number >= 0]
            assert not any(used == ref and slot >= first for slots in users for used, slot in slots), (
                "no live request has KV in cleared slots"
            )
            assert first >= self._copied_of(ref), "no step in flight copies cleared slots"
            self.slots[ref][first:] = [0] * (self._setup.block_size - first)
        for rank in self._ranks:
            rank.forget(step.request_ids)

    def _copied_of(self, ref: BlockRef) -> int:
        """Counts the first slots of a block that steps in flight copy to begin another request with."""
        size, num_copied = self._setup.block_size, 0
        for forward in self.in_flight.values():
            starts = {part.request_id: part.start for part in forward.parts}
            copied = (move for move in forward.rebalances if move.is_local and move.copies[0][0] == ref)
            num_copied = max([num_copied, *(starts[move.request_id] % size for move in copied)])
        return num_copied

    def _forward(self, forward: Forward) -> None:
        busy = Counter(instance for other in self.in_flight.values() for instance in other.instances)
        ahead, pp = self._setup.max_steps_in_flight - 1, self.cluster.pp
        assert all(busy[i] < ahead + pp(i) for i in forward.instances), "few steps are in flight on an instance"
        decoding = {part.request_id for part in forward.parts if part.unknown_on is not None}
        in_flight = Counter(part.request_id for other in self.in_flight.values() for part in other.parts)
        assert all(in_flight[request_id] <= ahead for request_id in decoding), "and fewer sample unknown tokens"
        assert forward.parts
        assert len({part.request_id for part in forward.parts}) == len(forward.parts)
        for move in forward.rebalances:
            if move.is_local:
                self._copy(forward, move)
            else:
                self._balance(forward, move)
        for part in forward.parts:
            self._begin(part)
        for part in forward.parts:
            self._check_span(part)
            self._check_blocks(part)
        for part in forward.parts:
            self._write(part)
        for move in forward.streams:
            [part] = [part for part in forward.parts if part.request_id == move.request_id]
            if move.way == "out":
                self._stream_out(part, move)
                continue
            table = self.live[move.request_id].table
            size = self._setup.block_size
            assert all((table.index(source) + 1) * size > part.start for source, _ in move.copies), "completed here"
            self._move(move)
        self._check_limits(forward)
        self.in_flight[forward.number] = forward

    def _begin(self, part: Part) -> None:
        """Tables first: a block may be named by two requests only if neither writes it."""
        tables = [self._ranks[instance].apply(part).table for instance in part.group]
        assert all(table == tables[0] for table in tables)
        fresh = _Live(group=part.group, next_start=part.start, slots=Slots(size=self._setup.block_size))
        live = self.live.setdefault(part.request_id, fresh)
        if not set(part.group) <= set(live.group) or live.is_new_there:
            live.is_new_there = False
            assert live.rotation is None, "a group does not grow while homes rotate in it"
            assert part.first_block == 0 and part.sampling is not None, "new members are told everything"
            request = self.requests[part.request_id]
            assert not request.keeps_history or part.new_output == tuple(request.output)
        live.group, live.targets = part.group, self.requests[part.request_id].targets
        for ref in live.table[part.first_block :]:
            self._owners[ref].remove(part.request_id)
        has_moved = any(old != new for old, new in zip(live.table, tables[0], strict=False))
        for old, new in zip(live.table, tables[0], strict=False):
            assert old == new or self._is_spilled(part, old, new), "a repeated table has not changed"
            if old != new:
                for number, forward in self.in_flight.items():
                    if any(other.request_id == part.request_id for other in forward.parts):
                        self._reads[number].add(old)
        live.table = list(tables[0])
        if len(live.slots.of) > 0 and has_moved:
            live.slots.move(live.table)
        for ref in part.blocks:
            self._owners[ref].add(part.request_id)
        assert len(set(live.table)) == len(live.table)
        assert live.rotation in (None, part.rotation), "once homes rotate by token they go on"
        live.rotation = part.rotation
        live.slots.follow(part, live.table)

    def _users(self, ref: BlockRef) -> set[int]:
        """Owners of a block and steps in flight that read it. Requests that have moved it to the host do not count."""
        readers = {-number for number, refs in self._reads.items() if ref in refs and number in self.in_flight}
        return {one for one in self._owners[ref] if one < 0 or ref in self._told(self.requests[one])} | readers

    @staticmethod
    def _told(request: Request) -> list[BlockRef]:
        """The table that its next step is told, if that is told all."""
        return [request.moving.get(ref, ref) for ref in request.table]

    def _is_spilled(self, part: Part, old: BlockRef, new: BlockRef) -> bool:
        """Return True if a block has moved to its host, back from it, or both, and the copy is complete."""
        coming = {target for moving in self.moving.values() for _, target in moving.move.copies}
        on_devices = [ref.pool for ref in (old, new) if self.cluster.tier(ref.pool) == "device"]
        hosts = {self.cluster.host_pool(one) if one in on_devices else one for one in (old.pool, new.pool)}
        return bool(on_devices) and set(on_devices) <= set(part.group) and len(hosts) == 1 and new not in coming

    def _check_span(self, part: Part) -> None:
        request, live = self.requests[part.request_id], self.live[part.request_id]
        assert part.start == live.next_start, "spans follow each other without a gap"
        assert part.start < part.stop <= request.num_tokens
        live.next_start = part.stop
        assert part.tokens == request.tokens(part.start, part.stop)
        assert part.rope_length == request.rope_length
        positions = [position for runs in part.runs for run in runs for position in run.positions]
        assert sorted(positions) == list(range(part.start, part.stop)), "every token is computed exactly once"
        for runs in part.runs:
            assert all(len(run) and run.step == 1 for run in runs)
            assert all(a.stop < b.start for a, b in pairwise(runs)), "runs ascend and are joined"
        assert len(part.group) == len(part.runs) == len(set(part.group))
        assert all(0 <= ref.block < self.cluster.pool_blocks[ref.pool] for ref in part.blocks)
        assert (part.exchange == LOCAL) == (len(part.group) == 1)
        by_default = self._setup.options.get("exchange", "auto") == "auto" and self._setup.facts.profile is None
        assert not by_default or part.exchange != RING_Q or part.hosted or part.stop == part.start + 1
        assert (part.sample is not None) == (part.stop >= request.num_known)
        assert UNKNOWN not in part.tokens[:-1], "at most the last token is yet to be sampled"
        assert (part.unknown_on is not None) == (part.tokens[-1] == UNKNOWN)
        if part.unknown_on is not None:
            assert part.unknown_on == live.sampled_on, "the sampling instance sends the token"
        live.sampled_on = None if part.sample is None else part.sample.instance
        if part.sample is not None:
            assert part.sample.position == part.stop
            runs = part.runs[part.group.index(part.sample.instance)]
            assert runs and runs[-1].stop == part.stop, "the member that computes the last token samples"

    def _check_blocks(self, part: Part) -> None:
        live, names = self.live[part.request_id], self._names(part.request_id)
        slots = live.slots.of
        assert {ref for ref, _ in slots} == set(live.table), "blocks for all tokens and no more"
        hosted = [ref for ref in live.table if self.cluster.tier(ref.pool) == "host"]
        assert len(hosted) == sum(part.hosted) and (not hosted or part.exchange.traits.reads_hosts)
        self._check_hosted(part, live.table)
        assert {ref.instance for ref in live.table if ref not in hosted} <= set(part.group)
        for member, runs in enumerate(part.runs):
            block_owners = {slots[position][0].instance for run in runs for position in run.positions}
            assert block_owners <= set(part.group[member:] if part.exchange == CHAIN else [part.group[member]])
        for ref, _ in slots[part.start :]:
            assert self._users(ref) == {part.request_id}, "a block that is written belongs to one request"
            assert ref not in self._named, "sources and targets of moves are not written"
        stored = [self.slots[ref][offset] for ref, offset in slots[: part.start]]
        assert stored == names[: part.start], f"the blocks of request {part.request_id} hold other tokens"

    def _check_hosted(self, part: Part, table: Sequence[BlockRef]) -> None:
        """Checks that each block on a host is attended over by one member there, and that they share evenly."""
        if part.hosted:
            pools = [self.cluster.host_pool(instance) for instance in part.group]
            _, shares = shares_of_hosts(table, pools, part.hosted, self._setup.block_size)
            met = [(pool, block) for pool, blocks in zip(pools, shares, strict=True) for block in blocks]
            assert sorted(met) == sorted(tuple(ref) for ref in table if self.cluster.tier(ref.pool) == "host")
            for pool in pools:
                numbers = [number for one, number in zip(pools, part.hosted, strict=True) if one == pool]
                assert max(numbers) - min(numbers) <= 1

    def _write(self, part: Part) -> None:
        names, slots = self._names(part.request_id), self.live[part.request_id].slots.of
        for position in range(part.start, part.stop):
            ref, offset = slots[position]
            self.slots[ref][offset] = names[position]

    def _names(self, request_id: int) -> list[int]:
        """Names every position of a request by all tokens up to it."""
        request, live = self.requests[request_id], self.live[request_id]
        if live.rope_length != request.rope_length:
            live.names, live.rope_length = [], request.rope_length
        for position in range(len(live.names), request.num_tokens):
            before = live.names[-1] if live.names else hash((request.rope_length, request.cache_salt))
            [token] = request.tokens(position, position + 1)
            if token == UNKNOWN:
                token = invented_token(request, position, self._setup.eos_token_ids)
            is_finite = before != NON_FINITE and token not in self.poison
            live.names.append(hash((before, position, token)) if is_finite else NON_FINITE)
        return live.names

    def _check_limits(self, forward: Forward) -> None:
        tokens: Counter[int] = Counter()
        for part in forward.parts:
            tokens.update({i: sum(map(len, runs)) for i, runs in zip(part.group, part.runs, strict=True)})
        assert max(tokens.values()) <= self._setup.max_num_batched_tokens
        rows = Counter(instance for part in forward.parts for instance in part.group)
        running = [live for number, live in self.live.items() if self._takes_seat(number)]
        seats = Counter(instance for live in running for instance in live.group)
        assert max([*rows.values(), *seats.values()]) <= self._setup.max_num_seqs
        cluster = self.cluster
        for part in forward.parts if cluster.has_roles else ():
            if part.group[0] in cluster.decode:
                assert part.stop - part.start == 1, "one token"
                assert len(part.group) == 1 or self._setup.policy == "csps", "on one instance, but for one policy"
            assert set(part.group) <= set(cluster.prefill) or set(part.group) <= set(cluster.decode)

    def _takes_seat(self, number: int) -> bool:
        """Return False for a request that has ended or only waits for its transfer."""
        request, live = self.requests[number], self.live[number]
        leaves = bool(request.targets) and live.sampled_on is not None
        return request.finish_reason is None and not leaves

    # ---------------------------------------------------------------- moves

    def keep(self, before: CheckedExecutor, tiers: Collection[Tier]) -> None:
        """Take over the contents of some tiers from earlier workers, which may have another layout."""
        old, new = before.cluster, self.cluster
        pools = dict(zip([*old.host_pools, *old.disk_pools], [*new.host_pools, *new.disk_pools], strict=True))
        for ref, held in before.slots.items():
            if old.tier(ref.pool) in tiers:
                self.slots[BlockRef(pools[ref.pool], ref.block)] = held

    def _swap(self, move: MoveKV) -> None:
        """Check a move between two tiers: sources are filled and not written, and targets are unused."""
        cluster, written = self.cluster, self._written()
        assert move.copies and len(set(move.copies)) == len(move.copies)
        for source, target in move.copies:
            here, there = (source, target) if move.way in ("out", "save") else (target, source)
            if move.way in ("out", "in"):
                assert cluster.tier(here.pool) == "device" and there.pool == cluster.host_pool(here.pool)
            else:
                assert cluster.tier(here.pool) == "host" and there.pool == cluster.disk_pool(here.pool)
                assert len(move.contents) == len(move.copies)
            assert self.slots[source][0] and source not in written, "copied blocks were computed"
            assert NON_FINITE not in self.slots[source], "only finite KV goes to another tier"
            assert not self._users(target) and target not in self._named, "only one move uses a target"
            assert all(self.pool(ref.pool).references(ref.block) > 0 for ref in (source, target))
        held = [list(self.slots[source]) for source, _ in move.copies]
        live = self.live.get(move.request_id) or _Live(group=(), next_start=0, slots=Slots(size=1))
        self.moving[move.number] = Moving(move=move, held=held, live=live)

    def _stream_out(self, part: Part, move: MoveKV) -> None:
        """Check blocks that a step fills and copies to hosts. Their KV may not be finite."""
        live, size = self.live[part.request_id], self._setup.block_size
        assert move.copies and len(set(move.copies)) == len(move.copies)
        for source, target in move.copies:
            stop = (live.table.index(source) + 1) * size
            assert part.start < stop and (stop <= part.stop or part.sample is not None), "filled by this step"
            assert target.pool == self.cluster.host_pool(source.pool)
            assert not self._users(target) and target not in self._named, "only one move uses a target"
            assert all(self.pool(ref.pool).references(ref.block) > 0 for ref in (source, target))
        held = [list(self.slots[source]) for source, _ in move.copies]
        self.moving[move.number] = Moving(move=move, held=held, live=live)

    def _written(self) -> set[BlockRef]:
        """The blocks that steps in flight write."""
        written = {target for f in self.in_flight.values() for m in f.rebalances for _, target in m.copies}
        for part in (part for forward in self.in_flight.values() for part in forward.parts):
            slots = self.live[part.request_id].slots.of
            written.update(ref for ref, _ in slots[part.start : part.stop])
        return written

    @property
    def non_finite_blocks(self) -> list[BlockRef]:
        """The blocks of devices that hold KV of poison. A copy to a host replaces the whole block there."""
        held = {ref: held for ref, held in self.slots.items() if self.cluster.tier(ref.pool) == "device"}
        return [ref for ref, names in held.items() if NON_FINITE in names]

    @property
    def _named(self) -> set[BlockRef]:
        """The blocks of all moves in flight."""
        return {ref for moving in self.moving.values() for pair in moving.move.copies for ref in pair}

    def _check_held(self, move: MoveKV) -> None:
        """Sources hold the beginning of the request up to there, and are full but for the end of a prompt."""
        live, names, size = self.live[move.request_id], self._names(move.request_id), self._setup.block_size
        assert move.copies and len(set(move.copies)) == len(move.copies)
        for source, _ in move.copies:
            index = live.table.index(source)
            stop = min((index + 1) * size, live.next_start)
            assert stop == (index + 1) * size or live.sampled_on is not None, "blocks are full, or the prompt is done"
            assert self.slots[source][: stop - index * size] == names[index * size : stop]

    def _meet(self, request: Request) -> None:
        """A request may send its cached blocks before its first part."""
        if request.id in self.live:
            return
        size, start = self._setup.block_size, request.num_scheduled
        live = _Live(group=request.group, next_start=start, slots=Slots(size=size), table=list(request.table))
        live.slots.of = [(live.table[position // size], position % size) for position in range(start)]
        live.slots.held = Counter(ref.instance for ref, _ in live.slots.of)
        for ref in live.table:
            self._owners[ref].add(request.id)
        self.live[request.id] = live

    def _check_computed(self, move: MoveKV) -> None:
        """No step in flight writes the blocks of a move."""
        parts = [part for forward in self.in_flight.values() for part in forward.parts]
        starts = [part.start for part in parts if part.request_id == move.request_id]
        table = self.live[move.request_id].table
        filling = {target for f in self.in_flight.values() for m in f.rebalances for _, target in m.copies}
        for source, _ in move.copies:
            assert all((table.index(source) + 1) * self._setup.block_size <= start for start in starts)
            assert source not in filling, "no step in flight fills moved blocks"

    def _move(self, move: MoveKV) -> None:
        """Check a move from a prefill to a decode instance."""
        cluster, live, request = self.cluster, self.live[move.request_id], self.requests[move.request_id]
        ([source], [target]) = (move.sources, move.targets)
        assert source != target and target in request.targets
        assert not cluster.has_roles or (source in cluster.prefill and target in cluster.decode)
        self._check_held(move)
        across = [moving for moving in self.moving.values() if moving.move.way == "across"]
        to_target = [moving for moving in across if moving.move.targets == (target,)]
        busy = {(id(moving.live), moving.move.sources) for moving in to_target}
        assert len(busy | {(id(live), (source,))}) <= cluster.backends
        reservation = self.reservation(move.request_id, target)
        before, copied = live.reservations.get(target, (None, set()))
        if before is not reservation:
            copied = set()
        live.reservations[target] = reservation, copied
        for here, there in move.copies:
            index = live.table.index(here)
            assert index not in copied, "each block is moved once, unless where it went to was taken back"
            copied.add(index)
            assert not self._users(there) and there not in self._named, "only one move uses a target"
            assert all(self.pool(ref.instance).references(ref.block) > 0 for ref in (here, there))
        held = [list(self.slots[here]) for here, _ in move.copies]
        self.moving[move.number] = Moving(move=move, held=held, live=live)

    def _end_move(self, moving: Moving, failed: tuple[int, ...]) -> None:
        for index, ((source, target), held) in enumerate(zip(moving.move.copies, moving.held, strict=True)):
            assert self.slots[source] == held, "moved blocks are not written"
            assert all(self.pool(ref.pool).references(ref.block) > 0 for ref in (source, target))
            assert not self._users(target), "only one move uses a target"
            self.slots[target] = [0] * self._setup.block_size if index in failed else held

    def _copy(self, forward: Forward, move: MoveKV) -> None:
        """Copy the block that an admitted request begins in. Other requests may write behind the copied tokens."""
        [part] = [part for part in forward.parts if part.request_id == move.request_id]
        [(source, target)] = move.copies
        assert part.first_block == 0 and part.blocks[part.start // self._setup.block_size] == target
        assert part.start % self._setup.block_size, "a block of which all is used is shared"
        assert source.instance == target.instance and source.instance in part.group
        assert self._users(target) <= {part.request_id} and target not in self._named
        assert all(self.pool(ref.instance).references(ref.block) > 0 for ref in (source, target))
        num_used = part.start % self._setup.block_size
        self.slots[target][:num_used] = self.slots[source][:num_used]
        assert NON_FINITE not in self.slots[target], "a copy has the tokens that it is used for"

    def _balance(self, forward: Forward, move: MoveKV) -> None:
        """Full blocks go to other members, and the old ones stay until the step is done."""
        [part] = [part for part in forward.parts if part.request_id == move.request_id]
        live, size = self.live[move.request_id], self._setup.block_size
        assert part.first_block == 0 and part.sampling is not None, "the whole table is told"
        assert set(move.sources) | set(move.targets) <= set(part.group)
        self._check_held(move)
        before, block_owners = Counter(ref.instance for ref in live.table[: part.start // size]), _holders(live.table)
        for source, target in move.copies:
            index = live.table.index(source)
            assert (index + 1) * size <= part.start and source.instance != target.instance
            assert not self._owners[target] and target not in self._named
            self._owners[source].remove(move.request_id)
            self._owners[source].add(-forward.number)
            self._owners[target].add(move.request_id)
            self.slots[target] = list(self.slots[source])
            live.table[index] = target
        live.slots.move(live.table)
        after = Counter(ref.instance for ref in live.table[: part.start // size])
        unevenness = [sum(number**2 for number in held.values()) for held in (before, after)]
        fewer = len(_holders(live.table)) < len(block_owners)
        assert fewer or unevenness[1] < unevenness[0], "KV is more even than before, or on fewer members"

    def _take_over(self) -> None:
        """Requests that have moved since the step before: all their KV is where they go on."""
        cluster = self.cluster
        for number, live in self.live.items():
            request = self.requests[number]
            if request.targets:
                live.targets = request.targets
            if request.targets or not live.targets or not request.table or request.group != live.targets:
                continue
            live.targets = ()
            group, table = set(request.group), request.table[: len(live.table)]  # the next block may be there already
            assert {ref.instance for ref in table} == group <= set(cluster.decode or cluster.instances)
            assert not any(p.request_id == number for f in self.in_flight.values() for p in f.parts)
            coming = {target for moving in self.moving.values() for _, target in moving.move.copies}
            assert not coming & set(table), "all has arrived"
            assert len(set(table)) == len(table) == len(live.table)
            for ref in live.table:
                self._owners[ref].remove(number)
            for ref in table:
                self._owners[ref].add(number)
            live.table, live.group, live.is_new_there = table, request.group, True
            live.slots.move(live.table)
            names = self._names(number)
            stored = [self.slots[ref][offset] for ref, offset in live.slots.of]
            assert stored == names[: len(stored)] and len(stored) == live.next_start, "KV stays the same"


@dataclass(kw_only=True)
class _Live:
    group: tuple[int, ...]
    next_start: int
    slots: Slots
    rotation: Rotation | None = None
    sampled_on: int | None = None
    reservations: dict[int, tuple[object, set[int]]] = field(default_factory=dict)
    targets: tuple[int, ...] = ()
    is_new_there: bool = False
    table: list[BlockRef] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    rope_length: int = -1


def _holders(table: Sequence[BlockRef]) -> set[int]:
    return {ref.instance for ref in table}
