"""The time of a long prompt with sparse attention, by a simulated pipeline (CSPS §3.2.5 and Eq. 6 and 7).

The timeline is of one member, and follows `attn/sparse`. All tokens are sent after the projections, to near members
first. A level is attended piece by piece as they arrive. The last piece of keys is attended in equally many parts of
the queries, and their results are sent meanwhile. A member has two links, inside its host and between hosts. Messages
on a link are sent in the order of submission, independently in both directions. All members are assumed to be equally
far: a message arrives when the message sent with it has left. Everything is arithmetic on counts and speeds, which may
come from data sheets or from measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise, product
from typing import Literal, NamedTuple, TypeVar

import msgspec

from longspan.core.runs import Run, SpanShards
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import (
    Block,
    Heads,
    Sent,
    num_queries,
    sampled_rows,
    sent,
    sparse_plan,
    visible_pairs,
)
from longspan.core.splits import spread_heads
from longspan.cost.shape import ModelShape

Where = Literal["inside", "between"]
Key = TypeVar("Key")


class LinkSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of one member in a link: bytes per second each way, and the start time of each message in seconds."""

    bytes_per_s: float
    message_s: float = 0.0


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The speeds of a member.

    Attributes:
        pairs_per_s: attended (query, key) pairs per second, counted for each head.
        qkv_s, linear_s: seconds per token and layer of the projections before and after attention.
        rest_s: R of §3.2.6, seconds per token of the prompt outside of attention, in all layers.
        projected_s: the part of `rest_s` before and after attention, which `gather_hidden` computes by micro-partition.
            0 if it is unknown.
    """

    inside: LinkSpeed
    between: LinkSpeed
    pairs_per_s: float
    qkv_s: float = 0.0
    linear_s: float = 0.0
    rest_s: float = 0.0
    projected_s: float = 0.0


class Members(NamedTuple):
    """The members that share a prompt: the host of each, their model, and the speeds of one member."""

    hosts: tuple[int, ...]
    shape: ModelShape
    rates: Rates


class Duplex(NamedTuple):
    """Bytes received and sent at the same time, and the number of messages each way."""

    coming: float = 0.0
    leaving: float = 0.0
    messages: int = 0


@dataclass(frozen=True, eq=False)
class Traffic:
    """The tokens between a member and the members that it first meets at a level, over one link.

    Attributes:
        first: bytes that are sent with the first piece: queries, and at level 1 all keys and values of a partition.
        keys: blocks of KV heads that are received, and that are sent.
        token_bytes: bytes of a key and a value of one head.
    """

    first: Duplex
    keys: tuple[tuple[Block, ...], tuple[Block, ...]]
    token_bytes: float

    def cut(self, num_pieces: int) -> list[Duplex]:
        """Return the bytes of each micro-partition."""
        cuts = []
        for number in range(num_pieces):
            keys = [
                self.token_bytes * sum(len(block.heads) * len(block.cut(number, num_pieces)) for block in blocks)
                for blocks in self.keys
            ]
            coming, leaving = (self.first[way] * (number == 0) + keys[way] for way in range(2))
            cuts.append(Duplex(coming, leaving, self.first.messages if coming or leaving else 0))
        return cuts


@dataclass(frozen=True, eq=False)
class MemberWork:
    """The work of one member in a layer.

    Attributes:
        near_pairs: pairs of queries with keys of their own partitions.
        at_once: by level, pairs with keys of this member, or keys that arrived at a lower level.
        by_piece: by level, pairs with keys that arrive in micro-partitions.
        tokens, results: messages by level and link.
        samples: messages with sampled queries, by link.
        rated_pairs: pairs of samples and its own keys.
    """

    num_tokens: int
    near_pairs: int
    at_once: Mapping[int, float]
    by_piece: Mapping[int, float]
    tokens: Mapping[tuple[int, Where], Traffic]
    results: Mapping[tuple[int, Where], Duplex]
    samples: Mapping[Where, Duplex]
    rated_pairs: int


def layer_time(
    work: MemberWork, pieces: Sequence[int], rates: Rates, *, rated: bool = True, samples: bool = True
) -> float:
    """Simulate a layer, and return its seconds.

    Args:
        pieces: micro-partitions of each level from 2 on.
        rated: whether tokens are rated before they are sent, as in all layers but the first and the last.
        samples: whether the next layer rates tokens. Samples are then sent during the projection behind attention, and
            delay the end of the layer if they take longer.
    """
    qkv_s, linear_s = rates.qkv_s * work.num_tokens, rates.linear_s * work.num_tokens
    clock = qkv_s + rated * work.rated_pairs / rates.pairs_per_s
    free = dict.fromkeys(product(("inside", "between"), range(2)), clock)

    def send(where: Where, duplex: Duplex) -> float:
        speed = rates.inside if where == "inside" else rates.between
        for way in range(2):
            last_s = duplex.messages * speed.message_s + duplex[way] / speed.bytes_per_s
            free[where, way] = max(free[where, way], clock) + last_s
        return max(free[where, 0], free[where, 1])

    arrivals: dict[tuple[int, int], float] = {}
    for level, num_pieces in enumerate((1, *pieces), 1):
        for number, where, duplex in _messages(work, level, num_pieces):
            arrivals[level, number] = max(arrivals.get((level, number), 0.0), send(where, duplex))
    clock = max(clock, arrivals.get((1, 0), 0.0)) + work.near_pairs / rates.pairs_per_s
    returned_s = 0.0
    for level, num_pieces in enumerate(pieces, 2):
        at_once_s = work.at_once.get(level, 0.0) / rates.pairs_per_s
        piece_s = work.by_piece.get(level, 0.0) / rates.pairs_per_s / num_pieces
        for number in range(num_pieces):
            clock = max(clock, arrivals.get((level, number), 0.0))
            if number < num_pieces - 1:
                clock += piece_s + (at_once_s if number == 0 else 0.0)
        last_s = piece_s + (at_once_s if num_pieces == 1 else 0.0)
        for _ in range(num_pieces):
            clock += last_s / num_pieces
            for (of, where), duplex in work.results.items():
                if of == level:
                    part = Duplex(duplex.coming / num_pieces, duplex.leaving / num_pieces, duplex.messages)
                    returned_s = max(returned_s, send(where, part))
    clock = max(clock, returned_s)
    if not samples:
        return clock + linear_s
    return max([clock + linear_s, *(send(where, duplex) for where, duplex in work.samples.items())])


def whole_prompt(num_tokens: int, partition: int, members: int) -> SpanShards:
    """Return the tokens of each member, with a partition for each."""
    starts = [min(num_tokens, member * partition) for member in range(members + 1)]
    return tuple((Run(*ends),) if ends[0] < ends[1] else () for ends in pairwise(starts))


@lru_cache(maxsize=2**12)
def member_works(
    setting: SparseSetting | None, q_runs: SpanShards, kv_runs: SpanShards, hosts: tuple[int, ...], shape: ModelShape
) -> tuple[MemberWork, ...]:
    """Count the work of each member in a layer of a step, by the ratios of layer 0.

    Args:
        setting: None is `alltoall` without levels.
        kv_runs: the keys of each member, with its new ones.
    """
    count = _exact_work if setting is None else partial(_sparse_work, setting)
    return tuple(count(member, q_runs, kv_runs, hosts, shape) for member in range(len(hosts)))


def _sparse_work(
    setting: SparseSetting, me: int, q_runs: SpanShards, kv_runs: SpanShards, hosts: tuple[int, ...], shape: ModelShape
) -> MemberWork:
    plan, heads = sparse_plan(setting, q_runs, kv_runs), Heads(shape.num_heads, shape.num_kv_heads)
    vector = shape.head_dim * shape.bytes_per_element
    levels = {other: plan.level(me, other) for other in range(len(hosts)) if other != me}
    queries: dict[tuple[int, Where], Duplex] = {}
    keys: dict[tuple[int, Where], tuple[list[Block], list[Block]]] = {}
    for other, level in levels.items():
        at = level, _where(hosts, me, other)
        both = [sent(setting, q_runs, kv_runs, 0, heads, ends) for ends in ((other, me), (me, other))]
        _add(queries, at, *(vector * _first_vectors(what, shape) for what in both))
        for way, what in enumerate(both):
            keys.setdefault(at, ([], []))[way].extend(what.keys)
    at_once, by_piece = Counter[int](), Counter[int]()
    results: dict[tuple[int, Where], Duplex] = {}
    answers: dict[tuple[int, int], list[float]] = {}
    for job in plan.jobs:
        counts = {query: num_queries(setting, query, 0, 0, job.level) for query in job.queries}
        for member in job.members:
            num_heads = len(job.share(member, shape.num_heads, shape.num_kv_heads).heads)
            for query, seen in zip(job.queries, job.sees, strict=True):
                if me in {member, query.member} and member != query.member:
                    other = query.member if member == me else member
                    answers.setdefault((job.level, other), [0.0, 0.0])[member == me] += (
                        (vector + 4) * num_heads * counts[query]
                    )
                for index in seen if member == me else ():
                    key = job.keys[index]
                    pairs = num_heads * counts[query] * setting.kept(key.size, 0, 0, job.level)
                    (by_piece if levels.get(key.member) == job.level else at_once)[job.level] += pairs
    for (level, other), ways in answers.items():
        _add(results, (level, _where(hosts, me, other)), *ways)
    samples: dict[Where, Duplex] = {}
    sampled = [len(sampled_rows(sum(map(len, own)), setting.samples)) for own in q_runs]
    for other in levels:
        coming, leaving = (shape.num_heads * (vector + 4) * sampled[member] for member in (other, me))
        _add(samples, _where(hosts, me, other), coming, leaving)
    near = sum(visible_pairs(query, key) for query in plan.queries[me] for key in plan.near[query])
    return MemberWork(
        num_tokens=sum(map(len, q_runs[me])),
        near_pairs=shape.num_heads * near,
        at_once=at_once,
        by_piece=by_piece,
        tokens={
            at: Traffic(queries[at], (tuple(come), tuple(leave)), 2 * vector) for at, (come, leave) in keys.items()
        },
        results=results,
        samples=samples,
        rated_pairs=shape.num_heads * sum(sampled) * sum(map(len, kv_runs[me])),
    )


def _first_vectors(what: Sent, shape: ModelShape) -> int:
    """Count the vectors that are sent with the first piece."""
    whole = sum(2 * shape.num_kv_heads * piece.size for piece in what.whole)
    return whole + sum(len(block.heads) * block.count for block in what.queries)


def _exact_work(
    me: int, q_runs: SpanShards, kv_runs: SpanShards, hosts: tuple[int, ...], shape: ModelShape
) -> MemberWork:
    """Count the work of `alltoall`, as one level whose attention starts when all tokens have arrived."""
    shares = spread_heads(shape.num_heads, shape.num_kv_heads, len(hosts))
    new, held = ([sum(map(len, own)) for own in runs] for runs in (q_runs, kv_runs))
    vector = shape.head_dim * shape.bytes_per_element

    def sent_bytes(source: int, target: int) -> float:
        share = shares[target]
        return vector * (len(share.heads) * new[source] + 2 * len(share.kv_heads) * held[source])

    tokens: dict[tuple[int, Where], Duplex] = {}
    results: dict[tuple[int, Where], Duplex] = {}
    for other in range(len(hosts)):
        if other != me:
            at = 2, _where(hosts, me, other)
            _add(tokens, at, sent_bytes(other, me), sent_bytes(me, other))
            heads = len(shares[other].heads), len(shares[me].heads)
            _add(results, at, vector * heads[0] * new[me], vector * heads[1] * new[other])
    cached = sum(held) - sum(new)
    pairs = len(shares[me].heads) * (sum(new) * (sum(new) + 1) // 2 + sum(new) * cached)
    return MemberWork(
        num_tokens=new[me],
        near_pairs=0,
        at_once={},
        by_piece={2: pairs},
        tokens={at: Traffic(duplex, ((), ()), 2 * vector) for at, duplex in tokens.items()},
        results=results,
        samples={},
        rated_pairs=0,
    )


@lru_cache(maxsize=2**14)
def _messages(work: MemberWork, level: int, num_pieces: int) -> list[tuple[int, Where, Duplex]]:
    """List the messages of a level before attention: the number of the piece, the link and the bytes."""
    messages = [
        (number, where, duplex)
        for (of, where), traffic in work.tokens.items()
        for number, duplex in enumerate(traffic.cut(num_pieces))
        if of == level and duplex.messages
    ]
    return sorted(messages, key=lambda message: message[0])


def _where(hosts: Sequence[int], me: int, other: int) -> Where:
    return "inside" if hosts[me] == hosts[other] else "between"


def _add(messages: dict[Key, Duplex], at: Key, coming: float, leaving: float) -> None:
    old = messages.get(at, Duplex())
    messages[at] = Duplex(old.coming + coming, old.leaving + leaving, old.messages + 1)
