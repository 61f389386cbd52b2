"""The messages of a layer of `gather_hidden` that micro-partitions do not hide (CSPS §3.2.5, Fig. 9b).

The timeline follows `attn/gather_hidden.py`. All micro-partitions are sent at once. A member computes one as soon as it
has arrived and the one before is done. Then the outputs are sent to the owners of the tokens, with keys and values. A
member has a link with equal bandwidth each way. It sends to its peers at equal speed, in the order of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from longspan.core.runs import SpanShards, clip, num_tokens
from longspan.core.splits import cut_evenly
from longspan.cost.csa_pipeline import LinkSpeed


class HiddenWork(NamedTuple):
    """The work of a layer on one member.

    Attributes:
        tokens: of each member, by micro-partition: `[pieces][members]`.
        computed_s: seconds of projections and attention by micro-partition.
        gathered_bytes, returned_bytes: of one token that is sent to one member, and of its results from one member.
    """

    tokens: Sequence[Sequence[int]]
    computed_s: Sequence[float]
    gathered_bytes: float
    returned_bytes: float


def tokens_of(runs: SpanShards, num_pieces: int) -> tuple[int, list[list[int]]]:
    """Return the first position of a step, and the tokens of each member by micro-partition."""
    positions = [run.positions for member_runs in runs for run in member_runs]
    start = min((own[0] for own in positions), default=0)
    stop = max((own[-1] + 1 for own in positions), default=0)
    ends = [(start + first, start + last) for first, last in cut_evenly(stop - start, num_pieces)]
    return start, [[num_tokens(clip(own, *each)) for own in runs] for each in ends]


def pair_shares(tokens: Sequence[Sequence[int]], start: int = 0) -> list[float]:
    """Return the share of all pairs of a query and a visible key that each micro-partition has, behind `start` keys."""
    counts = [sum(own) for own in tokens]
    ends = list(accumulate(counts, initial=start))
    pairs = [last * (last + 1) - first * (first + 1) for first, last in pairwise(ends)]
    return [one / sum(pairs) for one in pairs]


def exposed_s(work: HiddenWork, link: LinkSpeed) -> float:
    """Simulate a layer. Return its seconds beyond the computation of one member."""
    bytes_per_s, message_s = link.bytes_per_s, link.message_s
    members, peers = range(len(work.tokens[0])), len(work.tokens[0]) - 1
    gathered = [0] * len(members)
    computed_s, received_s = [0.0] * len(members), [0.0] * len(members)
    own_tokens = [sum(counts[member] for counts in work.tokens) for member in members]
    sent_s = [peers * own * work.gathered_bytes / bytes_per_s for own in own_tokens]
    for number, (counts, piece_s) in enumerate(zip(work.tokens, work.computed_s, strict=True), 1):
        gathered = [before + number for before, number in zip(gathered, counts, strict=True)]
        for member in members:
            latest = max((gathered[peer] for peer in members if peer != member and counts[peer]), default=0)
            arrived_s = number * message_s + peers * latest * work.gathered_bytes / bytes_per_s
            computed_s[member] = max(computed_s[member], arrived_s) + piece_s
        for member, own in enumerate(counts):
            way_s = message_s + (sum(counts) - own) * work.returned_bytes / bytes_per_s
            sent_s[member] = max(sent_s[member], computed_s[member]) + way_s
        for member, own in enumerate(counts):
            if own:
                way_s = message_s + peers * own * work.returned_bytes / bytes_per_s
                begun_s = max(computed_s[peer] for peer in members if peer != member)
                received_s[member] = max(received_s[member], begun_s) + way_s
    return max(*computed_s, *sent_s, *received_s) - sum(work.computed_s)
