"""Parts of requests on groups, and moves of KV over a group that grows (Tetris §4.1)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from longspan.core.blocks import BlockRef, PrefixHit
from longspan.core.exchange import RING_Q, Exchange, exchange_of
from longspan.core.layouts import shard_span
from longspan.core.owners import Rotation
from longspan.core.view import ClusterView, RequestView, ScheduledPart
from longspan.policy.batching import Budget, loaded_first, single_part
from longspan.policy.choosing import Chooser
from longspan.policy.facts import Facts
from longspan.policy.shards import ZIGZAG, Capacity, Shape, block_owners, shard_chunk, shard_to_last
from longspan.policy.sharing import SharingOptions

if TYPE_CHECKING:
    from longspan.policy.chain_cuts import ChainCuts

_ANSWER_TOKENS = 200
"""Upper bound for the output tokens that a prefill is planned for. `max_tokens` is often much larger than an answer.
More tokens give smaller groups on links where a sharded decode is slower than one on a single instance. Policy `auto`
begins with the same number.
"""


def expected_answer(request: RequestView) -> int:
    """Return the output tokens whose decode counts in the choice of a group."""
    return min(_ANSWER_TOKENS, max(0, request.max_tokens - (request.num_tokens - request.num_prompt) - 1))


class GroupParts:
    """Schedules parts on groups, by the options and by predicted times.

    Args:
        chain_cuts: the pieces of chains. None if the options have the fractions.
        balance: whether KV is spread evenly over a group that has grown.
    """

    def __init__(
        self,
        num_instances: int,
        options: SharingOptions,
        facts: Facts,
        chain_cuts: ChainCuts | None = None,
        *,
        balance: bool = False,
    ) -> None:
        self._options, self._chain_cuts, self._balance = options, chain_cuts, balance
        self._decoding = exchange_of(options.decode)
        self.chooser = Chooser(num_instances, facts, options)

    def exchange(self, new_tokens: int, cached_tokens: int, group: tuple[int, ...], answer_tokens: int = 0) -> Exchange:
        return self._options.wanted or self.chooser.exchange(new_tokens, cached_tokens, group, answer_tokens)

    def next(self, request: RequestView, budget: Budget, most: int, partition: int = 0) -> ScheduledPart | None:
        """Schedule the next chunk of a prompt, or one token of a decode. Return None if the budget has no token for it.

        If the last member of a chain has all KV, it decodes alone.

        Args:
            most: maximum tokens of a sharded prompt on each member.
            partition: see `chunk`.
        """
        start = request.num_scheduled
        is_single = request.num_tokens - start == 1
        if (alone := _alone(request, is_single=is_single)) is not None:
            return single_part(request, alone, start, budget)
        if is_single:
            rotates = self._options.rotate == "token" and start >= request.num_prompt
            if rotates or start % request.block_size:
                return self._one_token(request, budget, rotates=rotates)
        return self.chunk(request, budget, request.group, None, most=most, end=request.num_tokens, partition=partition)

    def _one_token(self, request: RequestView, budget: Budget, *, rotates: bool) -> ScheduledPart | None:
        """Schedule the next token of a decode on the owner of its block, or on the member it rotates to.

        Return None if that member has no token left. If a rotated token begins a block and none is free, the part asks
        for the block nevertheless: a request with a later admission is preempted, or this request waits.
        """
        start, group = request.num_scheduled, request.group
        block_owners: tuple[int, ...] = ()
        rotation = None
        if rotates:
            rotation = request.rotation or Rotation(start=start, held=request.owners.counts(start))
            owner, num_before = rotation.place(start)
            if num_before % request.block_size == 0:
                block_owners = (group[owner],)
        else:
            owner = group.index(request.table[start // request.block_size].instance)
        if budget.tokens[group[owner]] <= 0:
            return None
        return ScheduledPart(
            request=request,
            group=group,
            start=start,
            stop=start + 1,
            runs=shard_span("single", start, start + 1, len(group), head=owner),
            block_owners=block_owners,
            exchange=self._of_step(RING_Q if request.hosted else self._decoding, request, 1, len(group)),
            rotation=rotation,
        )

    def chunk(
        self,
        request: RequestView,
        budget: Budget,
        group: tuple[int, ...],
        hit: PrefixHit | None,
        *,
        most: int,
        end: int,
        partition: int = 0,
    ) -> ScheduledPart | None:
        """Shard tokens of a request up to `end` over a group of several. An admission begins behind its `hit`.

        If the group has grown, KV is spread over it first, if there are free blocks. Each member but the last has a
        `partition` of a whole prompt, if it is not 0.
        """
        if hit is not None and hit.waits:
            return loaded_first(request, group, budget, hit)
        if hit is None and (moves := self._even_moves(request, budget, group)):
            part = self._chunk(request, budget, group, None, most=most, end=end, moves=moves)
            if part is not None and budget.fits(part.new_blocks):
                return part
        return self._chunk(request, budget, group, hit, most=most, end=end, partition=partition)

    def _even_moves(self, request: RequestView, budget: Budget, group: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        if not self._balance or set(group) <= set(request.group) or budget.outgrows(request):
            return ()
        full = request.table[: request.num_scheduled // request.block_size]
        return even_moves(full, group, {i: budget.blocks[i] - budget.reserved[i] for i in group})

    def _chunk(
        self,
        request: RequestView,
        budget: Budget,
        group: tuple[int, ...],
        hit: PrefixHit | None,
        *,
        most: int,
        end: int,
        moves: tuple[tuple[int, int], ...] = (),
        partition: int = 0,
    ) -> ScheduledPart | None:
        if hit is None:
            table, start, cost = request.table, request.num_scheduled, Counter(instance for _, instance in moves)
        else:
            table, start, cost = hit.refs, hit.num_tokens, budget.view.kv.hit_cost(hit, budget.claimed)
        capacity = Capacity(
            tokens=tuple([min(budget.tokens[i], most) for i in group]),
            blocks=tuple([budget.blocks[i] - cost.get(i, 0) for i in group]),
            block_size=request.block_size,
        )
        if budget.outgrows(request):
            from longspan.policy.on_hosts import capacity_now  # noqa: PLC0415 - few requests are so long

            capacity = capacity_now(request, group, budget, capacity, hit)
        if not any(capacity.tokens):
            return None
        members = {instance: member for member, instance in enumerate(group)}  # -1 for blocks on hosts
        reads_hosts = bool(request.hosted) if hit is None else any(ref.pool not in members for ref in hit.refs)
        exchange, shape = RING_Q if reads_hosts else self._decoding, ZIGZAG
        if request.num_tokens - start > 1:
            new_tokens = min(end - start, sum(capacity.tokens))
            answer_tokens = expected_answer(request) if start == 0 and new_tokens == request.num_tokens else 0
            exchange = RING_Q if reads_hosts else self.exchange(new_tokens, start, group, answer_tokens)
            shape = self._shape(exchange, request, new_tokens, start, len(group), partition)
        moved = dict(moves)
        owners = [members.get(moved.get(index, ref.pool), -1) for index, ref in enumerate(table)]
        to_last = self._options.leaves_kv_with_last(exchange) and not is_too_large(request, budget.view, 1)
        shards = shard_to_last(start, end, owners, capacity, shape) if to_last else None
        kv_owner = None if shards is None else group[-1]
        shards = shards or shard_chunk(start, end, owners, capacity, shape, _first_member(request, len(group)))
        if shards is None:
            return None
        stop = max([run.stop for runs in shards for run in runs])
        begins = block_owners(shards, len(table), request.blocks_for(stop), request.block_size)
        return ScheduledPart(
            request=request,
            group=group,
            start=start,
            stop=stop,
            runs=shards,
            block_owners=tuple([group[member] if kv_owner is None else kv_owner for member in begins]),
            exchange=self._of_step(exchange, request, stop - start, len(group)),
            kv_owner=kv_owner,
            hit=hit,
            moves=moves,
        )

    def _of_step(self, exchange: Exchange, request: RequestView, num_tokens: int, members: int) -> Exchange:
        sparse = request.sparse
        if sparse is not None and exchange.has_sparse_form and num_tokens > 1:
            return exchange.sparse_form(sparse)
        if sparse is not None and sparse.drop_in_decode and exchange == RING_Q and num_tokens == 1:
            # After a preemption, KV may be on other members, which do not know the dropped tokens.
            keeps_members = not request.hosted and not request.num_preemptions
            return exchange.sparse_form(sparse) if keeps_members else exchange
        return self.chooser.of_step(exchange, num_tokens, members)

    def _shape(
        self,
        exchange: Exchange,
        request: RequestView,
        new_tokens: int,
        cached_tokens: int,
        members: int,
        partition: int,
    ) -> Shape:
        if request.sparse is not None and exchange.has_sparse_form:
            partition = request.sparse.partition
        if not exchange.traits.in_order:
            return _partitions_shape(request, partition, new_tokens, members) if partition else self._options.shape
        fractions = self._options.fractions_by_member
        if self._chain_cuts is not None:
            fractions = self._chain_cuts.fractions(new_tokens, cached_tokens, members)
        return Shape(layout="contiguous", fractions=fractions, chained=True)


def _partitions_shape(request: RequestView, partition: int, new_tokens: int, members: int) -> Shape:
    """Give each member a partition of a whole prompt, or even pieces of a chunk."""
    if new_tokens < request.num_tokens or new_tokens > members * partition:
        return Shape(layout="contiguous", in_order=True)
    pieces = [max(0, min(partition, new_tokens - member * partition)) for member in range(members)]
    return Shape(layout="contiguous", fractions=tuple([number / new_tokens for number in pieces]), in_order=True)


def _first_member(request: RequestView, members: int) -> int:
    """Return the member that takes the first block, which is a different one for each request.

    Members then compute equally many of the decodes of a step (Context Parallelism §3.6), even if the group gets every
    second request only.
    """
    return (request.id + request.id // members) % members


def _alone(request: RequestView, *, is_single: bool) -> int | None:
    """Return the only instance of a group, or for single tokens the owner of all KV. Else return None."""
    if len(request.group) == 1:
        return request.group[0]
    kv_owner = request.kv_owner
    alone = kv_owner is not None and is_single and all(ref.instance == kv_owner for ref in request.table)
    return kv_owner if alone else None


def is_too_large(request: RequestView, view: ClusterView, members: int) -> bool:
    return request.blocks_for(request.num_tokens) > members * view.kv.num_blocks(0)


def even_moves(
    blocks: Sequence[BlockRef], group: Sequence[int], free_blocks: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """Return moves (index into `blocks`, new owner) after which the members differ by at most one block.

    The number of moves is minimal: the members with the most blocks keep the odd ones, and only the last blocks of a
    member move. No member receives more blocks than its `free_blocks`.
    """
    held = defaultdict[int, list[int]](list)
    for index, ref in enumerate(blocks):
        held[ref.instance].append(index)
    each, odd = divmod(len(blocks), len(group))
    by_size = sorted(group, key=lambda instance: -len(held[instance]))
    wanted = {instance: each + (rank < odd) for rank, instance in enumerate(by_size)}
    receivers = [i for i in group for _ in range(min(wanted[i] - len(held[i]), free_blocks[i]))]
    leaving = [index for i in group for index in held[i][wanted[i] :]]
    return tuple(sorted(zip(leaving, receivers, strict=False)))
