"""The sparse form of `alltoall`: the order in which tokens and results travel, and what is computed meanwhile.

The levels and the ratings of tokens are described in `attn/sparse`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longspan.attn.comm import Message, Pending
from longspan.attn.exchanges import Call, register_attention
from longspan.attn.member import MemberPart, gather_runs
from longspan.attn.sparse.messages import partial_room, partials_of
from longspan.attn.sparse.part import SparsePart
from longspan.attn.sparse.ratings import Ratings
from longspan.core.exchange import ALLTOALL_SPARSE
from longspan.core.runs import num_tokens
from longspan.core.sparse import MOST_PIECES, RESULTS_HOP, TOKENS_HOP, SparseSetting


def alltoall_sparse(call: Call) -> None:
    """Computes attention like `alltoall`, without the tokens that the setting drops."""
    attend_levels(call, [_gathered(call, part) for part in call.parts])


def attend_levels(call: Call, stored: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Computes attention like `alltoall`, level by level.

    Near tokens are sent and attended first. Farther tokens travel meanwhile, and so do results (CSPS §3.2.5).

    Args:
        stored: for each part the keys and values `[kv_heads, tokens, head_dim]` that this member holds.
    """
    setting, memory = call.exchange.sparse, call.parts.memory
    assert setting is not None and call.spec.window is None, "a window drops all that is far"
    ratings = memory.pop(Ratings, None)
    found = ratings.of_keys() if isinstance(ratings, Ratings) else [None] * len(call.parts)
    if ratings is None or call.layer in (0, call.num_layers - 1):
        setting = setting.exact
    each = zip(call.parts, stored, found, strict=True)
    parts = [SparsePart(call, setting, part, kv, rated) for part, kv, rated in each]
    arriving = _Arriving(call, setting, parts)
    for part in parts:
        part.take_own()
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
        memory[Ratings] = Ratings(call, parts, lses)


class _Arriving:
    """The tokens that others send, which they begin to at once: those who are near first, and each in pieces."""

    def __init__(self, call: Call, setting: SparseSetting, parts: Sequence[SparsePart]) -> None:
        group, self._parts = call.group, parts
        self._levels = {
            member: min((level for part in parts if (level := part.plan.level(group.rank, member))), default=0)
            for member in group.peers
        }
        self._coming: dict[tuple[int, int], tuple[dict[int, Message], Pending]] = {}
        self._setting = setting
        for level in range(1, setting.num_levels + 1):
            near, num_pieces = self.sources(level), setting.num_pieces(level)
            for number in range(num_pieces):
                leaving = {member: _filled(call, parts, member, number, num_pieces) for member in near}
                coming = {member: _room(call, parts, member, group.rank, number, num_pieces) for member in near}
                pending = group.start(sends=leaving, receives=coming, hop=TOKENS_HOP + number)
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

    def __init__(self, call: Call, parts: Sequence[SparsePart]) -> None:
        self._call, self._parts = call, parts
        self._coming: list[tuple[int, int, dict[int, Message], Pending]] = []

    def send(self, level: int, number: int) -> None:
        """Sends everybody what was found for its queries; this member keeps its own."""
        group, me = self._call.group, self._call.group.rank
        sends = {asker: self._room(me, asker, level, number) for asker in group.peers}
        for asker, message in sends.items():
            rooms = partials_of(message)
            for part in self._parts:
                for found in part.found(asker, level, number):
                    for room, tensor in zip(next(rooms), found, strict=True):
                        room.copy_(tensor)
        for part in self._parts:
            part.take_results(me, part.found(me, level, number), level, number)
        results = {member: self._room(member, me, level, number) for member in group.peers}
        hop = RESULTS_HOP + (level - 2) * MOST_PIECES + number
        pending = group.start(sends=sends, receives=results, hop=hop)
        self._coming.append((level, number, results, pending))

    def take(self) -> None:
        """Waits for all results, in the order in which they were sent."""
        for level, number, messages, pending in self._coming:
            pending.wait()
            for member, message in messages.items():
                partials = partials_of(message)
                for part in self._parts:
                    part.take_results(member, partials, level, number)

    def _room(self, source: int, target: int, level: int, number: int) -> Message:
        """Allocates a message for log-sum-exps, and then for the outputs."""
        found = [one for part in self._parts for one in part.results(source, target, level, number)]
        return partial_room(self._call, [(len(heads), len(rows)) for *_, heads, rows in found])


def _gathered(call: Call, part: MemberPart) -> tuple[Tensor, Tensor]:
    """Returns all keys and values that this member holds of a part."""
    runs = part.kv_runs[call.group.rank]
    k, v = call.q.new_empty(2, call.spec.num_kv_heads, num_tokens(runs), call.spec.head_dim)
    gather_runs(call.parts.backend, part, runs, call.group.rank, call.kv, (k, v))
    return k, v


def _room(call: Call, parts: Sequence[SparsePart], source: int, target: int, number: int, num_pieces: int) -> Message:
    return Message.empty([shape for part in parts for shape in part.shapes(source, target, number, num_pieces)], call.q)


def _filled(call: Call, parts: Sequence[SparsePart], target: int, number: int, num_pieces: int) -> Message:
    message = _room(call, parts, call.group.rank, target, number, num_pieces)
    tensors = iter(message.tensors)
    for part in parts:
        part.fill(target, tensors, number, num_pieces)
    return message


register_attention(ALLTOALL_SPARSE, alltoall_sparse)
