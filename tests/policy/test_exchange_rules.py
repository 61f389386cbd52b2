"""Which exchange to use: the papers' rules for the papers' model, and the laws they obey for any."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from longspan.core.exchange import RING_KV, RING_Q
from longspan.core.parallel_args import parse_parallel
from longspan.cost.estimate import estimate_prefill
from longspan.cost.forward import rooflines
from longspan.cost.profile import LinkFit
from longspan.cost.shape import Hardware, ModelShape
from longspan.cost.topology import Devices
from longspan.policy.choosing import cheaper_weights, ring_kv_or_ring_q, unsharded_elements, unsharded_weights_pay
from longspan.simulation import read_architecture

LLAMA_405B = ModelShape(
    num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, head_dim=128, bytes_per_element=2
)
MULTI_HEAD = replace(LLAMA_405B, num_kv_heads=128)
# Context Parallelism: 800 TFLOP/s of bfloat16 is the peak of its power-limited H100 (Appendix A). The RDMA network
# between its hosts has 400 Gb/s per GPU (§4.1). An instance is TP8, which multiplies both by 8 and changes no choice.
GRAND_TETON = Hardware(flops_per_s=800e12, bytes_per_s=50e9)

TOKENS = st.integers(1, 2_000_000)
CACHED = st.integers(0, 2_000_000)
MEMBERS = st.integers(2, 64)
HARDWARE = st.builds(Hardware, flops_per_s=st.floats(1e9, 1e16), bytes_per_s=st.floats(1e6, 1e13))


def pass_kv_bytes(shape: ModelShape, new: int, cached: int) -> float:
    """Return the bytes of N hops of `ring_kv` for a layer (Table 3, §3.4)."""
    return (new + cached) * shape.kv_bytes


def pass_q_bytes(shape: ModelShape, new: int) -> float:
    """Return the bytes of N hops of `ring_q` for a layer: queries and as many partial outputs (Table 3, §3.4)."""
    return 2 * new * shape.num_heads * shape.head_dim * shape.bytes_per_element


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    num_kv_heads, per_group, head_dim = (
        draw(st.integers(1, 16)),
        draw(st.integers(1, 16)),
        draw(st.integers(1, 16)) * 16,
    )
    return ModelShape(
        num_layers=draw(st.integers(1, 126)),
        hidden_size=draw(st.sampled_from([num_kv_heads * per_group * head_dim, 576, 4096])),
        num_heads=num_kv_heads * per_group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bytes_per_element=draw(st.sampled_from([1, 2, 4])),
    )


@pytest.mark.parametrize("total", [128_000, 131_072])
def test_llama_405b_at_128k_turns_once_from_ring_q_to_ring_kv(total: int) -> None:
    choices = [ring_kv_or_ring_q(LLAMA_405B, GRAND_TETON, new, total - new, 4) for new in range(1, total + 1)]
    first_kv = choices.index(RING_KV)
    assert set(choices[:first_kv]) == {RING_Q} and set(choices[first_kv:]) == {RING_KV}
    assert 0.02 * total < first_kv + 1 <= 0.125 * total
    # At 1 / 8 = T / total + T / 32000: 3200 tokens of 128,000 (an exact tie there), 3215.2 of 131,072.
    assert abs(first_kv + 1 - 0.125 / (1 / total + 1 / 32_000)) <= 1


def test_devices_or_instances_choose_alike() -> None:
    per_instance = Hardware(flops_per_s=8 * 800e12, bytes_per_s=8 * 50e9)
    for new in range(1, 8_000, 7):
        arguments = (new, 128_000 - new, 4)
        assert ring_kv_or_ring_q(LLAMA_405B, per_instance, *arguments) == ring_kv_or_ring_q(
            LLAMA_405B, GRAND_TETON, *arguments
        )


@given(shapes(), TOKENS, CACHED, MEMBERS)
def test_on_a_link_that_hides_nothing_the_smaller_messages_win(
    shape: ModelShape, new: int, cached: int, num_members: int
) -> None:
    slow = Hardware(flops_per_s=1e30, bytes_per_s=1.0)
    smaller_q = pass_q_bytes(shape, new) < pass_kv_bytes(shape, new, cached)
    assume(pass_q_bytes(shape, new) != pass_kv_bytes(shape, new, cached))
    assert ring_kv_or_ring_q(shape, slow, new, cached, num_members) == (RING_Q if smaller_q else RING_KV)


@given(shapes(), HARDWARE, TOKENS, CACHED, MEMBERS)
def test_rings_are_compared_by_exposed_communication(
    shape: ModelShape, hardware: Hardware, new: int, cached: int, num_members: int
) -> None:
    """Appendix C before it is rearranged, for N - 1 hops. In `ring_q` one share of attention hides the queries."""
    width, hops = shape.num_heads * shape.head_dim, num_members - 1
    share_s = 4 * new * width * (new + cached) / (num_members**2 * hardware.flops_per_s)
    message_s = pass_kv_bytes(shape, new, cached) / num_members / hardware.bytes_per_s
    queries_s = hops / num_members * pass_q_bytes(shape, new) / 2 / hardware.bytes_per_s
    kv_s = hops * (message_s - share_s)
    q_s = max(0.0, queries_s - share_s) + queries_s
    assume(not math.isclose(kv_s, q_s, rel_tol=1e-6))
    choice = ring_kv_or_ring_q(shape, hardware, new, cached, num_members)
    assert choice == (RING_Q if kv_s > q_s else RING_KV)


@pytest.mark.parametrize("thousands", [2, 4, 8, 32])
def test_a_whole_prompt_takes_the_ring_that_the_estimate_finds_quicker(thousands: int) -> None:
    """As many KV heads as query heads, and a link that attention does not hide, whose messages are then alike."""
    devices = Devices(hardware="a100-sxm-80g", gpus_per_host=1, hosts=2, link="tcp-100g")
    [line] = rooflines(read_architecture("llama-7b"), devices, parse_parallel("2"))
    speeds = Hardware(flops_per_s=312e12, bytes_per_s=line.topology.bytes_per_s)
    length = thousands * 1024
    seconds = {ring: estimate_prefill(line, 2, ring, length).seconds for ring in (RING_KV, RING_Q)}
    found = ring_kv_or_ring_q(line.layer.model.attention, speeds, length, 0, 2)
    assert found == min(seconds, key=seconds.__getitem__) == RING_KV


@given(shapes(), HARDWARE, TOKENS, CACHED, MEMBERS, st.data())
def test_ring_kv_stays_chosen(
    shape: ModelShape, hardware: Hardware, new: int, cached: int, num_members: int, data: st.DataObject
) -> None:
    """Under everything that makes attention longer, links faster, or keys and values fewer."""

    def choice(faster: float = 1.0, slower: float = 1.0, more: int = 0, uncached: int = 0, fewer: int = 0) -> str:
        speeds = Hardware(flops_per_s=hardware.flops_per_s / slower, bytes_per_s=hardware.bytes_per_s * faster)
        return ring_kv_or_ring_q(shape, speeds, new + more, cached - uncached, num_members - fewer)

    assume(choice() == RING_KV)
    more, factor = data.draw(st.integers(0, 100_000)), data.draw(st.floats(1, 1000))
    uncached = data.draw(st.integers(0, cached))
    assert choice(more=more) == RING_KV
    assert choice(more=uncached, uncached=uncached) == RING_KV, "a higher miss rate of the same context"
    assert choice(uncached=uncached) == RING_KV
    assert choice(faster=factor) == RING_KV
    assert choice(slower=factor) == RING_KV
    assert choice(fewer=data.draw(st.integers(0, max(0, num_members - 3)))) == RING_KV


@given(st.integers(1, 300_000), st.integers(2, 32), st.integers(2, 8))
def test_whole_weights_are_those_of_supplement_a(length: int, tp: int, num_members: int) -> None:
    """Each instance sends (4 d² + 4 L d / N) (N - 1) elements, as in the supplement.

    In addition all tokens go to all ranks again: L d (N - 1) elements, which the supplement does not need.
    """
    d, others = 16384, tp - 1
    sent = unsharded_elements(MULTI_HEAD, length, num_members, tp, "peers")
    assert sent == pytest.approx((num_members * 4 * d**2 + 4 * length * d / tp + length * d) * others)


@given(shapes(), st.integers(1, 500_000), st.integers(1, 500_000), st.integers(1, 8), st.integers(2, 16))
def test_whole_weights_that_pay_pay_for_more_tokens(
    shape: ModelShape, length: int, more: int, num_members: int, tp: int
) -> None:
    """Weights from the host pay for any length or for none. They pay wherever weights from peers do."""
    pays = {source: unsharded_weights_pay(shape, length, num_members, tp, source) for source in ("host", "peers")}
    later = {
        source: unsharded_weights_pay(shape, length + more, num_members, tp, source) for source in ("host", "peers")
    }
    assert later["host"] == pays["host"] >= later["peers"] >= pays["peers"]


def test_whole_weights_pay_from_three_ranks_on() -> None:
    """Llama3-405B: two ranks swap (17 / 16) d to save d. Three ranks swap (17 / 24) d, and eight (17 / 64) d."""
    assert [unsharded_weights_pay(LLAMA_405B, 1000, 2, tp, "host") for tp in (2, 3, 8)] == [False, True, True]
    threshold = 2 * 16384 * 2 * (17 / 16) / (1 - 2 * (17 / 16) / 8)
    assert not unsharded_weights_pay(LLAMA_405B, int(threshold), 2, 8, "peers")
    assert unsharded_weights_pay(LLAMA_405B, int(threshold) + 1, 2, 8, "peers")


def test_weights_are_from_where_they_come_sooner() -> None:
    slow, fast = (LinkFit(start_s=0.0, bytes_per_s=speed, max_error=0.0) for speed in (1e9, 1e10))
    assert cheaper_weights(LLAMA_405B, 8, host=fast, peers=slow) == "host"
    assert cheaper_weights(LLAMA_405B, 8, host=slow, peers=fast) == "peers"
    assert cheaper_weights(LLAMA_405B, 2, host=slow, peers=slow) == "peers", "they lack only half"
    assert cheaper_weights(LLAMA_405B, 2, host=None, peers=fast) == "host"


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="9 query heads do not share 2 KV heads"):
        replace(LLAMA_405B, num_heads=9, num_kv_heads=2)
