"""The choice of group size and exchange for a prompt, by measured times, or by the rules of papers without them."""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING

from longspan.core.exchange import CHAIN, LOCAL, RING_KV, RING_Q, Exchange, WeightSource, exchange_of, of_any_layout
from longspan.cost.profile import LinkFit, Times
from longspan.cost.shape import Hardware, ModelShape
from longspan.policy.facts import Facts
from longspan.policy.group_times import class_of, nearest_times, times_over

if TYPE_CHECKING:
    from longspan.policy.sharing import SharingOptions

_MAX_CACHED = 100_000  # lengths


class Chooser:
    """Predicts the prefill on one instance and on groups of every size, and chooses the quickest."""

    def __init__(self, num_instances: int, facts: Facts, options: SharingOptions) -> None:
        profile = nearest_times(facts)
        times = {} if profile is None else profile.times()
        if options.wanted is not None:
            candidates: tuple[Exchange, ...] = (options.wanted,)
        else:
            candidates = (*of_any_layout(), CHAIN) if options.may_chain else of_any_layout()
        self._alone, self._candidates = times.get((1, LOCAL)), candidates
        self._shared = {
            members: measured
            for members in range(2, num_instances + 1)
            if (measured := {one: times[members, one] for one in candidates if (members, one) in times})
        }
        self._times_over = cache(partial(times_over, facts))
        self._decode_fits = {} if profile is None else profile.decode_fits()
        self._decode, self._facts, self._options = exchange_of(options.decode), facts, options
        self.members = lru_cache(maxsize=_MAX_CACHED)(self._members)
        """Cached, because every step predicts all waiting prompts."""

    def _members(self, new_tokens: int, cached_tokens: int = 0, answer_tokens: int = 0) -> int | None:
        """Return the smallest number of instances that is expected to finish a prompt and its answer first.

        Return None if times were not measured.
        """
        if self._alone is None or not self._shared:
            return None
        context = new_tokens + cached_tokens
        seconds = {1: self._alone.seconds(new_tokens, cached_tokens) + self._answer_s(1, LOCAL, context, answer_tokens)}
        for members, times in self._shared.items():
            seconds[members] = min(
                time.seconds(new_tokens, cached_tokens) + self._answer_s(members, exchange, context, answer_tokens)
                for exchange, time in times.items()
            )
        return min(seconds, key=seconds.__getitem__)

    @property
    def prices_answers(self) -> bool:
        """Whether decodes of any group were measured. Answers then count in the number of members."""
        return any(members > 1 for members, _ in self._decode_fits)

    def _answer_s(self, members: int, exchange: Exchange, context: int, answer_tokens: int) -> float:
        """Predict an answer on the owners of its KV. A group without measured decodes counts as one instance."""
        if not answer_tokens or (alone := self._decode_fits.get((1, LOCAL))) is None:
            return 0.0
        is_alone = self._options.leaves_kv_with_last(exchange)
        fit = alone if is_alone else self._decode_fits.get((members, self._decode), alone)
        return answer_tokens * fit.seconds(1, context)

    def _measured(self, group: tuple[int, ...]) -> dict[Exchange, Times]:
        """Return times by exchange over a group's class of link, of the nearest measured number of members."""
        times = self._times_over(class_of(self._facts, group))
        sizes = [size for size, each in times if size > 1 and each in self._candidates]
        nearest = min(sizes, key=lambda size: (abs(size - len(group)), -size), default=0)
        return {each: times[nearest, each] for each in self._candidates if (nearest, each) in times}

    def exchange(self, new_tokens: int, cached_tokens: int, group: tuple[int, ...], answer_tokens: int = 0) -> Exchange:
        """Return the exchange by which a group is expected to finish this chunk and its answer first.

        Without measurements over its class of link use Algorithm 5, or `ring_kv` without a model or hardware.

        Args:
            answer_tokens: 0 for a chunk that does not end its prompt, because the last chunk decides the decode.
        """
        members = len(group)
        if times := self._measured(group):
            context = new_tokens + cached_tokens
            return min(
                times,
                key=lambda one: (
                    times[one].seconds(new_tokens, cached_tokens) + self._answer_s(members, one, context, answer_tokens)
                ),
            )
        shape, hardware = self._facts.shape, self._facts.hardware
        if shape is None or hardware is None:
            return RING_KV
        return ring_kv_or_ring_q(shape, hardware, new_tokens, cached_tokens, members)

    def of_step(self, exchange: Exchange, new_tokens: int, members: int) -> Exchange:
        """Set the source of weights of a step by `alltoall`, if unsharded weights are an option or send fewer bytes."""
        shape, tp, weights = self._facts.shape, self._facts.tp or 1, self._options.weights
        if "weights" not in exchange.traits.parameters or new_tokens == 1 or tp == 1:
            return exchange
        if weights == "auto":
            if shape is None or not unsharded_weights_pay(shape, new_tokens, members, tp, self._source(shape, tp)):
                return exchange
            weights = self._source(shape, tp)
        return exchange._replace(weights=weights)

    def _source(self, shape: ModelShape, tp: int) -> WeightSource:
        """Return the source of unsharded weights: by measured links, or the host without a profile and on CPUs."""
        profile = self._facts.profile
        if profile is None or profile.profile_key.device == "cpu":
            return "host"
        peers = profile.link("all_gather", tp) or profile.link("point_to_point", 2)
        return cheaper_weights(shape, tp, host=profile.link("host_copy", 1), peers=peers)


# ---------------------------------------------------------------- the rules of papers
#
# Context Parallelism (arXiv 2411.01783): its T is `new_tokens` here, P `cached_tokens`, N `num_members`, C
# `flops_per_s`, BW `bytes_per_s`, e `bytes_per_element`. Its D is `num_heads * head_dim`, which cancels. The fitted
# rule of its Appendix D is in benchmarks/papers. CSPS counts the bytes of `alltoall` (its SP-NTP) in supplement A.


def ring_kv_or_ring_q(
    shape: ModelShape, hardware: Hardware, new_tokens: int, cached_tokens: int, num_members: int
) -> Exchange:
    """Choose the ring whose communication is expected to delay attention less (Algorithm 5, Appendix C).

    `ring_kv` is chosen if the keys and values that attention does not hide are at most the data that `ring_q` exposes.
    These are partial outputs, and the queries that 1/N of all attention does not hide. Algorithm 5 hides all queries,
    but our `ring_q` sends them to all members at once. Log-sum-exps are neglected (Eq. 5). A whole prompt and ties
    take `ring_kv`.

    The choice is monotone. `ring_kv` stays chosen with more new tokens, at fixed cached or total tokens. It also stays
    chosen with more bandwidth, fewer cached tokens, fewer members (down to 3), or slower devices.
    """
    assert new_tokens >= 1 and num_members >= 2, f"{new_tokens} new tokens of {num_members} members"
    miss_rate = new_tokens / (new_tokens + cached_tokens)
    equal_messages = shape.kv_bytes / (shape.num_heads * shape.head_dims[0] * shape.bytes_per_element)
    # Bytes that the link carries while attention runs, in units of the bytes of the queries of all tokens.
    hidden = 4 * new_tokens * hardware.bytes_per_s / (num_members * hardware.flops_per_s * shape.bytes_per_element)
    late = max(miss_rate + hidden, 2 * miss_rate + hidden * (num_members - 2) / (num_members - 1))
    return RING_KV if late >= equal_messages else RING_Q


def unsharded_weights_pay(shape: ModelShape, length: int, num_members: int, tp: int, weights: WeightSource) -> bool:
    """Return True if `alltoall` sends fewer bytes with unsharded weights than with shares of heads.

    Between instances both send the same. With shares, each instance sums outputs of its tokens over `tp` ranks, in
    total 2 L d (t - 1) elements. With H_q head_dim = d, two ranks never gain. Three ranks gain with few KV heads.
    """
    return unsharded_elements(shape, length, num_members, tp, weights) < 2 * length * shape.hidden_size * (tp - 1)


def unsharded_elements(shape: ModelShape, length: int, num_members: int, tp: int, weights: WeightSource) -> float:
    """Return the elements that ranks send for a layer with unsharded weights.

    Each rank projects all heads of its tokens. Inside instances, queries, keys and values are sent to the ranks of
    their heads, and outputs back. The share that moves is (t - 1)/t: 2 (H_q + H_kv) head_dim L (t - 1)/t elements. With
    fewer KV heads than ranks, H_kv counts a head once per rank that needs it. Then all ranks receive all outputs,
    L d (t - 1) elements. Weights of `peers` are 2 (H_q + H_kv) head_dim d (t - 1) elements per instance for any
    length. Weights of the `host` take no link.
    """
    held_kv_heads = max(shape.num_kv_heads, min(tp, shape.num_heads))
    by_heads = 2 * (shape.num_heads + held_kv_heads) * shape.head_dim * length * (tp - 1) / tp
    gathered = length * shape.hidden_size * (tp - 1)
    if weights == "peers":
        gathered += num_members * shape.attention_weights * (tp - 1)
    return by_heads + gathered


def cheaper_weights(shape: ModelShape, tp: int, *, host: LinkFit | None, peers: LinkFit | None) -> WeightSource:
    """Return the quicker source of a layer's unsharded weights, or `host` if a link was not measured.

    Args:
        host: the link for copies from a rank's host.
        peers: the link for messages between the `tp` ranks.
    """
    if host is None or peers is None:
        return "host"
    num_bytes = shape.attention_weights * shape.bytes_per_element
    return "host" if host.seconds(num_bytes) <= peers.seconds(num_bytes * (tp - 1) / tp) else "peers"
