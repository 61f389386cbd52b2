"""What a cost depends on: the shape of a model, the speed of the hardware."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model that decide what its attention computes and sends.

    Attributes:
        bytes_per_element: of queries, keys, values, hidden states and attention weights: 2 for bfloat16.

    Raises:
        ValueError: for a size that is not positive, or query heads that do not divide into groups by KV head.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_element: float

    @property
    def kv_bytes(self) -> float:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_element

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """How fast instances compute, and how fast they send to each other.

    Achieved speeds serve better than peaks. Give both per device or both per instance: the rules need their ratio.

    Attributes:
        flops_per_s: of one instance, in attention.
        bytes_per_s: from one instance to another, one way.

    Raises:
        ValueError: for a speed that is not positive.
    """

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_positive(self)


def typical_hardware(device: str, threads: int) -> Hardware:
    """Speeds within a factor of a few, for want of measurements.

    Of CPU threads that attend in float32, and messages between processes; of accelerators of 2023, and their links.
    """
    if device == "cuda":
        return Hardware(flops_per_s=4e14, bytes_per_s=5e10)
    return Hardware(flops_per_s=6e10 * threads, bytes_per_s=1.5e9)


def _check_positive(numbers: ModelShape | Hardware) -> None:
    for field in fields(numbers):
        value = getattr(numbers, field.name)
        if not value > 0:
            raise ValueError(f"{field.name} must be above 0, but {value} given")
