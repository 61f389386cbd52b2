"""The modelled time to first token of a chain, against hand-made schedules and the paper's bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from chains import LayerCost, chain
from hypothesis import given
from hypothesis import strategies as st

from longspan.cost.partitions import chain_ttft_s, even, search
from longspan.cost.profile import LinkFit, PrefillTime

# Seconds that are easy to add. No bytes are sent.
FREE = LayerCost(qkv_s=1.0, rest_s=2.0, attention_s=0.5, kv_bytes=0, bytes_per_s=1.0, latency_s=0.0, dense=True)
# Similar to a 7B model on fast devices at 16K tokens. Attention is a third of the work.
LLAMA_LIKE = LayerCost(
    qkv_s=1e-6, rest_s=3e-6, attention_s=1e-9, kv_bytes=16384, bytes_per_s=3e11, latency_s=1e-5, dense=True
)

COSTS = st.builds(
    LayerCost,
    qkv_s=st.floats(0, 1e-3),
    rest_s=st.floats(0, 1e-3),
    attention_s=st.floats(0, 1e-5),
    kv_bytes=st.floats(0, 1e6),
    bytes_per_s=st.floats(1e6, 1e12),
    latency_s=st.floats(0, 1e-2),
    dense=st.booleans(),
)
PARTITIONS = st.lists(st.integers(1, 300), min_size=1, max_size=6).map(tuple)
LAYERS = st.integers(1, 6)


def test_a_single_member_computes_layers_sequentially() -> None:
    timeline = chain(FREE, 3, (4,))
    assert timeline.ttft_s == 3 * (4 * 1.0 + 16 * 0.5 + 4 * 2.0)
    assert timeline.busy_s == (timeline.ttft_s,)
    assert chain(replace(FREE, dense=False), 3, (4,)).ttft_s == 3 * (4 + 10 * 0.5 + 8)


def test_two_members_without_communication_by_hand() -> None:
    """Member 0: 2 + 4/2 + 4 = 8 a layer. Member 1: 2 + 8/2 + 4 = 10, and the keys it needs are always there."""
    timeline = chain(FREE, 2, (2, 2))
    assert timeline.busy_s == (16.0, 20.0)
    assert timeline.ttft_s == 20.0


def test_a_later_member_waits_for_the_keys_of_an_earlier_one() -> None:
    """(3, 1): the keys of layer 0 are there at 3, of layer 1 at 3 + 4.5 + 6 + 3 = 16.5. Then 4/2 + 2 remain."""
    assert chain(FREE, 1, (3, 1)).ttft_s == 3 + 2 + 2
    assert chain(FREE, 2, (3, 1)).ttft_s == 16.5 + 2 + 2
    assert chain(FREE, 2, (3, 1)).busy_s == (27.0, 10.0)


def test_chain_time_follows_from_one_instance_and_a_link() -> None:
    """Alone, all layers together take the fitted time, without the fixed time of a prompt."""
    alone = PrefillTime(start_s=0.5, token_s=1e-3, cached_s=2e-6, square_s=1e-6)
    link = LinkFit(start_s=1e-4, bytes_per_s=1e9, max_error=0)
    found_s = chain_ttft_s((4000,), alone, link, num_layers=6, kv_bytes=100)
    assert found_s == pytest.approx(alone.seconds(4000) - 0.5, rel=1e-3)
    cost = LayerCost(
        qkv_s=0, rest_s=1e-3 / 6, attention_s=2e-6 / 6, kv_bytes=100, bytes_per_s=1e9, latency_s=1e-4, dense=False
    )
    for partition in ((2500, 1500), (1000, 2000, 3000)):
        found_s = chain_ttft_s(partition, alone, link, num_layers=6, kv_bytes=100)
        assert found_s == pytest.approx(chain(cost, 6, partition).ttft_s)


def test_messages_by_hand() -> None:
    """2 tokens of 3 bytes at 2 bytes per second and 1 second of latency. Keys leave at 2 and arrive at 2 + 3 + 1 = 6.

    So member 1 is done with layer 0 at 6 + 4 + 4 = 14. Keys of layer 1 are ready at 8 + 2 = 10 and come at 14, while
    member 1 projects until 16, and is done at 24.
    """
    linked = replace(FREE, kv_bytes=3, bytes_per_s=2.0, latency_s=1.0)
    assert chain(linked, 1, (2, 2)).ttft_s == 14.0
    assert chain(linked, 2, (2, 2)).ttft_s == 24.0


def test_a_slow_link_carries_one_message_after_the_other() -> None:
    """20 seconds a message: sent from 2 to 22, 22 to 42, 42 to 62. Member 1 then computes for 8 more seconds."""
    assert chain(replace(FREE, kv_bytes=10, bytes_per_s=1.0), 3, (2, 2)).ttft_s == 62 + 4 + 4


def test_messages_grow_along_the_chain() -> None:
    """Three members of one token, a byte each: keys are ready at 1, come at 2, go on as two bytes, come at 4."""
    assert chain(replace(FREE, kv_bytes=1), 1, (1, 1, 1)).ttft_s == 4 + 3 * 0.5 + 2


def test_products_of_the_papers_figures() -> None:
    """Fig. 5: 16, 21 and 18 products in a chain of 4, 3 and 2 tokens."""
    products = LayerCost(qkv_s=0, rest_s=0, attention_s=1, kv_bytes=0, bytes_per_s=1, latency_s=0, dense=True)
    assert chain(products, 1, (4, 3, 2)).busy_s == (16, 21, 18)


def test_members_without_tokens_only_pass_on() -> None:
    assert chain(FREE, 2, (0, 4, 0)).ttft_s == chain(FREE, 2, (4,)).ttft_s
    assert chain(FREE, 2, (0, 4, 0)).busy_s[0] == 0


@given(COSTS, LAYERS, PARTITIONS)
def test_the_paper_s_lower_bound_holds(cost: LayerCost, num_layers: int, partition: tuple[int, ...]) -> None:
    """Equation 2, half of one member's time times 1/p + 1/p², bounds the work of the busiest member.

    Earlier members still compute after they have sent the keys of the last layer. The first token does not wait for
    that, so it may come one layer's work before the bound.
    """
    p = len(partition)
    timeline = chain(cost, num_layers, partition)
    bound = chain(cost, num_layers, (sum(partition),)).ttft_s / 2 * (1 / p + 1 / p**2) * (1 - 1e-9)
    assert max(timeline.busy_s) >= bound
    assert timeline.ttft_s >= bound * (num_layers - 1) / num_layers


@given(COSTS, LAYERS, PARTITIONS)
def test_members_end_after_their_work_and_links_only_delay(
    cost: LayerCost, num_layers: int, partition: tuple[int, ...]
) -> None:
    timeline = chain(cost, num_layers, partition)
    assert timeline.ttft_s >= timeline.busy_s[-1] * (1 - 1e-9)
    without_links = chain(replace(cost, kv_bytes=0, latency_s=0), num_layers, partition)
    assert without_links.ttft_s <= timeline.ttft_s
    assert without_links.busy_s == timeline.busy_s


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("dense", [True, False])
def test_searched_partitions_are_better_than_even_and_favour_earlier_members(members: int, dense: bool) -> None:
    cost = replace(LLAMA_LIKE, dense=dense)
    best = search(lambda p: chain(cost, 32, p).ttft_s, 16384, members, 128)
    assert all(earlier > later for earlier, later in pairwise(best))
    evenly = chain(cost, 32, even(16384, members, 128)).ttft_s
    assert chain(cost, 32, best).ttft_s < 0.9 * evenly
