"""The cluster as a value: the grid of ranks, and the layers of pipeline stages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import chain, pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from longspan.core.cluster import Cluster
from longspan.core.locations import Location
from longspan.core.splits import ParallelSpec, split_layers

SPECS = st.builds(ParallelSpec, instances=st.integers(1, 4), tp=st.integers(1, 4), pp=st.integers(1, 4))
CLUSTERS = st.builds(Cluster, spec=SPECS, decode_spec=st.none() | SPECS)


@given(CLUSTERS)
def test_ranks_are_numbered_by_instance_stage_and_shard(cluster: Cluster) -> None:
    grid = [
        (instance, stage, shard)
        for instance in cluster.instances
        for stage in range(cluster.pp(instance))
        for shard in range(cluster.tp(instance))
    ]
    assert [cluster.at(rank) for rank in range(cluster.num_ranks)] == grid
    assert [cluster.rank(*place) for place in grid] == list(range(cluster.num_ranks))


@given(CLUSTERS)
def test_instances_and_stages_divide_the_ranks(cluster: Cluster) -> None:
    assert [*chain(*map(cluster.ranks, cluster.instances))] == list(range(cluster.num_ranks))
    for instance in cluster.instances:
        stages = [cluster.stage_ranks(instance, stage) for stage in range(cluster.pp(instance))]
        assert [*chain(*stages)] == list(cluster.ranks(instance))


@given(CLUSTERS)
def test_every_instance_has_its_role(cluster: Cluster) -> None:
    assert [*cluster.prefill, *cluster.decode] == list(cluster.instances)
    assert cluster.has_roles == bool(cluster.decode) and cluster.backends
    for instance in cluster.instances:
        spec = cluster.decode_spec if instance in cluster.decode else cluster.spec
        assert spec is not None
        assert (cluster.tp(instance), cluster.pp(instance)) == (spec.tp, spec.pp)


@given(CLUSTERS, st.integers(1, 3))
def test_hosts_are_those_of_the_locations(cluster: Cluster, per_host: int) -> None:
    assert cluster.hosts == (0,) * cluster.num_ranks
    locations = tuple(Location(host=rank // per_host, device=rank) for rank in range(cluster.num_ranks))
    placed = replace(cluster, locations=locations)
    assert placed.hosts == tuple(rank // per_host for rank in range(cluster.num_ranks))
    assert all(placed.location(i) == locations[placed.ranks(i)[0]] for i in placed.instances)
    for one in (cluster, placed):
        nearest_first = sorted(one.instances, key=one.location)
        assert all(one.location(a) < one.location(b) for a, b in pairwise(nearest_first))


@given(CLUSTERS)
def test_a_cluster_travels_in_messages(cluster: Cluster) -> None:
    cluster = cluster.with_blocks([7 + instance for instance in cluster.instances])
    assert cluster.hosts and cluster.at(0)  # values computed on first use are not sent
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cluster), type=Cluster) == cluster


@given(st.integers(1, 12), st.integers(0, 30), st.floats(0, 20))
def test_layers_are_split_so_that_the_slowest_stage_is_quickest(pp: int, more: int, head: float) -> None:
    """Every other split is tried."""
    number = pp + min(more, 12 - pp if pp > 4 else more)
    stages = split_layers(number, pp, head)
    assert [layer for stage in stages for layer in stage] == list(range(number))
    assert len(stages) == pp and all(stages)

    def slowest(counts: tuple[int, ...]) -> float:
        return max(*counts, counts[-1] + head / 16)

    found = slowest(tuple(map(len, stages)))
    cuts = itertools.islice(itertools.combinations(range(1, number), pp - 1), 5000)
    others = (tuple(b - a for a, b in itertools.pairwise((0, *cut, number))) for cut in cuts)
    assert all(found <= slowest(other) + 1e-9 for other in others)


def test_more_stages_than_layers_are_refused() -> None:
    with refused("pp"):
        Cluster.of("2xpp4").with_layers(3, 1.0)


def test_the_stage_of_a_layer_has_it() -> None:
    cluster = Cluster.of("pp3", "2xpp2").with_layers(10, 4.0)
    for instance, layer in itertools.product(cluster.instances, range(10)):
        assert layer in cluster.layers(instance, cluster.stage_of(instance, layer))
    assert cluster.row_names[2:] == ["0, stage 2", *(f"{i}, stage {j}" for i in (1, 2) for j in (0, 1))]
