"""Laws of the closed form of offline throughput: Table 3 by hand, and the simulator on the same work."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from refusals import refused

from longspan import ClusterSpec
from longspan.core.cluster import Cluster
from longspan.core.options import SchedulingArgs
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.topology import Devices
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload, text

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
from closed_form import OfflineWork, Pass, kv_tokens, layer_terms, pair_throughput, static_throughput

MODEL, HARDWARE, GPUS = "llama-2-70b", "a10", 8
WORK = OfflineWork(num_requests=100, input_len=3000, output_len=100)
ALL_ON_HOSTS = 1e12


def line_of(spec: str, name: str = MODEL) -> Roofline:
    model = from_config(catalog.model_config(name), name=name)
    return rooflines(model, Devices(hardware=HARDWARE, gpus_per_host=GPUS), Cluster.of(spec))[0]


def static(spec: str, work: OfflineWork, max_num_batched_tokens: int) -> float:
    return static_throughput(line_of(spec), Cluster.of(spec).num_instances, work, max_num_batched_tokens)


def test_terms_are_those_of_table_3() -> None:
    """Operations and bytes of Llama 2 70B, over the speeds that an A10 reaches of 125 TFLOP/s and 600 GB/s."""
    weights = 2 * 8192 * (64 + 8) * 128 + 3 * 8192 * 28672
    prompts, s, kv_token = 4, 3000, 2 * 8 * 128 * 2
    prefill = layer_terms(line_of("pp8"), Pass(prompts * s, s / 2, 0, 0))
    decode = layer_terms(line_of("pp8"), Pass(0, 0, 4, s))
    curve = catalog.efficiency().curve(catalog.device("a10"), "bfloat16")
    flops, bytes_per_s, attended = 125e12 * curve.compute, 600e9 * curve.memory, 125e12 * 0.628
    assert prefill.products_s == pytest.approx(2 * prompts * s * weights / flops)
    assert prefill.scores_s == pytest.approx(2 * prompts * 64 * s**2 * 128 / attended)
    assert prefill.kv_s == pytest.approx(2 * prompts * s * (64 + 2 * 8) * 128 / bytes_per_s)
    assert decode.products_s == pytest.approx(2 * 4 * weights / flops)
    assert decode.scores_s == pytest.approx(4 * 4 * 64 * s * 128 / attended)
    assert decode.kv_s == pytest.approx(4 * s * kv_token / bytes_per_s)
    assert decode.weights_s == prefill.weights_s == pytest.approx(2 * weights / bytes_per_s)
    ranks = layer_terms(line_of("tp4pp2"), Pass(prompts * s, s / 2, 0, 0))
    assert ranks[:4] == pytest.approx([term / 4 for term in prefill[:4]])
    ring_bytes_per_s = 0.75 * 15.75e9 * 4 / (2 * 3)
    assert ranks.network_s == pytest.approx(2 * 59e-6 + 4 * prompts * s * 8192 / ring_bytes_per_s)
    assert prefill.network_s == 0


@pytest.mark.parametrize(
    ("spec", "output_len", "max_num_batched_tokens"),
    [
        ("tp8", 1, 512),
        ("tp8", 100, 2048),
        ("tp4pp2", 300, 1024),
        ("tp2pp4", 30, 4096),
        ("pp8", 1, 8192),
        ("pp8", 30, 4096),
    ],
)
def test_the_closed_form_equals_the_simulator(spec: str, output_len: int, max_num_batched_tokens: int) -> None:
    work = replace(WORK, output_len=output_len)
    scheduling = SchedulingArgs(
        policy="chunked", max_num_batched_tokens=max_num_batched_tokens, block_size=16, max_num_seqs=1024
    )
    cluster = ClusterSpec(hardware=HARDWARE, gpus_per_host=GPUS, parallel=spec)
    arrivals = [
        Arrival(due_s=0.0, prompt=text(3 * index + 2, work.input_len), output_len=output_len)
        for index in range(work.num_requests)
    ]
    makespan_s = make_experiment(MODEL, cluster, scheduling).run(Workload(arrivals=arrivals, shares=False)).makespan_s
    assert static(spec, work, max_num_batched_tokens) == pytest.approx(work.num_requests / makespan_s, rel=0.15)


@pytest.mark.parametrize("spec", ["tp8", "tp2pp4", "pp8"])
def test_longer_answers_take_longer_and_half_the_requests_half_the_time(spec: str) -> None:
    rates = [static(spec, replace(WORK, output_len=length), 2048) for length in (1, 2, 10, 50, 100, 300, 1000, 3000)]
    assert all(shorter > longer for shorter, longer in pairwise(rates))
    many = replace(WORK, num_requests=10**6)  # so that first and last ones do not count
    assert static(spec, replace(many, num_requests=10**7), 2048) == pytest.approx(static(spec, many, 2048), rel=1e-3)


def test_too_little_memory_is_refused_with_the_arithmetic() -> None:
    long = replace(WORK, input_len=90_000)
    with pytest.raises(ValueError, match=r"90000 \+ 100 tokens fits .* GiB per GPU"):
        static("pp8", long, 2048)
    with refused("output_len"):
        replace(WORK, output_len=0)


def test_a_pair_is_no_better_than_its_parts_and_as_good_where_nothing_is_decoded() -> None:
    prefill, decode, many = line_of("pp8"), line_of("tp4pp2"), replace(WORK, num_requests=10**5)
    prompts = replace(many, output_len=1)
    assert pair_throughput(prefill, decode, 1, prompts, 8192, ALL_ON_HOSTS) == pytest.approx(
        static("pp8", prompts, 8192), rel=1e-3
    )
    rates = [pair_throughput(prefill, decode, 1, many, 8192, hosts) for hosts in (1e6, 1e7, ALL_ON_HOSTS)]
    assert rates[0] < rates[1] < rates[2] < static("pp8", prompts, 8192)


def test_kv_memory_shrinks_with_passes_and_more_than_doubles_with_the_ranks() -> None:
    """Since weights are split as well, as the paper says of TP and PP."""
    assert kv_tokens(line_of("tp4pp2"), 4096) < kv_tokens(line_of("tp4pp2"), 512)
    for few, many in (("tp4", "tp8"), ("pp4", "pp8")):
        assert kv_tokens(line_of(many, "codellama-34b"), 512) > 2 * kv_tokens(line_of(few, "codellama-34b"), 512)
