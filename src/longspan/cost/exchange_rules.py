"""The choice of an exchange: the rules of two papers as pure functions of model shape, hardware, lengths and group
size.

Context Parallelism (arXiv 2411.01783) chooses between `ring_kv` (its pass-KV) and `ring_q` (pass-Q) by equations 1, 2
and 5 and Algorithms 1 and 5; the fitted rule of Appendix D is in benchmarks/papers. Its T is `new_tokens` here, P
`cached_tokens`, N `num_members`, C `flops_per_s`, BW `bytes_per_s`, e `bytes_per_element`, and its D is
`num_heads * head_dim`, which cancels in the rules.

CSPS chooses between `alltoall` (its SP-NTP) and `gather_hidden` (SP-TP) by the bytes of supplement A.

Bytes are of one layer. A prompt without cached tokens is a full prefill.
"""

from __future__ import annotations

import math
from typing import Literal

from longspan.core.exchange import ALLTOALL, GATHER_HIDDEN, RING_KV, RING_Q, Exchange, WeightSource
from longspan.cost.architecture import Hardware, ModelShape
from longspan.cost.time_fit import LinkFit


def pass_kv_bytes(shape: ModelShape, new_tokens: int, cached_tokens: int) -> float:
    """Counts all keys and values of a layer: what N hops of `ring_kv` carry (Table 3, §3.4)."""
    return (new_tokens + cached_tokens) * shape.kv_bytes


def pass_q_bytes(shape: ModelShape, new_tokens: int) -> float:
    """Counts all queries of a layer: what N hops of `ring_q` carry, without partial outputs (Table 3, §3.4)."""
    return new_tokens * shape.num_heads * shape.head_dim * shape.bytes_per_element


def ring_kv_or_ring_q(
    shape: ModelShape,
    hardware: Hardware,
    new_tokens: int,
    cached_tokens: int,
    num_members: int,
    *,
    algorithm: Literal[1, 5] = 5,
) -> Exchange:
    """Chooses the ring whose communication is expected to delay attention less.

    Algorithm 1 takes `ring_kv` when attention hides its hops (Eq. 2) or queries are no smaller (Eq. 1). Algorithm 5
    (Appendix C) also counts the all-to-all of `ring_q`, which nothing hides: `ring_kv` when the part of keys and values
    that attention does not hide is no larger than the partial outputs, their log-sum-exps neglected (Eq. 5). Eq. 2
    implies that, so it is not asked. Where Algorithm 1 takes `ring_kv`, Algorithm 5 does, too.

    Both are monotone: with more new tokens (for a fixed number of cached ones, or of all), more bandwidth, fewer cached
    tokens, fewer members or slower devices, `ring_kv` stays chosen once it is. A tie is `ring_kv`'s.

    Raises:
        ValueError: without new tokens, or for a group of one, which exchanges nothing.
    """
    _check_lengths(new_tokens, cached_tokens)
    _check_group(num_members)
    miss_rate = new_tokens / (new_tokens + cached_tokens)
    equal_messages = 2 * shape.num_kv_heads / shape.num_heads
    # What the link carries while attention runs, in units of the bytes that all queries of all tokens would have.
    hidden = 4 * new_tokens * hardware.bytes_per_s / (num_members * hardware.flops_per_s * shape.bytes_per_element)
    if algorithm == 1:
        prefers_kv = hidden >= equal_messages or miss_rate >= equal_messages
    else:
        prefers_kv = miss_rate + hidden >= equal_messages
    return RING_KV if prefers_kv else RING_Q


def alltoall_bytes(shape: ModelShape, length: int, num_members: int, *, gathers_weights: bool) -> float:
    """Counts what all members send for a layer of `alltoall`: Q, K and V to the members of their heads, outputs back.

    With even pieces, (N - 1)/N of everything moves: (H_q + 2 H_kv + H_q) head_dim L (N - 1)/N elements for `length` L.
    When there are fewer KV heads than members, H_kv counts a KV head once per member that needs it. With
    `gathers_weights` (for instances split by tensor parallelism), every member also fetches what it lacks of the four
    projections: 2 (H_q + H_kv) head_dim hidden_size (N - 1) elements in all. For H_q = H_kv and H_q head_dim =
    hidden_size = d this is supplement A's multi-head form, (4 d² + 4 L d/N) (N - 1).
    """
    _check_group(num_members)
    held_kv_heads = max(shape.num_kv_heads, min(num_members, shape.num_heads))
    elements = 2 * (shape.num_heads + held_kv_heads) * shape.head_dim * length * (num_members - 1) / num_members
    if gathers_weights:
        elements += _attention_weights(shape) * (num_members - 1)
    return elements * shape.bytes_per_element


def gather_hidden_bytes(shape: ModelShape, length: int, num_members: int) -> float:
    """Counts what all members send for a layer of `gather_hidden`: an all-gather and a reduce-scatter of hidden states.

    2 L d (N - 1) elements (supplement A), however many heads of either kind there are.
    """
    _check_group(num_members)
    return 2 * length * shape.hidden_size * (num_members - 1) * shape.bytes_per_element


def alltoall_or_gather_hidden(shape: ModelShape, length: int, num_members: int) -> Exchange:
    """Chooses the exchange that sends less on instances split by tensor parallelism, where `alltoall` has to gather
    weights.
    """
    alltoall = alltoall_bytes(shape, length, num_members, gathers_weights=True)
    return ALLTOALL if alltoall < gather_hidden_bytes(shape, length, num_members) else GATHER_HIDDEN


def alltoall_threshold(shape: ModelShape, num_members: int) -> float:
    """Finds the length above which `alltoall_or_gather_hidden` is `alltoall`; infinity when it never is.

    2 d N/(N - 2) in multi-head form, hence infinity for two members (where the supplement says that it always is). In
    general a d/(d - a/N) with a = (H_q + H_kv) head_dim, so that with grouped queries two members have one, too. (Where
    KV heads are shared by members, the a below counts them as `alltoall_bytes` does.)
    """
    per_token = alltoall_bytes(shape, 1, num_members, gathers_weights=False)
    saved_per_token = gather_hidden_bytes(shape, 1, num_members) - per_token
    weights = _attention_weights(shape) * (num_members - 1) * shape.bytes_per_element
    return weights / saved_per_token if saved_per_token > 0 else math.inf


def summed_bytes(shape: ModelShape, length: int, tp: int) -> float:
    """Counts what the ranks of all instances send for a layer whose heads they share, beside what instances exchange.

    Each instance sums outputs of its tokens over `tp` ranks: 2 L d (t - 1) elements in all, as `gather_hidden_bytes`.
    """
    return gather_hidden_bytes(shape, length, tp)


def whole_bytes(shape: ModelShape, length: int, num_members: int, tp: int, weights: WeightSource) -> float:
    """Counts the same for unsharded weights, with which each rank makes all heads of its part of its instance's tokens.

    Inside instances, queries, keys and values go to the ranks of their heads and outputs back, as in `alltoall_bytes`
    for L tokens and t ranks; then all ranks get all outputs, L d (t - 1) elements. Weights of `peers` are 2 (H_q +
    H_kv) head_dim d (t - 1) elements for each of the instances, however many tokens there are; those of the `host` take
    no link.
    """
    elements = float(length * shape.hidden_size * (tp - 1))
    if weights == "peers":
        elements += num_members * _attention_weights(shape) * (tp - 1)
    return alltoall_bytes(shape, length, tp, gathers_weights=False) + elements * shape.bytes_per_element


def unsharded_weights_pay(shape: ModelShape, length: int, num_members: int, tp: int, weights: WeightSource) -> bool:
    """Tells whether `alltoall` with unsharded weights moves fewer bytes for `length` tokens of a step than with shares
    of heads.

    Between instances both move the same. With H_q head_dim = d, two ranks never gain; with few KV heads three do.

    Raises:
        ValueError: when instances are not split.
    """
    return whole_bytes(shape, length, num_members, tp, weights) < summed_bytes(shape, length, tp)


def cheaper_weights(shape: ModelShape, tp: int, *, host: LinkFit | None, peers: LinkFit | None) -> WeightSource:
    """Whence the unsharded weights of a layer come sooner; the host where either link was not measured.

    Args:
        host: copies from a rank's host.
        peers: what each of `tp` ranks sends to the others.
    """
    if host is None or peers is None:
        return "host"
    num_bytes = _attention_weights(shape) * shape.bytes_per_element
    return "host" if host.seconds(num_bytes) <= peers.seconds(num_bytes * (tp - 1) / tp) else "peers"


def _attention_weights(shape: ModelShape) -> int:
    """Counts the elements of the projections of one layer that make queries, keys, values and the output."""
    return 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size


def _check_lengths(new_tokens: int, cached_tokens: int) -> None:
    if new_tokens < 1 or cached_tokens < 0:
        raise ValueError(f"a step has at least 1 new and 0 cached tokens, but {new_tokens} and {cached_tokens} given")


def _check_group(num_members: int) -> None:
    if num_members < 2:
        raise ValueError(f"an exchange is among at least 2 members, but {num_members} given")
