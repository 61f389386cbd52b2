"""The setup of simulated clusters, and its costs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from linear_cost import LinearCost

from longspan.core.cluster import Cluster
from longspan.core.fleets import in_phases
from longspan.core.kv.lookup import SwapCost
from longspan.core.locations import Location
from longspan.core.request import Request
from longspan.core.splits import ParallelSpec
from longspan.core.steps import Forward, MoveKV
from longspan.cost.flows import Flow
from longspan.cost.step_cost import ReshardCost
from longspan.policy.facts import Facts
from longspan.runtime.batch import RankRequests

VOCAB = 64


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The first instances prefill only. The remaining ones decode only."""

    num_prefill: int
    num_decode: int
    backends: int

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            spec=ParallelSpec(instances=self.num_prefill),
            decode_spec=ParallelSpec(instances=self.num_decode),
            transfer_backends=self.backends,
        )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A cluster. Sizes that are not given are large. The default policy on several instances is `context`.

    Attributes:
        phases: the specs of the prefill and the decode phase. The first has `num_instances`.
    """

    num_instances: int = 1
    num_blocks: int = 256
    block_size: int = 16
    policy: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    eos_token_ids: tuple[int, ...] = ()
    rope_switch_length: int | None = None
    prefix_caching: bool = True
    max_steps_in_flight: int = 2
    uneven: int = 0
    facts: Facts = field(default_factory=Facts)
    tp: int = 1
    pp: int = 1
    roles: Roles | None = None
    phases: tuple[ParallelSpec, ParallelSpec] | None = None
    decode_blocks: int | None = None
    locations: tuple[Location, ...] = ()
    host_blocks: tuple[int, ...] = ()
    disk_blocks: tuple[int, ...] = ()
    swap: SwapCost | None = None

    def __post_init__(self) -> None:
        if not self.policy:
            usual = "tetris" if self.roles is not None else "chunked" if self.num_instances == 1 else "context"
            object.__setattr__(self, "policy", usual)

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The clusters of the two phases. Empty without phases."""
        if self.phases is None:
            return ()
        return tuple(map(self._with_pools, in_phases(Cluster(spec=self.phases[0], decode_spec=self.phases[1]))))

    @property
    def cluster(self) -> Cluster:
        if self.phases is not None:
            return self.clusters[0]
        bare = Cluster(spec=ParallelSpec(instances=self.num_instances, tp=self.tp, pp=self.pp))
        cluster = bare if self.roles is None else self.roles.cluster
        assert cluster.num_instances == self.num_instances, "roles are given to all instances"
        return self._with_pools(cluster)

    def split(self, spec: ParallelSpec) -> Cluster:
        """The same ranks, split otherwise. Pools of hosts keep their numbers."""
        cluster = self.cluster
        assert spec.num_ranks == cluster.num_ranks and spec.instances <= cluster.host_pools.start
        return self._with_pools(Cluster(spec=spec, num_device_pools=cluster.host_pools.start))

    def _with_pools(self, cluster: Cluster) -> Cluster:
        cluster = cluster.with_layers(12, 0.0)
        locations = [one for i, one in enumerate(self.locations) for _ in cluster.ranks(i)]
        cluster = replace(
            cluster, locations=tuple(locations), host_blocks=self.host_blocks, disk_blocks=self.disk_blocks
        )
        return cluster.with_blocks([self.blocks_of(instance) for instance in cluster.instances])

    def blocks_of(self, instance: int) -> int:
        """How many KV blocks an instance has."""
        decodes = self.roles is not None and instance >= self.roles.num_prefill
        return self.decode_blocks if decodes and self.decode_blocks is not None else self.num_blocks

    def lag_s(self, instance: int, step: int) -> float:
        """Instances end their steps at different times unless `uneven` is 0."""
        return zlib.crc32(f"{self.uneven} {instance} {step}".encode()) % 64 / 100 if self.uneven else 0.0


@dataclass(frozen=True)
class UnevenCost:
    """A linear cost, after which each instance lags by its own time. The cluster is that of the setup by default."""

    setup: Setup
    num_layers: int = 2
    cluster: Cluster | None = None

    def resharded(self, cluster: Cluster) -> UnevenCost:
        """See `StepCost`."""
        return replace(self, cluster=cluster)

    def reshard(self, cluster: Cluster) -> ReshardCost:
        """See `StepCost`."""
        return ReshardCost(copied_bytes=0.0, seconds=1.0 + self.setup.lag_s(cluster.num_instances, 0))

    def exposed_s(self, forward: Forward) -> None:
        """See `StepCost`."""

    def flows(self, move: MoveKV) -> tuple[Flow, ...]:
        """See `StepCost`."""
        lag_s = self.setup.lag_s((*move.targets, *move.sources, 0)[0], move.number)
        more = 10 * lag_s / LinearCost.per_block_s
        return tuple(flow._replace(num_bytes=flow.num_bytes + more) for flow in LinearCost().flows(move))

    def seconds(self, forward: Forward) -> dict[int, float]:
        """See `StepCost`."""
        even = LinearCost().seconds(forward)
        return {instance: time + self.setup.lag_s(instance, forward.number) for instance, time in even.items()}

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float, ...]]:
        """See `StepCost`."""
        pp, seconds = (self.cluster or self.setup.cluster).pp, self.seconds(forward)
        return {instance: (own / pp(instance),) * pp(instance) for instance, own in seconds.items()}


def rank_requests() -> RankRequests:
    """Return the requests of a rank without a device."""
    files: Any = None  # no request has a grammar
    info: Any = SimpleNamespace(vocab_size=VOCAB)
    return RankRequests(files, info, torch.device("cpu"))


def invented_token(request: Request, position: int, eos: tuple[int, ...]) -> int:
    """Return the token that `SimExecutor` samples."""
    token = zlib.crc32(f"{request.id} {position}".encode()) % VOCAB
    banned = (*eos, *request.params.stop_ids)
    while position - len(request.prompt) < request.params.min_tokens and token in banned:
        token = (token + 1) % VOCAB
    return token
