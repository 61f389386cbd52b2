"""Sharding over groups: the share of each member of a chunk, and moves of KV over a group that grows (Tetris §4.1)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from longspan.core.blocks import BlockRef, PrefixHit
from longspan.core.exchange import BUILT_IN, RING_Q, Exchange, decoding, exchange_of, exchanges, takers
from longspan.core.exchange_plugins import exchange_names
from longspan.core.layouts import shard_span
from longspan.core.owners import Rotation
from longspan.core.runs import Layout, Run, SpanShards
from longspan.core.view import ClusterView, RequestView, ScheduledPart
from longspan.cost.partition_table import PartitionTable, parse_fractions
from longspan.errors import ParameterError
from longspan.policy.batching import Budget, loaded_first, single_part
from longspan.policy.choosing import Chooser
from longspan.policy.facts import Facts

_ANSWER_TOKENS = 200
"""Upper bound for the output tokens that a prefill is planned for. `max_tokens` is often much larger than an answer.
More tokens give smaller groups on links where a sharded decode is slower than one on a single instance. Policy `auto`
begins with the same number.
"""


def expected_answer(request: RequestView) -> int:
    """Returns the output tokens whose decode counts in the choice of a group: as many as it may have, up to a bound."""
    return min(_ANSWER_TOKENS, max(0, request.max_tokens - (request.num_tokens - request.num_prompt) - 1))


def check_exchange(key: str, given: str, choices: Callable[[], Iterable[Exchange]], *, automatic: bool = True) -> None:
    """Raises ParameterError unless an option names one of these exchanges, or `auto` where that is possible."""
    if given not in BUILT_IN and given in exchange_names():
        from longspan.cost.channels import cost_of  # noqa: PLC0415 - plug-ins alone

        cost_of(exchange_of(given))  # an exchange of a plug-in is a choice once it is loaded
    kinds = ["auto"] * automatic + [one.kind for one in choices()]
    if given not in kinds:
        raise ParameterError(key, f"is one of {', '.join(kinds)}, but {given!r} given", given)


@dataclass(frozen=True, kw_only=True)
class SharingOptions:
    """Options that tell how a request is sharded over a group.

    Attributes:
        exchange: of prefill; `auto` chooses for each step what is expected to be quickest.
        decode: the exchange of single tokens. All but `ring_q` move the KV of the whole request for each of them.
        layout: of prefill; `auto` is zigzag, or contiguous for a chain or when fractions are given.
        fractions: of a contiguous layout, one per instance (`0.6,0.4`); empty for even pieces.
        dense: with `gather_kv`, compute the scores that causality hides, too, as KV-Runahead's baseline does.
        weights: with `alltoall` and tensor parallelism, every rank prefills with the unsharded weights of a layer, and
            gets them from the `host`, whose copy CPUs map, or from the `peers` in its instance; `auto` does so where it
            sends fewer bytes than summing outputs, and takes what is quicker.
        home: where a chain leaves the KV: all of it with the `last` instance while that has room, which then decodes
            alone, or each token's where it was `computed`; `auto` is last.
        rotate: who holds new tokens of a decode: by `block`, the member with the fewest blocks takes the next block; by
            `token`, the one with the fewest tokens takes the next token. What members hold then differs by one token at
            most once it has evened out, but the next turn of a conversation computes the answer again: only blocks with
            neighbouring tokens are found again.
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
        check_exchange("exchange", self.exchange, exchanges)
        check_exchange("decode", self.decode, decoding, automatic=False)
        traits = None if self.exchange == "auto" else exchange_of(self.exchange).traits
        if traits is not None and self.layout not in {"auto", *traits.layouts}:
            able, use = " or ".join(traits.layouts), traits.layouts[0]
            problem = f"{self.exchange} computes with layout {able}, but layout {self.layout} given: use {use}"
            raise ParameterError("exchange", problem, self.exchange)
        if self.fractions and self.layout not in {"auto", "contiguous"}:
            problem = f"are for layout contiguous, but {self.layout} given: leave one of them out"
            raise ParameterError("fractions", problem, self.fractions)
        parameters = () if traits is None else traits.parameters
        but_given = f"but {self.exchange} given: leave one of them out"
        if self.dense and "dense" not in parameters:
            raise ParameterError("dense", f"is for exchange {takers('dense')}, {but_given}", self.dense)
        if self.weights != "auto" and "weights" not in parameters:
            raise ParameterError("weights", f"are for exchange {takers('weights')}, {but_given}", self.weights)
        if self.home != "auto" and traits is not None and traits.keeps != "later":
            able = ", ".join(one.kind for one in exchanges() if one.traits.keeps == "later")
            raise ParameterError("home", f"is for exchange {able}, {but_given}", self.home)
        if self.fractions:
            parse_fractions(self.fractions)

    def check_instances(self, number: int, tp: int | None) -> None:
        """Checks the options against the instances; `tp` is None while it is not known."""
        if self.fractions and (given := len(self.fractions_by_member)) != number:
            problem = f"{self.fractions} are {given}, but there are {number} instances: give one for each"
            raise ParameterError("fractions", problem, self.fractions)
        if self.weights != "auto" and tp == 1:
            problem = (
                f"({self.weights}) are for instances split by tensor parallelism, but tp is 1: leave them out, or "
                "split instances with parallel, such as 2xtp2"
            )
            raise ParameterError("weights", problem, self.weights)

    @cached_property
    def fractions_by_member(self) -> tuple[float, ...]:
        """The fractions in order of the members, empty for even pieces."""
        return parse_fractions(self.fractions) if self.fractions else ()

    @cached_property
    def shape(self) -> Shape:
        """The layout of prompts for all exchanges but chains."""
        layout = self.layout
        if layout == "auto":
            layout = "contiguous" if self.fractions else "zigzag"
        return Shape(layout=layout, fractions=self.fractions_by_member)

    @cached_property
    def wanted(self) -> Exchange | None:
        """The exchange of prefill; None when it is to be chosen."""
        return None if self.exchange == "auto" else exchange_of(self.exchange)._replace(dense=self.dense)


_REMEDY = "measure it with longspan profile --partitions, or choose partition=even"


class Partitions:
    """The paper's KVR-E (`even`), KVR-S (`searched`) and KVR-P (`predicted` from the two nearest lengths).

    `auto` takes predicted pieces if anything was searched for such chains, else even ones; so does every kind while
    nobody has looked for a table.

    Attributes:
        whole: prompts are to be one chain each, which is how cuts are searched, and what KVR-E is. Not so on a single
            instance; nor when pieces are even for want of a table: then several chains balance members better.

    Args:
        members: of the longest chain.

    Raises:
        ValueError: when pieces are to be searched or predicted ones, and the table has none for this model and group.
    """

    def __init__(self, kind: Literal["auto", "even", "searched", "predicted"], facts: Facts, members: int) -> None:
        self._kind, self._table, self._model = kind, facts.partitions or PartitionTable(), facts.model
        known = self._table.lengths(self._model, members)
        if kind == "auto" or facts.partitions is None:
            self._kind = "predicted" if known else "even"
        elif kind != "even" and members > 1 and not known:
            raise ValueError(
                f"partition={kind} needs a table of partitions, but there is none for {members} instances with this "
                f"model, precision and number of threads: {_REMEDY}"
            )
        self.whole = members > 1 and (kind == "even" or self._kind != "even")

    def check(self, length: int, members: int) -> None:
        """Raises ValueError when searched pieces are wanted for a prompt of this length, and there are none."""
        if self._kind == "searched" and members > 1 and self._table.exact(self._model, members, length) is None:
            known = self._table.lengths(self._model, members)
            lengths = ", ".join(f"{length:,}" for length in known) or "none"
            raise ValueError(
                f"partition=searched has none for {length:,} tokens on {members} instances, only for {lengths}: "
                f"{_REMEDY} or predicted"
            )

    def fractions(self, new_tokens: int, cached_tokens: int, members: int) -> tuple[float, ...]:
        """Returns the fractions of one chain, which computes `new_tokens` in a step; empty for even pieces.

        Chains are searched for whole prompts. What has no entry of its own is predicted: a part of a prompt, or a
        request that gave its KV up and comes back longer. Behind cached tokens, which all members see alike, pieces are
        more even: as far from even ones as the searched ones are, times the part of all tokens that is new.
        """
        if self._kind == "even":
            return ()
        exact = self._kind == "searched" and not cached_tokens
        found = self._table.exact(self._model, members, new_tokens) if exact else None
        found = found or self._table.predict(self._model, members, new_tokens) or ()
        new = new_tokens / (new_tokens + cached_tokens)
        return tuple([new * fraction + (1 - new) / members for fraction in found])


class GroupParts:
    """Schedules parts on groups by the options, and by what is expected to be quickest.

    Args:
        partitions: the pieces of chains; None when the options have them.
        balance: whether KV is spread evenly over a group that has grown.
    """

    def __init__(
        self,
        num_instances: int,
        options: SharingOptions,
        facts: Facts,
        partitions: Partitions | None = None,
        *,
        balance: bool = False,
    ) -> None:
        self._options, self._partitions, self._balance = options, partitions, balance
        self._decoding = exchange_of(options.decode)
        chains = options.layout in {"auto", "contiguous"}
        self.chooser = Chooser(
            num_instances,
            facts,
            options.wanted,
            chains=chains,
            weights=options.weights,
            decode=self._decoding,
            keeps_later=options.home != "computed",
        )

    def exchange(self, new_tokens: int, cached_tokens: int, members: int, answer_tokens: int = 0) -> Exchange:
        return self._options.wanted or self.chooser.exchange(new_tokens, cached_tokens, members, answer_tokens)

    def next(self, request: RequestView, budget: Budget, most: int, partition: int = 0) -> ScheduledPart | None:
        """Schedules the next chunk of a prompt, or token of a decode; None when the budget has no token left for it.

        After a chain its last member goes on alone. `most` bounds the tokens of a sharded prompt on each member; for
        `partition`, see `chunk`.
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
        """Schedules the next token of a decode on the owner of its block, or on whom it rotates to, if that has budget.

        When a token that rotates has to begin a block and none is free there, the part asks for it all the same: who
        came later gives way, or else it waits.
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
            exchange=RING_Q if request.hosted else self._decoding,
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
        """Shards tokens of a request up to `end` over a group of several; those of an admission behind its `hit`.

        When the group has grown, what the request holds is spread over it first, if there is room for that. Each member
        has a `partition` of a whole prompt, if one is given, and the last one what is left.
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
        room = Room(
            tokens=tuple([min(budget.tokens[i], most) for i in group]),
            blocks=tuple([budget.blocks[i] - cost.get(i, 0) for i in group]),
            block_size=request.block_size,
        )
        if budget.outgrows(request):
            from longspan.policy.on_hosts import room_now  # noqa: PLC0415 - few requests are so long

            room = room_now(request, group, budget, room, hit)
        if not any(room.tokens):
            return None
        members = {instance: member for member, instance in enumerate(group)}  # -1 for blocks on hosts
        reads_hosts = bool(request.hosted) if hit is None else any(ref.pool not in members for ref in hit.refs)
        exchange, shape = RING_Q if reads_hosts else self._decoding, _ZIGZAG
        if request.num_tokens - start > 1:
            new_tokens = min(end - start, sum(room.tokens))
            answer_tokens = expected_answer(request) if start == 0 and new_tokens == request.num_tokens else 0
            exchange = RING_Q if reads_hosts else self.exchange(new_tokens, start, len(group), answer_tokens)
            shape = self._shape(exchange, request, new_tokens, start, len(group), partition)
        moved = dict(moves)
        owners = [members.get(moved.get(index, ref.pool), -1) for index, ref in enumerate(table)]
        to_last = self._leaves_kv_with_last(exchange) and not is_too_large(request, budget.view, 1)
        shards = _shard_to_last(start, end, owners, room, shape) if to_last else None
        kv_owner = None if shards is None else group[-1]
        shards = shards or shard_chunk(start, end, owners, room, shape, _first_member(request, len(group)))
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
        if request.sparse is not None and exchange.has_sparse_form and num_tokens > 1:
            return exchange.sparse_form(request.sparse)
        return self.chooser.of_step(exchange, num_tokens, members)

    def _leaves_kv_with_last(self, exchange: Exchange) -> bool:
        return exchange.traits.keeps == "later" and self._options.home != "computed"

    def _shape(
        self,
        exchange: Exchange,
        request: RequestView,
        new_tokens: int,
        cached_tokens: int,
        members: int,
        partition: int,
    ) -> Shape:
        """Returns the shape of the next chunk, on so many members."""
        if request.sparse is not None and exchange.has_sparse_form:
            return _partitions_shape(request, request.sparse.partition, new_tokens, members)
        if partition and not exchange.traits.in_order:
            return _partitions_shape(request, partition, new_tokens, members)
        if not exchange.traits.in_order:
            return self._options.shape
        fractions = self._options.fractions_by_member
        if self._partitions is not None:
            fractions = self._partitions.fractions(new_tokens, cached_tokens, members)
        return Shape(layout="contiguous", fractions=fractions, chained=True)


def _partitions_shape(request: RequestView, partition: int, new_tokens: int, members: int) -> Shape:
    """Gives each member a partition of a whole prompt, and even pieces of a chunk."""
    if new_tokens < request.num_tokens or new_tokens > members * partition:
        return Shape(layout="contiguous", in_order=True)
    left = [max(0, min(partition, new_tokens - member * partition)) for member in range(members)]
    return Shape(layout="contiguous", fractions=tuple([number / new_tokens for number in left]), in_order=True)


def _first_member(request: RequestView, members: int) -> int:
    """Returns the member that is the first to take a block: another one for each request, so that of those that decode
    together each member computes as many (Context Parallelism §3.6); also if a group gets only every second request.
    """
    return (request.id + request.id // members) % members


def _alone(request: RequestView, *, is_single: bool) -> int | None:
    """Returns the instance that goes on alone: the only one, or for single tokens the owner of all KV."""
    if len(request.group) == 1:
        return request.group[0]
    kv_owner = request.kv_owner
    alone = kv_owner is not None and is_single and all(ref.instance == kv_owner for ref in request.table)
    return kv_owner if alone else None


def is_too_large(request: RequestView, view: ClusterView, members: int) -> bool:
    return request.blocks_for(request.num_tokens) > members * view.kv.num_blocks(0)


def even_moves(
    blocks: Sequence[BlockRef], group: Sequence[int], room: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """Chooses pairs of an index into `blocks` and its new owner; members then differ by one block at most.

    There are as few moves as can be: whoever has most keeps the odd blocks, and only the last blocks of a member leave
    it. No member is given more blocks than it has `room` for.
    """
    held = defaultdict[int, list[int]](list)
    for index, ref in enumerate(blocks):
        held[ref.instance].append(index)
    each, odd = divmod(len(blocks), len(group))
    most = sorted(group, key=lambda instance: -len(held[instance]))
    wanted = {instance: each + (rank < odd) for rank, instance in enumerate(most)}
    receivers = [i for i in group for _ in range(min(wanted[i] - len(held[i]), room[i]))]
    leaving = [index for i in group for index in held[i][wanted[i] :]]
    return tuple(sorted(zip(leaving, receivers, strict=False)))


# ---------------------------------------------------------------- shards of the next chunk


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layout of chunks, and for a contiguous one the fractions of the members, if they are not even.

    For a chain, `chained`, the first member begins even inside a block that another one holds. With `in_order` members
    have neighbouring pieces in their own order.
    """

    layout: Layout = "zigzag"
    fractions: tuple[float, ...] = ()
    chained: bool = False
    in_order: bool = False


@dataclass(frozen=True, kw_only=True)
class Room:
    """Tokens to compute and free KV blocks that each member of a group can still take in this step."""

    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    block_size: int

    def fits(self, shards: SpanShards) -> bool:
        for runs, tokens, blocks in zip(shards, self.tokens, self.blocks, strict=True):
            if sum([len(run) for run in runs]) > tokens:
                return False
            if sum([len(_begun(run, self.block_size)) for run in runs]) > blocks:
                return False
        return True


_ZIGZAG = Shape()


def shard_chunk(
    start: int, stop: int, owners: Sequence[int], room: Room, shape: Shape = _ZIGZAG, first: int = 0
) -> SpanShards | None:
    """Shards the next chunk of the tokens `[start, stop)`; `owners` names the member that holds each block so far.

    The rest in the wanted shape, if it fits; else as many blocks as can be sharded in that shape; else, with little
    room, part of one block to the member that holds it, or for a new one to the member whose turn it is. None when
    there is room for no token. Shards may ask for a block that is not free when none is: then somebody must give way.

    Members take turns in the request's blocks from `first` on. Whoever holds two more than the one with the fewest has
    to wait, but not for one more: all requests behind a prefix that they share would begin with the same member. Where
    no block is free, the member with the fewest is to get one.
    """
    num_members, size = len(room.tokens), room.block_size
    members, held, next_one = range(num_members), Counter(owners), first + len(owners)
    enough = min(held[m] for m in members) + any(number > 0 for number in room.blocks)
    by_turn = sorted(members, key=lambda m: (max(held[m], enough), (m - next_one) % num_members))
    head = None
    if start % size:
        head = 0 if shape.chained else owners[start // size]
    # A chain has its own order, and fractions are of certain members.
    order = members if shape.chained or shape.fractions or shape.in_order else by_turn
    turns = {member: turn for turn, member in enumerate(order)}
    for end in chain((stop,), _ends(start, room, shape)):
        if start < end <= stop:
            in_order = shard_span(
                shape.layout,
                *(start, end, num_members),
                align=size,
                head=None if head is None else turns[head],
                fractions=shape.fractions,
            )
            shards = tuple([in_order[turns[member]] for member in members])
            if room.fits(shards):
                return shards
    return _shard_one_block(start, stop, head, by_turn, room)


def _shard_to_last(start: int, stop: int, owners: Sequence[int], room: Room, shape: Shape) -> SpanShards | None:
    """Shards a chunk for a chain whose last member holds all KV; returns None when it has no room for that."""
    shards = shard_chunk(start, stop, owners, replace(room, blocks=(stop,) * len(room.tokens)), shape)
    if shards is None:
        return None
    num_blocks = -(-max(run.stop for runs in shards for run in runs) // room.block_size) - len(owners)
    return shards if num_blocks <= room.blocks[-1] else None


def _ends(start: int, room: Room, shape: Shape) -> Iterator[int]:
    """Yields ends of a chunk that fills the room: even shards have whole rounds of blocks, others are rounded."""
    num_members, size = len(room.tokens), room.block_size
    if shape.fractions:
        most = start + int(
            min(tokens / part for tokens, part in zip(room.tokens, shape.fractions, strict=True) if part)
        )
        yield from ((most // size - less) * size for less in range(2 * num_members))
    else:
        most = start + min(room.tokens) * num_members
        yield from (most // quantum * quantum for quantum in (2 * num_members * size, num_members * size))


def _shard_one_block(start: int, stop: int, head: int | None, order: Sequence[int], room: Room) -> SpanShards | None:
    if head is None:
        able = [m for m in order if room.tokens[m] > 0]
        if any(number > 0 for number in room.blocks):  # whoever has a block but no token left has them in a later step
            able = [m for m in able if room.blocks[m] > 0]
        head = next(iter(able), None)
    if head is None or room.tokens[head] <= 0:
        return None
    end = min(stop, start + room.tokens[head], (start // room.block_size + 1) * room.block_size)
    return shard_span("single", start, end, len(order), head=head)


def block_owners(shards: SpanShards, first: int, last: int, block_size: int) -> tuple[int, ...]:
    """Returns the member that begins, and so holds, each block `first <= b < last`."""
    begins = {block: member for member, runs in enumerate(shards) for run in runs for block in _begun(run, block_size)}
    return tuple([begins[block] for block in range(first, last)])


def _begun(run: Run, block_size: int) -> range:
    return range(-(-run.start // block_size), -(-run.stop // block_size))
