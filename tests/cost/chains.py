"""A chain by the costs of a layer, as KV-Runahead has them: projections and the work behind attention are separate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from longspan.cost.partitions import Member, skewed


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Seconds of one layer on one member, and of sending between two.

    Attributes:
        qkv_s, rest_s: per token, of projections, and of everything behind attention.
        attention_s: per pair of a query and a key.
        dense: whether masked pairs are computed, too, in rectangles as a plain matrix product has them (Figs. 2 and 4).
    """

    qkv_s: float
    rest_s: float
    attention_s: float
    kv_bytes: float
    bytes_per_s: float
    latency_s: float
    dense: bool


@dataclass(frozen=True, kw_only=True)
class Timeline:
    ttft_s: float
    busy_s: tuple[float, ...]


def chain(cost: LayerCost, num_layers: int, partition: Sequence[int]) -> Timeline:
    """When the last member with tokens is done, and how long each computes."""
    members = []
    for tokens, end in zip(partition, accumulate(partition), strict=True):
        pairs = tokens * end if cost.dense else tokens * (end - tokens) + tokens * (tokens + 1) / 2
        members.append(
            Member(
                before_s=cost.qkv_s * tokens,
                behind_s=cost.attention_s * pairs + cost.rest_s * tokens,
                message_s=end * cost.kv_bytes / cost.bytes_per_s,
                latency_s=cost.latency_s,
            )
        )
    last = max(member for member, tokens in enumerate(partition) if tokens)
    busy_s = tuple(num_layers * (member.before_s + member.behind_s) for member in members)
    return Timeline(ttft_s=skewed(members, num_layers)[last], busy_s=busy_s)
