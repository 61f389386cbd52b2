"""Facts: those of an engine equal those of a simulation of the same cluster by the same profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invented_profiles import measure

from longspan.args import EngineArgs
from longspan.core.cluster import Cluster
from longspan.core.options import SchedulingArgs
from longspan.cost.memory import with_pools
from longspan.cost.pricing import PricedPhases
from longspan.model.source import own_dtype, smollm2_folder
from longspan.policy.registry import policy_names
from longspan.profiling.store import profile_file
from longspan.resolve import ResolvedEngine
from longspan.sim.experiment import Experiment
from longspan.sim.resolve import kv_record
from longspan.sim.spec import ClusterSpec, HardwareSpec
from longspan.simulation import make_experiment, read_architecture, resolved_dtype

SIZES: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 64}
NEEDED: dict[str, dict[str, Any]] = {
    "fixed-sp": {"policy_options": {"sp": "2"}},
    "seesaw": {"prefill_parallel": "pp2", "decode_parallel": "1", "host_kv_gib": 0.01},
    "loongserve-disagg": {"prefill_parallel": "2", "decode_parallel": "1"},
}
"""The required options of each policy. Policies without any run on two instances."""
HEAD = 1e-3
"""The relative difference of turn costs that follows from `head_layers`."""
LAID_OUT = ("parallel", "prefill_parallel", "decode_parallel")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the measured profile of the model from other tests."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))


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


def predictions(cost: PricedPhases | None, cluster: Cluster) -> tuple[float, ...]:
    assert cost is not None
    times = cost.prefill_s(cluster, 1000, 500), cost.decode_s(cluster, 7, 300)
    return (*times, cost.reshard_s(cluster), cost.swap_s(cluster, 5))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("policy", policy_names())
def test_facts_of_an_engine_equal_those_of_a_simulation(tiny: Path, policy: str) -> None:
    """These differ by design.

    - `partitions`: an engine reads the partitions that were searched on its machine. They have a file of their own. A
      simulation is not given it, so it models partitions by the profile.
    - `phase_cost`: prices hold functions, so their predictions are compared.
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
    assert [*map(comparable, found.phases)] == [*map(comparable, simulated.phases)]
    for one, other in zip(found.phases, simulated.phases, strict=True):
        assert predictions(found.phase_cost, one) == pytest.approx(predictions(simulated.phase_cost, other), rel=HEAD)
    assert engine.policy.settings == experiment.policy().settings


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "options",
    [{"parallel": one} for one in ("2", "tp2", "tp3", "pp2", "2xtp2", "tp2pp3")]
    + [{"parallel": "2", "host_kv_gib": 0.01, "disk_kv_gib": 0.02}],
    ids=str,
)
def test_pools_of_an_engine_are_as_large_as_those_of_a_simulation(tiny: Path, options: dict[str, Any]) -> None:
    """Both have the same memory for KV on each rank. Heads and layers that ranks cannot share evenly count as well."""
    scheduling = SchedulingArgs(block_size=16, **{name: value for name, value in options.items() if name != "parallel"})
    given = EngineArgs(str(tiny), threads_per_rank=1, block_size=16, **options)
    engine = ResolvedEngine.of(given, kv_bytes=lambda *_: 10**6)
    bare = ClusterSpec(parallel=options["parallel"], hardware="a100-sxm-80g").clusters("chunked")[0]
    sizes = read_architecture(str(tiny), HardwareSpec(dtype="float32"))
    cluster = bare.with_layers(sizes.attention.num_layers, sizes.head_layers)
    simulated = with_pools(cluster, kv_record(sizes, 16), scheduling, lambda *_: 10**6, "")
    for name in ("num_blocks", "host_blocks", "disk_blocks", "num_device_pools"):
        assert getattr(engine.config.cluster, name) == getattr(simulated, name), name
    assert engine.model.record == kv_record(sizes, 16)


@pytest.mark.usefixtures("own_cache")
def test_steps_of_an_engine_are_as_large_as_those_of_a_simulation(tiny: Path) -> None:
    measure(tiny, tp=1, token_s=1e-4, decode_s=0.01)
    engine, experiment = both(tiny, "chunked")
    assert engine.config.max_num_batched_tokens == experiment.scheduling.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("stated", "resolved"),
    [("float32", "float32"), ("float64", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16"), (None, "auto")],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_precision_of_a_simulation_is_that_of_an_engine(
    tiny: Path, tmp_path: Path, key: str, stated: str | None, resolved: str
) -> None:
    """A config.json that states none leaves 16 bits, since a simulation reads no weights."""
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if name not in {"dtype", "torch_dtype"}}
    text = json.dumps(config if stated is None else {**config, key: stated})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    if stated is not None:
        assert own_dtype(tmp_path, with_weights=False) == resolved
    cluster = ClusterSpec(hardware="a100-sxm-80g")
    for model in (tmp_path, tmp_path / "config.json"):
        assert resolved_dtype(str(model), "auto") == resolved
        assert resolved_dtype(str(model), "float16") == "float16"
        experiment = make_experiment(str(model), cluster)
        assert experiment.fleet.precision.weights == ("bfloat16" if stated is None else resolved)
        assert read_architecture(str(model)).attention.bytes_per_element == (4 if resolved == "float32" else 2)


def test_the_default_model_has_one_precision() -> None:
    assert resolved_dtype("smollm2-135m", "auto") == own_dtype(smollm2_folder()) == "float32"
