"""The messages of a layer of `gather_hidden` that micro-partitions do not hide (CSPS §3.2.5, Fig. 9b).

The timeline follows `attn/gather_hidden.py`. All micro-partitions are sent at once. A member computes one as soon as it
has arrived and the one before is done. Then the outputs are sent to the owners of the tokens, with keys and values. A
member has a link with equal bandwidth each way. It sends to its peers at equal speed, in the order of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def tokens_of(runs: SpanShards, num_pieces: int) -> list[list[int]]:
    """Count the tokens of each member by micro-partition, for a whole prompt."""
    stop = max((run.positions[-1] + 1 for member_runs in runs for run in member_runs), default=0)
    return [[num_tokens(clip(own, *ends)) for own in runs] for ends in cut_evenly(stop, num_pieces)]


def pair_shares(tokens: Sequence[Sequence[int]]) -> list[float]:
    """Return the share of all pairs of a query and a visible key that each micro-partition has."""
    shares, before = [], 0
    total = sum(map(sum, tokens))
    for counts in tokens:
        after = before + sum(counts)
        shares.append((after * (after + 1) - before * (before + 1)) / (total * (total + 1)))
        before = after
    return shares


def exposed_s(work: HiddenWork, link: LinkSpeed) -> float:
    """Simulate a layer. Return its seconds beyond the computation of one member."""
    bytes_per_s, message_s = link.bytes_per_s, link.message_s
    members = range(len(work.tokens[0]))
    peers = len(members) - 1
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
