"""Seconds of steps from a profile, and profiles from seconds of steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from linear_cost import LinearCost
from msgspec import structs
from one_part import part_of
from refusals import refused
from step_seconds import seconds_of
from test_profile import SUBJECT, in_profile

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster as Instances
from longspan.core.exchange import CHAIN, LOCAL, RING_KV, RING_Q, Exchange
from longspan.core.layouts import shard_span
from longspan.core.runs import Layout
from longspan.core.steps import Forward, MoveKV, Part
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.flows import alone_s
from longspan.cost.pricing import predicted_profile
from longspan.cost.profile import Decode, Prefill, Profile, Transfer, fit_decodes
from longspan.cost.shape import ModelShape

BLOCK_SIZE = 100
PREFILL = {1: (0.02, 1e-4, 2e-8, 1e-8), 2: (0.03, 6e-5, 1e-8, 5e-9)}
DECODE = {1: (0.01, 1e-3, 1e-7), 2: (0.015, 8e-4, 5e-8)}


def prefill_s(members: int, new: int, cached: int) -> float:
    a, b, c, d = PREFILL[members]
    return a + b * new + c * cached * new + d * new * new


def decode_s(members: int, *contexts: int) -> float:
    a, b, c = DECODE[members]
    return a + sum(b + c * context for context in contexts)


def profile(*, decodes: bool = True) -> Profile:
    found = Profile(profile_key=SUBJECT)
    for members, exchange in ((1, "local"), (2, "ring_kv")):
        kind: dict[str, Any] = {"members": members, "exchange": exchange}
        for new in (200, 1000, 4000):
            for cached in (0, 500, 8000):
                seconds = (prefill_s(members, new, cached),)
                found = found.with_measured(Prefill(new_tokens=new, cached_tokens=cached, seconds=seconds, **kind))
        kind["exchange"] = "ring_q" if members > 1 else "local"
        for batch in (1, 4, 8) if decodes else ():
            for context in (100, 2000):
                seconds = (decode_s(members, *[context] * batch),)
                found = found.with_measured(Decode(batch=batch, context_tokens=context, seconds=seconds, **kind))
    return found


def part(name: int, start: int, stop: int, *group: int, exchange: Exchange = LOCAL) -> Part:
    layout: Layout = "single" if stop - start == 1 else "contiguous" if exchange == CHAIN else "zigzag"
    runs = shard_span(layout, start, stop, len(group), align=BLOCK_SIZE, head=0)
    return part_of(group, request_id=name, start=start, stop=stop, runs=runs, exchange=exchange)


def seconds(*parts: Part) -> dict[int, float]:
    return seconds_of(fitted(profile()), Forward(number=1, parts=parts))


def fitted(measured: Profile, *others: Profile) -> FittedCost:
    shape = ModelShape(num_layers=10, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, bytes_per_element=2)
    return FittedCost(measured, shape, block_size=BLOCK_SIZE, others=others)


def test_one_prefill_takes_the_measured_time() -> None:
    assert seconds(part(0, 500, 1500, 3)) == {3: pytest.approx(prefill_s(1, 1000, 500), rel=1e-3)}
    shared = part(0, 500, 1500, 3, 5, exchange=RING_KV)
    assert seconds(shared) == dict.fromkeys((3, 5), pytest.approx(prefill_s(2, 1000, 500), rel=1e-3))


@pytest.mark.parametrize(("length", "busiest"), [(100, 100), (250, 150), (450, 250), (650, 350), (700, 400)])
def test_a_prefill_takes_the_time_of_its_busiest_member(length: int, busiest: int) -> None:
    shared = part(0, 0, length, 3, 5, exchange=RING_KV)
    assert seconds(shared) == dict.fromkeys((3, 5), pytest.approx(prefill_s(2, 2 * busiest, 0), rel=1e-3))


def test_a_chain_that_is_cut_unevenly_on_purpose_counts_as_it_is() -> None:
    chain = profile()
    for length in (200, 1000, 4000):
        took = Prefill(members=2, exchange="chain", new_tokens=length, cached_tokens=0, seconds=(length * 1e-3,))
        chain = chain.with_measured(took)
    even = part(0, 0, 500, 0, 1, exchange=CHAIN)
    assert [sum(map(len, runs)) for runs in even.runs] == [200, 300]
    uneven = replace(even, runs=shard_span("contiguous", 0, 500, 2, align=BLOCK_SIZE, fractions=(0.6, 0.4)))
    for one, counted in ((even, 600), (uneven, 500)):
        found = seconds_of(fitted(chain), Forward(number=0, parts=(one,)))
        assert found == dict.fromkeys((0, 1), pytest.approx(counted * 1e-3, rel=1e-3))


def test_measured_prompts_count_as_their_busiest_member_too() -> None:
    few = Prefill(members=2, exchange="ring_kv", new_tokens=60, cached_tokens=0, seconds=(0.5,))
    same = seconds_of(
        fitted(profile().with_measured(few)), Forward(number=0, parts=(part(0, 0, 60, 0, 1, exchange=RING_KV),))
    )
    assert same == dict.fromkeys((0, 1), pytest.approx(0.5, rel=0.02))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=9))
def test_decodes_add_up_behind_one_start(contexts: list[int]) -> None:
    parts = [part(name, context, context + 1, 0) for name, context in enumerate(contexts)]
    assert seconds(*parts) == {0: pytest.approx(decode_s(1, *contexts), rel=1e-3)}
    parts = [part(name, context, context + 1, 0, 1, exchange=RING_Q) for name, context in enumerate(contexts)]
    assert seconds(*parts) == dict.fromkeys((0, 1), pytest.approx(decode_s(2, *contexts), rel=1e-3))


def test_a_mixed_step_starts_once() -> None:
    found = seconds(part(0, 0, 1000, 0), part(1, 500, 1500, 0), part(2, 300, 301, 0), part(3, 50, 51, 1))
    prefills = prefill_s(1, 1000, 0) + prefill_s(1, 1000, 500) - PREFILL[1][0]
    beside = PREFILL[1][1] + DECODE[1][2] * 300
    assert found == {0: pytest.approx(prefills + beside, rel=1e-3), 1: pytest.approx(decode_s(1, 50), rel=1e-3)}


def test_decodes_of_a_group_send_messages_also_during_a_prefill() -> None:
    decodes = [part(name, 300, 301, 0, 1, exchange=RING_Q) for name in (1, 2)]
    found = seconds(part(0, 0, 1000, 0, 1, exchange=RING_KV), *decodes)
    messages = DECODE[2][0] - DECODE[1][0]
    expected = prefill_s(2, 1000, 0) + messages + 2 * (PREFILL[1][1] + DECODE[2][2] * 300)
    assert found == dict.fromkeys((0, 1), pytest.approx(expected, rel=1e-3))


def test_decodes_of_two_groups_send_the_messages_of_both() -> None:
    found = seconds(part(0, 300, 301, 0, 1, exchange=RING_Q), part(1, 300, 301, 0, 2, exchange=RING_Q))
    alone, messages = decode_s(2, 300), DECODE[2][0] - DECODE[1][0]
    both = alone + messages + DECODE[2][1] + DECODE[2][2] * 300
    assert found == dict.fromkeys((0, 1, 2), pytest.approx(both, rel=1e-3)), "members of a group with 0 wait for it"


def test_members_that_compute_tokens_of_their_peers_wait_for_each_other() -> None:
    shared = part(0, 300, 301, 0, 1, exchange=RING_Q)
    alone, more_s = decode_s(2, 300), 0.7 - DECODE[1][1]
    measured = profile()
    for batch, more in ((1, 0.5), (2, 0.7), (4, 9.0)):
        took = decode_s(2, *[1000] * batch) + more
        sizes: dict[str, Any] = {"members": 2, "exchange": "ring_q", "batch": batch, "context_tokens": 1000}
        measured = measured.with_measured(Decode(**sizes, singles=2, seconds=(took,)))
    assert measured.decode_fits() == profile().decode_fits()
    cost = fitted(measured)

    def took_s(*parts: Part) -> dict[int, float]:
        return seconds_of(cost, Forward(number=1, parts=parts))

    beside = DECODE[1][1] + DECODE[1][2] * 50
    assert took_s(shared) == dict.fromkeys((0, 1), pytest.approx(alone, rel=1e-3))
    assert took_s(shared, part(1, 50, 51, 0)) == dict.fromkeys((0, 1), pytest.approx(alone + beside, rel=1e-3))
    both = took_s(shared, part(1, 50, 51, 1))
    assert both == dict.fromkeys((0, 1), pytest.approx(alone + beside + more_s, rel=1e-3))
    prefill = took_s(shared, part(1, 0, 1000, 1))
    messages, token = DECODE[2][0] - DECODE[1][0], PREFILL[1][1] + DECODE[2][2] * 300
    assert prefill == dict.fromkeys((0, 1), pytest.approx(prefill_s(1, 1000, 0) + messages + token, rel=1e-3))


def test_forwarding_a_token_takes_no_time() -> None:
    found = seconds(replace(part(0, 300, 301, 0), unknown_on=2))
    assert found == {0: pytest.approx(decode_s(1, 300), rel=1e-3), 2: 0.0}


def test_missing_measurements_are_refused_with_the_remedy() -> None:
    with refused("profile"):
        seconds(part(0, 0, 100, 0, 1, 2, exchange=RING_KV))
    with refused("profile"):
        fitted(profile(decodes=False))


def test_kv_moves_as_quickly_as_ranks_sent_messages() -> None:
    def took(num_bytes: int) -> float:
        return 1e-4 + num_bytes / 1e9

    linked = profile()
    for size in (2**12, 2**16, 2**20, 2**24):
        transfer = Transfer(kind="point_to_point", members=2, num_bytes=size, seconds=(took(size),))
        linked = linked.with_transfer(transfer)
    block_bytes = 100 * 2 * 2 * 16 * 2 * 10
    to_two = tuple((BlockRef(0, block), BlockRef(1 + block % 2, block)) for block in range(6))
    move = MoveKV(number=2, request_id=0, copies=to_two)
    assert alone_s(fitted(linked).flows(move)) == pytest.approx(took(6 * block_bytes), rel=1e-3)
    with refused("profile"):
        alone_s(fitted(profile()).flows(move))


def test_host_keys_are_copied_to_a_device_and_never_to_a_cpu() -> None:
    """Blocks have 12,800 bytes, and come at 1 MB/s: 100 of them in 1.28 s."""
    on_cpu = profile()
    for size in (2**12, 2**16, 2**20):
        transfer = Transfer(kind="host_copy", members=1, num_bytes=size, seconds=(1e-9 + size / 1e6,))
        on_cpu = on_cpu.with_transfer(transfer)
    on_device = structs.replace(on_cpu, profile_key=structs.replace(SUBJECT, device="cuda"))

    def more_s(measured: Profile, own: Part) -> float:
        parts = [replace(own, hosted=(number,) if number else ()) for number in (0, 100)]
        without, with_some = (seconds_of(fitted(measured), Forward(number=1, parts=(one,)))[0] for one in parts)
        return with_some - without

    decode, prompt = part(0, 20_000, 20_001, 0), part(0, 20_000, 22_000, 0)
    block_s = 100 * 2 * 2 * 16 * 2 * 10 / 1e6
    assert more_s(on_device, decode) == pytest.approx(100 * block_s, rel=1e-3)
    hidden_s = prefill_s(1, 2000, 20_000) - prefill_s(1, 2000, 0)
    assert 0.5 < hidden_s < 1.0
    assert more_s(on_device, prompt) == pytest.approx(100 * block_s - hidden_s, rel=0.05)
    assert more_s(on_cpu, decode) == more_s(on_cpu, prompt) == 0.0


def test_links_are_those_of_any_profile() -> None:
    """Instances that are split otherwise may be too few to send each other anything."""
    split = structs.replace(profile(), profile_key=structs.replace(SUBJECT, tp=2))
    linked = profile().with_transfer(Transfer(kind="point_to_point", members=2, num_bytes=2**20, seconds=(0.001,)))
    linked = linked.with_transfer(Transfer(kind="point_to_point", members=2, num_bytes=2**21, seconds=(0.002,)))
    cost = fitted(linked, split).resharded(Instances.of("2xtp2"))
    move = MoveKV(number=2, request_id=0, copies=((BlockRef(0, 0), BlockRef(1, 0)),))
    assert alone_s(cost.flows(move)) == pytest.approx(alone_s(fitted(linked).flows(move)) / 2, rel=0.1)


def test_layers_hide_a_balance_except_before_the_first_layer() -> None:
    linked = profile().with_transfer(Transfer(kind="point_to_point", members=2, num_bytes=2**20, seconds=(0.001,)))
    linked = linked.with_transfer(Transfer(kind="point_to_point", members=2, num_bytes=2**21, seconds=(0.002,)))
    shared = part(0, 500, 1500, 3, 5, exchange=RING_KV)
    move = MoveKV(number=2, request_id=0, copies=((BlockRef(3, 0), BlockRef(5, 0)),))
    cost = fitted(linked)
    plain = seconds_of(cost, Forward(number=1, parts=(shared,)))
    balanced = seconds_of(cost, Forward(number=1, parts=(shared,), rebalances=(move,)))
    assert balanced == {i: pytest.approx(plain[i] + alone_s(cost.flows(move)) / 10) for i in (3, 5)}


def test_old_profiles_are_read_and_decodes_are_kept() -> None:
    with_decodes = profile()
    assert Profile.from_json(with_decodes.to_json()) == with_decodes
    old = profile(decodes=False).to_json().replace(',\n "decodes": []', "")
    assert '"decodes"' not in old and Profile.from_json(old) == profile(decodes=False)
    twice = with_decodes.with_measured(with_decodes.decodes[0])
    assert len(twice.decodes) == len(with_decodes.decodes) and len(twice.decodes[-1].seconds) == 2


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-5))
def test_a_fit_of_decodes_finds_the_true_parameters(a: float, b: float, c: float) -> None:
    fit = fit_decodes(
        [(batch, context, a + b * batch + c * batch * context) for batch in (1, 4) for context in (9, 800)]
    )
    assert fit is not None and fit.max_error < 1e-6
    assert fit.seconds(3, 70) == pytest.approx(a + 3 * b + 210 * c, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"members": 2}, {"context_tokens": 0}, {"seconds": (0.0,)}])
def test_invalid_decode_measurements_are_refused(wrong: dict[str, Any]) -> None:
    given_: dict[str, Any] = {"members": 1, "exchange": "local", "batch": 1, "context_tokens": 9, "seconds": (1.0,)}
    with pytest.raises(ValueError, match=r"not a profile: "):
        Profile.from_json(in_profile(decodes=[given_ | wrong]))


def test_a_cost_becomes_the_profile_that_it_would_have_shown() -> None:
    cost = LinearCost(base_s=0.5, per_token_s=0.001)
    shared: dict[str, Any] = {"prompts": [(1200, 0), (2400, 600)], "exchanges": [RING_KV, CHAIN]}
    shared["classes"] = {size: "other_host" if size > 2 else "same_host" for size in range(1, 7)}
    found = predicted_profile(cost, SUBJECT, num_instances=6, **shared)
    assert sorted({prefill.members for prefill in found.prefills}) == [1, 2, 4, 6]
    more = predicted_profile(cost, SUBJECT, num_instances=6, **shared, sizes=[0, 3, 4, 5, 7])
    assert sorted({prefill.members for prefill in more.prefills}) == [1, 2, 3, 4, 5, 6]
    for prefill in found.prefills:
        assert prefill.median_s == pytest.approx(0.5 + 0.001 * prefill.new_tokens / prefill.members, rel=0.01)
    assert {prefill.exchange for prefill in found.prefills if prefill.members > 1} == {"ring_kv", "chain"}
    assert all(prefill.link_class == shared["classes"][prefill.members] for prefill in found.prefills)
