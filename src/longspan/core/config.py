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
        phases: the clusters of both phases, on the same devices. Empty without phases.
        max_model_len: maximum tokens of a request by user and model, see `longest`.
        rope_switch_length: requests longer than this use other rotary factors. None for most models.
        max_num_batched_tokens: maximum tokens of one step on one instance.
        max_num_seqs: maximum running requests per instance.
        max_steps_in_flight: maximum incomplete steps per decoding request and per instance, plus one for each further
            pipeline stage of the instance. With 2, the next step arrives before the present step ends.
        swap: returns the cost of loading KV on a cluster. None: a load always pays.
    """

    cluster: Cluster
    block_size: int
    max_model_len: int
    phases: tuple[Cluster, ...] = ()
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
        # With 3, penalties or prefix keys could need a token that a step in flight still samples.
        assert self.max_steps_in_flight in (1, 2)

    @property
    def fleet(self) -> tuple[Cluster, ...]:
        """The cluster, or the clusters of both phases, see `core.fleets`."""
        return self.phases or (self.cluster,)

    @classmethod
    def of(
        cls,
        scheduling: SchedulingArgs,
        cluster: Cluster,
        policy: Policy,
        *,
        phases: tuple[Cluster, ...] = (),
        context_length: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        rope_switch_length: int | None = None,
        seed: int = 0,
        swap: SwapPrices | None = None,
    ) -> EngineConfig:
        """Return the configuration for options, a policy and a model. The defaults are for any model."""
        if scheduling.host_kv_gib and not scheduling.enable_prefix_caching:
            problem = f"{scheduling.host_kv_gib:g} keeps KV for prefix caching, which is off: leave one of them out"
            raise ParameterError("host_kv_gib", problem, scheduling.host_kv_gib)
        check_phases(scheduling, phases)
        capacity = capacity_tokens(policy, phases or (cluster,), scheduling.block_size)
        max_len = scheduling.max_model_len
        if max_len is not None and context_length is not None and max_len > context_length:
            problem = f"{max_len} exceeds the model's context of {context_length} tokens: give at most that"
            raise ParameterError("max_model_len", problem, max_len)
        if max_len is not None and max_len > capacity:
            problem = f"{max_len} does not fit: the KV pools hold {capacity} tokens; allow more memory"
            if cluster.host_blocks and not policy.reads_hosts:
                problem += f", or choose a policy that reads KV on hosts, which {scheduling.policy} does not"
            raise ParameterError("max_model_len", problem, max_len)
        return cls(
            cluster=cluster,
            phases=phases,
            block_size=scheduling.block_size,
            max_model_len=max_len or context_length or capacity,
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
        """Return the length that the rotary embeddings of a request are pinned to. 0 for most models."""
        switch = self.rope_switch_length
        if switch is None:
            return 0
        return switch + 1 if num_tokens > switch else switch


def check_phases(scheduling: SchedulingArgs, phases: Sequence[Cluster]) -> None:
    """Raise ParameterError for clusters of phases without host pools."""
    if phases and not scheduling.host_kv_gib:
        problem = f"must be above 0, since policy {scheduling.policy} offloads KV to hosts between its phases"
        raise ParameterError("host_kv_gib", problem, scheduling.host_kv_gib)


def capacity_tokens(policy: Policy, clusters: Sequence[Cluster], block_size: int) -> int:
    """Return the length of the longest request that always fits if it is alone.

    It may be partly on a host, if the policy reads host blocks. With phases it must also fit the memory of one host.
    """
    capacities = []
    for cluster in clusters:
        on_host = 0
        if device_limit(policy, cluster) is not None:
            pools = {cluster.host_pool(instance) for instance in policy.instances}
            sizes = [cluster.pool_blocks[pool] for pool in pools]
            on_host = min(sizes) if policy.capacity < len(policy.instances) else sum(sizes)
        capacities.append((policy.capacity_on(cluster) * cluster.num_blocks[0] + on_host) * block_size)
        decode = [cluster.num_blocks[instance] for instance in cluster.decode]
        bounds = [sum(decode)] if decode and policy.shards_decodes else decode
        bounds += cluster.host_blocks if len(clusters) > 1 else ()
        capacities += [number * block_size for number in bounds]
    return min(capacities)


def device_limit(policy: Policy, cluster: Cluster) -> int | None:
    """Return the maximum device blocks of one request, see `ClusterView`."""
    if not (policy.reads_hosts and cluster.host_blocks) or cluster.has_roles:
        return None
    return policy.capacity * cluster.num_blocks[0]
