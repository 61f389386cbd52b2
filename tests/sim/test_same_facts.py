"""Facts: those of an engine equal those of a simulation of the same cluster by the same profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invented_profiles import measure

from longspan.args import EngineArgs
from longspan.core.cluster import Cluster
from longspan.core.options import SchedulingArgs
from longspan.policy.facts import TurnCost
from longspan.policy.registry import policy_names
from longspan.profiling.store import profile_file
from longspan.resolve import ResolvedEngine
from longspan.sim.experiment import Experiment
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment

SIZES: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 64}
NEEDED: dict[str, dict[str, Any]] = {
    "fixed-sp": {"policy_options": {"sp": "2"}},
    "seesaw": {"prefill_parallel": "pp2", "decode_parallel": "1", "host_kv_gib": 0.01},
    "loongserve-disagg": {"prefill_parallel": "2", "decode_parallel": "1"},
}
"""The options that a policy cannot do without. Others run on two instances."""
HEAD = 1e-3
"""The relative difference of turn costs that follows from `head_layers`."""
LAID_OUT = ("parallel", "prefill_parallel", "decode_parallel")


def both(model: Path, policy: str) -> tuple[ResolvedEngine, Experiment]:
    """Resolve an engine, and a simulation with the same options and the profile that the engine finds."""
    options = {"policy": policy, **SIZES, **NEEDED.get(policy, {})}
    if not any(name in options for name in LAID_OUT):
        options["parallel"] = "2"
    given = EngineArgs(str(model), threads_per_rank=1, **options)
    engine = ResolvedEngine.of(given)
    layout = {name: options.pop(name) for name in LAID_OUT if name in options}
    cluster = ClusterSpec(profile=profile_file(engine.profile_key), **layout)
    return engine, make_experiment(str(model), cluster, SchedulingArgs(**options))


def comparable(cluster: Cluster | None) -> tuple[Cluster, list[range]]:
    """Return the cluster without the fields that differ by design, and the layers of each rank."""
    assert cluster is not None
    layers = [
        cluster.layers(instance, stage) for instance in cluster.instances for stage in range(cluster.pp(instance))
    ]
    return replace(cluster, locations=(), head_layers=0.0), layers


def predictions(cost: TurnCost | None, cluster: Cluster) -> tuple[float, ...]:
    assert cost is not None
    times = cost.prefill_s(cluster, 1000, 500), cost.decode_s(cluster, 7, 300)
    return (*times, cost.reshard_s(cluster), cost.swap_s(cluster, 5))


@pytest.mark.parametrize("policy", policy_names())
def test_facts_of_an_engine_equal_those_of_a_simulation(tiny: Path, policy: str) -> None:
    """These differ by design.

    - `partitions`: an engine reads those that were searched on its machine. They have a file of their own, which a
      simulation is not given, so it models them by the profile.
    - `turn_cost`: prices hold functions, so their predictions are compared.
    - `Cluster.locations`: simulated hosts are those of `ClusterSpec`, and an engine is on this machine.
    - `Cluster.head_layers`: an engine counts the weights of norms. A config.json does not have them.
    """
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.01, exchanges=("ring_kv", "ring_q", "alltoall"))
    engine, experiment = both(tiny, policy)
    found, simulated = engine.facts, experiment.facts
    assert found.profile is not None
    for name in ("shape", "hardware", "profile", "model"):
        assert getattr(found, name) == getattr(simulated, name), name
    assert comparable(found.cluster) == comparable(simulated.cluster)
    assert [*map(comparable, found.turns)] == [*map(comparable, simulated.turns)]
    for one, other in zip(found.turns, simulated.turns, strict=True):
        assert predictions(found.turn_cost, one) == pytest.approx(predictions(simulated.turn_cost, other), rel=HEAD)
    assert engine.policy.settings == experiment.policy().settings


def test_steps_of_an_engine_are_as_large_as_those_of_a_simulation(tiny: Path) -> None:
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.01)
    engine, experiment = both(tiny, "chunked")
    assert engine.config.max_num_batched_tokens == experiment.scheduling.max_num_batched_tokens == 2048
