"""All instances of a deployment and the ranks of each, which prefill and decode may split differently."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longspan.core.parallel import ParallelSpec


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Instances that prefill only, and others that decode only: the first `num_prefill` do the one, the rest the other.

    Attributes:
        backends: how many transfers of KV a decode instance receives at once; each needs buffers there.

    Raises:
        ValueError: when a role has no instance, or nothing can be received.
    """

    num_prefill: int
    num_decode: int
    backends: int

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "backends"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but {getattr(self, name)} given")

    @property
    def prefill(self) -> range:
        """The instances that prefill."""
        return range(self.num_prefill)

    @property
    def decode(self) -> range:
        """The instances that decode."""
        return range(self.num_prefill, self.num_prefill + self.num_decode)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Instances in order, those of `spec` first; with `decode_spec` these prefill, and those of `decode_spec` decode.

    Ranks are numbered in the same order: those of an instance follow each other, in order of their place in it.
    """

    spec: ParallelSpec
    decode_spec: ParallelSpec | None = None

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """Ranks of each instance."""
        decode = () if self.decode_spec is None else (self.decode_spec.tp,) * self.decode_spec.instances
        return (self.spec.tp,) * self.spec.instances + decode

    @property
    def num_instances(self) -> int:
        """Copies of the model."""
        return len(self.tps)

    @property
    def num_ranks(self) -> int:
        """Worker processes in all."""
        return sum(self.tps)

    def ranks(self, instance: int) -> range:
        """Of one instance."""
        first = self._first_ranks[instance]
        return range(first, first + self.tps[instance])

    def place(self, rank: int) -> tuple[int, int]:
        """The instance of a rank, and its place in it."""
        instance = next(i for i in range(self.num_instances) if rank in self.ranks(i))
        return instance, rank - self._first_ranks[instance]

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        return tuple(sum(self.tps[:instance]) for instance in range(self.num_instances))

    def __str__(self) -> str:
        return str(self.spec) if self.decode_spec is None else f"{self.spec} prefill + {self.decode_spec} decode"
