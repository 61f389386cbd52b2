"""Costs of KV transfers: bytes by heads over links. The busiest device sets the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_part import part_of
from step_seconds import seconds_of

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_KV
from longspan.core.layouts import shard_span
from longspan.core.runs import Run
from longspan.core.splits import ParallelSpec
from longspan.core.steps import Forward, MoveKV, MoveWay, Part
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.flows import Flow, alone_s, shared_rates
from longspan.cost.forward import rooflines
from longspan.cost.step_cost import RooflineCost
from longspan.cost.topology import Devices
from longspan.sim.executor import SimExecutor, VirtualClock

BLOCK = 256
MODEL = from_config(catalog.model_config("llama-3-8b"), name="llama-3-8b")
HOSTS = Devices(hardware="a100-sxm-80g", gpus_per_host=8, hosts=4)
TOKEN_BYTES = 2 * 8 * 128 * 2 * 32
"""Keys and values, 8 heads of 128, 16 bits, 32 layers."""


def cost(prefill: str = "16", decode: str | None = "2xtp8", cluster: Devices = HOSTS) -> RooflineCost:
    spec = None if decode is None else ParallelSpec.parse(decode)
    instances = Cluster(spec=ParallelSpec.parse(prefill), decode_spec=spec)
    return RooflineCost(MODEL, cluster, instances, block_size=BLOCK)


def move(*pairs: tuple[int, int], blocks: int = 100) -> MoveKV:
    copies = [(BlockRef(s, b), BlockRef(t, b)) for s, t in pairs for b in range(blocks)]
    return MoveKV(number=1, request_id=0, copies=tuple(copies))


def test_each_source_sends_over_its_own_link_at_the_same_time() -> None:
    found = cost()
    one, four = alone_s(found.flows(move((0, 16)))), alone_s(found.flows(move((0, 16), (1, 16), (2, 16), (3, 16))))
    assert four == pytest.approx(one), "8 devices receive the bytes of 4"
    between = found.lines[0].topology.between
    assert one == pytest.approx(between.latency_s + 100 * BLOCK * TOKEN_BYTES / between.bytes_per_s)
    assert not between.shared


def test_moves_of_different_sources_run_concurrently() -> None:
    """As the engine sends them: eight of them end when one of eight sources would."""
    found, ends = cost(), []
    for moves in ([move(*((source, 16) for source in range(8)))], [move((source, 16)) for source in range(8)]):
        executor = SimExecutor(clock=(clock := VirtualClock()), vocab_size=9, cost=found)
        for number, one in enumerate(moves, start=1):
            executor.submit(replace(one, number=number))
        done = 0
        while done < len(moves):
            done += len(executor.poll(None))
        ends.append(clock.now())
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


@pytest.mark.parametrize("way", ["out", "in"])
def test_all_ranks_of_an_instance_copy_to_and_from_its_host_at_once(way: MoveWay) -> None:
    """Concurrently with moves in the other direction, and to other instances."""
    found, bus = cost(), HOSTS.device.bus
    pairs = [(BlockRef(16, block), BlockRef(20, block)) for block in range(100)]
    copies = tuple(pairs if way == "out" else [pair[::-1] for pair in pairs])
    flows = found.flows(MoveKV(number=1, request_id=0, copies=copies, way=way))
    assert alone_s(flows) == pytest.approx(bus.latency_s + 100 * BLOCK * TOKEN_BYTES / 8 / bus.bytes_per_s)
    other = found.flows(move((0, 16)))
    assert alone_s([*flows, *other]) == max(alone_s(flows), alone_s(other))


@pytest.mark.parametrize("spec", ["1", "tp8", "pp2"])
def test_keys_on_a_host_come_over_the_bus(spec: str) -> None:
    """A decode hides none of the copy. A prompt hides it under its attention. Each rank gets its own heads."""
    found, tp = cost(spec, None), 8 if spec == "tp8" else 1

    def more_s(tokens: int, cached: int) -> float:
        own = part_of((0,), start=cached, stop=cached + tokens, runs=((Run(cached, cached + tokens),),))
        steps = [
            Forward(number=1, parts=(replace(own, hosted=(number,) if number else ()),))
            for number in (0, cached // BLOCK)
        ]
        without, with_some = (seconds_of(found, step)[0] for step in steps)
        return with_some - without

    bus = HOSTS.device.bus
    assert more_s(1, 512 * BLOCK) == pytest.approx(512 * BLOCK * TOKEN_BYTES / bus.bytes_per_s / tp, rel=1e-6)
    assert more_s(8192, 512 * BLOCK) == 0.0, "attention takes longer"
    assert 0.0 < more_s(2, 512 * BLOCK) < more_s(1, 512 * BLOCK)


def test_on_a_cpu_they_are_there() -> None:
    found = cost("1", None, Devices(hardware="cpu-epyc-9654", gpus_per_host=1))
    own = part_of((0,), start=4096, stop=4097, runs=((Run(4096, 4097),),))
    steps = [Forward(number=1, parts=(replace(own, hosted=(number,) if number else ()),)) for number in (0, 16)]
    assert seconds_of(found, steps[0]) == seconds_of(found, steps[1])


def test_sixteen_sources_are_too_many_for_eight_receivers() -> None:
    found = cost()
    between = found.lines[0].topology.between
    all_of_them = alone_s(found.flows(move(*((source, 16) for source in range(16)))))
    expected = 16 * 100 * BLOCK * TOKEN_BYTES / 8 / between.bytes_per_s
    assert all_of_them == pytest.approx(between.latency_s + expected)


def test_heads_that_several_ranks_have_are_sent_to_each() -> None:
    few = replace(MODEL, attention=replace(MODEL.attention, num_kv_heads=4))
    instances = Cluster(spec=ParallelSpec(instances=8), decode_spec=ParallelSpec(tp=8))
    found = RooflineCost(few, replace(HOSTS, hosts=2), instances, block_size=BLOCK)
    between = found.lines[0].topology.between
    sent_bytes = 100 * BLOCK * TOKEN_BYTES  # 4 heads to 8 ranks: as much as 8 heads to 8
    assert alone_s(found.flows(move((0, 8)))) == pytest.approx(between.latency_s + sent_bytes / between.bytes_per_s)


def test_a_move_inside_a_host_does_not_use_the_network() -> None:
    found = cost("4", "tp4", replace(HOSTS, hosts=1))
    assert alone_s(found.flows(move((0, 4)))) < alone_s(cost().flows(move((0, 16)))) / 5


def test_devices_that_share_a_link_share_it() -> None:
    shared = next(name for name in catalog.names("links") if catalog.link(name).shared)
    found = cost(cluster=replace(HOSTS, link=shared))
    one, two = alone_s(found.flows(move((0, 16)))), alone_s(found.flows(move((0, 16), (1, 16))))
    assert two == pytest.approx(2 * one, rel=1e-3)
    assert alone_s(found.flows(move((0, 16), (8, 17)))) == pytest.approx(one), "other hosts"


def test_roles_lie_on_their_own_devices() -> None:
    prefill, decode = rooflines(
        MODEL, HOSTS, Cluster(spec=ParallelSpec(instances=16), decode_spec=ParallelSpec(instances=2, tp=8))
    )
    assert [prefill.topology.hosts[i] for i in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert [decode.topology.hosts[i] for i in (16, 17)] == [2, 3]
    with pytest.raises(ValueError, match=r"16 \* 1 \+ 3 \* 8 = 40 GPUs"):
        rooflines(MODEL, HOSTS, Cluster(spec=ParallelSpec(instances=16), decode_spec=ParallelSpec(instances=3, tp=8)))


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 4), st.sampled_from([0.5, 1.0, 3.0])),
            min_size=1,
            max_size=3,
            unique_by=lambda at: at[0],
        ),
        min_size=1,
        max_size=8,
    )
)
def test_flows_share_links_fairly(paths: list[list[tuple[int, float]]]) -> None:
    """Max-min: each flow passes a saturated link end where no other flow gets more bytes per second."""
    flows = [Flow(0, 1, 1.0, 0.0, tuple(path)) for path in paths]
    rates = shared_rates(flows)
    used: Counter[Hashable] = Counter()
    for flow, rate in zip(flows, rates, strict=True):
        used.update({end: rate * seconds for end, seconds in flow.s_per_byte})
    assert max(used.values()) < 1 + 1e-9
    for flow, rate in zip(flows, rates, strict=True):
        full = [end for end, _ in flow.s_per_byte if used[end] > 1 - 1e-9]
        others = {end: max(r for f, r in zip(flows, rates, strict=True) if end in dict(f.s_per_byte)) for end in full}
        assert min(others.values()) <= rate * (1 + 1e-9)


def _prefill(rebalances: tuple[MoveKV, ...] = (), new: int = 32_768, cached: int = 0) -> Forward:
    group = (0, 1, 2, 3)
    part = Part(
        request_id=0,
        start=cached,
        stop=cached + new,
        tokens=range(new),
        group=group,
        runs=shard_span("zigzag", cached, cached + new, 4),
        exchange=RING_KV,
        first_block=0,
        blocks=(),
        sample=None,
    )
    return Forward(number=1, parts=(part,), rebalances=rebalances)


def test_a_balance_with_long_layers_costs_its_first_layer() -> None:
    found = cost()
    moved = move((0, 2), (1, 3), blocks=32)
    plain, balanced = seconds_of(found, _prefill(cached=32_768)), seconds_of(found, _prefill((moved,), cached=32_768))
    part_s = alone_s(found.flows(moved)) / 32
    assert [balanced[i] - plain[i] for i in range(4)] == [pytest.approx(part_s)] * 4


def test_a_copy_within_an_instance_costs_nothing() -> None:
    found = cost()
    assert seconds_of(found, _prefill((move((1, 1), blocks=1),))) == seconds_of(found, _prefill())


def test_members_that_swap_blocks_move_them() -> None:
    """Sources and targets are the same instances then, as in a copy."""
    found = cost()
    swapped, copied = move((0, 2), (2, 0)), move((0, 0), (2, 2))
    assert copied.is_local and not swapped.is_local
    assert seconds_of(found, _prefill((swapped,)))[0] > seconds_of(found, _prefill((copied,)))[0]


def test_a_balance_with_short_layers_is_exposed() -> None:
    found = cost()
    moved = move((0, 2), blocks=2000)
    plain, balanced = seconds_of(found, _prefill(new=1024)), seconds_of(found, _prefill((moved,), new=1024))
    assert balanced[0] - plain[0] > alone_s(found.flows(moved)) / 2


def test_a_decode_on_eight_ranks_is_quicker_than_on_one() -> None:
    found = cost()
    decodes = [
        Part(
            request_id=0,
            start=16_000,
            stop=16_001,
            tokens=(0,),
            group=(instance,),
            runs=((Run(16_000, 16_001),),),
            exchange=LOCAL,
            first_block=0,
            blocks=(),
            sample=None,
        )
        for instance in (0, 16)
    ]
    alone, split = (max(seconds_of(found, Forward(number=1, parts=(part,))).values()) for part in decodes)
    assert split < alone / 2
