"""Requests that decode together in a group: each member computes about the same number of tokens."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
from cluster import Cluster as Served
from cluster import Setup

from longspan.core.cluster import Cluster
from longspan.core.exchange import RING_Q
from longspan.core.options import SchedulingArgs
from longspan.core.request import Request
from longspan.core.runs import num_tokens
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.estimate import estimate_decode
from longspan.cost.forward import rooflines
from longspan.cost.topology import Devices
from longspan.policy.shards import Capacity, block_owners, shard_chunk
from longspan.sim.spec import ClusterSpec
from longspan.simulation import simulate
from longspan.workload.spec import WorkloadSpec


def serving(num_instances: int, **options: str) -> Served:
    return Served(
        Setup(
            num_instances=num_instances,
            num_blocks=800,
            policy="context",
            options={"threshold": "1", "exchange": "ring_kv", **options},
            max_num_batched_tokens=4096,
        )
    )


def computed(cluster: Served, requests: list[Request]) -> list[Counter[int]]:
    """How many tokens each member decodes, in every step that decodes all of these requests."""
    found = []
    ids = {request.id for request in requests}
    for forward in cluster.forwards:
        decodes = [part for part in forward.parts if part.request_id in ids and part.start + 1 == part.stop]
        if {part.request_id for part in decodes} == ids:
            step = Counter[int]()
            for part in decodes:
                step.update(dict(zip(part.group, map(num_tokens, part.runs), strict=True)))
            found.append(step)
    return found


@pytest.mark.parametrize(("members", "rotate"), [(2, "block"), (4, "block"), (3, "token")])
def test_first_tokens_of_many_prompts_are_on_all_members_alike(members: int, rotate: str) -> None:
    draw, cluster, firsts = random.Random(0), serving(members, rotate=rotate), Counter[int]()
    for number in range(240):
        request = cluster.add([number % 60] * draw.randint(40, 600), max_tokens=2)
        cluster.run()
        firsts += computed(cluster, [request])[-1]
        cluster.executor.steps.clear()
    assert sum(firsts.values()) == 240
    assert min(firsts.values()) > 0.75 * sum(firsts.values()) / members


@pytest.mark.parametrize("rotate", ["block", "token"])
@pytest.mark.parametrize("length", [256, 500])
def test_requests_alike_decode_on_all_members_in_every_step(length: int, rotate: str) -> None:
    """A member may have one token more while some requests have begun their next block and some have not."""
    cluster, every = serving(4, rotate=rotate), Counter[int]()
    requests = [cluster.add([number] * length, max_tokens=100) for number in range(8)]
    cluster.run()
    steps = computed(cluster, requests)
    assert len(steps) > 80
    assert all(max(step.values()) <= 3 for step in steps)
    for step in steps:
        every += step
    assert max(every.values()) < 1.05 * sum(every.values()) / 4


def test_a_group_that_gets_every_second_request_has_them_on_all_members() -> None:
    cluster, firsts = serving(2), Counter[int]()
    for number in range(20):
        request = cluster.add([number] * 300, max_tokens=2)
        cluster.run()
        if number % 2:
            firsts += computed(cluster, [request])[-1]
    assert min(firsts[0], firsts[1]) >= 4


@pytest.mark.parametrize("num_shared", [20, 21])
def test_questions_about_one_document_decode_on_all_members(num_shared: int) -> None:
    """Also where one member holds a block less of the document than its peer."""
    cluster = serving(2)
    document = [token % 50 for token in range(16 * num_shared)]
    cluster.add(document, max_tokens=2)
    cluster.run()
    asked = [cluster.add([*document, 50 + number], max_tokens=15) for number in range(8)]
    cluster.run()
    assert all(request.metrics.num_cached_tokens == 16 * num_shared for request in asked)
    steps = computed(cluster, asked)
    assert steps and all(step == {0: 4, 1: 4} for step in steps)


def test_the_kv_of_members_stays_even() -> None:
    capacity = Capacity(tokens=(64,) * 4, blocks=(999,) * 4, block_size=16)
    for first in range(4):
        for held in ([], [0, 1, 2, 3, 0], [1] * 9, [3, 3, 2]):
            owners = list(held)
            while len(owners) < 80:
                shards = shard_chunk(16 * len(owners), 16 * len(owners) + 1, owners, capacity, first=first)
                assert shards is not None
                owners += block_owners(shards, len(owners), len(owners) + 1, 16)
            counts = Counter(owners)
            assert max(counts.values()) - min(counts.values()) <= 2


@pytest.mark.parametrize(("parallel", "batch"), [("4", 8), ("8", 20), ("4xtp2", 32)])
def test_a_simulated_batch_decodes_as_quickly_as_estimated(tmp_path: Path, parallel: str, batch: int) -> None:
    """Requests that are alike and decode together, from the moment all of them have started."""
    length, lengths = 8192, tmp_path / "alike.json"
    lengths.write_text(json.dumps({"input_len": {"0": length, "1": length}, "output_len": {"0": 300, "1": 300}}))
    instances = Cluster.of(parallel)
    cluster = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=instances.num_ranks, parallel=parallel)
    scheduling = SchedulingArgs(policy="context", exchange="ring_kv", policy_options={"threshold": "0"})
    workload = WorkloadSpec(workload=str(lengths), rate=math.inf, num_requests=batch)
    served = simulate("llama-3-8b", cluster, workload, scheduling=scheduling).served
    last = max(served, key=lambda one: one.ttft_s)
    model = from_config(catalog.model_config("llama-3-8b"), name="llama-3-8b")
    devices = Devices(hardware="a100-sxm-80g", gpus_per_host=instances.num_ranks)
    [roofline] = rooflines(model, devices, instances)
    expected = estimate_decode(roofline, instances.num_instances, RING_Q, length + 50, batch)
    assert statistics.median(last.tbt_s[:100]) == pytest.approx(expected.seconds, rel=0.005)
