"""Laws of the simulated pipeline of `gather_hidden`, and its price in steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_seconds import seconds_of

from longspan.core.cluster import Cluster
from longspan.core.exchange import GATHER_HIDDEN, Exchange
from longspan.core.layouts import shard_span
from longspan.core.runs import Run
from longspan.core.steps import Forward, Part, Sample
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.csa_pipeline import LinkSpeed
from longspan.cost.hidden_pipeline import HiddenWork, exposed_s, pair_shares, tokens_of
from longspan.cost.step_cost import RooflineCost
from longspan.cost.topology import Devices

TOKENS = 96
MODEL = from_config(catalog.model_config("llama-3-8b"), name="llama-3-8b")


def work(runs, pieces: int, computed_s: float, gathered: float = 1.0, returned: float = 1.0) -> HiddenWork:
    _, tokens = tokens_of(runs, pieces)
    return HiddenWork(tokens, [share * computed_s for share in pair_shares(tokens)], gathered, returned)


def test_one_piece_overlaps_nothing() -> None:
    """All hidden states of the peers, then all sums of the own tokens."""
    for size in (2, 3, 4):
        runs = shard_span("zigzag", 0, TOKENS, size)
        exposed = exposed_s(work(runs, 1, 1000.0), LinkSpeed(2.0, 5.0))
        assert exposed == pytest.approx(2 * (size - 1) * TOKENS / size / 2.0 + 2 * 5.0)


def test_two_members_in_two_pieces_by_hand() -> None:
    """Member 0 has the first half, member 1 the second. A half takes 48 s on the link, and 100 s of computation."""
    runs = ((Run(0, 48),), (Run(48, 96),))
    found = exposed_s(HiddenWork(tokens_of(runs, 2)[1], [100.0, 100.0], 1.0, 1.0), LinkSpeed(1.0))
    assert found == 48, "member 1 waits for the first half, and computes the second while its sums arrive"
    found = exposed_s(HiddenWork(tokens_of(runs, 4)[1], [50.0] * 4, 1.0, 1.0), LinkSpeed(1.0))
    assert found == 24, "it waits for a quarter"
    found = exposed_s(HiddenWork(tokens_of(runs, 2)[1], [10.0, 10.0], 1.0, 1.0), LinkSpeed(1.0))
    assert found == 48 + 10 + 48 - 20, "member 0 sends its half, and after the computation its sums of the other"


@given(
    st.sampled_from(("zigzag", "contiguous", "striped")),
    st.integers(2, 4),
    st.floats(0.0, 1000.0),
    st.floats(0.1, 10.0),
)
def test_pieces_never_wait_longer_than_without(layout, size: int, computed_s: float, bytes_per_s: float) -> None:
    """The sum of both messages is the longest wait. The link is a lower bound for the whole layer."""
    runs, link = shard_span(layout, 0, TOKENS, size), LinkSpeed(bytes_per_s)
    whole = exposed_s(work(runs, 1, computed_s), link)
    for pieces in (2, 4, 8):
        exposed = exposed_s(work(runs, pieces, computed_s), link)
        assert -1e-9 <= exposed <= whole * (1 + 1e-9)
        assert exposed + computed_s >= whole * (1 - 1e-9), "each direction carries all its bytes"


def test_pieces_hide_more_of_striped_tokens_than_of_contiguous_ones() -> None:
    seconds = [
        exposed_s(work(shard_span(layout, 0, TOKENS, 4), 8, 300.0), LinkSpeed(1.0))
        for layout in ("striped", "zigzag", "contiguous")
    ]
    assert seconds == sorted(seconds)


def test_a_free_link_exposes_nothing() -> None:
    assert exposed_s(work(shard_span("zigzag", 0, TOKENS, 2), 4, 10.0), LinkSpeed(float("inf"))) == 0


def prompt(exchange: Exchange, stop: int = 32768) -> Forward:
    part = Part(
        request_id=0,
        start=0,
        stop=stop,
        tokens=range(stop),
        group=(0, 1),
        runs=shard_span("zigzag", 0, stop, 2),
        exchange=exchange,
        first_block=0,
        blocks=(),
        sample=Sample(instance=1, position=stop),
    )
    return Forward(number=1, parts=(part,))


def test_the_step_cost_falls_with_micro_partitions() -> None:
    devices = Devices(hardware="a100-sxm-80g", gpus_per_host=1, hosts=2)
    cost = RooflineCost(MODEL, devices, Cluster.of("2"), block_size=256)
    exchanges = [GATHER_HIDDEN._replace(micro_partitions=pieces) for pieces in (1, 2, 4, 8)]
    seconds = [max(seconds_of(cost, prompt(exchange)).values()) for exchange in exchanges]
    assert all(more >= less for more, less in pairwise(seconds))
    assert seconds[0] > seconds[1] > seconds[3]
    exposed_s = [max(cost.exposed_s(prompt(exchange)).values()) for exchange in exchanges]
    assert exposed_s[-1] > 0, "the first range is waited for"
    for all_s, waited_s in zip(seconds, exposed_s, strict=True):
        assert seconds[0] - all_s == pytest.approx(exposed_s[0] - waited_s), "only messages take less time"
