"""The sizes of a model's attention, and the speeds that policies compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.cost.layer_kinds import Latent, Windows

if TYPE_CHECKING:
    from longspan.core.runs import Run


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model that determine the operations and messages of its attention.

    Attributes:
        bytes_per_element: of queries and hidden states, and of keys and values in messages. 2 for bfloat16.
        kv_element_bytes: of stored keys and values. `bytes_per_element` if None.
        latent: with latent attention, `num_kv_heads` is 1 and `head_dim` the stored elements of a token.
        windows: the layers with sliding windows, if any.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_element: float
    kv_element_bytes: float | None = None
    latent: Latent | None = None
    windows: Windows | None = None

    @property
    def bytes_per_kv_element(self) -> float:
        return self.bytes_per_element if self.kv_element_bytes is None else self.kv_element_bytes

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per token and layer."""
        vectors = 1 if self.latent else 2
        return vectors * self.num_kv_heads * self.head_dim * self.bytes_per_kv_element

    def block_bytes(self, num_tokens: int) -> float:
        """Return the bytes of a KV block of `num_tokens` tokens, with all layers and heads."""
        return num_tokens * self.kv_bytes * self.num_layers

    @property
    def attention_weights(self) -> int:
        """Elements of the projections of one layer."""
        if self.latent is not None:
            heads = self.num_heads * self.latent.head_weights(self.hidden_size)
            return self.latent.down_weights(self.hidden_size) + heads
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size

    @property
    def head_dims(self) -> tuple[int, int]:
        """Elements of a query or key of one head, and of an output or value."""
        return (self.latent.key_dim, self.latent.value_dim) if self.latent else (self.head_dim, self.head_dim)

    @property
    def pair_flops(self) -> int:
        """Operations of attention for a pair of a query and a key in one layer, with keys and values of each head."""
        return 2 * self.num_heads * sum(self.head_dims)

    def seen(self, num_tokens: float, num_queries: float = 1) -> float:
        """Return the keys that the last `num_queries` of `num_tokens` tokens attend to, as the mean over layers."""
        if self.windows is None:
            return num_tokens
        return self._mean(num_tokens, self.windows.keys(num_tokens, num_queries))

    def pairs(self, run: Run) -> float:
        """Return the pairs of a query in a run and a visible key, as the mean over layers."""
        number = len(run)
        pairs = number * (run.start + (number - 1) * run.step / 2 + 1)
        return pairs if self.windows is None else self._mean(pairs, self.windows.pairs(run.start, number, run.step))

    def _mean(self, full: float, windowed: float) -> float:
        assert self.windows is not None
        return full + (windowed - full) * self.windows.num_layers / self.num_layers

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Compute speed of an instance, and link speed between instances.

    Use achieved speeds instead of peaks. Give both per device or both per instance, since the rules use their ratio.

    Attributes:
        flops_per_s: operations per second of one instance in attention.
        bytes_per_s: bytes per second from one instance to another, one way.
    """

    flops_per_s: float
    bytes_per_s: float


def typical_hardware(device: str, threads: int) -> Hardware:
    """Return rough speeds for a machine without a profile.

    CPU: threads that attend in float32, and messages between processes. CUDA: accelerators of 2023, and their links.
    """
    if device == "cuda":
        return Hardware(flops_per_s=4e14, bytes_per_s=5e10)
    return Hardware(flops_per_s=6e10 * threads, bytes_per_s=1.5e9)
