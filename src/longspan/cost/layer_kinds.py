"""Layers that differ from the plain ones: mixtures of experts, latent attention and sliding windows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts in the feed-forward layers.

    Attributes:
        number: routed experts of a layer.
        per_token: routed experts that compute each token.
        intermediate_size: of a routed expert.
        shared_size: the intermediate sizes of all shared experts, which compute every token, added together.
        layers: the layers with experts. Other layers are dense.
        are_whole: expert parallelism. Tensor-parallel ranks have whole experts instead of a slice of each.
    """

    number: int
    per_token: int
    intermediate_size: int
    shared_size: int
    layers: tuple[int, ...]
    are_whole: bool = False

    def active(self, tokens: float) -> float:
        """Return the expected number of distinct experts that compute `tokens` tokens, if all are equally likely."""
        unused: float = (1 - self.per_token / self.number) ** tokens
        return self.number * (1 - unused)

    def busiest_rank(self, tokens: float, ranks: int) -> float:
        """Return the expected active experts of the rank with the most, among the ranks with most experts.

        The numbers of ranks are taken as normal, with the variance of drawing the active experts among all. Their
        maximum is Blom's approximation.
        """
        active, share = self.active(tokens), self.per_rank(ranks) / self.number
        mean, unused = active * share, 1 - active / self.number
        quantile = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        busiest = mean + quantile * math.sqrt(mean * (1 - share) * unused)
        return min(max(busiest, min(1.0, active)), self.per_rank(ranks), active)

    def per_rank(self, ranks: int) -> int:
        """Return the experts of the rank with the most, with expert parallelism."""
        return -(-self.number // ranks)

    def ranks_per_token(self, ranks: int) -> float:
        """Return the expected number of ranks that have any expert of a token."""
        return ranks * (1 - (1 - 1 / ranks) ** self.per_token)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2): a token stores one vector, from which each head derives its KV.

    Attributes:
        rank: elements of the compressed keys and values (kv_lora_rank).
        rotary_dim: elements of the rotary key that all heads share (qk_rope_head_dim).
        plain_dim: elements of a head's keys without rotary embedding (qk_nope_head_dim).
        value_dim: elements of a head's values (v_head_dim).
        q_rank: elements of the compressed queries (q_lora_rank). 0: queries are not compressed.
    """

    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    q_rank: int

    @property
    def stored_dim(self) -> int:
        """Elements that a token stores in a layer."""
        return self.rank + self.rotary_dim

    @property
    def key_dim(self) -> int:
        """Elements of a head's keys, and of its queries."""
        return self.plain_dim + self.rotary_dim

    def down_weights(self, hidden_size: int) -> int:
        """Return the elements of the compressing projections, of which every tensor-parallel rank has a copy."""
        return hidden_size * (self.q_rank + self.stored_dim)

    def head_weights(self, hidden_size: int) -> int:
        """Return the elements of the projections of one head."""
        queries = (self.q_rank or hidden_size) * self.key_dim
        return queries + self.rank * (self.plain_dim + self.value_dim) + self.value_dim * hidden_size


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The layers in which a token attends to itself and at most `size` - 1 tokens before it."""

    size: int
    num_layers: int

    def keys(self, num_tokens: float, num_queries: float = 1) -> float:
        """Return the keys that the last `num_queries` of `num_tokens` tokens attend to, in a layer with the window."""
        return min(num_tokens, self.size - 1 + num_queries)

    def pairs(self, start: int, number: int, step: int = 1) -> float:
        """Return the pairs of a query and a visible key, of queries at `start`, `start` + `step` and so on."""
        inside = min(number, max(0, -(-(self.size - 1 - start) // step)))
        return inside * (start + (inside - 1) * step / 2 + 1) + (number - inside) * self.size
