"""An experiment: a simulated cluster with a policy, what fits there and what steps cost; and what its runs find out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.exchange import CHAIN, of_any_layout
from longspan.core.options import SchedulingArgs
from longspan.core.policy import Policy
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, Hardware
from longspan.cost.estimate import (
    CPU_KV_BYTES,
    CPU_STEP_SHARE,
    USED_MEMORY,
    activation_bytes,
    full_step,
    searched_fractions,
    whole_prompt_tokens,
)
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.forward import Roofline
from longspan.cost.partitions import ModelledPartitions, PartitionTable, fractions_by, modelled_ttft
from longspan.cost.pricing import PricedTurns, SwapPrice, predicted_profile
from longspan.cost.profile import Profile, ProfileKey, profiled_prompts
from longspan.cost.step_cost import RooflineCost, StepCost
from longspan.cost.topology import Devices
from longspan.errors import ParameterError
from longspan.policy.choosing import Facts
from longspan.policy.facts import early_facts, known_facts, measured_turns
from longspan.policy.registry import make_policy
from longspan.policy.step_size import with_step_tokens
from longspan.policy.tetris.rates import RateTable
from longspan.sim.resolved import Fleet, ResolvedCluster
from longspan.sim.run import Observers, Result, percentile, simulate
from longspan.sim.spec import ClusterSpec, Faults, ServiceLevel
from longspan.sim.timeline import Timeline
from longspan.workload.arrivals import Workload

MAX_TIMES_LIGHT = 25
"""A rate is too high when the 99th percentile of TTFT is this many times that of light load (Tetris §7.2)."""

ATTAINMENT = 0.9
"""A rate is too high when a smaller part of all requests keeps within a given service level (DistServe §6)."""

IMPROVEMENT_RATES = tuple(round(0.05 * step, 2) for step in range(1, 16))
"""These are tried for each request rate: 0.05 to 0.75."""
_PROFILED_TOKENS = 2**20
"""KV tokens of an instance whose memory is not known."""
_DEVICE = "cuda"
"""The kind of devices with data sheets."""
_ACTIVATION_SHARE = 0.25
"""The part of what weights leave that activations may take, so that a prompt is one step. The rest is for KV."""
_PREDICTED_LENGTHS = tuple(2048 * 2**power for power in range(8))
"""No more than prompts have: a fit to much longer ones is off by a tenth where most of them are."""
_GRID_PER_S = 0.5
_FAR_APART_S = 1e6
_MAX_DOUBLINGS = 24
_PRECISION = 1.02

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a title and a total; is then told how many are done."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A simulated cluster, its policy, and its faults; any workload can be run on it.

    Attributes:
        cost: seconds of its steps.
        facts: what policies know of it; also the clusters that take turns, if there are several.
        fleet: the devices.
        progress: is told how many requests of a run are done.
    """

    cluster: Cluster
    cost: StepCost
    facts: Facts
    fleet: Fleet
    scheduling: SchedulingArgs
    faults: Faults
    progress: ProgressBar = lambda _title, _total: nullcontext(lambda _done: None)

    def with_options(self, options: Mapping[str, str]) -> Experiment:
        """Returns an experiment with some options of the policy set or replaced."""
        options = {**(self.scheduling.policy_options or {}), **options}
        return replace(self, scheduling=replace(self.scheduling, policy_options=options))

    @property
    def block_bytes(self) -> float:
        """Counts the bytes of a KV block with all layers and heads."""
        shape = self.facts.shape
        assert shape is not None, "the model of a simulation is known"
        return shape.kv_bytes * shape.num_layers * self.scheduling.block_size

    @property
    def resolved(self) -> ResolvedCluster:
        """The cluster with all that was derived, for people."""
        clusters = self.facts.turns or (self.cluster,)
        return ResolvedCluster(fleet=self.fleet, clusters=tuple(clusters), block_size=self.scheduling.block_size)

    def policy(self) -> Policy:
        """Makes the policy as it is before the first request."""
        return make_policy(
            self.scheduling.policy,
            num_instances=self.cluster.num_instances,
            options=self.scheduling.all_policy_options(),
            facts=self.facts,
        )

    def run(self, workload: Workload, timeline: Timeline | None = None, *, title: str = "requests") -> Result:
        """Serves all requests of a workload.

        Raises:
            ValueError: for a policy or options that cannot be.
        """
        policy, scheduling = self.policy(), self.scheduling
        if not (workload.shares or self.cluster.host_blocks):
            scheduling = replace(scheduling, enable_prefix_caching=False)  # it would find nothing
        config = EngineConfig.of(scheduling, self.cluster, policy, turns=self.facts.turns, swap=self._swap)
        with self.progress(title, len(workload.arrivals)) as finished:
            watch = replace(timeline.watching(self.cost) if timeline else Observers(), finished=finished)
            return simulate(workload.arrivals, config, policy, self.cost, faults=self.faults, watch=watch)

    def _swap(self, cluster: Cluster) -> SwapPrice:
        return SwapPrice.of(self.cost if cluster == self.cluster else self.cost.resharded(cluster), cluster)

    def at_light_load(self, workload: Workload) -> Result:
        """Serves the requests such that none meets another."""
        return self.run(workload.one_by_one(_FAR_APART_S), title="light load")

    def light_ttft_p99_s(self, workload: Workload) -> float | None:
        """Returns P99 of TTFT when no request meets another; None when none is served."""
        return percentile(self.at_light_load(workload).ttfts_s, 99)

    def max_rate(
        self, workload: Workload, keeps_up: Callable[[Result], bool], *, start: float, precision: float = _PRECISION
    ) -> float | None:
        """Finds, as `find_max_rate` does, the highest rate at which the result keeps up, see `near_light_load` and
        `within`.
        """

        def tried(rate: float) -> bool:
            return keeps_up(self.run(workload.at_rate(rate), title=f"rate {rate:.3g}"))

        return find_max_rate(tried, start=start, precision=precision)

    def improvement_rates(
        self, workload: Workload, highest: float
    ) -> tuple[RateTable, Mapping[float, Mapping[float, float]]]:
        """Finds which improvement rate of the policy `tetris` is best at request rates up to `highest`.

        Where others decode, answers count for nothing: they are one token long then, which takes less time to simulate.

        Returns:
            The table for `-o improvement_rates=`, and mean TTFTs by request rate and improvement rate.

        Raises:
            ValueError: for another policy, options that say the rates, or when no request is served.
        """
        if self.scheduling.policy != "tetris":
            problem = f"must be tetris, which has improvement rates, but {self.scheduling.policy} given"
            raise ParameterError("policy", problem, self.scheduling.policy)
        for option in ("improvement_rate", "improvement_rates"):
            if option in self.scheduling.all_policy_options():
                raise ValueError(f"what -o {option} says is to be found: leave that out")
        if self.cluster.has_roles:
            workload = replace(workload, arrivals=[replace(one, output_len=1) for one in workload.arrivals])
        best: dict[float, float] = {}
        means_s: dict[float, Mapping[float, float]] = {}
        rates = request_rates(highest)
        with self.progress("request rates", len(rates)) as finished:
            for number, rate in enumerate(rates, start=1):
                at_rate = workload.at_rate(rate)
                means_s[rate] = {one: self._mean_ttft_s(at_rate, one) for one in IMPROVEMENT_RATES}
                best[rate] = min(IMPROVEMENT_RATES, key=means_s[rate].__getitem__)  # the lowest of equals
                finished(number)
        return RateTable(entries=tuple(best.items())), means_s

    def _mean_ttft_s(self, workload: Workload, improvement_rate: float) -> float:
        tried = self.with_options({"improvement_rate": str(improvement_rate)})
        found = tried.run(workload, title=f"improvement rate {improvement_rate:g}").ttfts_s
        if not len(found):
            raise ValueError("no request was served, so no improvement rate is best")
        return float(np.mean(found))


def near_light_load(light_s: float) -> Callable[[Result], bool]:
    """Returns the test of a result whose P99 of TTFT stays below `MAX_TIMES_LIGHT` times that of light load."""

    def test(result: Result) -> bool:
        found = percentile(result.ttfts_s, 99)
        return found is not None and found < MAX_TIMES_LIGHT * light_s

    return test


def within(level: ServiceLevel) -> Callable[[Result], bool]:
    """Returns the test of a result with enough requests that keep within a service level, see `ATTAINMENT`."""
    return lambda result: result.attainment(level) >= ATTAINMENT


def find_max_rate(keeps_up: Callable[[float], bool], *, start: float, precision: float = _PRECISION) -> float | None:
    """Finds the highest rate, to a `precision` of 2 %, at which `keeps_up` holds, by doubling and halving `start`.

    None when all requests at once are not too many either: it takes more of them to find a rate.
    """
    if keeps_up(math.inf):
        return None
    low = start
    for _ in range(_MAX_DOUBLINGS):
        if keeps_up(low):
            break
        low /= 2
    else:
        raise ValueError(f"not even {low:g} requests per second are few enough")
    high = 2 * low
    while low >= start and keeps_up(high):
        low, high = high, 2 * high
    while high / low > precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def request_rates(highest: float) -> tuple[float, ...]:
    """Lists the rates of the grid, up to the first that is not below `highest`."""
    if not 0 < highest <= 1000:
        raise ValueError(f"request rates to profile are above 0 and at most 1000 per second, but {highest:g} given")
    rates = [_GRID_PER_S]
    while rates[-1] < highest:
        rates.append(_GRID_PER_S * (len(rates) + 1))
    return tuple(rates)


# ---------------------------------------------------------------- clusters


def computed_experiment(
    model: Architecture, spec: ClusterSpec, scheduling: SchedulingArgs, faults: Faults
) -> Experiment:
    """Makes an experiment on a cluster that costs what data sheets say."""
    if spec.hardware is None:
        raise ParameterError("hardware", "must be a name that longspan estimate knows, if no profile is given")
    clusters = _clusters(spec, model, scheduling)
    cluster, hardware = clusters[0], spec.hardware
    devices = Devices(
        hardware=hardware,
        gpus_per_host=spec.devices_per_host(cluster),
        hosts=spec.hosts,
        link=spec.link,
        link_gbytes_per_s=spec.link_gbytes_per_s,
    )
    kernels = spec.attention or "flash"
    cost = RooflineCost(model, devices, cluster, block_size=scheduling.block_size, kernels=kernels)
    partitions = ModelledPartitions(partial(searched_fractions, cost.lines[0], align=scheduling.block_size))
    turns = clusters if len(clusters) > 1 else ()
    early = early_facts(cluster, turns, model=model.name, partitions=partitions)
    scheduling = _with_step_tokens(scheduling, early, _DEVICE, partial(_device_tokens, cost.lines[0], scheduling))
    clusters = tuple(_with_pools(one, cost.resharded(one), model, scheduling) for one in clusters)
    cluster, turns = clusters[0], clusters if turns else ()
    profile_key = ProfileKey(
        model=model.name,
        dtype=spec.dtype,
        device=_DEVICE,
        tp=cluster.spec.tp,
        threads=1,
        kernel=kernels,
        machine=hardware,
    )
    options = scheduling.all_policy_options()
    named = [options.get("sp", ""), *options.get("sp_sizes", "").split(",")]  # policies refuse wrong ones
    profile = predicted_profile(
        cost,
        profile_key,
        num_instances=cluster.spec.instances,
        prompts=profiled_prompts(_PREDICTED_LENGTHS, 2 * _PREDICTED_LENGTHS[-1]),
        exchanges=(*of_any_layout(), CHAIN),
        sizes={int(size) for size in named if size.strip().isdecimal()},
    )
    flops_per_s = cluster.spec.tp * catalog.device(hardware).peak(model.attention.bytes_per_element)
    facts = known_facts(
        profile_key,
        model.attention,
        cluster,
        profile=profile,
        partitions=partitions,
        hardware=Hardware(flops_per_s=flops_per_s, bytes_per_s=cost.lines[0].topology.bytes_per_s),
        turns=turns,
        turn_cost=PricedTurns(cost, turns, scheduling.block_size) if turns else None,
    )
    fleet = Fleet.of(devices, dtype=spec.dtype, ffn_dtype=spec.ffn_dtype)
    return Experiment(cluster=cluster, cost=cost, facts=facts, fleet=fleet, scheduling=scheduling, faults=faults)


def measured_experiment(
    model: Architecture, profile: Profile, spec: ClusterSpec, scheduling: SchedulingArgs, faults: Faults
) -> Experiment:
    """Makes an experiment on a cluster of instances that cost what was measured of one."""
    key = profile.profile_key
    num_blocks = scheduling.num_gpu_blocks_override or math.ceil(_PROFILED_TOKENS / scheduling.block_size)
    clusters = tuple(
        _with_tiers(one.with_blocks([num_blocks] * one.num_instances), model, scheduling)
        for one in _clusters(spec, model, scheduling)
    )
    cluster, turns = clusters[0], clusters if len(clusters) > 1 else ()
    if {one.tp(instance) for one in clusters for instance in one.instances} != {key.tp}:
        given = " and ".join(map(str, clusters))
        raise ParameterError("profile", f"is of instances with tp {key.tp}, but {given} given", spec.profile)
    partitions: PartitionTable | ModelledPartitions = PartitionTable()
    if (ttft_s := modelled_ttft(profile, model.attention)) is not None:
        found = partial(fractions_by, ttft_s, align=scheduling.block_size)
        partitions = ModelledPartitions(found)
    cost = FittedCost(profile, model.attention, block_size=scheduling.block_size, cluster=cluster)
    facts = known_facts(
        key,
        model.attention,
        cluster,
        profile=profile,
        partitions=partitions,
        turns=turns,
        turn_cost=measured_turns(cost, turns, scheduling.block_size),
    )
    whole_tokens = partial(_measured_tokens, model, key, cluster.num_ranks, scheduling)
    return Experiment(
        cluster=cluster,
        cost=cost,
        facts=facts,
        fleet=Fleet(
            hardware=f"{key.device} of {key.machine}",
            hosts=spec.hosts,
            gpus_per_host=spec.devices_per_host(cluster),
            dtype=key.dtype,
            details=f"{key.threads} threads per rank",
        ),
        scheduling=_with_step_tokens(scheduling, facts, key.device, whole_tokens),
        faults=faults,
    )


def _with_step_tokens(
    scheduling: SchedulingArgs, facts: Facts, device: str, whole_tokens: Callable[[int], int]
) -> SchedulingArgs:
    """Return options with the size of steps, as the policy wants them."""
    assert facts.cluster is not None
    options, num_instances = scheduling.all_policy_options(), facts.cluster.num_instances
    policy = make_policy(scheduling.policy, num_instances=num_instances, options=options, facts=facts)
    return with_step_tokens(scheduling, policy, device, whole_tokens)


def _device_tokens(line: Roofline, scheduling: SchedulingArgs, least: int) -> int:
    """Counts the tokens of a step for which a device needs `_ACTIVATION_SHARE` of what weights leave."""

    def needed_bytes(tokens: int) -> float:
        full = full_step(line, tokens)
        return full.scores + full.activations

    idle = full_step(line, 0)
    room_bytes = _ACTIVATION_SHARE * (USED_MEMORY * idle.capacity - idle.used)
    longest = scheduling.max_model_len or _PROFILED_TOKENS
    return whole_prompt_tokens(needed_bytes, room_bytes, least=least, longest=longest)


def _measured_tokens(
    model: Architecture, key: ProfileKey, num_ranks: int, scheduling: SchedulingArgs, least: int
) -> int:
    """Counts the tokens of a step as an engine on such a CPU does; the memory of a measured GPU is not known."""
    return whole_prompt_tokens(
        lambda tokens: sum(activation_bytes(model, tokens, key.tp)),
        CPU_STEP_SHARE * (CPU_KV_BYTES // num_ranks) if key.device == "cpu" else math.inf,
        least=least,
        longest=scheduling.max_model_len or _PROFILED_TOKENS,
    )


def _num_blocks(line: Roofline, scheduling: SchedulingArgs) -> int:
    """Counts the blocks that fit beside weights and the activations of a full step; of several stages, each computes
    its part of that at once.
    """
    assert scheduling.max_num_batched_tokens is not None, "the size of steps was found before"
    tokens, layer = -(-scheduling.max_num_batched_tokens // len(line.stages)), line.layer
    full = full_step(line, tokens)
    block = scheduling.block_size * layer.kv_bytes * max(map(len, line.stages))
    found = int(full.kv_room // block)
    if found < 1:
        raise ValueError(
            f"no KV block fits into {USED_MEMORY:.0%} of a device's memory beside a step of {tokens} tokens: "
            f"{full.arithmetic}: use a larger tp, or fewer max_num_batched_tokens"
        )
    return found


def _clusters(spec: ClusterSpec, model: Architecture, scheduling: SchedulingArgs) -> tuple[Cluster, ...]:
    """Returns the clusters that a policy has take turns, or the only one, for a model."""
    found = spec.clusters(scheduling.policy)
    return tuple(one.with_layers(model.attention.num_layers, model.head_layers) for one in found)


def _with_pools(cluster: Cluster, cost: RooflineCost, model: Architecture, scheduling: SchedulingArgs) -> Cluster:
    """Gives the devices of a cluster, and the tiers below them, as many blocks as they have room for."""
    blocks = [scheduling.num_gpu_blocks_override or _num_blocks(line, scheduling) for line in cost.lines]
    numbers = [blocks[-1 if instance in cluster.decode else 0] for instance in cluster.instances]
    return _with_tiers(cluster.with_blocks(numbers), model, scheduling)


def _with_tiers(cluster: Cluster, model: Architecture, scheduling: SchedulingArgs) -> Cluster:
    """Gives hosts and their disks pools of blocks with all layers and heads."""
    block_bytes = scheduling.block_size * model.attention.kv_bytes * model.attention.num_layers
    return cluster.with_tiers(block_bytes, host_kv_gib=scheduling.host_kv_gib, disk_kv_gib=scheduling.disk_kv_gib)
