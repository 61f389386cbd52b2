"""Parts of requests on groups of several instances; KV is spread anew over a group that has grown (Tetris §4.1)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from longspan.core.exchange import RING_Q, Exchange, decoding, exchange_of, exchanges, takers
from longspan.core.owners import BlockRef, PrefixHit, Rotation
from longspan.core.runs import SpanShards, shard_span
from longspan.core.view import ClusterView, RequestView, ScheduledPart
from longspan.cost.partitions import parse_fractions
from longspan.policy.batching import Budget, single_part
from longspan.policy.choosing import Chooser
from longspan.policy.sharding import Partitions, Room, Shape, block_owners, shard_chunk, shard_to_last


def check_exchange(key: str, given: str, choices: Sequence[Exchange], *, automatic: bool = True) -> None:
    """Raises ValueError unless an option names one of these kinds of exchange, or `auto` where that is possible."""
    kinds = ["auto"] * automatic + [one.kind for one in choices]
    if given not in kinds:
        raise ValueError(f"option {key} is one of {', '.join(kinds)}, but {given!r} given")


@dataclass(frozen=True, kw_only=True)
class SharingOptions:
    """Options that tell how a request is sharded over a group.

    Attributes:
        exchange: of prefill; `auto` chooses for each step what is expected to be quickest.
        decode: the exchange of single tokens. All but `ring_q` move the KV of the whole request for each of them.
        layout: of prefill; `auto` is zigzag, or contiguous for a chain or when fractions are given.
        fractions: of a contiguous layout, one per instance (`0.6,0.4`); empty for even pieces.
        dense: with `gather_kv`, compute the scores that causality hides, too, as KV-Runahead's baseline does.
        weights: with `alltoall` and tensor parallelism, every rank prefills with the unsharded weights of a layer,
            and gets them from the `host`, whose copy CPUs map, or from the `peers` in its instance; `auto` does so
            where it sends fewer bytes than summing outputs, and takes what is quicker.
        home: where a chain leaves the KV: all of it with the `last` instance while that has room, which then decodes
            alone, or each token's where it was `computed`; `auto` is last.
        rotate: who holds new tokens of a decode: by `block`, the member with the fewest blocks takes the next block; by
            `token`, the one with the fewest tokens takes the next token. What members hold then differs by one token at
            most once it has evened out, but the next turn of a conversation computes the answer again: only blocks with
            neighbouring tokens are found again.

    Raises:
        ValueError: for options that contradict each other.
    """

    exchange: str = "auto"
    decode: str = RING_Q.kind
    layout: Literal["auto", "zigzag", "striped", "contiguous"] = "auto"
    fractions: str = ""
    dense: bool = False
    weights: Literal["auto", "host", "peers"] = "auto"
    home: Literal["auto", "last", "computed"] = "auto"
    rotate: Literal["block", "token"] = "block"

    def __post_init__(self) -> None:
        check_exchange("exchange", self.exchange, tuple(exchanges()))
        check_exchange("decode", self.decode, decoding(), automatic=False)
        traits = None if self.exchange == "auto" else exchange_of(self.exchange).traits
        if traits is not None and self.layout not in {"auto", *traits.layouts}:
            raise ValueError(
                f"exchange {self.exchange} computes with layout {' or '.join(traits.layouts)}, but "
                f"layout {self.layout} given: use {traits.layouts[0]}"
            )
        if self.fractions and self.layout not in {"auto", "contiguous"}:
            raise ValueError(f"fractions are for layout contiguous, but {self.layout} given: leave one of them out")
        if self.dense and (traits is None or "dense" not in traits.parameters):
            raise ValueError(
                f"dense is for exchange {takers('dense')}, but {self.exchange} given: leave one of them out"
            )
        if self.weights != "auto" and (traits is None or "weights" not in traits.parameters):
            raise ValueError(
                f"weights are for exchange {takers('weights')}, but {self.exchange} given: leave one of them out"
            )
        if self.home != "auto" and traits is not None and traits.keeps != "later":
            raise ValueError(f"home is for exchange chain, but {self.exchange} given: leave one of them out")
        if self.fractions:
            parse_fractions(self.fractions)

    def check_group(self, size: int) -> None:
        """Raises ValueError when there are not as many fractions as instances."""
        given = len(parse_fractions(self.fractions)) if self.fractions else size
        if given != size:
            raise ValueError(
                f"fractions {self.fractions} are {given}, but there are {size} instances: give one for each"
            )

    def shape(self, exchange: Exchange) -> Shape:
        """Returns the layout of prompts for an exchange."""
        return self._shapes[exchange.traits.in_order]

    def check_tp(self, tp: int | None) -> None:
        """Raises ValueError when weights are to be made whole that are, on instances of one rank; None is unknown."""
        if self.weights != "auto" and tp == 1:
            raise ValueError(
                f"weights={self.weights} is for instances split by tensor parallelism, but tp is 1: leave it out, or "
                "split them with --parallel, such as 2xtp2"
            )

    @cached_property
    def _shapes(self) -> tuple[Shape, Shape]:
        """Holds the shape for all exchanges but chains, and the one for chains."""
        layout = self.layout
        if layout == "auto":
            layout = "contiguous" if self.fractions else "zigzag"
        fractions = parse_fractions(self.fractions) if self.fractions else ()
        return Shape(layout=layout, fractions=fractions), Shape(layout="contiguous", fractions=fractions, chained=True)

    @property
    def chains(self) -> bool:
        """Tells whether the layout can be that of a chain."""
        return self.layout in {"auto", "contiguous"}

    @cached_property
    def decoding(self) -> Exchange:
        """Returns the exchange of single tokens."""
        return exchange_of(self.decode)

    @cached_property
    def wanted(self) -> Exchange | None:
        """Returns the exchange of prefill; None when it is to be chosen."""
        if self.exchange == "auto":
            return None
        return exchange_of(self.exchange)._replace(dense=self.dense)


def even_moves(
    blocks: Sequence[BlockRef], group: Sequence[int], room: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """Chooses pairs of an index into `blocks` and the member it goes to; members then differ by one block at most.

    There are as few moves as can be: whoever has most keeps the odd blocks, and only the last blocks of a member leave
    it. No member is given more blocks than it has `room` for.
    """
    places = defaultdict[int, list[int]](list)
    for place, ref in enumerate(blocks):
        places[ref.instance].append(place)
    held = Counter({instance: len(found) for instance, found in places.items()})
    each, odd = divmod(len(blocks), len(group))
    most = sorted(group, key=lambda instance: -held[instance])
    wanted = {instance: each + (rank < odd) for rank, instance in enumerate(most)}
    takers = [i for i in group for _ in range(min(max(0, wanted[i] - held[i]), max(0, room[i])))]
    givers = [place for i in group for place in places[i][wanted[i] :]]
    return tuple(sorted(zip(givers, takers, strict=False)))


class GroupParts:
    """Shapes shares by the options, and by what is expected to be quickest.

    Args:
        balance: whether KV is spread evenly over a group that has grown.
    """

    def __init__(
        self,
        options: SharingOptions,
        chooser: Chooser,
        partitions: Partitions | None = None,
        *,
        balance: bool = False,
    ) -> None:
        self._options, self._chooser, self._partitions, self._balance = options, chooser, partitions, balance

    def exchange(self, new_tokens: int, cached_tokens: int, members: int) -> Exchange:
        """Returns the exchange of a step of prefill."""
        return self._options.wanted or self._chooser.exchange(new_tokens, cached_tokens, members)

    def next(self, request: RequestView, budget: Budget, most: int) -> ScheduledPart | None:
        """Schedules the next chunk of a prompt or token of a decode, which the end of a chain goes on with alone.

        `most` bounds the tokens of a sharded prompt on each member; None when there are none left to give.
        """
        start = request.num_scheduled
        is_single = request.num_tokens - start == 1
        if (end := _alone(request, is_single=is_single)) is not None:
            return single_part(request, end, start, budget)
        if is_single and self._options.rotate == "token" and start >= request.num_prompt:
            return _rotated_part(request, self._options.decoding, budget)
        if is_single and start % request.block_size:
            return _one_token_part(request, self._options.decoding, budget)
        return self.chunk(request, budget, request.group, None, most=most, end=request.num_tokens)

    def chunk(
        self,
        request: RequestView,
        budget: Budget,
        group: tuple[int, ...],
        hit: PrefixHit | None,
        *,
        most: int,
        end: int,
    ) -> ScheduledPart | None:
        """Shards tokens of a request up to `end` over a group of several; those of an admission behind its `hit`.

        When the group has grown, what the request holds is spread over it first, if there is room for that.
        """
        moves = self._moves(request, budget, group) if hit is None else ()
        scheduled = self._chunk(request, budget, group, hit, most=most, end=end, moves=moves)
        if moves and (scheduled is None or not budget.fits(scheduled.new_blocks)):
            scheduled = self._chunk(request, budget, group, hit, most=most, end=end)
        return scheduled

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
    ) -> ScheduledPart | None:
        table = list(hit.refs) if hit is not None else request.table
        start = hit.num_tokens if hit is not None else request.num_scheduled
        cost = budget.view.kv.hit_cost(hit, budget.claimed) if hit is not None else Counter[int]()
        if moves:
            cost.update(instance for _, instance in moves)
        room = Room(
            tokens=tuple([min(budget.tokens[i], most) for i in group]),
            blocks=tuple([budget.blocks[i] - cost.get(i, 0) for i in group]),
            block_size=request.block_size,
        )
        exchange = self._options.decoding
        shape = Shape()
        if request.num_tokens - start > 1:
            exchange = self.exchange(min(end - start, sum(room.tokens)), start, len(group))
            shape = self._shape(exchange, request.num_tokens, len(group))
        owners = [group.index(ref.instance) for ref in table]
        for index, instance in moves:
            owners[index] = group.index(instance)
        sharded: SpanShards | None = None
        held: tuple[int, ...] = ()
        kv_owner = None
        later = exchange.traits.keeps == "later" and self._options.home != "computed"
        if later and not is_too_large(request, budget.view, 1):
            sharded, held = shard_to_last(start, end, owners, room, shape)
            kv_owner = None if sharded is None else group[-1]
        if sharded is None:
            sharded = shard_chunk(start, end, owners, room, shape)
            if sharded is None:
                return None
            stop = max([run.stop for runs in sharded for run in runs])
            held = block_owners(sharded, len(table), request.blocks_for(stop), request.block_size)
        return ScheduledPart(
            request=request,
            group=group,
            start=start,
            stop=max([run.stop for runs in sharded for run in runs]),
            runs=sharded,
            block_owners=tuple([group[member] for member in held]),
            exchange=self._chooser.of_step(exchange, sum([len(run) for runs in sharded for run in runs]), len(group)),
            kv_owner=kv_owner,
            hit=hit,
            moves=moves,
        )

    def _moves(self, request: RequestView, budget: Budget, group: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Chooses full blocks that go to other members before the first step of a larger group."""
        if not self._balance or set(group) <= set(request.group):
            return ()
        full = request.table[: request.num_scheduled // request.block_size]
        return even_moves(full, group, {i: budget.blocks[i] - budget.reserved[i] for i in group})

    def _shape(self, exchange: Exchange, num_tokens: int, members: int) -> Shape:
        """Returns the shape of a prompt of this length on so many members."""
        shape = self._options.shape(exchange)
        if not exchange.traits.in_order or self._partitions is None:
            return shape
        return replace(shape, fractions=self._partitions.fractions(num_tokens, members))


def _one_token_part(request: RequestView, exchange: Exchange, budget: Budget) -> ScheduledPart | None:
    """Schedules the next token of a decode inside a block on the member that owns the block, if that has budget."""
    start = request.num_scheduled
    assert start % request.block_size, "a block that begins is sharded like others"
    owner = request.group.index(request.table[start // request.block_size].instance)
    return _one_token(request, owner, exchange, budget)


def _rotated_part(request: RequestView, exchange: Exchange, budget: Budget) -> ScheduledPart | None:
    """Schedules the next token of a decode that rotates by token, if its owner has budget.

    When the owner has to begin a block and none is free there, the part asks for it all the same: who came later gives
    way, or else it waits.
    """
    start, group = request.num_scheduled, request.group
    rotation = request.rotation or Rotation(start=start, held=request.owners.counts(start))
    owner, num_before = rotation.place(start)
    block_owners = () if num_before % request.block_size else (group[owner],)
    return _one_token(request, owner, exchange, budget, block_owners, rotation)


def _one_token(
    request: RequestView,
    owner: int,
    exchange: Exchange,
    budget: Budget,
    block_owners: tuple[int, ...] = (),
    rotation: Rotation | None = None,
) -> ScheduledPart | None:
    """Schedules the next token of a request on member `owner` of its group."""
    start, group = request.num_scheduled, request.group
    if budget.tokens[group[owner]] <= 0:
        return None
    return ScheduledPart(
        request=request,
        group=group,
        start=start,
        stop=start + 1,
        runs=shard_span("single", start, start + 1, len(group), head=owner),
        block_owners=block_owners,
        exchange=exchange,
        rotation=rotation,
    )


def _alone(request: RequestView, *, is_single: bool) -> int | None:
    """Returns the instance that goes on by itself: the only one, or for single tokens the owner of all KV."""
    if len(request.group) == 1:
        return request.group[0]
    kv_owner = request.kv_owner
    alone = kv_owner is not None and is_single and all(ref.instance == kv_owner for ref in request.table)
    return kv_owner if alone else None


def is_too_large(request: RequestView, view: ClusterView, members: int) -> bool:
    """Tells whether a request outgrows so many empty pools."""
    return request.blocks_for(request.num_tokens) > members * view.kv.num_blocks(0)
