"""What the engine must know of the model and the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from longspan.core.account import KvAccount
from longspan.core.cluster import Roles
from longspan.core.protocols import EnginePolicy
from longspan.core.view import Limits


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine must know of the model and the cluster.

    Attributes:
        num_blocks: KV blocks per instance.
        roles: which instances prefill and which decode; None when all do both.
        decode_blocks: KV blocks of those that only decode; None for as many as the others have.
        max_model_len: the longest request, prompt and output together, in tokens.
        rope_switch_length: requests longer than this use other rotary factors; None for most models.
        max_steps_in_flight: steps that an instance may have been sent and not completed. With 2 it never waits for the
            controller: the next step is there before the present one ends.

    Raises:
        ValueError: for a value out of range.
    """

    num_instances: int
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    rope_switch_length: int | None = None
    limits: Limits = field(default_factory=Limits)
    prefix_caching: bool = True
    max_steps_in_flight: int = 2
    seed: int = 0
    roles: Roles | None = None
    decode_blocks: int | None = None

    def __post_init__(self) -> None:
        given = self.num_instances if self.roles is None else self.roles.num_prefill + self.roles.num_decode
        if given != self.num_instances:
            raise ValueError(f"roles are given to {given} instances, but there are {self.num_instances}")
        if self.decode_blocks is not None and self.roles is None:
            raise ValueError(f"decode_blocks {self.decode_blocks} are of instances that only decode: give roles, too")
        if self.max_steps_in_flight not in (1, 2):
            # With 3, a token could be needed (by penalties, as a prefix key) that two steps ago was not known yet.
            raise ValueError(f"max_steps_in_flight must be 1 or 2, but {self.max_steps_in_flight} given")

    @property
    def num_blocks_to_decode(self) -> int | None:
        """KV blocks of an instance that only decodes; None when there are no such."""
        if self.roles is None:
            return None
        return self.num_blocks if self.decode_blocks is None else self.decode_blocks

    def empty_account(self) -> KvAccount:
        """Pools of these sizes, in which nothing is."""
        decode = () if self.roles is None else self.roles.decode
        return KvAccount(
            num_instances=self.num_instances,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            prefix_caching=self.prefix_caching,
            other_blocks=dict.fromkeys(decode, self.num_blocks_to_decode or 0),
        )

    def check_capacity(self, policy: EnginePolicy) -> None:
        """Raises ValueError when `max_model_len` is more than the policy can place."""
        capacity = capacity_tokens(
            policy,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            decode_blocks=self.num_blocks_to_decode,
        )
        if self.max_model_len > capacity:
            raise ValueError(f"max_model_len {self.max_model_len} exceeds the {capacity} tokens that the KV pools hold")

    def rope_length(self, num_tokens: int) -> int:
        """The length that rotary embeddings are pinned to, for a request of so many tokens; 0 for most models."""
        switch = self.rope_switch_length
        if switch is None:
            return 0
        return switch + 1 if num_tokens > switch else switch


def capacity_tokens(policy: EnginePolicy, *, num_blocks: int, block_size: int, decode_blocks: int | None = None) -> int:
    """The longest request that is sure to fit when it is alone; `decode_blocks` are one decode instance's, if any."""
    capacity = policy.capacity_tokens(num_blocks=num_blocks, block_size=block_size)
    return capacity if decode_blocks is None else min(capacity, decode_blocks * block_size)
