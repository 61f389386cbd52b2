"""The choice of an exchange: the rules of two papers as pure functions of model shape, hardware, lengths and group
size.

Context Parallelism (arXiv 2411.01783) chooses between `ring_kv` (its pass-KV) and `ring_q` (pass-Q); the fitted rule of
its Appendix D is in benchmarks/papers. Its T is `new_tokens` here, P `cached_tokens`, N `num_members`, C `flops_per_s`,
BW `bytes_per_s`, e `bytes_per_element`, and its D is `num_heads * head_dim`, which cancels.

CSPS counts the bytes of `alltoall` (its SP-NTP) in supplement A.
"""

from __future__ import annotations

from longspan.core.exchange import RING_KV, RING_Q, Exchange, WeightSource
from longspan.cost.architecture import Hardware, ModelShape
from longspan.cost.profile import LinkFit


def ring_kv_or_ring_q(
    shape: ModelShape, hardware: Hardware, new_tokens: int, cached_tokens: int, num_members: int
) -> Exchange:
    """Chooses the ring whose communication is expected to delay attention less (Algorithm 5, Appendix C).

    It is `ring_kv` when the part of keys and values that attention does not hide is no larger than the partial outputs
    of `ring_q`, which nothing hides; their log-sum-exps are neglected (Eq. 5). That follows where attention hides all
    hops (Eq. 2), so it is not asked.

    The choice is monotone: with more new tokens (for a fixed number of cached ones, or of all), more bandwidth, fewer
    cached tokens, fewer members or slower devices, `ring_kv` stays chosen once it is. A tie is `ring_kv`'s.
    """
    assert new_tokens >= 1 and num_members >= 2, f"{new_tokens} new tokens of {num_members} members"
    miss_rate = new_tokens / (new_tokens + cached_tokens)
    equal_messages = 2 * shape.num_kv_heads / shape.num_heads
    # What the link carries while attention runs, in units of the bytes that all queries of all tokens would have.
    hidden = 4 * new_tokens * hardware.bytes_per_s / (num_members * hardware.flops_per_s * shape.bytes_per_element)
    return RING_KV if miss_rate + hidden >= equal_messages else RING_Q


def unsharded_weights_pay(shape: ModelShape, length: int, num_members: int, tp: int, weights: WeightSource) -> bool:
    """Tells whether `alltoall` with unsharded weights moves fewer bytes for `length` tokens of a step than with shares
    of heads.

    Between instances both move the same. With shares, each instance sums outputs of its tokens over `tp` ranks: 2 L d
    (t - 1) elements in all. With H_q head_dim = d, two ranks never gain; with few KV heads three do.
    """
    return unsharded_elements(shape, length, num_members, tp, weights) < 2 * length * shape.hidden_size * (tp - 1)


def unsharded_elements(shape: ModelShape, length: int, num_members: int, tp: int, weights: WeightSource) -> float:
    """Counts what ranks send for a layer with unsharded weights, in which each makes all heads of some tokens.

    Inside instances, queries, keys and values go to the ranks of their heads and outputs back, of which (t - 1)/t move:
    2 (H_q + H_kv) head_dim L (t - 1)/t elements; with fewer KV heads than ranks, H_kv counts one once per rank that
    needs it. Then all ranks get all outputs, L d (t - 1) elements. Weights of `peers` are 2 (H_q + H_kv) head_dim d
    (t - 1) elements for each instance, however many tokens there are; those of the `host` take no link.
    """
    held_kv_heads = max(shape.num_kv_heads, min(tp, shape.num_heads))
    by_heads = 2 * (shape.num_heads + held_kv_heads) * shape.head_dim * length * (tp - 1) / tp
    gathered = length * shape.hidden_size * (tp - 1)
    if weights == "peers":
        gathered += num_members * shape.attention_weights * (tp - 1)
    return by_heads + gathered


def cheaper_weights(shape: ModelShape, tp: int, *, host: LinkFit | None, peers: LinkFit | None) -> WeightSource:
    """Whence the unsharded weights of a layer come sooner; the host where either link was not measured.

    Args:
        host: copies from a rank's host.
        peers: what each of `tp` ranks sends to the others.
    """
    if host is None or peers is None:
        return "host"
    num_bytes = shape.attention_weights * shape.bytes_per_element
    return "host" if host.seconds(num_bytes) <= peers.seconds(num_bytes * (tp - 1) / tp) else "peers"
