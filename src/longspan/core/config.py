"""The configuration of an engine for a model and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.core.cluster import Cluster
from longspan.core.options import SchedulingArgs
from longspan.core.policy import Policy
from longspan.errors import ParameterError

if TYPE_CHECKING:  # types alone
    from longspan.core.kv.lookup import SwapPrices
    from longspan.core.sparse import SparseSetting


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configures the engine for a model and a cluster.

    Attributes:
        cluster: with the sizes of its pools.
        turns: all clusters that take turns on the same devices, this one among them; empty when it stays.
        max_model_len: the bound of user and model for the tokens of a request, see `longest`.
        rope_switch_length: requests longer than this use other rotary factors; None for most models.
        max_num_batched_tokens: tokens that one instance computes in one step, at most.
        max_num_seqs: requests that one instance takes part in at once, at most.
        max_steps_in_flight: the most incomplete steps that a request may be in while it decodes, and that each instance
            has, but for those that keep its further stages busy. With 2, instances never wait for the controller: the
            next step is there before the present one ends.
        swap: says whether KV on hosts is worth a copy on a cluster; None when it always is.
    """

    cluster: Cluster
    block_size: int
    max_model_len: int
    turns: tuple[Cluster, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    rope_switch_length: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    prefix_caching: bool = True
    max_steps_in_flight: int = 2
    seed: int = 0
    swap: SwapPrices | None = None

    def __post_init__(self) -> None:
        assert self.cluster.num_blocks, f"the KV pools of {self.cluster} have no sizes"
        # With 3, a token could be needed (by penalties, as a prefix key) that two steps ago was not known yet.
        assert self.max_steps_in_flight in (1, 2)

    @property
    def fleet(self) -> tuple[Cluster, ...]:
        """The cluster, or the clusters of both phases, see `core.fleets`."""
        return self.turns or (self.cluster,)

    @classmethod
    def of(
        cls,
        scheduling: SchedulingArgs,
        cluster: Cluster,
        policy: Policy,
        *,
        turns: tuple[Cluster, ...] = (),
        context_length: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        rope_switch_length: int | None = None,
        seed: int = 0,
        swap: SwapPrices | None = None,
    ) -> EngineConfig:
        """Returns what the options mean with this policy, for a model with the other facts; without, for any model."""
        if scheduling.host_kv_gib and not scheduling.enable_prefix_caching:
            problem = f"{scheduling.host_kv_gib:g} keeps KV for prefix caching, which is off: leave one of them out"
            raise ParameterError("host_kv_gib", problem, scheduling.host_kv_gib)
        check_phases(scheduling, turns)
        capacity = capacity_tokens(policy, turns or (cluster,), scheduling.block_size)
        wanted = scheduling.max_model_len
        if wanted is not None and context_length is not None and wanted > context_length:
            problem = f"{wanted} exceeds the model's context of {context_length} tokens"
            raise ParameterError("max_model_len", problem, wanted)
        if wanted is not None and wanted > capacity:
            problem = f"{wanted} does not fit: the KV pools hold {capacity} tokens; allow more memory"
            if cluster.host_blocks and not policy.reads_hosts:
                problem += f", or choose a policy that reads KV on hosts, which {scheduling.policy} does not"
            raise ParameterError("max_model_len", problem, wanted)
        return cls(
            cluster=cluster,
            turns=turns,
            block_size=scheduling.block_size,
            max_model_len=wanted or context_length or capacity,
            eos_token_ids=eos_token_ids,
            rope_switch_length=rope_switch_length,
            max_num_batched_tokens=scheduling.max_num_batched_tokens or cls.max_num_batched_tokens,
            max_num_seqs=scheduling.max_num_seqs,
            prefix_caching=scheduling.enable_prefix_caching,
            max_steps_in_flight=2 if scheduling.async_scheduling else 1,
            seed=seed,
            swap=swap,
        )

    def longest(self, policy: Policy) -> int:
        """Return the tokens of the longest request, prompt and output together, that a policy can place."""
        return min(self.max_model_len, capacity_tokens(policy, self.fleet, self.block_size))

    def sparse(self, policy: Policy, num_prompt_tokens: int) -> SparseSetting | None:
        """Return how the prefill of a prompt drops tokens. None is exact."""
        return policy.sparse(num_prompt_tokens, self.block_size, self.cluster.num_blocks[0])

    def rope_length(self, num_tokens: int) -> int:
        """Returns the length that such a request's rotary embeddings are pinned to; 0 for most models."""
        switch = self.rope_switch_length
        if switch is None:
            return 0
        return switch + 1 if num_tokens > switch else switch


def check_phases(scheduling: SchedulingArgs, turns: Sequence[Cluster]) -> None:
    """Raise ParameterError for clusters that take turns without pools on hosts."""
    if turns and not scheduling.host_kv_gib:
        problem = f"is where KV lies while clusters change, which policy {scheduling.policy} has them do: give some"
        raise ParameterError("host_kv_gib", problem, scheduling.host_kv_gib)


def capacity_tokens(policy: Policy, clusters: Sequence[Cluster], block_size: int) -> int:
    """Returns the length of the longest request that is sure to fit when it is alone.

    What devices have no room for may lie on a host, if the policy reads it there. Where clusters take turns it must fit
    all of them, and the memory of a host, too, where KV lies in between.
    """
    found = []
    for cluster in clusters:
        on_host = 0
        if device_limit(policy, cluster) is not None:
            pools = {cluster.host_pool(instance) for instance in policy.instances}
            sizes = [cluster.pool_blocks[pool] for pool in pools]
            on_host = min(sizes) if policy.capacity < len(policy.instances) else sum(sizes)
        found.append((policy.capacity_on(cluster) * cluster.num_blocks[0] + on_host) * block_size)
        decode = [cluster.num_blocks[instance] for instance in cluster.decode]
        others = [sum(decode)] if decode and policy.shards_decodes else decode
        others += cluster.host_blocks if len(clusters) > 1 else ()
        found += [number * block_size for number in others]
    return min(found)


def device_limit(policy: Policy, cluster: Cluster) -> int | None:
    """Returns the blocks that one request may have on devices, see `ClusterView`."""
    if not (policy.reads_hosts and cluster.host_blocks) or cluster.has_roles:
        return None
    return policy.capacity * cluster.num_blocks[0]
