"""The configuration of the engine: what it must know of the model and the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from longspan.core.account import KvAccount
from longspan.core.cluster import Cluster
from longspan.core.options import Option, PromptExchange, PromptLayout, at_least_one, key_values
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
        at_least_one(max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs)


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


_SHARING = ("exchange", "layout", "fractions")
"""Policy options that are options of their own, too."""
_scheduling = partial(Option, group="Scheduling and memory")


@dataclass(frozen=True, kw_only=True)
class SchedulingArgs:
    """The options that say who decides the steps of an engine, and within which bounds; simulations have the same."""

    policy: Annotated[
        str,
        _scheduling(
            "Who decides the steps: auto, chunked, context, runahead, tetris, fixed-sp, loongserve or "
            "loongserve-disagg."
        ),
    ] = "auto"
    exchange: Annotated[
        PromptExchange, _scheduling("How queries, keys and values of a shared prompt travel; auto chooses per step.")
    ] = "auto"
    layout: Annotated[PromptLayout, _scheduling("How a shared prompt is sharded.")] = "auto"
    fractions: Annotated[
        str | None,
        _scheduling(
            "Of a contiguous layout, what part each instance gets.", metavar="F,F,...", default="as the policy has it"
        ),
    ] = None
    policy_options: Annotated[
        Mapping[str, str] | None,
        _scheduling(
            "An option of the policy; repeatable.",
            name="policy-option",
            short="o",
            metavar="KEY=VALUE",
            repeatable=True,
            read=key_values,
        ),
    ] = None
    max_model_len: Annotated[
        int | None, _scheduling("Longest prompt plus output, in tokens.", default="what model and KV pools allow")
    ] = None
    block_size: Annotated[int, _scheduling("Tokens per KV block.")] = 256
    max_num_batched_tokens: Annotated[int, _scheduling("Most tokens of one step on one instance.")] = 2048
    max_num_seqs: Annotated[int, _scheduling("Most requests that run at once on one instance.")] = 128
    num_gpu_blocks_override: Annotated[
        int | None, _scheduling("KV blocks of each instance, whatever memory there is.", default="what memory holds")
    ] = None
    enable_prefix_caching: Annotated[bool, _scheduling("Reuse the KV of prompts that begin alike.")] = True
    async_scheduling: Annotated[bool, _scheduling("Plan and send a step while the last one runs.")] = True

    def __post_init__(self) -> None:
        at_least_one(
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
        )

    @property
    def limits(self) -> Limits:
        return Limits(max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs)

    def all_policy_options(self) -> dict[str, str]:
        """Returns the options of the policy, also those that are options of their own.

        Raises:
            ParameterError: for one that is given twice.
        """
        options = dict(self.policy_options or {})
        for name in _SHARING:
            value = getattr(self, name)
            if value not in (None, "auto"):
                if name in options:
                    problem = f"{value} and policy option {name}={options[name]} are given: give one of them"
                    raise ParameterError(name, problem, value)
                options[name] = value
        return options
