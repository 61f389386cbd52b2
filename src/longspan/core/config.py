"""The configuration of the engine: what it must know of the model and the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from longspan.core.account import KvAccount
from longspan.core.cluster import Cluster
from longspan.core.protocols import EnginePolicy
from longspan.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one step.

    Attributes:
        max_num_batched_tokens: tokens that one instance computes in one step, at most.
        max_num_seqs: requests that one instance takes part in at once, at most.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ParameterError(name, f"must be at least 1, but {getattr(self, name)} given", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configures the engine for a model and a cluster.

    Attributes:
        cluster: with the sizes of its pools.
        max_model_len: the longest request, prompt and output together, in tokens.
        rope_switch_length: requests longer than this use other rotary factors; None for most models.
        max_steps_in_flight: a request may be in so many steps that are not complete. With 2, instances never wait for
            the controller: the next step is there before the present one ends.

    Raises:
        ValueError: for a value out of range.
    """

    cluster: Cluster
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    rope_switch_length: int | None = None
    limits: Limits = field(default_factory=Limits)
    prefix_caching: bool = True
    max_steps_in_flight: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.cluster.pools:
            raise ValueError(f"the KV pools of {self.cluster} have no sizes")
        if self.max_steps_in_flight not in (1, 2):
            # With 3, a token could be needed (by penalties, as a prefix key) that two steps ago was not known yet.
            raise ValueError(f"max_steps_in_flight must be 1 or 2, but {self.max_steps_in_flight} given")

    @property
    def most_steps_of_instances(self) -> list[int]:
        """Each stage of an instance can have as many steps in flight as a request may be in."""
        return [self.max_steps_in_flight * self.cluster.pp(instance) for instance in self.cluster.instances]

    def empty_account(self) -> KvAccount:
        return KvAccount(self.cluster.pools, block_size=self.block_size, prefix_caching=self.prefix_caching)

    def check_capacity(self, policy: EnginePolicy) -> None:
        """Raises ValueError when `max_model_len` is more than the policy can place."""
        capacity = capacity_tokens(policy, self.cluster, self.block_size)
        if self.max_model_len > capacity:
            raise ValueError(f"max_model_len {self.max_model_len} exceeds the {capacity} tokens that the KV pools hold")

    def rope_length(self, num_tokens: int) -> int:
        """Returns the length that rotary embeddings are pinned to, for a request of so many tokens; 0 for most
        models.
        """
        switch = self.rope_switch_length
        if switch is None:
            return 0
        return switch + 1 if num_tokens > switch else switch


def capacity_tokens(policy: EnginePolicy, cluster: Cluster, block_size: int) -> int:
    """Returns the length of the longest request that is sure to fit when it is alone."""
    capacity = policy.capacity_tokens(num_blocks=cluster.pools[0].num_blocks, block_size=block_size)
    return min([capacity, *(cluster.pools[instance].num_blocks * block_size for instance in cluster.decode)])
