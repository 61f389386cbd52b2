"""The time to first token of a chain (KV-Runahead, arXiv 2405.05329) and of its baseline, simulated layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from longspan.cost.time_fit import LinkFit, TimeFit


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Costs of a chain: of one layer on one member, and of sending between two.

    Attributes:
        qkv_s: seconds per token for the projections to queries, keys and values.
        rest_s: seconds per token for everything behind attention: output projection and MLP.
        attention_s: seconds per pair of a query and a key.
        kv_bytes: keys and values of one token.
        bytes_per_s, latency_s: of the link between two members, one way.
        dense: whether masked pairs are computed, too, in rectangles as a plain matrix product has them (Figs. 2 and 4).

    Raises:
        ValueError: for a negative cost, or a link without speed.
    """

    qkv_s: float
    rest_s: float
    attention_s: float
    kv_bytes: float
    bytes_per_s: float
    latency_s: float
    dense: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"{field.name} must not be negative, but {getattr(self, field.name)} given")
        if self.bytes_per_s == 0:
            raise ValueError("bytes_per_s must be above 0, but 0 given")


def layer_cost(alone: TimeFit, link: LinkFit, *, num_layers: int, kv_bytes: float) -> LayerCost:
    """Derives the costs of a layer from the times of one instance.

    They do not tell projections from what is behind attention, so all counts as that.
    """
    return LayerCost(
        qkv_s=0.0,
        rest_s=alone.token_s / num_layers,
        attention_s=alone.pair_s / num_layers,
        kv_bytes=kv_bytes,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.start_s,
        dense=False,
    )


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When the last member that has tokens is done, which samples, and how long each member computes in all."""

    ttft_s: float
    busy_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Member:
    """Costs of a layer for one member of a chain, in seconds.

    Attributes:
        before_s: until its own keys and values are there.
        behind_s: attention and everything after it.
        message_s: keys and values, all up to its own, on their way to the next member.
        latency_s: of that message, besides.
    """

    before_s: float
    behind_s: float
    message_s: float
    latency_s: float = 0.0


def skewed(members: Sequence[Member], num_layers: int, *, rendezvous: bool = False) -> list[float]:
    """When each member of a chain is done (§4.1, Fig. 7).

    In every layer a member projects its tokens while its predecessor's message is under way, and attends once all KV up
    to its own is there; it leaves for the successor at that moment, while attention runs. So layers run skewed, and
    nobody waits for a later member. A link carries one message after the other.

    With `rendezvous`, a message also waits until its receiver has come to the same layer.
    """
    free_s, link_free_s = [0.0] * len(members), [0.0] * len(members)
    for _ in range(num_layers):
        arrived_s = ready_s = 0.0
        for index, member in enumerate(members):
            if index and rendezvous:
                previous = members[index - 1]
                begun_s = max(ready_s, free_s[index], link_free_s[index - 1])
                link_free_s[index - 1] = begun_s + previous.message_s
                arrived_s = link_free_s[index - 1] + previous.latency_s
            ready_s = max(free_s[index] + member.before_s, arrived_s)
            if not rendezvous:
                link_free_s[index] = max(ready_s, link_free_s[index]) + member.message_s
                arrived_s = link_free_s[index] + member.latency_s
            free_s[index] = ready_s + member.behind_s
    return free_s


def chain(cost: LayerCost, num_layers: int, partition: Sequence[int]) -> Timeline:
    """Times a prefill whose members hold consecutive pieces of a prompt and hand KV down the line, see `skewed`.

    Raises:
        ValueError: when no member has tokens, or one has fewer than none.
    """
    last = _last_with_tokens(partition)
    held = list(accumulate(partition))
    compute_s = _compute_s(cost, partition, held)
    members = [
        Member(
            before_s=cost.qkv_s * tokens,
            behind_s=compute,
            message_s=keys * cost.kv_bytes / cost.bytes_per_s,
            latency_s=cost.latency_s,
        )
        for tokens, compute, keys in zip(partition, compute_s, held, strict=True)
    ]
    return _timeline(cost, num_layers, partition, compute_s, skewed(members, num_layers)[last])


def gather_kv(cost: LayerCost, num_layers: int, partition: Sequence[int]) -> Timeline:
    """The same with the paper's baseline, TSP: in every layer all members meet and gather everybody's KV (Fig. 4).

    The all-gather goes around the ring in N - 1 rounds, each as long as its largest message, and overlaps nothing.

    Raises:
        ValueError: when no member has tokens, or one has fewer than none.
    """
    last = _last_with_tokens(partition)
    compute_s = _compute_s(cost, partition, [sum(partition)] * len(partition))
    gather_s = (len(partition) - 1) * (cost.latency_s + max(partition) * cost.kv_bytes / cost.bytes_per_s)
    free_s = [0.0] * len(partition)
    for _ in range(num_layers):
        met_s = max(free + cost.qkv_s * tokens for free, tokens in zip(free_s, partition, strict=True))
        free_s = [met_s + gather_s + compute for compute in compute_s]
    return _timeline(cost, num_layers, partition, compute_s, free_s[last])


def _last_with_tokens(partition: Sequence[int]) -> int:
    if min(partition, default=0) < 0 or not any(partition):
        raise ValueError(f"not a partition of a prompt: {tuple(partition)}")
    return max(member for member, tokens in enumerate(partition) if tokens)


def _compute_s(cost: LayerCost, partition: Sequence[int], dense_keys: Sequence[int]) -> list[float]:
    """Times what members compute from attention to the end of a layer; `dense_keys` is the width of their
    rectangles.
    """
    compute_s = []
    for tokens, end, keys in zip(partition, accumulate(partition), dense_keys, strict=True):
        visible = tokens * (end - tokens) + tokens * (tokens + 1) / 2
        pairs = tokens * keys if cost.dense else visible
        compute_s.append(cost.attention_s * pairs + cost.rest_s * tokens)
    return compute_s


def _timeline(
    cost: LayerCost, num_layers: int, partition: Sequence[int], compute_s: Sequence[float], ttft_s: float
) -> Timeline:
    busy_s = (num_layers * (cost.qkv_s * n + compute) for n, compute in zip(partition, compute_s, strict=True))
    return Timeline(ttft_s=ttft_s, busy_s=tuple(busy_s))
