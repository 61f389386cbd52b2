"""Simulations of models with experts, latent attention and windows: pools by hand, and every policy completes."""

from __future__ import annotations

import pytest

from longspan.core.blocks import BlockRef
from longspan.core.options import SchedulingArgs
from longspan.core.steps import MoveKV
from longspan.cost.memory import USED_MEMORY
from longspan.cost.step_cost import ReshardCost
from longspan.errors import ParameterError
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment, read_architecture, simulate
from longspan.workload.spec import WorkloadSpec

_FEW = WorkloadSpec(num_requests=6, rate=1.0, workload="short", output_len=20)
SEESAW = {"prefill_parallel": "tp4pp2", "decode_parallel": "tp8"}


@pytest.mark.parametrize(
    ("model", "cluster", "scheduling"),
    [
        ("gpt-oss-120b", {"hardware": "h100-sxm-80g", "parallel": "2xtp4"}, {}),
        ("gpt-oss-20b", {"hardware": "l40s", "parallel": "4"}, {"policy": "auto"}),
        ("deepseek-v3", {"hardware": "h200-sxm", "parallel": "tp8pp2", "hosts": 2}, {}),
        ("deepseek-v3", {"hardware": "h200-sxm", "parallel": "tp8", "expert_parallel": True}, {"policy": "chunked"}),
        ("deepseek-v3", {"hardware": "h200-sxm", "parallel": "2xtp8", "hosts": 2}, {"policy": "context"}),
        ("deepseek-v3", {"hardware": "h200-sxm", **SEESAW}, {"policy": "seesaw", "host_kv_gib": 200}),
        ("qwen3-30b-a3b", {"hardware": "h100-sxm-80g", "parallel": "2"}, {"policy": "tetris"}),
        ("qwen3-30b-a3b", {"hardware": "h100-sxm-80g", "parallel": "2", "dtype": "fp8"}, {"policy": "runahead"}),
        ("mixtral-8x7b", {"hardware": "a100-sxm-80g", "parallel": "tp2", "kv_cache_dtype": "fp8"}, {}),
    ],
    ids=str,
)
def test_every_kind_of_model_is_served(model: str, cluster: dict[str, object], scheduling: dict[str, object]) -> None:
    found = simulate(model, ClusterSpec(**cluster), _FEW, scheduling=SchedulingArgs(**scheduling)).summary()  # type: ignore[arg-type]
    assert found["num_completed"] == 6
    assert found["num_output_tokens"] == 120


@pytest.mark.parametrize(("parallel", "layers"), [("tp8", 61), ("tp4pp2", 31), ("tp8pp2", 31)])
def test_a_larger_tp_stores_no_more_latents(parallel: str, layers: int) -> None:
    """Each rank has 576 elements of 2 bytes per token and layer, in the memory that weights leave."""
    spec = ClusterSpec(hardware="h200-sxm", parallel=parallel, hosts=2 if parallel == "tp8pp2" else 1)
    experiment = make_experiment("deepseek-v3", spec, SchedulingArgs(policy="chunked", block_size=64))
    [blocks] = experiment.cluster.num_blocks
    stored = blocks * 64 * layers * 576 * 2
    model, tp = read_architecture("deepseek-v3"), experiment.cluster.spec.tp
    weights = max(
        model.rank_bytes(experiment.cluster.layers(0, stage), tp) for stage in range(experiment.cluster.pp(0))
    )
    room = USED_MEMORY * 140.4 * 2**30 - weights
    assert 0.9 * room < stored + 2.5 * 2**30 <= room + 2**30


def test_moves_to_other_instances_carry_the_latent_to_each_rank() -> None:
    disaggregated = ClusterSpec(hardware="h200-sxm", prefill_parallel="tp8", decode_parallel="tp8", hosts=2)
    experiment = make_experiment("deepseek-v3", disaggregated, SchedulingArgs(policy="tetris", block_size=64))
    assert experiment.cluster.has_roles
    copies = (BlockRef(0, 0), BlockRef(1, 0)), (BlockRef(0, 1), BlockRef(1, 1))
    [flow] = experiment.cost.flows(MoveKV(number=1, request_id=0, copies=copies))
    assert flow.num_bytes == 2 * 8 * 61 * 64 * 576 * 2


def test_resharding_copies_missing_weights() -> None:
    spec = ClusterSpec(hardware="h200-sxm", **SEESAW)  # type: ignore[arg-type]
    experiment = make_experiment("deepseek-v3", spec, SchedulingArgs(policy="seesaw", host_kv_gib=200))
    prefill, decode = experiment.facts.phases
    there: ReshardCost = experiment.cost.resharded(prefill).reshard(decode)
    back = experiment.cost.resharded(decode).reshard(prefill)
    total = read_architecture("deepseek-v3").weight_bytes
    assert 0.2 * total < there.copied_bytes < total
    assert 0.2 * total < back.copied_bytes < 1.1 * total


def test_expert_parallelism_needs_ranks_that_share_experts() -> None:
    cluster = ClusterSpec(hardware="h100-sxm-80g", parallel="2", expert_parallel=True)
    with pytest.raises(ParameterError, match=r"expert_parallel needs tp 2 or more.*: use a larger tp"):
        make_experiment("qwen3-30b-a3b", cluster)
