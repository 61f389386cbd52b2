"""Which exchange to use: the papers' rules for the papers' model, and the laws they obey for any."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from longspan.core.exchange import ALLTOALL, GATHER_HIDDEN, RING_KV, RING_Q
from longspan.cost.architecture import Hardware, ModelShape
from longspan.cost.exchange_rules import (
    alltoall_bytes,
    alltoall_or_gather_hidden,
    alltoall_threshold,
    cheaper_weights,
    gather_hidden_bytes,
    pass_kv_bytes,
    pass_q_bytes,
    ring_kv_or_ring_q,
    summed_bytes,
    unsharded_weights_pay,
    whole_bytes,
)
from longspan.cost.time_fit import LinkFit

LLAMA_405B = ModelShape(
    num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, head_dim=128, bytes_per_element=2
)
MULTI_HEAD = replace(LLAMA_405B, num_kv_heads=128)
# Context Parallelism: 800 TFLOP/s of bfloat16 is the peak of its power-limited H100 (Appendix A), 400 Gb/s per GPU the
# RDMA network between its hosts (§4.1). An instance is TP8, which multiplies both by 8 and changes no choice.
GRAND_TETON = Hardware(flops_per_s=800e12, bytes_per_s=50e9)
ALGORITHMS: list[Literal[1, 5]] = [1, 5]

TOKENS = st.integers(1, 2_000_000)
CACHED = st.integers(0, 2_000_000)
MEMBERS = st.integers(2, 64)
HARDWARE = st.builds(Hardware, flops_per_s=st.floats(1e9, 1e16), bytes_per_s=st.floats(1e6, 1e13))


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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("total", [128_000, 131_072])
def test_llama_405b_at_128k_turns_once_from_ring_q_to_ring_kv(total: int, algorithm: Literal[1, 5]) -> None:
    choices = [
        ring_kv_or_ring_q(LLAMA_405B, GRAND_TETON, new, total - new, 4, algorithm=algorithm)
        for new in range(1, total + 1)
    ]
    first_kv = choices.index(RING_KV)
    assert set(choices[:first_kv]) == {RING_Q} and set(choices[first_kv:]) == {RING_KV}
    assert 0.02 * total < first_kv + 1 <= 0.125 * total
    # Algorithm 1 turns where attention hides the ring: at 4 * 800e12 * 8 * 2 / (2 * 128 * 50e9) = 4000 tokens.
    # Algorithm 5 at 1 / 8 = T / total + T / 32000: 3200 tokens of 128,000 (an exact tie there), 3215.2 of 131,072.
    exact = 4000 if algorithm == 1 else 0.125 / (1 / total + 1 / 32_000)
    assert abs(first_kv + 1 - exact) <= 1


def test_devices_or_instances_choose_alike() -> None:
    per_instance = Hardware(flops_per_s=8 * 800e12, bytes_per_s=8 * 50e9)
    for new in range(1, 8_000, 7):
        for algorithm in ALGORITHMS:
            arguments = (new, 128_000 - new, 4)
            assert ring_kv_or_ring_q(LLAMA_405B, per_instance, *arguments, algorithm=algorithm) == ring_kv_or_ring_q(
                LLAMA_405B, GRAND_TETON, *arguments, algorithm=algorithm
            )


def test_messages_of_llama_405b() -> None:
    """A KV head for every 16 query heads, in keys and in values: an eighth of the queries' bytes without a cache."""
    assert pass_q_bytes(LLAMA_405B, 1000) == 1000 * 128 * 128 * 2
    assert pass_kv_bytes(LLAMA_405B, 1000, 0) == pass_q_bytes(LLAMA_405B, 1000) / 8
    assert pass_kv_bytes(LLAMA_405B, 1000, 7000) == pass_q_bytes(LLAMA_405B, 1000)


@given(shapes(), TOKENS, CACHED, MEMBERS)
def test_on_a_link_that_hides_nothing_the_smaller_messages_win(
    shape: ModelShape, new: int, cached: int, num_members: int
) -> None:
    slow = Hardware(flops_per_s=1e30, bytes_per_s=1.0)
    smaller_q = pass_q_bytes(shape, new) < pass_kv_bytes(shape, new, cached)
    assume(pass_q_bytes(shape, new) != pass_kv_bytes(shape, new, cached))
    for algorithm in ALGORITHMS:
        choice = ring_kv_or_ring_q(shape, slow, new, cached, num_members, algorithm=algorithm)
        assert choice == (RING_Q if smaller_q else RING_KV)


@given(shapes(), HARDWARE, TOKENS, CACHED, MEMBERS)
def test_algorithm_5_weighs_what_the_paper_weighs(
    shape: ModelShape, hardware: Hardware, new: int, cached: int, num_members: int
) -> None:
    """Appendix C before it is rearranged: exposed pass-KV communication against the all-to-all, per hop."""
    width = shape.num_heads * shape.head_dim
    attention_s = 4 * new * width * (new + cached) / (num_members * hardware.flops_per_s)
    exposed_s = pass_kv_bytes(shape, new, cached) / hardware.bytes_per_s - attention_s
    alltoall_s = new * width * shape.bytes_per_element / hardware.bytes_per_s
    assume(not math.isclose(exposed_s, alltoall_s, rel_tol=1e-6))
    choice = ring_kv_or_ring_q(shape, hardware, new, cached, num_members)
    assert choice == (RING_Q if exposed_s > alltoall_s else RING_KV)


@given(shapes(), HARDWARE, TOKENS, CACHED, MEMBERS, st.data())
def test_ring_kv_stays_chosen(
    shape: ModelShape, hardware: Hardware, new: int, cached: int, num_members: int, data: st.DataObject
) -> None:
    """Under everything that makes attention longer, links faster, or keys and values fewer."""
    algorithm = data.draw(st.sampled_from(ALGORITHMS))

    def choice(faster: float = 1.0, slower: float = 1.0, more: int = 0, uncached: int = 0, fewer: int = 0) -> str:
        speeds = Hardware(flops_per_s=hardware.flops_per_s / slower, bytes_per_s=hardware.bytes_per_s * faster)
        return ring_kv_or_ring_q(shape, speeds, new + more, cached - uncached, num_members - fewer, algorithm=algorithm)

    assume(choice() == RING_KV)
    more, factor = data.draw(st.integers(0, 100_000)), data.draw(st.floats(1, 1000))
    uncached = data.draw(st.integers(0, cached))
    assert choice(more=more) == RING_KV
    assert choice(more=uncached, uncached=uncached) == RING_KV, "a higher miss rate of the same context"
    assert choice(uncached=uncached) == RING_KV
    assert choice(faster=factor) == RING_KV
    assert choice(slower=factor) == RING_KV
    assert choice(fewer=data.draw(st.integers(0, num_members - 2))) == RING_KV


@given(shapes(), HARDWARE, TOKENS, CACHED, MEMBERS)
def test_algorithm_5_never_takes_ring_q_where_algorithm_1_does_not(
    shape: ModelShape, hardware: Hardware, new: int, cached: int, num_members: int
) -> None:
    """The all-to-all only speaks against `ring_q`."""
    if ring_kv_or_ring_q(shape, hardware, new, cached, num_members, algorithm=1) == RING_KV:
        assert ring_kv_or_ring_q(shape, hardware, new, cached, num_members, algorithm=5) == RING_KV


def elements(shape: ModelShape, length: int, num_members: int) -> float:
    return alltoall_bytes(shape, length, num_members, gathers_weights=True) / shape.bytes_per_element


@given(st.integers(1, 300_000), st.integers(2, 32))
def test_bytes_of_supplement_a(length: int, num_members: int) -> None:
    """(4 d² + 4 L d / N) (N - 1) against 2 L d (N - 1) elements."""
    d, others = 16384, num_members - 1
    assert elements(MULTI_HEAD, length, num_members) == pytest.approx(
        (4 * d**2 + 4 * length * d / num_members) * others
    )
    assert gather_hidden_bytes(MULTI_HEAD, length, num_members) == 2 * length * d * others * 2


@given(shapes(), st.integers(1, 40), st.integers(2, 16))
def test_alltoall_bytes_are_what_members_send(shape: ModelShape, piece: int, num_members: int) -> None:
    """Counted head by head and member by member: whole groups are split, or a KV head is shared by several members."""
    num_kv_heads = shape.num_kv_heads
    if num_kv_heads >= num_members:
        kv_heads = [num_kv_heads // num_members + (m < num_kv_heads % num_members) for m in range(num_members)]
    else:
        kv_heads = [1] * min(num_members, shape.num_heads) + [0] * max(0, num_members - shape.num_heads)
    received = piece * (num_members - 1) * (2 * shape.num_heads + 2 * sum(kv_heads)) * shape.head_dim
    sent = alltoall_bytes(shape, piece * num_members, num_members, gathers_weights=False)
    assert sent == pytest.approx(received * shape.bytes_per_element)


def test_alltoall_threshold_of_the_supplement() -> None:
    """L > 2 d N / (N - 2); its inequality never holds for two members, whatever its text says."""
    assert alltoall_threshold(MULTI_HEAD, 3) == pytest.approx(98_304)
    assert alltoall_or_gather_hidden(MULTI_HEAD, 98_304 - 1, 3) == GATHER_HIDDEN
    assert alltoall_or_gather_hidden(MULTI_HEAD, 98_304 + 1, 3) == ALLTOALL
    assert alltoall_threshold(MULTI_HEAD, 2) == math.inf
    assert all(alltoall_or_gather_hidden(MULTI_HEAD, 10**n, 2) == GATHER_HIDDEN for n in range(10))


def test_grouped_queries_lower_the_threshold() -> None:
    """And give two members one: with 8 of 128 KV heads, (17 / 16) d / (1 - 17 / 32)."""
    assert alltoall_threshold(LLAMA_405B, 2) == pytest.approx(16384 * (17 / 16) / (15 / 32))
    assert alltoall_threshold(LLAMA_405B, 3) < alltoall_threshold(MULTI_HEAD, 3)


@given(shapes(), st.integers(1, 500_000), st.integers(2, 16))
def test_the_threshold_is_where_the_choice_turns(shape: ModelShape, length: int, num_members: int) -> None:
    threshold = alltoall_threshold(shape, num_members)
    assume(not math.isclose(length, threshold, rel_tol=1e-9))
    expected = ALLTOALL if length > threshold else GATHER_HIDDEN
    assert alltoall_or_gather_hidden(shape, length, num_members) == expected


@given(st.integers(1, 300_000), st.integers(2, 32), st.integers(2, 8))
def test_whole_weights_are_those_of_supplement_a(length: int, tp: int, num_members: int) -> None:
    """For every instance (4 d² + 4 L d / N) (N - 1) elements, and what the supplement has no need of: all tokens go to
    all ranks again, L d (N - 1). Summing takes its 2 L d (N - 1).
    """
    d, others = 16384, tp - 1
    sent = whole_bytes(MULTI_HEAD, length, num_members, tp, "peers")
    assert sent == pytest.approx(2 * (num_members * 4 * d**2 + 4 * length * d / tp + length * d) * others)
    assert summed_bytes(MULTI_HEAD, length, tp) == 2 * 2 * length * d * others


@given(shapes(), st.integers(1, 500_000), st.integers(1, 500_000), st.integers(1, 8), st.integers(2, 16))
def test_whole_weights_that_pay_pay_for_more_tokens(
    shape: ModelShape, length: int, more: int, num_members: int, tp: int
) -> None:
    """Those of the host for any length or none; and wherever those of peers do."""
    pays = {source: unsharded_weights_pay(shape, length, num_members, tp, source) for source in ("host", "peers")}
    later = {
        source: unsharded_weights_pay(shape, length + more, num_members, tp, source) for source in ("host", "peers")
    }
    assert later["host"] == pays["host"] >= later["peers"] >= pays["peers"]


def test_whole_weights_pay_from_three_ranks_on() -> None:
    """Llama3-405B: two ranks swap (17 / 16) d for the d that they save; three (17 / 24) d, and eight (17 / 64) d."""
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
    with pytest.raises(ValueError, match="num_layers must be above 0, but 0 given"):
        replace(LLAMA_405B, num_layers=0)
    with pytest.raises(ValueError, match="9 query heads do not share 2 KV heads"):
        replace(LLAMA_405B, num_heads=9, num_kv_heads=2)
    with pytest.raises(ValueError, match="bytes_per_s must be above 0, but nan"):
        replace(GRAND_TETON, bytes_per_s=math.nan)
    with pytest.raises(ValueError, match="at least 2 members, but 1"):
        ring_kv_or_ring_q(LLAMA_405B, GRAND_TETON, 1, 0, 1)
    with pytest.raises(ValueError, match="but 0 and 5 given"):
        ring_kv_or_ring_q(LLAMA_405B, GRAND_TETON, 0, 5, 2)
    with pytest.raises(ValueError, match="at least 2 members, but 1"):
        alltoall_threshold(LLAMA_405B, 1)
