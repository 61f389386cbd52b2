"""The sparse attention of one request in one layer, on one member: sent tokens, attention, and returned results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.attn.backends import Partial, add_sinks, nothing_seen
from longspan.attn.exchanges import Call
from longspan.attn.member import MemberPart, attend_runs
from longspan.attn.paged import KeysAndValues
from longspan.attn.sparse.kept import record_kept
from longspan.core.runs import Relation, positions
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import Block, Heads, Job, Piece, Sent, num_queries, sent, sparse_plan
from longspan.core.splits import HeadShare, uniform_pieces

_Keys = tuple[Tensor, Tensor, Tensor | None]
"""Keys and values `[kv_heads, tokens, head_dim]`, and the indices of the attended ones (None: all)."""


class _Received:
    """The tokens that a member has received: whole pieces, and the most important queries and keys of pieces."""

    def __init__(self) -> None:
        self.whole: dict[Piece, KeysAndValues] = {}
        self._queries: dict[Piece, list[tuple[range, Tensor]]] = {}
        self._keys: dict[Piece, list[tuple[range, range, KeysAndValues]]] = {}
        """Heads, tokens counted from the most important one, and their keys and values."""

    def add_queries(self, block: Block, queries: Tensor) -> None:
        self._queries.setdefault(block.piece, []).append((block.heads, queries))

    def add_keys(self, block: Block, tokens: range, kv: KeysAndValues) -> None:
        self._keys.setdefault(block.piece, []).append((block.heads, tokens, kv))

    def queries(self, piece: Piece, heads: range, rows: range) -> Tensor:
        """Return some queries of some heads. The received blocks are in order of their heads."""
        tensors = []
        for block_heads, tensor in self._queries[piece]:
            start, stop = max(block_heads.start, heads.start), min(block_heads.stop, heads.stop)
            if start < stop:
                first = block_heads.start
                tensors.append(tensor[start - first : stop - first, rows.start : rows.stop])
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def keys(self, piece: Piece, tokens: range, kv_heads: range) -> list[tuple[slice, slice, KeysAndValues]]:
        """List the received keys and values of some tokens and heads, with their slices among these."""
        blocks = []
        for block_heads, block_tokens, kv in self._keys[piece]:
            first, last = max(block_heads.start, kv_heads.start), min(block_heads.stop, kv_heads.stop)
            start, stop = max(block_tokens.start, tokens.start), min(block_tokens.stop, tokens.stop)
            if first < last and start < stop:
                heads = slice(first - block_heads.start, last - block_heads.start)
                k, v = (tensor[heads, start - block_tokens.start : stop - block_tokens.start] for tensor in kv)
                head_slice = slice(first - kv_heads.start, last - kv_heads.start)
                blocks.append((head_slice, slice(start - tokens.start, stop - tokens.start), (k, v)))
        return blocks


class SparsePart:
    """The attention of one request in one layer, on one member.

    Args:
        kv: the keys and values `[kv_heads, tokens, head_dim]` that this member holds.
        ratings: `[kv_heads, tokens]`, the importance of these keys. None keeps all of them.
    """

    def __init__(
        self, call: Call, setting: SparseSetting, part: MemberPart, kv: KeysAndValues, ratings: Tensor | None
    ) -> None:
        self.part, self._call, self._setting, self._ratings = part, call, setting, ratings
        self.k, self.v = kv
        self.plan = sparse_plan(setting, part.q_runs, part.kv_runs)
        self._heads = Heads(call.spec.num_heads, call.spec.num_kv_heads, call.first_kv_head)
        self._readers = call.spec.num_heads // call.spec.num_kv_heads
        self._rank = call.group.rank
        self._orders: dict[tuple[int, int], Tensor] = {}
        self._received = _Received()
        self._near: dict[Piece, Partial] = {}
        self._earlier: dict[tuple[int, Piece, int], list[Partial]] = {}
        """By job, piece of queries of any member, and first head: results over all but the last keys of a level."""
        self._results: dict[tuple[int, Piece, int], Partial] = {}
        """By the same: results of some of the queries over all keys of a level."""
        self._far: dict[Piece, dict[int, Partial]] = {}
        """By piece of this member's queries and job: the results of all heads."""

    # ------------------------------------------------------------ tokens

    def sent(self, source: int, target: int) -> Sent:
        part, layer = self.part, self._call.layer if len(self._setting.drop) > 1 else 0
        return sent(self._setting, part.q_runs, part.kv_runs, layer, self._heads, (source, target))

    def shapes(self, source: int, target: int, number: int, num_pieces: int) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of the tensors that `fill` fills and `receive` takes. Queries are in the first piece."""
        tokens, spec = self.sent(source, target), self._call.spec
        for piece in tokens.whole if number == 0 else ():
            yield from [(spec.num_kv_heads, piece.size, spec.head_dim)] * 2
        for block in tokens.queries if number == 0 else ():
            yield (len(block.heads), block.count, spec.head_dim)
        for block in tokens.keys:
            yield from [(len(block.heads), len(block.cut(number, num_pieces)), spec.head_dim)] * 2

    def fill(self, target: int, tensors: Iterator[Tensor], number: int, num_pieces: int) -> None:
        tokens = self.sent(self._rank, target)
        for piece in tokens.whole if number == 0 else ():
            for tensor in self._own(piece):
                next(tensors).copy_(tensor)
        for block in tokens.queries if number == 0 else ():
            next(tensors).copy_(self._kept_queries(block))
        for block in tokens.keys:
            self._select_keys(block.piece, block.heads, block.cut(number, num_pieces), (next(tensors), next(tensors)))

    def receive_own(self) -> None:
        """Add the queries that this member would send to itself. Its keys stay in place."""
        for block in self.sent(self._rank, self._rank).queries:
            self._received.add_queries(block, self._kept_queries(block))

    def receive(self, source: int, tensors: Iterator[Tensor], number: int, num_pieces: int) -> None:
        tokens = self.sent(source, self._rank)
        for piece in tokens.whole if number == 0 else ():
            self._received.whole[piece] = next(tensors), next(tensors)
        for block in tokens.queries if number == 0 else ():
            self._received.add_queries(block, next(tensors))
        for block in tokens.keys:
            self._received.add_keys(block, block.cut(number, num_pieces), (next(tensors), next(tensors)))

    def _kept_queries(self, block: Block) -> Tensor:
        """Return queries of some heads, the most important first. Queries in order of position are not copied."""
        piece, heads = block.piece, block.heads
        queries = self._rows(piece)[heads.start : heads.stop]
        order = self._query_order(piece)
        if order is None:
            return queries[:, : block.count]
        of_head = torch.arange(heads.start, heads.stop, device=queries.device) // self._readers
        kept = queries.new_empty(len(heads), block.count, queries.shape[2])
        self._call.parts.backend.select((queries,), order[of_head, : block.count], (kept,))
        return kept

    def _select_keys(self, piece: Piece, heads: range, tokens: range, out: KeysAndValues) -> None:
        """Copy own keys and values. `tokens` count from the most important one."""
        own, order = (
            [tensor[heads.start : heads.stop] for tensor in self._own(piece)],
            self._order(piece.offset, piece.offset + piece.size),
        )
        if order is None:
            for tensor, target in zip(own, out, strict=True):
                target.copy_(tensor[:, tokens.start : tokens.stop])
        else:
            indices = order[heads.start : heads.stop, tokens.start : tokens.stop]
            self._call.parts.backend.select(own, indices, out)

    def _rows(self, piece: Piece) -> Tensor:
        return self._call.q[:, self.part.rows][:, piece.offset : piece.offset + piece.size]

    def _order(self, start: int, stop: int) -> Tensor | None:
        """Sort own keys for each KV head, the most important first. None keeps the order of position."""
        if self._ratings is not None and (start, stop) not in self._orders:
            order = self._ratings[:, start:stop].sort(dim=1, descending=True, stable=True).indices
            self._orders[start, stop] = order.to(torch.int32)
        return self._orders.get((start, stop))

    def _query_order(self, piece: Piece) -> Tensor | None:
        """Sort queries by the ratings of their keys, which this member holds: the last keys of their partition."""
        if self._setting.mode != "qkv" or self._ratings is None:
            return None
        [keys] = [held for held in self.plan.keys[self._rank] if held.partition == piece.partition]
        start, stop = keys.offset + keys.size - piece.size, keys.offset + keys.size
        is_held = (start, stop) in self._orders or positions(keys.runs)[-piece.size :] == positions(piece.runs)
        assert is_held, "a member has the keys of its queries"
        return self._order(start, stop)

    # ------------------------------------------------------------ attention

    def attend_near(self, *, waits: bool) -> None:
        """Attend queries to keys of their own partition. `waits` selects queries that need keys of other members."""
        call = self._call
        for query in self.plan.queries[self._rank]:
            near = self.plan.near[query]
            if waits == any(piece.member != self._rank for piece in near):
                tokens = [self._received.whole.get(piece) or self._own(piece) for piece in near]
                k, v = (torch.cat(kind, dim=1) if len(kind) > 1 else kind[0] for kind in zip(*tokens, strict=True))
                runs = [run for piece in near for run in piece.runs]
                self._near[query] = attend_runs(
                    call.parts.backend, self._rows(query), query.runs, k, v, runs, call.spec
                )

    def _own(self, piece: Piece) -> KeysAndValues:
        tokens = slice(piece.offset, piece.offset + piece.size)
        return self.k[:, tokens], self.v[:, tokens]

    def attend_far(self, level: int, number: int, num_pieces: int, sources: Sequence[int]) -> None:
        """Attend the queries of a level to the keys of one micro-partition, except the last one."""
        for key, query, keys, heads, kv_heads in self._regions(level):
            count = self._num_queries(query, level, kv_heads.start)
            tokens = self._tokens(level, keys, kv_heads, number, num_pieces, sources)
            if count and tokens is not None:
                partial = self._attend(self._received.queries(query, heads, range(count)), tokens, heads, kv_heads)
                self._earlier.setdefault(key, []).append(partial)

    def finish_far(self, level: int, number: int, num_pieces: int, sources: Sequence[int]) -> None:
        """Attend one piece of the queries of a level to the last keys. Then their results can be returned."""
        self._results.clear()
        for key, query, keys, heads, kv_heads in self._regions(level):
            rows = _piece_of(self._num_queries(query, level, kv_heads.start), number, num_pieces)
            if not rows:
                continue
            q = self._received.queries(query, heads, rows)
            partials = [
                (out[:, rows.start : rows.stop], lse[:, rows.start : rows.stop])
                for out, lse in self._earlier.get(key, ())
            ]
            tokens = self._tokens(level, keys, kv_heads, num_pieces - 1, num_pieces, sources)
            if tokens is not None:
                partials.append(self._attend(q, tokens, heads, kv_heads))
            if len(partials) > 1:
                out = torch.empty_like(q)
                partials = [(out, self._call.parts.backend.merge_into(out, partials))]
            self._results[key] = partials[0] if partials else nothing_seen(q)

    def _regions(self, level: int) -> Iterator[tuple[tuple[int, Piece, int], Piece, list[Piece], range, range]]:
        """Yield a key, queries, the keys that they see at a level, and heads of this member with their KV heads."""
        for number, job in enumerate(self.plan.jobs):
            if job.level == level and self._rank in job.members:
                share = job.share(self._rank, self._heads.num_heads, self._heads.num_kv_heads)
                for query, seen in zip(job.queries, job.sees, strict=True):
                    for heads, kv_heads in self._alike(job, share):
                        keys = [job.keys[index] for index in seen]
                        yield (number, query, heads.start), query, keys, heads, kv_heads

    def _tokens(
        self, level: int, pieces: Sequence[Piece], kv_heads: range, number: int, num_pieces: int, sources: Sequence[int]
    ) -> _Keys | None:
        """Return the keys and values of one micro-partition of a level.

        Micro-partition 0 includes own keys, and keys of members whose tokens arrived at an earlier level.
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
        if all(piece.member == self._rank for piece, _ in wanted):
            return self._own_keys(wanted, kv_heads)
        if len(wanted) == 1 and len(blocks := self._received.keys(*wanted[0], kv_heads)) == 1:
            return *blocks[0][2], None
        sizes = [len(tokens) for _, tokens in wanted]
        k, v = self.k.new_empty(2, len(kv_heads), sum(sizes), self.k.shape[2])
        for (piece, tokens), *out in zip(wanted, k.split(sizes, dim=1), v.split(sizes, dim=1), strict=True):
            self._copy(piece, tokens, kv_heads, (out[0], out[1]))
        return k, v, None

    def _own_keys(self, wanted: Sequence[tuple[Piece, range]], kv_heads: range) -> _Keys:
        """Return own keys by their indices if they are sorted, else all keys of the pieces, which are adjacent."""
        k, v = (tensor[kv_heads.start : kv_heads.stop] for tensor in (self.k, self.v))
        if self._ratings is None:
            first, last = wanted[0][0], wanted[-1][0]
            start, stop = first.offset, last.offset + last.size
            assert sum(len(tokens) for _, tokens in wanted) == stop - start, "without ratings all are kept"
            return k[:, start:stop], v[:, start:stop], None
        indices = []
        for piece, tokens in wanted:
            order = self._order(piece.offset, piece.offset + piece.size)
            assert order is not None, "there are ratings"
            indices.append(order[kv_heads.start : kv_heads.stop, tokens.start : tokens.stop] + piece.offset)
        return k, v, torch.cat(indices, dim=1)

    def _copy(self, piece: Piece, tokens: range, kv_heads: range, out: KeysAndValues) -> None:
        """Copy some tokens of some heads of a piece, which is received or own."""
        if piece.member == self._rank:
            self._select_keys(piece, kv_heads, tokens, out)
            return
        for *place, kv in self._received.keys(piece, tokens, kv_heads):
            for target, tensor in zip(out, kv, strict=True):
                target[*place].copy_(tensor)

    def _alike(self, job: Job, share: HeadShare) -> Iterator[tuple[range, range]]:
        """Cut a share into query heads, with their KV heads, that keep the same number of tokens."""
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
        """Yield job, piece, heads and rows of the results that `source` returns to `target` in one message."""
        for index, job in enumerate(self.plan.jobs):
            if job.level == level and source in job.members:
                share = job.share(source, self._heads.num_heads, self._heads.num_kv_heads)
                for query in job.queries:
                    for heads, kv_heads in self._alike(job, share) if query.member == target else ():
                        count = self._num_queries(query, level, kv_heads.start)
                        if rows := _piece_of(count, number, self._setting.num_pieces(level)):
                            yield index, query, heads, rows

    def results_for(self, target: int, level: int, number: int) -> Iterator[Partial]:
        for index, query, heads, _ in self.results(self._rank, target, level, number):
            yield self._results[index, query, heads.start]

    def receive_results(self, source: int, partials: Iterator[Partial], level: int, number: int) -> None:
        """Copy results to their heads among all heads. Queries are in order, and dropped queries have seen nothing."""
        for index, query, heads, rows in self.results(source, self._rank, level, number):
            by_job = self._far.setdefault(query, {})
            if index not in by_job:
                by_job[index] = self._empty_result(query)
            for all_heads, tensor in zip(by_job[index], next(partials), strict=True):
                all_heads[heads.start : heads.stop, rows.start : rows.stop] = tensor

    def _empty_result(self, query: Piece) -> Partial:
        """Allocate the results of a piece. In mode `kv` all queries get some, otherwise dropped queries see nothing."""
        q = self._rows(query)
        if self._setting.mode == "qkv":
            return nothing_seen(q)
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def keep(self) -> None:
        """Record the keys of earlier partitions that decodes read, see `KeptKeys`."""
        order = None if self._ratings is None else self._order
        record_kept(self.part.kept, self.plan, self._setting, self._call.layer, self._rank, self._heads, order)

    def finish(self) -> Tensor:
        """Merge all levels and the sinks into the output. Return the log-sum-exp `[heads, queries]`."""
        call, lses = self._call, []
        for query in self.plan.queries[self._rank]:
            partials = [self._near[query], *self._far.get(query, {}).values()]
            out = call.out[:, self.part.rows][:, query.offset : query.offset + query.size]
            lse = call.parts.backend.merge_into(out, partials, self._query_order(query))
            lses.append(add_sinks(out, lse, call.sinks))
        return torch.cat(lses, dim=1) if lses else call.q.new_empty(call.spec.num_heads, 0, dtype=torch.float32)


def _piece_of(count: int, number: int, num_pieces: int) -> range:
    return range(number * count // num_pieces, (number + 1) * count // num_pieces)
