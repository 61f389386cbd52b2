"""Sparse attention in levels: the members that compute each region, and the tokens that members send each other.

Every member computes the same plan by arithmetic on positions, so that no sizes or indices are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, zip_longest

from longspan.core.runs import Run, SpanShards, clip, num_tokens
from longspan.core.sparse import SparseSetting
from longspan.core.splits import HeadShare, spread_heads


def ratios_by_rule(drop: float, num_levels: int) -> tuple[float, ...]:
    """Return the drop ratios of all levels from 2 on: level 2 + n keeps 1/2^n of the tokens of level 2 (CSPS §3.2.4).

    So a token attends to fewer tokens of more distant regions. The paper's text says so, but its formula is inverted.
    """
    return tuple(1 - (1 - drop) / 2**n for n in range(num_levels - 1))


def segments_of(num_members: int, hosts: Sequence[int], num_levels: int) -> tuple[int, ...]:
    """Return segments that follow the links of the cluster: a member, then its host, then several hosts.

    Args:
        hosts: the host of each member. Members of a host are adjacent.
    """
    per_host = max(map(hosts.count, set(hosts)))
    sizes = {1} | ({per_host} if 1 < per_host < num_members else set())
    doubled = 1
    while len(sizes) < num_levels - 1 and doubled < num_members:
        doubled *= 2
        if doubled < num_members:
            sizes.add(doubled)
    return tuple(sorted(sizes)[: max(1, num_levels - 1)])


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of a partition on one member: queries of the step, or keys.

    Attributes:
        offset: the index of its first token among all queries, or keys, of the request on the member.
    """

    member: int
    partition: int
    offset: int
    size: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """The attention of one segment at a level above 1. Its heads are spread over the members with tokens of it."""

    level: int
    members: tuple[int, ...]
    """In order of their heads."""
    queries: tuple[Piece, ...]
    keys: tuple[Piece, ...]
    sees: tuple[tuple[int, ...], ...]
    """The indices into `keys` of the pieces that each piece of queries meets at this level."""

    def share(self, member: int, num_heads: int, num_kv_heads: int) -> HeadShare:
        return spread_heads(num_heads, num_kv_heads, len(self.members))[self.members.index(member)]


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """The regions of one request's attention in a step.

    Attributes:
        queries, keys: the pieces of each member, in order of position.
        near: for each piece of queries, the pieces of keys of its own partition.
        jobs: level by level.
    """

    queries: tuple[tuple[Piece, ...], ...]
    keys: tuple[tuple[Piece, ...], ...]
    near: Mapping[Piece, tuple[Piece, ...]]
    jobs: tuple[Job, ...]

    def level(self, member: int, other: int) -> int:
        """Return the first level at which tokens of two members meet. 0 if there is none."""
        pair = {member, other}
        if any({query.member, key.member} == pair for query, keys in self.near.items() for key in keys):
            return 1
        return min((job.level for job in self.jobs if pair <= {*job.members}), default=0)


@lru_cache(maxsize=256)
def sparse_plan(setting: SparseSetting, q_runs: SpanShards, kv_runs: SpanShards) -> SparsePlan:
    """Return the plan of a step, which is the same on every member."""
    queries = tuple(_pieces(setting, member, runs) for member, runs in enumerate(q_runs))
    keys = tuple(_pieces(setting, member, runs) for member, runs in enumerate(kv_runs))
    all_queries = [piece for pieces in queries for piece in pieces]
    all_keys = [piece for pieces in keys for piece in pieces]
    near = {
        query: tuple(
            key
            for key in all_keys
            if key.partition == query.partition and key.runs[0].start <= query.runs[-1].positions[-1]
        )
        for query in all_queries
    }
    jobs: dict[tuple[int, int], list[tuple[Piece, list[Piece]]]] = {}
    for query in all_queries:
        met: dict[int, list[Piece]] = {}
        for key in all_keys:
            if key.partition < query.partition:
                met.setdefault(setting.level(query.partition, key.partition), []).append(key)
        for level, seen in met.items():
            jobs.setdefault((level, setting.segment(level, query.partition)), []).append((query, seen))
    order = _Order(setting, [*all_queries, *all_keys])
    made = tuple(_job(level, jobs[level, segment], order.of(level, segment)) for level, segment in sorted(jobs))
    return SparsePlan(queries=queries, keys=keys, near=near, jobs=made)


class _Order:
    """Orders the members of segments by their heads, to minimise the bytes sent.

    A member keeps the heads of the level below at each level.
    """

    def __init__(self, setting: SparseSetting, pieces: Sequence[Piece]) -> None:
        self._segments: list[dict[int, list[int]]] = []
        found: dict[int, list[int]] = {}
        for piece in sorted(pieces, key=lambda piece: (piece.partition, piece.member)):
            found.setdefault(piece.partition, []).append(piece.member)
        below = found = {partition: list(dict.fromkeys(members)) for partition, members in found.items()}
        partitions = sorted(found)
        for level in range(1, setting.num_levels + 1):
            lower = {
                setting.segment(level - 1, one) if level > 1 else one: setting.segment(level, one) for one in partitions
            }
            joined: dict[int, list[list[int]]] = {}
            for part, whole in lower.items():
                joined.setdefault(whole, []).append(below[part])
            below = {
                whole: list(
                    dict.fromkeys(member for row in zip_longest(*lists) for member in row if member is not None)
                )
                for whole, lists in joined.items()
            }
            self._segments.append(below)

    def of(self, level: int, segment: int) -> list[int]:
        return self._segments[level - 1][segment]


def _job(level: int, pairs: Sequence[tuple[Piece, Sequence[Piece]]], order: Sequence[int]) -> Job:
    keys = list(dict.fromkeys(key for _, seen in pairs for key in seen))
    number = {key: index for index, key in enumerate(keys)}
    taking_part = {piece.member for piece in (*keys, *(query for query, _ in pairs))}
    return Job(
        level=level,
        members=tuple(member for member in order if member in taking_part),
        queries=tuple(query for query, _ in pairs),
        keys=tuple(keys),
        sees=tuple(tuple(number[key] for key in seen) for _, seen in pairs),
    )


def _pieces(setting: SparseSetting, member: int, runs: Sequence[Run]) -> tuple[Piece, ...]:
    found, offset = [], 0
    if runs:
        first, last = runs[0].start // setting.partition, max(run.positions[-1] for run in runs) // setting.partition
        for partition in range(first, last + 1):
            own = clip(runs, partition * setting.partition, (partition + 1) * setting.partition)
            if own:
                size = num_tokens(own)
                found.append(Piece(member, partition, offset, size, own))
                offset += size
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Block:
    """Heads of a piece with an equal number of kept tokens.

    Attributes:
        basis: number of these tokens kept at the level where both ends meet. It is cut into even pieces.
    """

    piece: Piece
    heads: range
    count: int
    basis: int

    def cut(self, number: int, num_pieces: int) -> range:
        """Return the tokens of a micro-partition."""
        start = min(self.count, number * self.basis // num_pieces)
        stop = self.count if number == num_pieces - 1 else min(self.count, (number + 1) * self.basis // num_pieces)
        return range(start, stop)


@dataclass(frozen=True, slots=True)
class Sent:
    """The tokens that one member sends to another before attention.

    Attributes:
        whole: pieces of keys in partitions of which the receiver has queries, with all heads, in order of position.
        queries, keys: blocks of query heads and of KV heads, the most important tokens first.
    """

    whole: tuple[Piece, ...]
    queries: tuple[Block, ...]
    keys: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer on a rank. `first` is the number of its first KV head in the whole layer."""

    num_heads: int
    num_kv_heads: int
    first: int = 0


def num_queries(setting: SparseSetting, piece: Piece, layer: int, kv_head: int, level: int) -> int:
    """Return the number of queries of a piece that attend at a level."""
    return setting.kept(piece.size, layer, kv_head, level) if setting.mode == "qkv" else piece.size


@lru_cache(maxsize=4096)
def sent(
    setting: SparseSetting, q_runs: SpanShards, kv_runs: SpanShards, layer: int, heads: Heads, ends: tuple[int, int]
) -> Sent:
    """Return the tokens that the first of two members sends to the second: the union over levels, sent once."""
    plan, (source, target) = sparse_plan(setting, q_runs, kv_runs), ends
    readers = heads.num_heads // heads.num_kv_heads
    queries: dict[Piece, list[int]] = {}
    keys: dict[Piece, list[int]] = {}
    for job in plan.jobs:
        if target not in job.members:
            continue
        share = job.share(target, heads.num_heads, heads.num_kv_heads)
        for piece in job.queries:
            for head in share.heads if piece.member == source else ():
                count = num_queries(setting, piece, layer, heads.first + head // readers, job.level)
                counts = queries.setdefault(piece, [0] * heads.num_heads)
                counts[head] = max(counts[head], count)
        for piece in job.keys:
            for head in share.kv_heads if piece.member == source else ():
                counts = keys.setdefault(piece, [0] * heads.num_kv_heads)
                counts[head] = max(counts[head], setting.kept(piece.size, layer, heads.first + head, job.level))
    whole = dict.fromkeys(
        key for query in plan.queries[target] for key in plan.near[query] if key.member == source != target
    )
    level = plan.level(source, target)
    bases = {
        piece: [setting.kept(piece.size, layer, heads.first + head, level) for head in range(heads.num_kv_heads)]
        for piece in keys
    }
    return Sent(whole=tuple(whole), queries=_blocks(queries, queries), keys=_blocks(keys, bases))


def _blocks(counts: Mapping[Piece, Sequence[int]], bases: Mapping[Piece, Sequence[int]]) -> tuple[Block, ...]:
    found = []
    for piece, by_head in counts.items():
        alike, start = list(zip(by_head, bases[piece], strict=True)), 0
        for head in range(1, len(alike) + 1):
            if head == len(alike) or alike[head] != alike[start]:
                if by_head[start]:
                    found.append(Block(piece, range(start, head), *alike[start]))
                start = head
    return tuple(found)


@lru_cache(maxsize=4096)
def decode_counts(
    setting: SparseSetting, kv_runs: tuple[Run, ...], boundary: int, layer: int, heads: Heads
) -> tuple[int, ...]:
    """Return the keys before `boundary` that a decode reads of one member, by KV head. The layer drops tokens."""
    last = boundary // setting.partition
    pieces = _pieces(setting, 0, clip(kv_runs, 0, boundary))
    return tuple(
        sum(
            setting.kept(piece.size, layer, heads.first + head, setting.level(last, piece.partition))
            for piece in pieces
        )
        for head in range(heads.num_kv_heads)
    )


def decode_share(setting: SparseSetting, num_tokens: int, num_members: int, num_layers: int) -> float:
    """Return the share of all keys that a decode reads, as the mean over layers and KV heads.

    Each member has a partition. The first and the last layer read all keys.
    """
    if not setting.drop_in_decode:
        return 1.0
    last = min((num_tokens - 1) // setting.partition, num_members - 1)
    far = sum(setting.partition * _mean_kept(setting, setting.level(last, other), num_layers) for other in range(last))
    return (far + num_tokens - last * setting.partition) / num_tokens


@lru_cache(maxsize=256)
def _mean_kept(setting: SparseSetting, level: int, num_layers: int) -> float:
    num_heads = max(map(len, setting.drop))
    ratios = [setting.ratio(layer, head, level) for layer in range(1, num_layers - 1) for head in range(num_heads)]
    return 1 - sum(ratios) / (num_layers * num_heads)


@dataclass(frozen=True, slots=True)
class SparseWork:
    """The work of one or more layers.

    Attributes:
        sent_bytes, returned_bytes: sent between members before attention, with sampled queries, and after it.
        near_pairs, far_pairs: pairs of a query, of any head, and a key that meet at level 1, and at further levels.
    """

    sent_bytes: int = 0
    returned_bytes: int = 0
    near_pairs: int = 0
    far_pairs: int = 0

    @property
    def num_bytes(self) -> int:
        return self.sent_bytes + self.returned_bytes

    @property
    def num_pairs(self) -> int:
        return self.near_pairs + self.far_pairs

    def __add__(self, other: SparseWork) -> SparseWork:
        return SparseWork(
            self.sent_bytes + other.sent_bytes,
            self.returned_bytes + other.returned_bytes,
            self.near_pairs + other.near_pairs,
            self.far_pairs + other.far_pairs,
        )


def drops_in(layer: int, stages: Sequence[range]) -> bool:
    """Return whether a layer may drop tokens. The last layer and a stage's first layer, without ratings, may not."""
    return layer < stages[-1].stop - 1 and all(layer != stage.start for stage in stages)


def work_of_layer(  # noqa: PLR0917 - a setting, the runs of members, and a layer
    setting: SparseSetting,
    q_runs: SpanShards,
    kv_runs: SpanShards,
    layer: int,
    stages: Sequence[range],
    heads: Heads,
    dim: int,
    element_bytes: int,
) -> SparseWork:
    """Return the work of a layer of a pipeline stage, as the exchange computes it."""
    if not drops_in(layer, stages):
        setting = setting.exact
    plan, readers = sparse_plan(setting, q_runs, kv_runs), heads.num_heads // heads.num_kv_heads
    vectors = sampled = results = far = 0
    for source, target in permutations(range(len(q_runs)), 2):
        what = sent(setting, q_runs, kv_runs, layer, heads, (source, target))
        vectors += sum(2 * heads.num_kv_heads * piece.size for piece in what.whole)
        vectors += sum(len(block.heads) * block.count for block in what.queries)
        vectors += sum(2 * len(block.heads) * block.count for block in what.keys)
    for job in plan.jobs:
        for head in range(heads.num_kv_heads):
            kept = [setting.kept(piece.size, layer, heads.first + head, job.level) for piece in job.keys]
            for query, seen in zip(job.queries, job.sees, strict=True):
                count = num_queries(setting, query, layer, heads.first + head, job.level)
                far += readers * count * sum(kept[index] for index in seen)
        for member in job.members:
            for head in job.share(member, heads.num_heads, heads.num_kv_heads).heads:
                for query in job.queries:
                    if query.member != member:
                        results += num_queries(setting, query, layer, heads.first + head // readers, job.level)
    near = sum(visible_pairs(query, key) for query, keys in plan.near.items() for key in keys)
    if drops_in(layer + 1, stages):
        rows = sum(len(sampled_rows(num_tokens(runs), setting.samples)) for runs in q_runs)
        sampled = (len(q_runs) - 1) * heads.num_heads * rows
    with_lse = element_bytes * dim + 4
    return SparseWork(
        sent_bytes=element_bytes * dim * vectors + with_lse * sampled,
        returned_bytes=with_lse * results,
        near_pairs=heads.num_heads * near,
        far_pairs=far,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """The savings of a request by sparse attention.

    Attributes:
        num_levels: the maximum over parts.
        mean_drop_ratio: mean over layers, KV heads and levels from 2 on, including layers without drops.
        bytes_saved_share, attention_flops_saved_share: fractions of the same work without drops.
        decode_reads_saved_share: the fraction of the keys of the prompt that each decode leaves out.
    """

    num_levels: int
    mean_drop_ratio: float
    bytes_saved_share: float
    attention_flops_saved_share: float
    decode_reads_saved_share: float = 0.0


def savings(
    parts: Sequence[tuple[SparseSetting, SpanShards, SpanShards]],
    layers: Sequence[tuple[int, int, int]],
    stages: Sequence[range],
    element_bytes: int,
) -> Savings:
    """Return the savings over the parts of a request, at least one.

    Args:
        layers: the query heads, KV heads and head size of each.
        stages: the layers of each pipeline stage.
    """
    taken = full = SparseWork()
    ratios: list[float] = []
    for setting, q_runs, kv_runs in parts:
        for layer, (num_heads, num_kv_heads, dim) in enumerate(layers):
            what = q_runs, kv_runs, layer, stages, Heads(num_heads, num_kv_heads), dim, element_bytes
            taken += work_of_layer(setting, *what)
            full += work_of_layer(setting.exact, *what)
            drops = drops_in(layer, stages)
            ratios += [
                setting.ratio(layer, head, level) if drops else 0.0
                for head in range(num_kv_heads)
                for level in range(2, setting.num_levels + 1)
            ]
    return Savings(
        num_levels=max(setting.num_levels for setting, *_ in parts),
        mean_drop_ratio=sum(ratios) / len(ratios),
        bytes_saved_share=1 - taken.num_bytes / full.num_bytes if full.num_bytes else 0.0,
        attention_flops_saved_share=1 - taken.num_pairs / full.num_pairs,
        decode_reads_saved_share=1 - decode_share(setting, sum(map(num_tokens, kv_runs)), len(kv_runs), len(layers)),
    )


def visible_pairs(query: Piece, key: Piece) -> int:
    return sum(_sees(one, other) for one in query.runs for other in key.runs)


def _sees(queries: Run, keys: Run) -> int:
    """Return the number of pairs of a query and a visible key, for runs without gaps."""
    before = max(0, min(keys.stop, queries.start) - keys.start)
    both = range(max(queries.start, keys.start), min(queries.stop, keys.stop))
    after = max(0, queries.stop - max(queries.start, keys.stop))
    return len(queries) * before + len(both) * (len(both) + 1) // 2 + after * len(both) if both or before else 0


def sampled_rows(size: int, samples: int) -> tuple[int, ...]:
    """Return the sampled queries of a piece, evenly spaced, including the last query."""
    return tuple(range(size)) if size <= samples else tuple((i + 1) * size // samples - 1 for i in range(samples))
