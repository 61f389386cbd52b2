"""The sparse form of `alltoall`: the order of sends and receives, and the computation that overlaps with them.

`attn/sparse` describes the levels and the ratings of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longspan.attn.comm import Message, Pending
from longspan.attn.exchanges import Call, exchange
from longspan.attn.member import empty_partials, partials_of
from longspan.attn.paged import KeysAndValues
from longspan.attn.sparse.part import SparsePart
from longspan.attn.sparse.ratings import Ratings
from longspan.core.exchange import ALLTOALL_SPARSE
from longspan.core.sparse import MAX_PIECES, RESULTS_HOP, TOKENS_HOP, SparseSetting


@exchange(ALLTOALL_SPARSE)
def alltoall_sparse(call: Call) -> None:
    """Compute attention like `alltoall`, without the tokens that the setting drops."""
    stored = [call.gathered(part, part.kv_runs[call.group.rank]) for part in call.parts]
    parts, lses = attend_levels(call, stored, rated_keys(call))
    if call.exchange.sparse is not None and call.exchange.sparse.drop_in_decode:
        for part in parts:
            part.keep()
    rate_later(call, parts, lses)


def rated_keys(call: Call) -> Sequence[Tensor] | None:
    """Wait for the ratings `[kv_heads, keys]` of each part's keys on this member. None if the layer drops nothing."""
    ratings = call.parts.memory.pop(Ratings, None)
    if not isinstance(ratings, Ratings):
        return None
    all_ratings = ratings.of_keys()
    return None if call.layer in (0, call.num_layers - 1) else all_ratings


def rate_later(call: Call, parts: Sequence[SparsePart], lses: Sequence[Tensor]) -> None:
    """Start to rate the keys for the next layer, if that layer drops tokens."""
    if call.layer + 1 in call.layers and call.layer + 1 != call.num_layers - 1:
        call.parts.memory[Ratings] = Ratings(call, parts, lses)


def attend_levels(
    call: Call, stored: Sequence[KeysAndValues], ratings: Sequence[Tensor] | None
) -> tuple[list[SparsePart], list[Tensor]]:
    """Compute attention like `alltoall`, level by level. Return the log-sum-exps `[heads, queries]` of each part.

    Near tokens are sent and attended first. Distant tokens and results are sent meanwhile (CSPS §3.2.5).

    Args:
        stored: for each part the keys and values `[kv_heads, tokens, head_dim]` that this member holds.
        ratings: `[kv_heads, tokens]` of each part. None keeps all tokens.
    """
    setting = call.exchange.sparse
    assert setting is not None and call.spec.visibility.max_keys is None, (
        "layers with a window have no distant tokens to drop"
    )
    if ratings is None:
        setting = setting.exact
    all_ratings: Sequence[Tensor | None] = [None] * len(call.parts) if ratings is None else ratings
    each = zip(call.parts, stored, all_ratings, strict=True)
    parts = [SparsePart(call, setting, part, kv, part_ratings) for part, kv, part_ratings in each]
    tokens = _Tokens(call, setting, parts)
    for part in parts:
        part.receive_own()
        part.attend_near(waits=False)
    tokens.receive(1, 0)
    for part in parts:
        part.attend_near(waits=True)
    results = _Results(call, parts)
    for level in range(2, setting.num_levels + 1):
        sources, num_pieces = tokens.sources(level), setting.num_pieces(level)
        for number in range(num_pieces):
            tokens.receive(level, number)
            for part in parts if number < num_pieces - 1 else ():
                part.attend_far(level, number, num_pieces, sources)
        for number in range(num_pieces):
            for part in parts:
                part.finish_far(level, number, num_pieces, sources)
            results.send(level, number)
    results.receive()
    return parts, [part.finish() for part in parts]


class _Tokens:
    """Sends and receives tokens. All sends start at once: to near members first, and in pieces."""

    def __init__(self, call: Call, setting: SparseSetting, parts: Sequence[SparsePart]) -> None:
        group, self._parts, self._setting = call.group, parts, setting
        self._levels = {
            peer: min((level for part in parts if (level := part.plan.level(group.rank, peer))), default=0)
            for peer in group.peers
        }
        self._incoming: dict[tuple[int, int], tuple[dict[int, Message], Pending]] = {}
        for level in range(1, setting.num_levels + 1):
            num_pieces = setting.num_pieces(level)
            for number in range(num_pieces):
                sends, receives = {}, {}
                for peer in self.sources(level):
                    sends[peer] = _empty(call, parts, group.rank, peer, number, num_pieces)
                    tensors = iter(sends[peer].tensors)
                    for part in parts:
                        part.fill(peer, tensors, number, num_pieces)
                    receives[peer] = _empty(call, parts, peer, group.rank, number, num_pieces)
                pending = group.start(sends=sends, receives=receives, hop=TOKENS_HOP + number)
                self._incoming[level, number] = receives, pending

    def sources(self, level: int) -> list[int]:
        """List the members whose tokens meet tokens of this member at this level, and at no lower one."""
        return [peer for peer, first in self._levels.items() if first == level]

    def receive(self, level: int, number: int) -> None:
        messages, pending = self._incoming[level, number]
        pending.wait()
        for peer, message in messages.items():
            tensors = iter(message.tensors)
            for part in self._parts:
                part.receive(peer, tensors, number, self._setting.num_pieces(level))


class _Results:
    """Sends and receives results for queries of other members, while further queries are computed."""

    def __init__(self, call: Call, parts: Sequence[SparsePart]) -> None:
        self._call, self._parts = call, parts
        self._incoming: list[tuple[int, int, dict[int, Message], Pending]] = []

    def send(self, level: int, number: int) -> None:
        """Send to each member the results for its queries. This member keeps its own."""
        group, rank = self._call.group, self._call.group.rank
        sends = {peer: self._empty(rank, peer, level, number) for peer in group.peers}
        for peer, message in sends.items():
            results = [partial for part in self._parts for partial in part.results_for(peer, level, number)]
            for targets, partial in zip(partials_of(message), results, strict=True):
                for target, tensor in zip(targets, partial, strict=True):
                    target.copy_(tensor)
        for part in self._parts:
            part.receive_results(rank, part.results_for(rank, level, number), level, number)
        receives = {peer: self._empty(peer, rank, level, number) for peer in group.peers}
        hop = RESULTS_HOP + (level - 2) * MAX_PIECES + number
        self._incoming.append((level, number, receives, group.start(sends=sends, receives=receives, hop=hop)))

    def receive(self) -> None:
        """Wait for all results, in the order of the sends."""
        for level, number, messages, pending in self._incoming:
            pending.wait()
            for peer, message in messages.items():
                partials = partials_of(message)
                for part in self._parts:
                    part.receive_results(peer, partials, level, number)

    def _empty(self, source: int, target: int, level: int, number: int) -> Message:
        results = [result for part in self._parts for result in part.results(source, target, level, number)]
        return empty_partials([(len(heads), len(rows)) for *_, heads, rows in results], self._call.spec, self._call.q)


def _empty(call: Call, parts: Sequence[SparsePart], source: int, target: int, number: int, num_pieces: int) -> Message:
    return Message.empty([shape for part in parts for shape in part.shapes(source, target, number, num_pieces)], call.q)
