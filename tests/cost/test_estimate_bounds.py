"""Estimates of mixtures of experts, other links and launch modes stay within the limits of memory, wires and peaks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_KV, RING_Q, Exchange
from longspan.cost import catalog
from longspan.cost.architecture import Architecture
from longspan.cost.estimate import estimate_decode, estimate_prefill, host_kv
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.layer_kinds import Experts
from longspan.cost.links import collective_s
from longspan.cost.topology import Devices
from longspan.errors import ParameterError
from longspan.simulation import read_architecture

MODELS = [read_architecture(name) for name in catalog.names("models")]
SPARSE = [model for model in MODELS if model.experts is not None]


def on(model: Architecture, spec: str, hardware: str = "h100-sxm-80g", hosts: int = 1) -> Roofline:
    devices = Devices(hardware=hardware, gpus_per_host=8, hosts=hosts)
    return rooflines(model, devices, Cluster.of(spec))[0]


def whole(model: Architecture) -> Architecture:
    assert model.experts is not None
    return replace(model, experts=replace(model.experts, are_whole=True))


@pytest.mark.parametrize("spec", ["8", "4xtp2", "pp8", "2xpp4", "2xtp2pp2", "tp8"])
@pytest.mark.parametrize("model", SPARSE, ids=lambda model: model.name)
def test_a_decode_step_takes_no_less_than_reading_the_experts_of_each_instance_and_group(
    model: Architecture, spec: str
) -> None:
    instances = Cluster.of(spec).num_instances
    for hardware in ("h100-sxm-80g", "a100-sxm-80g", "h200-sxm"):
        for line in (on(model, spec, hardware), *([on(whole(model), spec, hardware)] if "tp" in spec else [])):
            for batch in (1, 4, 16, 64, 300):
                step = estimate_decode(line, instances, LOCAL if instances == 1 else RING_Q, 1024, batch)
                assert 0 < step.lower_bound_s <= step.seconds


@pytest.mark.parametrize("members", range(2, 9))
@pytest.mark.parametrize("kind", ["all_reduce", "gather", "alltoall"])
def test_collectives_of_a_mesh_are_no_faster_than_the_links_of_the_group(kind: str, members: int) -> None:
    """Each of 8 GPUs has a link of 64 GB/s to each other GPU."""
    mesh = catalog.link("infinity-fabric3")
    seconds = collective_s(getattr(mesh, kind), 1e9, members)
    assert seconds > 1e9 / ((members - 1) * mesh.nominal_bytes_per_s / 7)


@pytest.mark.parametrize("spec", ["1", "2", "tp2", "tp8", "pp2", "2xtp4", "2xtp2pp2"])
@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "llama-3-70b", "llama-7b"])
def test_every_rank_loads_the_kv_of_its_own_heads_and_layers_from_its_host(name: str, spec: str) -> None:
    line, cluster, context = on(read_architecture(name), spec), Cluster.of(spec), 65_536
    shape, bus = line.layer.model.attention, line.layer.device.bus
    kv_heads = max(1.0, shape.num_kv_heads / line.layer.tp)
    rank_bytes = context * shape.kv_bytes / shape.num_kv_heads * kv_heads * max(map(len, line.stages))
    found = host_kv(line, cluster.num_instances, 1, 1000.0, context).fetch_s
    assert found == pytest.approx(bus.latency_s + rank_bytes / cluster.num_instances / bus.bytes_per_s)


@pytest.mark.parametrize("model", SPARSE, ids=lambda model: model.name)
def test_no_rank_has_less_than_a_whole_expert(model: Architecture) -> None:
    assert model.experts is not None
    if model.experts.number < 32 <= model.attention.num_heads:
        with pytest.raises(ParameterError, match=rf"expert_parallel.* share {model.experts.number} whole experts: use"):
            on(whole(model), "tp32", hosts=4)
    on(whole(model), "tp8")


@pytest.mark.parametrize(("number", "ranks"), [(8, 8), (8, 3), (16, 12), (160, 64), (5, 4)])
def test_the_busiest_rank_computes_whole_experts_and_stores_them(number: int, ranks: int) -> None:
    experts = Experts(number=number, per_token=1, intermediate_size=64, shared_size=0, layers=(0, 1), are_whole=True)
    held = max(Counter(expert % ranks for expert in range(number)).values())
    assert experts.busiest_rank(1e6, ranks) == pytest.approx(held)
    assert experts.busiest_rank(1, ranks) == pytest.approx(1)
    model = replace(MODELS[0], experts=experts)
    of_experts = [
        replace(model, experts=replace(experts, intermediate_size=size)).rank_bytes(range(2), ranks) for size in (64, 0)
    ]
    each = model.matrices_of(64) * model.precision.ffn_bytes
    assert of_experts[0] - of_experts[1] == pytest.approx(2 * held * each)


@pytest.mark.parametrize("hardware", ["h100-sxm-80g", "a100-sxm-80g", "mi300x", "l40s"])
def test_all_to_alls_of_an_instance_and_of_instances_take_equally_long(hardware: str) -> None:
    for size in (2, 4, 8):
        ranks, instances = on(MODELS[0], f"tp{size}", hardware), on(MODELS[0], str(size), hardware)
        for num_bytes in (1e3, 1e6, 1e9):
            assert ranks.topology.scatter_s(num_bytes) == instances.topology.alltoall_s(num_bytes, tuple(range(size)))


@pytest.mark.parametrize("spec", ["tp8", "tp4pp2", "2xtp4"])
@pytest.mark.parametrize("model", SPARSE, ids=lambda model: model.name)
def test_bytes_are_those_of_the_collectives_whose_seconds_are_predicted(model: Architecture, spec: str) -> None:
    plain, placed = on(model, spec), on(whole(model), spec)
    instances = Cluster.of(spec).num_instances
    exchange = LOCAL if instances == 1 else RING_KV
    for length in (16, 512, 32_768):
        sums, scatters = (estimate_prefill(line, instances, exchange, length) for line in (plain, placed))
        is_quicker = scatters.breakdown.all_reduce_s < sums.breakdown.all_reduce_s * (1 - 1e-9)
        assert is_quicker == (scatters.bytes_exchanged != pytest.approx(sums.bytes_exchanged))


@pytest.mark.parametrize("exchange", [RING_KV, RING_Q])
def test_only_eager_decodes_wait_for_hops(exchange: Exchange) -> None:
    devices, model = Devices(hardware="h100-sxm-80g", gpus_per_host=8), read_architecture("llama-3-8b")
    eager, graph, compiled = (
        rooflines(model, devices, Cluster.of("4"), launch=launch)[0] for launch in ("eager", "graph", "compiled")
    )
    hops_s = 32 * (2 if exchange == RING_Q else 3) * eager.layer.attention.hop_us * 1e-6
    steps = [estimate_decode(line, 4, exchange, 4096, 4).breakdown.overhead_s for line in (eager, graph, compiled)]
    assert steps[1] == steps[2] and steps[0] - steps[1] == pytest.approx(hops_s)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_utilisation_counts_no_more_products_than_are_computed(model: Architecture) -> None:
    """The embedding is no product. The output head is one for sampled tokens, of a prompt only the last."""
    line = on(replace(model, vocab_size=10**7), "1")
    small = on(model, "1")
    for phase in (estimate_prefill, estimate_decode):
        large_flops, flops = (
            (found := phase(each, 1, LOCAL, 4096)).flops_per_gpu_s * found.seconds for each in (line, small)
        )
        assert large_flops - flops == pytest.approx(2 * (10**7 - model.vocab_size) * model.attention.hidden_size)
        assert 0 < phase(line, 1, LOCAL, 4096).mfu < 1
