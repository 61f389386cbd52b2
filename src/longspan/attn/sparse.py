"""Attention that drops unimportant tokens far away before they travel (CSPS §3.2.4, SP-NTP): `alltoall` with a setting.

Each member attends its own partition to itself, all heads, where it is. What lies farther apart meets as in `alltoall`,
level by level: heads are spread over the members of a segment, and each gets the tokens that are kept there. Each
destination is sent everything once, the most important tokens first, so that any level's tokens are a beginning of
those; then every member gets partial outputs with their log-sum-exps, and merges them (Eq. 5).

A token is rated by the attention that it got in the layer before. Members send a sample of their queries, with the
log-sum-exps that are known by then, to those who hold keys; so each rates its own keys, dropped ones too, and no rating
travels. The first and the last layer of a model, and the first of a pipeline stage, drop nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attn.backends import Partial, merge_each, nothing_seen
from longspan.attn.comm import ALONE, Message, Pending, Shape
from longspan.attn.exchanges import Call
from longspan.attn.member import MemberPart, MemberParts, attend_runs, by_position, gather_runs, row_slices, split_runs
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.cluster import HeadShare, uniform_pieces
from longspan.core.exchange import ALLTOALL
from longspan.core.runs import Relation, Run, SpanShards, coalesce, num_tokens, positions
from longspan.core.sparse import MOST_LEVELS, MOST_PIECES, SparseSetting
from longspan.core.sparse_plan import Heads, Job, Piece, Sent, num_queries, sampled_rows, sent, sparse_plan

_TOKENS, _RESULTS, _SAMPLES = 0, MOST_PIECES, MOST_LEVELS * MOST_PIECES
SPARSE_HOPS = _SAMPLES + 1
"""The hops of a layer: pieces of tokens; then, by level, pieces of results; then samples."""
_TILE = 4096
"""Keys that are rated at a time."""


def sparse_alltoall(call: Call, stored: Sequence[tuple[Tensor, Tensor]] | None = None) -> None:
    """Computes attention like `alltoall`, without what the setting drops.

    What is near is sent, and computed, first; what is farther travels meanwhile, and so do results (CSPS §3.2.5).

    Args:
        stored: for each part the keys and values `[kv_heads, tokens, head_dim]` of this member, if they are not in the
            pool.
    """
    setting, memory = call.exchange.sparse, call.parts.memory
    assert setting is not None and call.spec.window is None, "a window drops all that is far"
    ratings = memory.pop(_Ratings, None)
    found = ratings.of_keys() if isinstance(ratings, _Ratings) else [None] * len(call.parts)
    if ratings is None or call.layer in (0, call.num_layers - 1):
        setting = setting.exact
    stored = stored or [_gathered(call, part) for part in call.parts]
    each = zip(call.parts, stored, found, strict=True)
    parts = [_Part(call, setting, part, kv, rated) for part, kv, rated in each]
    arriving = _Arriving(call, setting, parts)
    for part in parts:
        part.take(call.group.rank, part.own_tokens(), 0, 1)
        part.attend_near(waits=False)
    arriving.take(1, 0)
    for part in parts:
        part.attend_near(waits=True)
    returning = _Returning(call, parts)
    for level in range(2, setting.num_levels + 1):
        sources, num_pieces = arriving.sources(level), setting.num_pieces(level)
        for number in range(num_pieces):
            arriving.take(level, number)
            for part in parts if number < num_pieces - 1 else ():
                part.attend_far(level, number, num_pieces, sources)
        for number in range(num_pieces):
            for part in parts:
                part.finish_far(level, number, num_pieces, sources)
            returning.send(level, number)
    returning.take()
    lses = [part.finish() for part in parts]
    if call.layer + 1 in call.layers and call.layer + 1 != call.num_layers - 1:
        memory[_Ratings] = _Ratings(call, parts, lses)


class _Arriving:
    """The tokens that others send, which they begin to at once: those who are near first, and each in pieces."""

    def __init__(self, call: Call, setting: SparseSetting, parts: Sequence[_Part]) -> None:
        group, self._parts = call.group, parts
        self._levels = {
            member: min((level for part in parts if (level := part.plan.level(group.rank, member))), default=0)
            for member in group.others
        }
        self._coming: dict[tuple[int, int], tuple[dict[int, Message], Pending]] = {}
        self._setting = setting
        for level in range(1, setting.num_levels + 1):
            near, num_pieces = self.sources(level), setting.num_pieces(level)
            for number in range(num_pieces):
                leaving = {member: _filled(call, parts, member, number, num_pieces) for member in near}
                coming = {member: _room(call, parts, member, group.rank, number, num_pieces) for member in near}
                pending = group.start(sends=leaving, receives=coming, hop=_TOKENS + number)
                self._coming[level, number] = coming, pending

    def sources(self, level: int) -> list[int]:
        """Lists the members that have tokens which meet this member's at this level, and at none before."""
        return [member for member, first in self._levels.items() if first == level]

    def take(self, level: int, number: int) -> None:
        coming, pending = self._coming[level, number]
        pending.wait()
        for member, message in coming.items():
            tensors = iter(message.tensors)
            for part in self._parts:
                part.take(member, tensors, number, self._setting.num_pieces(level))


class _Returning:
    """The results that members send to those whose queries they have attended, while they go on with others."""

    def __init__(self, call: Call, parts: Sequence[_Part]) -> None:
        self._call, self._parts = call, parts
        self._coming: list[tuple[int, int, dict[int, Message], Pending]] = []

    def send(self, level: int, number: int) -> None:
        """Sends everybody what was found for its queries; this member keeps its own."""
        group, me = self._call.group, self._call.group.rank
        answers = {asker: self._room(me, asker, level, number) for asker in range(group.size)}
        for asker, message in answers.items():
            partials = _partials(message)
            for part in self._parts:
                part.answer(asker, partials, level, number)
        results = {member: self._room(member, me, level, number) for member in group.others}
        sends = {asker: answers[asker] for asker in group.others}
        hop = _RESULTS + (level - 2) * MOST_PIECES + number
        pending = group.start(sends=sends, receives=results, hop=hop)
        self._coming.append((level, number, {**results, me: answers[me]}, pending))

    def take(self) -> None:
        """Waits for all results, in the order in which they were sent."""
        for level, number, messages, pending in self._coming:
            pending.wait()
            for member, message in messages.items():
                partials = _partials(message)
                for part in self._parts:
                    part.take_results(member, partials, level, number)

    def _room(self, source: int, target: int, level: int, number: int) -> Message:
        """Allocates a message for log-sum-exps, and then for the outputs."""
        found = [one for part in self._parts for one in part.results(source, target, level, number)]
        counts = [(len(heads), len(rows)) for *_, heads, rows in found]
        shapes: list[Shape] = [(shape, torch.float32) for shape in counts]
        shapes += [((*shape, self._call.spec.head_dim), self._call.q.dtype) for shape in counts]
        return Message(shapes, self._call.q.device)


def _gathered(call: Call, part: MemberPart) -> tuple[Tensor, Tensor]:
    """Returns all keys and values that this member holds of a part."""
    runs = part.kv_runs[call.group.rank]
    k, v = call.q.new_empty(2, call.spec.num_kv_heads, num_tokens(runs), call.spec.head_dim)
    gather_runs(part, runs, call.group.rank, call.kv, k, v)
    return k, v


class _Part:
    """One request's attention in one layer, on one member."""

    def __init__(
        self,
        call: Call,
        setting: SparseSetting,
        part: MemberPart,
        kv: tuple[Tensor, Tensor],
        ratings: Tensor | None,
    ) -> None:
        self.part, self._call, self._setting, self._ratings = part, call, setting, ratings
        self.plan = sparse_plan(setting, part.q_runs, part.kv_runs)
        self._heads = Heads(call.spec.num_heads, call.spec.num_kv_heads, call.first_kv_head)
        self._readers = call.spec.num_heads // call.spec.num_kv_heads
        self._me = call.group.rank
        self._orders: dict[Piece, Tensor] = {}
        self._query_orders: dict[Piece, Tensor] = {}
        self._near: dict[Piece, Partial] = {}
        self._whole: dict[Piece, tuple[Tensor, Tensor]] = {}
        self._queries: dict[Piece, list[tuple[range, Tensor]]] = {}
        self._keys: dict[Piece, list[tuple[range, range, tuple[Tensor, Tensor]]]] = {}
        """What has come of a piece: heads, and tokens from the most important one on."""
        self._begun: dict[tuple[int, Piece, int], list[Partial]] = {}
        self._found: dict[tuple[int, Piece, int], Partial] = {}
        """By job, piece of queries (of any member) and first head: what this member has found, for some of them."""
        self._far: dict[Piece, dict[int, Partial]] = {}
        """By piece of this member's queries and job: the results of all heads."""
        self.k, self.v = kv

    # ------------------------------------------------------------ tokens

    def sent(self, source: int, target: int) -> Sent:
        part, layer = self.part, self._call.layer if len(self._setting.drop) > 1 else 0
        return sent(self._setting, part.q_runs, part.kv_runs, layer, self._heads, (source, target))

    def shapes(self, source: int, target: int, number: int, num_pieces: int) -> Iterator[tuple[int, ...]]:
        """Yields those of the tensors that `fill` fills and `take` takes; queries are in the first piece."""
        what, spec = self.sent(source, target), self._call.spec
        for piece in what.whole if number == 0 else ():
            yield from [(spec.num_kv_heads, piece.size, spec.head_dim)] * 2
        for block in what.queries if number == 0 else ():
            yield (len(block.heads), block.count, spec.head_dim)
        for block in what.keys:
            yield from [(len(block.heads), len(block.cut(number, num_pieces)), spec.head_dim)] * 2

    def fill(self, target: int, tensors: Iterator[Tensor], number: int, num_pieces: int) -> None:
        what = self.sent(self._me, target)
        for piece in what.whole if number == 0 else ():
            for all_tokens in (self.k, self.v):
                next(tensors).copy_(all_tokens[:, piece.offset : piece.offset + piece.size])
        for block in what.queries if number == 0 else ():
            order = self._query_order(block.piece) if self._setting.mode == "qkv" else None
            _keep(block.heads, range(block.count), self._rows(block.piece), order, self._readers, next(tensors))
        for block in what.keys:
            piece = block.piece
            for all_tokens in (self.k, self.v):
                tokens = all_tokens[:, piece.offset : piece.offset + piece.size]
                _keep(block.heads, block.cut(number, num_pieces), tokens, self._order(piece), 1, next(tensors))

    def own_tokens(self) -> Iterator[Tensor]:
        """Returns what this member would send to itself."""
        shapes = self.shapes(self._me, self._me, 0, 1)
        tensors = [self._call.q.new_empty(shape) for shape in shapes]
        self.fill(self._me, iter(tensors), 0, 1)
        return iter(tensors)

    def take(self, source: int, tensors: Iterator[Tensor], number: int, num_pieces: int) -> None:
        what = self.sent(source, self._me)
        for piece in what.whole if number == 0 else ():
            self._whole[piece] = next(tensors), next(tensors)
        for block in what.queries if number == 0 else ():
            self._queries.setdefault(block.piece, []).append((block.heads, next(tensors)))
        for block in what.keys:
            came = block.heads, block.cut(number, num_pieces), (next(tensors), next(tensors))
            self._keys.setdefault(block.piece, []).append(came)

    def _rows(self, piece: Piece) -> Tensor:
        return self._call.q[:, self.part.rows][:, piece.offset : piece.offset + piece.size]

    def _order(self, piece: Piece) -> Tensor | None:
        """Sorts the tokens of a piece of keys for each KV head, the most important first; None for their own order."""
        if self._ratings is None:
            return None
        if piece not in self._orders:
            rated = self._ratings[:, piece.offset : piece.offset + piece.size]
            self._orders[piece] = rated.sort(dim=1, descending=True, stable=True).indices
        return self._orders[piece]

    def _query_order(self, piece: Piece) -> Tensor | None:
        """Does the same for queries, whose keys this member holds, too: they are the last of their partition."""
        if self._ratings is None:
            return None
        if piece not in self._query_orders:
            [keys] = [one for one in self.plan.keys[self._me] if one.partition == piece.partition]
            assert positions(keys.runs)[-piece.size :] == positions(piece.runs), "who computes a token has its key"
            last = keys.offset + keys.size
            rated = self._ratings[:, last - piece.size : last]
            self._query_orders[piece] = rated.sort(dim=1, descending=True, stable=True).indices
        return self._query_orders[piece]

    # ------------------------------------------------------------ attention

    def attend_near(self, *, waits: bool) -> None:
        """Attends queries to the keys of their own partition, some of which other members may have sent."""
        call = self._call
        for query in self.plan.queries[self._me]:
            near = self.plan.near[query]
            if waits == any(piece.member != self._me for piece in near):
                found = [self._whole.get(piece) or self._own(piece) for piece in near]
                k, v = (torch.cat(kind, dim=1) if len(kind) > 1 else kind[0] for kind in zip(*found, strict=True))
                runs = [run for piece in near for run in piece.runs]
                self._near[query] = attend_runs(
                    call.parts.backend, self._rows(query), query.runs, k, v, runs, call.spec
                )

    def _own(self, piece: Piece) -> tuple[Tensor, Tensor]:
        tokens = slice(piece.offset, piece.offset + piece.size)
        return self.k[:, tokens], self.v[:, tokens]

    def attend_far(self, level: int, number: int, num_pieces: int, sources: Sequence[int]) -> None:
        """Attends the queries of a level to the keys that came with a micro-partition, all but the last of which."""
        for key, query, keys, heads, kv_heads in self._regions(level):
            count = self._num_queries(query, level, kv_heads.start)
            tokens = self._tokens(level, keys, kv_heads, number, num_pieces, sources)
            if count and tokens is not None:
                found = self._attend(_heads_of(self._queries[query], heads, range(count)), *tokens, heads, kv_heads)
                self._begun.setdefault(key, []).append(found)

    def finish_far(self, level: int, number: int, num_pieces: int, sources: Sequence[int]) -> None:
        """Attends a part of the queries of a level to the keys that came last: then their results can be returned."""
        self._found.clear()
        for key, query, keys, heads, kv_heads in self._regions(level):
            rows = _piece_of(self._num_queries(query, level, kv_heads.start), number, num_pieces)
            if not rows:
                continue
            q = _heads_of(self._queries[query], heads, rows)
            partials = [
                (out[:, rows.start : rows.stop], lse[:, rows.start : rows.stop])
                for out, lse in self._begun.get(key, ())
            ]
            tokens = self._tokens(level, keys, kv_heads, num_pieces - 1, num_pieces, sources)
            if tokens is not None:
                partials.append(self._attend(q, *tokens, heads, kv_heads))
            self._found[key] = (
                merge_each(partials) if len(partials) > 1 else partials[0] if partials else nothing_seen(q)
            )

    def _regions(self, level: int) -> Iterator[tuple[tuple[int, Piece, int], Piece, list[Piece], range, range]]:
        """Yields, with a key, queries and the keys that they meet at a level, for some heads of this member."""
        for number, job in enumerate(self.plan.jobs):
            if job.level == level and self._me in job.members:
                share = job.share(self._me, self._heads.num_heads, self._heads.num_kv_heads)
                for query, seen in zip(job.queries, job.sees, strict=True):
                    for heads, kv_heads in self._alike(job, share):
                        keys = [job.keys[index] for index in seen]
                        yield (number, query, heads.start), query, keys, heads, kv_heads

    def _tokens(
        self, level: int, pieces: Sequence[Piece], kv_heads: range, number: int, num_pieces: int, sources: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Returns the keys and values of a level that came with a micro-partition; those of whom this member has met at
        a level before count to the first.
        """
        found = []
        for piece in pieces:
            kept = self._kept(piece, level, kv_heads.start)
            if piece.member in sources:
                tokens = _piece_of(kept, number, num_pieces)
            else:
                tokens = range(kept) if number == 0 else range(0)
            if tokens:
                found.append(tuple(self._cut(piece, kind, kv_heads, tokens) for kind in range(2)))
        if not found:
            return None
        k, v = zip(*found, strict=True)
        return (k[0], v[0]) if len(found) == 1 else (torch.cat(k, dim=1), torch.cat(v, dim=1))

    def _cut(self, piece: Piece, kind: int, kv_heads: range, tokens: range) -> Tensor:
        """Returns some tokens of some heads out of all that has come of a piece."""
        by_heads: dict[range, list[Tensor]] = {}
        for heads, have, tensors in self._keys[piece]:
            tensor = tensors[kind]
            first, last = max(heads.start, kv_heads.start), min(heads.stop, kv_heads.stop)
            start, stop = max(have.start, tokens.start), min(have.stop, tokens.stop)
            if first < last and start < stop:
                some = tensor[first - heads.start : last - heads.start, start - have.start : stop - have.start]
                by_heads.setdefault(heads, []).append(some)
        rows = [some[0] if len(some) == 1 else torch.cat(some, dim=1) for some in by_heads.values()]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _alike(self, job: Job, share: HeadShare) -> Iterator[tuple[range, range]]:
        """Cuts a share into query heads and their KV heads that keep equally many tokens."""
        for piece in uniform_pieces(share, self._readers):
            ratios = [self._ratio(job.level, kv_head) for kv_head in piece.kv_heads]
            per_head = len(piece.heads) // max(1, len(piece.kv_heads))
            start = 0
            for stop in range(1, len(ratios) + 1):
                if stop == len(ratios) or ratios[stop] != ratios[start]:
                    first = piece.heads.start
                    yield (
                        range(first + start * per_head, first + stop * per_head),
                        range(piece.kv_heads.start + start, piece.kv_heads.start + stop),
                    )
                    start = stop

    def _ratio(self, level: int, kv_head: int) -> float:
        return self._setting.ratio(self._call.layer, self._heads.first + kv_head, level)

    def _kept(self, piece: Piece, level: int, kv_head: int) -> int:
        return self._setting.kept(piece.size, self._call.layer, self._heads.first + kv_head, level)

    def _num_queries(self, piece: Piece, level: int, kv_head: int) -> int:
        return num_queries(self._setting, piece, self._call.layer, self._heads.first + kv_head, level)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, heads: range, kv_heads: range) -> Partial:
        spec = self._call.spec.of_heads(HeadShare(heads, kv_heads))
        everything = Relation("full", -q.shape[1], k.shape[1])
        return self._call.parts.backend.attend(q, k, v, everything, spec)

    # ------------------------------------------------------------ results

    def results(self, source: int, target: int, level: int, number: int) -> Iterator[tuple[int, Piece, range, range]]:
        """Yields what one member finds for queries of another, and returns together: job, piece, heads, and queries."""
        for index, job in enumerate(self.plan.jobs):
            if job.level == level and source in job.members:
                share = job.share(source, self._heads.num_heads, self._heads.num_kv_heads)
                for query in job.queries:
                    for heads, kv_heads in self._alike(job, share) if query.member == target else ():
                        count = self._num_queries(query, level, kv_heads.start)
                        yield index, query, heads, _piece_of(count, number, self._setting.num_pieces(level))

    def answer(self, target: int, partials: Iterator[Partial], level: int, number: int) -> None:
        for index, query, heads, rows in self.results(self._me, target, level, number):
            rooms = next(partials)
            for room, tensor in zip(rooms, self._found[index, query, heads.start], strict=True) if rows else ():
                room.copy_(tensor)

    def take_results(self, source: int, partials: Iterator[Partial], level: int, number: int) -> None:
        """Puts results where their heads and queries are among all; queries that were dropped have found nothing."""
        for index, query, heads, rows in self.results(source, self._me, level, number):
            by_job = self._far.setdefault(query, {})
            if index not in by_job:
                by_job[index] = nothing_seen(self._rows(query))
            order = self._query_order(query) if self._setting.mode == "qkv" else None
            for all_of, some in zip(by_job[index], next(partials), strict=True):
                if order is None:
                    all_of[heads.start : heads.stop, rows.start : rows.stop] = some
                else:
                    for head, row in zip(heads, some, strict=True):
                        all_of[head, order[head // self._readers, rows.start : rows.stop]] = row

    def finish(self) -> Tensor:
        """Merges all levels into the output; returns the log-sum-exp `[heads, queries]`."""
        call, rows, lses = self._call, self.part.rows, []
        for query in self.plan.queries[self._me]:
            out, lse = merge_each([self._near[query], *self._far.get(query, {}).values()])
            start = rows.start + query.offset
            call.out[:, start : start + query.size] = out.to(call.q.dtype)
            lses.append(lse)
        return torch.cat(lses, dim=1) if lses else call.q.new_empty(call.spec.num_heads, 0, dtype=torch.float32)


def _keep(heads: range, kept: range, tokens: Tensor, order: Tensor | None, readers: int, room: Tensor) -> None:
    """Copies tokens of some heads, which count from the most important one on; `readers` heads have an order each."""
    some, rows = tokens[heads.start : heads.stop], slice(kept.start, kept.stop)
    if order is None:
        room.copy_(some[:, rows])
        return
    ordered = torch.arange(heads.start, heads.stop, device=tokens.device) // readers
    torch.gather(some, 1, order[ordered, rows, None].expand(-1, -1, tokens.shape[-1]), out=room)


def _heads_of(blocks: Sequence[tuple[range, Tensor]], heads: range, rows: range) -> Tensor:
    """Returns some tokens of some heads out of blocks that lie in order."""
    found = []
    for have, tensor in blocks:
        start, stop = max(have.start, heads.start), min(have.stop, heads.stop)
        if start < stop:
            found.append(tensor[start - have.start : stop - have.start, rows.start : rows.stop])
    return found[0] if len(found) == 1 else torch.cat(found)


def _piece_of(count: int, number: int, num_pieces: int) -> range:
    return range(number * count // num_pieces, (number + 1) * count // num_pieces)


def _room(call: Call, parts: Sequence[_Part], source: int, target: int, number: int, num_pieces: int) -> Message:
    return Message.room([shape for part in parts for shape in part.shapes(source, target, number, num_pieces)], call.q)


def _filled(call: Call, parts: Sequence[_Part], target: int, number: int, num_pieces: int) -> Message:
    message = _room(call, parts, call.group.rank, target, number, num_pieces)
    tensors = iter(message.tensors)
    for part in parts:
        part.fill(target, tensors, number, num_pieces)
    return message


def _partials(message: Message) -> Iterator[Partial]:
    half = len(message.tensors) // 2
    return zip(message.tensors[half:], message.tensors[:half], strict=True)


class _Ratings:
    """Rates the keys of a member for each KV head, by the attention that they get from a sample of queries.

    That is sent as soon as a layer's attention is done, and awaited when the next needs it.
    """

    def __init__(self, call: Call, parts: Sequence[_Part], lses: Sequence[Tensor]) -> None:
        self._spec, self._parts, group = call.spec, parts, call.group
        assert call.exchange.sparse is not None, "it rates for that"
        self._setting, self._me = call.exchange.sparse, group.rank
        own = self._room(call, group.rank)
        partials = _partials(own)
        for part, lse in zip(parts, lses, strict=True):
            rows = list(self._sampled(part, group.rank))
            q_room, lse_room = next(partials)
            lse_room.copy_(lse[:, rows])
            q_room.copy_(call.q[:, part.part.rows][:, rows])
        self._coming = {member: self._room(call, member) for member in group.others}
        self._pending: Pending = group.start(
            sends=dict.fromkeys(group.others, own), receives=self._coming, hop=_SAMPLES
        )
        self._coming[group.rank] = own

    def of_keys(self) -> list[Tensor]:
        """Waits for the samples; returns for each part the mean attention `[kv_heads, keys]` of those that see them."""
        self._pending.wait()
        each = {member: _partials(message) for member, message in self._coming.items()}
        found = []
        for part in self._parts:
            ratings, seen_by = torch.zeros(2, *part.k.shape[:2], device=part.k.device)
            own = torch.tensor(positions(part.part.kv_runs[self._me]), device=part.k.device)
            for member, partials in each.items():
                q, lse = next(partials)
                asked = positions(part.part.q_runs[member])
                sampled = torch.tensor([asked[row] for row in self._sampled(part, member)], device=q.device)
                if len(sampled) and len(own):
                    sees = sampled[:, None] >= own
                    ratings += _attention_of(q, sees, part.k, lse, self._spec)
                    seen_by += sees.sum(dim=0)
            ratings /= seen_by.clamp_min(1)
            if self._setting.rate_by == "layer":
                ratings = ratings.sum(dim=0, keepdim=True).expand_as(ratings)
            found.append(ratings)
        return found

    def _room(self, call: Call, member: int) -> Message:
        counts = [(call.spec.num_heads, len(self._sampled(part, member))) for part in self._parts]
        shapes: list[Shape] = [(shape, torch.float32) for shape in counts]
        shapes += [((*shape, call.spec.head_dim), call.q.dtype) for shape in counts]
        return Message(shapes, call.q.device)

    def _sampled(self, part: _Part, member: int) -> tuple[int, ...]:
        return sampled_rows(num_tokens(part.part.q_runs[member]), self._setting.samples)


def _attention_of(q: Tensor, sees: Tensor, k: Tensor, lse: Tensor, spec: AttnSpec) -> Tensor:
    """Sums the attention of queries `[heads, n, dim]`, which see the keys `[kv_heads, tokens, dim]` or not."""
    num_kv_heads, num_keys, dim = k.shape
    queries = q.float().reshape(num_kv_heads, -1, dim)
    lses, found = lse.reshape(num_kv_heads, -1, 1), []
    visible = sees.repeat(spec.num_heads // num_kv_heads, 1)
    for start in range(0, num_keys, _TILE):
        keys = slice(start, start + _TILE)
        scores = torch.matmul(queries, k[:, keys].float().transpose(1, 2)).mul_(spec.scale)
        if spec.softcap is not None:
            scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        found.append(scores.sub_(lses).exp_().masked_fill_(~visible[:, keys], 0.0).sum(dim=1))
    return torch.cat(found, dim=1)


# ---------------------------------------------------------------- one member with all tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLayer:
    """The setting and the layer of a member that has all tokens of its heads (SP-TP), see `Call`."""

    setting: SparseSetting
    layer: int
    num_layers: int
    layers: range
    first_kv_head: int

    def of_share(self, share: HeadShare) -> SparseLayer:
        return replace(self, first_kv_head=self.first_kv_head + share.kv_heads.start)


class AlonePart(NamedTuple):
    """One request: the queries of every member, keys and values of all, and where results go, as of `attend_all`."""

    q_runs: SpanShards
    q: Sequence[Tensor]
    held: Sequence[Sequence[Run]]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    results: Sequence[Tensor]


def attend_alone(parts: MemberParts, each: Sequence[AlonePart], at: SparseLayer, spec: AttnSpec) -> None:
    """Attends sparsely where all tokens have been gathered: nothing travels, and only what is kept is computed.

    Args:
        parts: remembers, from layer to layer, how keys are rated.
    """
    own, stored, queries, row = [], [], [], 0
    for one in each:
        runs = coalesce(run for member_runs in one.q_runs for run in member_runs)
        seen = coalesce(run for member_runs in one.held for run in member_runs)
        rows = slice(row, row + num_tokens(runs))
        own.append(MemberPart(rows=rows, q_runs=(runs,), kv_runs=(seen,), blocks=()))
        stored.append((by_position(one.held, one.k), by_position(one.held, one.v)))
        queries.append(by_position(one.q_runs, one.q))
        row = rows.stop
    q = torch.cat(queries, dim=1)
    alone = MemberParts(own, parts.backend)
    alone.memory = parts.memory
    call = Call(
        exchange=ALLTOALL._replace(sparse=at.setting),
        group=ALONE,
        parts=alone,
        q=q,
        k=q,
        v=q,
        kv=PagedKv(keys=q[None], values=q[None]),  # not read
        spec=spec,
        out=torch.empty_like(q),
        layer=at.layer,
        num_layers=at.num_layers,
        layers=at.layers,
        first_kv_head=at.first_kv_head,
    )
    sparse_alltoall(call, stored)
    for one, part in zip(each, own, strict=True):
        of_part = call.out[:, part.rows]
        for result, runs, places in zip(one.results, one.q_runs, row_slices(one.q_runs), strict=True):
            for (_, room), place in zip(split_runs(result, runs), places, strict=True):
                room.copy_(of_part[:, place])
