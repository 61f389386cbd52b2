"""One request's sparse attention in one layer, on one member: what it sends, attends, and returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.attn.backends import Partial, nothing_seen
from longspan.attn.exchanges import Call
from longspan.attn.member import MemberPart, attend_runs
from longspan.core.runs import Relation, positions
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import Block, Heads, Job, Piece, Sent, num_queries, sent, sparse_plan
from longspan.core.splits import HeadShare, uniform_pieces

_Keys = tuple[Tensor, Tensor, Tensor | None]
"""Keys and values `[kv_heads, tokens, head_dim]`, and the indices of those that are meant, if not all."""


class SparsePart:
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
            for tokens in self._own(piece):
                next(tensors).copy_(tokens)
        for block in what.queries if number == 0 else ():
            next(tensors).copy_(self._kept_queries(block))
        for block in what.keys:
            self._select_keys(block.piece, block.heads, block.cut(number, num_pieces), (next(tensors), next(tensors)))

    def take_own(self) -> None:
        """Takes the queries that this member would send to itself; its keys stay where they are."""
        for block in self.sent(self._me, self._me).queries:
            self._queries.setdefault(block.piece, []).append((block.heads, self._kept_queries(block)))

    def take(self, source: int, tensors: Iterator[Tensor], number: int, num_pieces: int) -> None:
        what = self.sent(source, self._me)
        for piece in what.whole if number == 0 else ():
            self._whole[piece] = next(tensors), next(tensors)
        for block in what.queries if number == 0 else ():
            self._queries.setdefault(block.piece, []).append((block.heads, next(tensors)))
        for block in what.keys:
            came = block.heads, block.cut(number, num_pieces), (next(tensors), next(tensors))
            self._keys.setdefault(block.piece, []).append(came)

    def _kept_queries(self, block: Block) -> Tensor:
        """Returns queries of some heads, the most important first; those in order of position are not copied."""
        piece, heads = block.piece, block.heads
        queries = self._rows(piece)[heads.start : heads.stop]
        order = self._query_order(piece) if self._setting.mode == "qkv" else None
        if order is None:
            return queries[:, : block.count]
        of_head = torch.arange(heads.start, heads.stop, device=queries.device) // self._readers
        found = queries.new_empty(len(heads), block.count, queries.shape[2])
        self._call.parts.backend.select((queries,), order[of_head, : block.count], (found,))
        return found

    def _select_keys(self, piece: Piece, heads: range, tokens: range, rooms: tuple[Tensor, Tensor]) -> None:
        """Copies own keys and values, which count from the most important one on."""
        own, order = [kind[heads.start : heads.stop] for kind in self._own(piece)], self._order(piece)
        if order is None:
            for kind, room in zip(own, rooms, strict=True):
                room.copy_(kind[:, tokens.start : tokens.stop])
        else:
            indices = order[heads.start : heads.stop, tokens.start : tokens.stop]
            self._call.parts.backend.select(own, indices, rooms)

    def _rows(self, piece: Piece) -> Tensor:
        return self._call.q[:, self.part.rows][:, piece.offset : piece.offset + piece.size]

    def _order(self, piece: Piece) -> Tensor | None:
        """Sorts the tokens of a piece of keys for each KV head, the most important first; None for their own order."""
        if self._ratings is None:
            return None
        if piece not in self._orders:
            self._orders[piece] = _sorted(self._ratings[:, piece.offset : piece.offset + piece.size])
        return self._orders[piece]

    def _query_order(self, piece: Piece) -> Tensor | None:
        """Does the same for queries, whose keys this member holds, too: they are the last of their partition."""
        if self._ratings is None:
            return None
        if piece not in self._query_orders:
            [keys] = [one for one in self.plan.keys[self._me] if one.partition == piece.partition]
            assert positions(keys.runs)[-piece.size :] == positions(piece.runs), "who computes a token has its key"
            last = keys.offset + keys.size
            self._query_orders[piece] = _sorted(self._ratings[:, last - piece.size : last])
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
                found = self._attend(_heads_of(self._queries[query], heads, range(count)), tokens, heads, kv_heads)
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
                partials.append(self._attend(q, tokens, heads, kv_heads))
            if len(partials) > 1:
                out = torch.empty_like(q)
                partials = [(out, self._call.parts.backend.merge_into(out, partials))]
            self._found[key] = partials[0] if partials else nothing_seen(q)

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
    ) -> _Keys | None:
        """Returns the keys and values of a level that came with a micro-partition; those of whom this member has met at
        a level before, and its own, count to the first.
        """
        wanted = []
        for piece in pieces:
            kept = self._kept(piece, level, kv_heads.start)
            if piece.member in sources:
                tokens = _piece_of(kept, number, num_pieces)
            else:
                tokens = range(kept) if number == 0 else range(0)
            if tokens:
                wanted.append((piece, tokens))
        if not wanted:
            return None
        if all(piece.member == self._me for piece, _ in wanted):
            return self._own_keys(wanted, kv_heads)
        if len(wanted) == 1 and len(came := self._came(*wanted[0], kv_heads)) == 1:
            return *came[0][2], None
        sizes = [len(tokens) for _, tokens in wanted]
        k, v = self.k.new_empty(2, len(kv_heads), sum(sizes), self.k.shape[2])
        for (piece, tokens), *rooms in zip(wanted, k.split(sizes, dim=1), v.split(sizes, dim=1), strict=True):
            self._copy(piece, tokens, kv_heads, (rooms[0], rooms[1]))
        return k, v, None

    def _own_keys(self, wanted: Sequence[tuple[Piece, range]], kv_heads: range) -> _Keys:
        """Returns some of this member's own keys, by their indices where these are sorted; else all of these pieces,
        which are neighbours.
        """
        k, v = (kind[kv_heads.start : kv_heads.stop] for kind in (self.k, self.v))
        if self._ratings is None:
            first, last = wanted[0][0], wanted[-1][0]
            start, stop = first.offset, last.offset + last.size
            assert sum(len(tokens) for _, tokens in wanted) == stop - start, "without ratings all are kept"
            return k[:, start:stop], v[:, start:stop], None
        found = []
        for piece, tokens in wanted:
            order = self._order(piece)
            assert order is not None, "there are ratings"
            found.append(order[kv_heads.start : kv_heads.stop, tokens.start : tokens.stop] + piece.offset)
        return k, v, torch.cat(found, dim=1)

    def _copy(self, piece: Piece, tokens: range, kv_heads: range, rooms: tuple[Tensor, Tensor]) -> None:
        """Copies some tokens of some heads out of all that has come of a piece, or that this member has."""
        if piece.member == self._me:
            self._select_keys(piece, kv_heads, tokens, rooms)
            return
        for *place, found in self._came(piece, tokens, kv_heads):
            for room, tensor in zip(rooms, found, strict=True):
                room[*place].copy_(tensor)

    def _came(self, piece: Piece, tokens: range, kv_heads: range) -> list[tuple[slice, slice, tuple[Tensor, Tensor]]]:
        """Lists what has come of some tokens of some heads, and where among these it is."""
        found = []
        for heads, have, tensors in self._keys[piece]:
            first, last = max(heads.start, kv_heads.start), min(heads.stop, kv_heads.stop)
            start, stop = max(have.start, tokens.start), min(have.stop, tokens.stop)
            if first < last and start < stop:
                k, v = (
                    kind[first - heads.start : last - heads.start, start - have.start : stop - have.start]
                    for kind in tensors
                )
                place = (
                    slice(first - kv_heads.start, last - kv_heads.start),
                    slice(start - tokens.start, stop - tokens.start),
                )
                found.append((*place, (k, v)))
        return found

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

    def _attend(self, q: Tensor, keys: _Keys, heads: range, kv_heads: range) -> Partial:
        (k, v, indices), backend = keys, self._call.parts.backend
        spec = self._call.spec.of_heads(HeadShare(heads, kv_heads))
        if indices is not None:
            return backend.attend_kept(q, k, v, indices, spec)
        return backend.attend(q, k, v, Relation("full", -q.shape[1], k.shape[1]), spec)

    # ------------------------------------------------------------ results

    def results(self, source: int, target: int, level: int, number: int) -> Iterator[tuple[int, Piece, range, range]]:
        """Yields what one member finds for queries of another, and returns together: job, piece, heads, and queries,
        of which there are some.
        """
        for index, job in enumerate(self.plan.jobs):
            if job.level == level and source in job.members:
                share = job.share(source, self._heads.num_heads, self._heads.num_kv_heads)
                for query in job.queries:
                    for heads, kv_heads in self._alike(job, share) if query.member == target else ():
                        count = self._num_queries(query, level, kv_heads.start)
                        if rows := _piece_of(count, number, self._setting.num_pieces(level)):
                            yield index, query, heads, rows

    def found(self, target: int, level: int, number: int) -> Iterator[Partial]:
        """Yields what this member has found for queries of a member."""
        for index, query, heads, _ in self.results(self._me, target, level, number):
            yield self._found[index, query, heads.start]

    def take_results(self, source: int, partials: Iterator[Partial], level: int, number: int) -> None:
        """Puts results where their heads are among all; queries are in order, and dropped ones have found nothing."""
        for index, query, heads, rows in self.results(source, self._me, level, number):
            by_job = self._far.setdefault(query, {})
            if index not in by_job:
                by_job[index] = self._room_of(query)
            for all_of, some in zip(by_job[index], next(partials), strict=True):
                all_of[heads.start : heads.stop, rows.start : rows.stop] = some

    def _room_of(self, query: Piece) -> Partial:
        """Allocates room for results; with `kv` all queries have some, and else those that are dropped saw nothing."""
        q = self._rows(query)
        if self._setting.mode == "qkv":
            return nothing_seen(q)
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def finish(self) -> Tensor:
        """Merges all levels into the output; returns the log-sum-exp `[heads, queries]`."""
        call, rows, lses = self._call, self.part.rows, []
        for query in self.plan.queries[self._me]:
            start = rows.start + query.offset
            partials = [self._near[query], *self._far.get(query, {}).values()]
            out = call.out[:, start : start + query.size]
            order = self._query_order(query) if self._setting.mode == "qkv" else None
            lses.append(call.parts.backend.merge_into(out, partials, order))
        return torch.cat(lses, dim=1) if lses else call.q.new_empty(call.spec.num_heads, 0, dtype=torch.float32)


def _sorted(ratings: Tensor) -> Tensor:
    return ratings.sort(dim=1, descending=True, stable=True).indices.to(torch.int32)


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=dim)


def _heads_of(blocks: Sequence[tuple[range, Tensor]], heads: range, rows: range) -> Tensor:
    """Returns some tokens of some heads out of blocks that lie in order."""
    found = []
    for have, tensor in blocks:
        start, stop = max(have.start, heads.start), min(have.stop, heads.stop)
        if start < stop:
            found.append(tensor[start - have.start : stop - have.start, rows.start : rows.stop])
    return _joined(found, 0)


def _piece_of(count: int, number: int, num_pieces: int) -> range:
    return range(number * count // num_pieces, (number + 1) * count // num_pieces)
