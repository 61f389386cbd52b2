"""Messages and collectives over links: their order in bytes, members and speed, and measured sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.cost import catalog
from longspan.cost.links import Link, collective_s

MEASURED = ("nvlink3", "nvlink4", "nvlink5", "pcie4-x16-l40s")
KINDS = ("all_reduce", "gather", "alltoall")
SIZES = st.floats(1, 1e10)
LINKS = st.sampled_from([catalog.link(name) for name in catalog.names("links")])


@given(link=LINKS, kind=st.sampled_from(KINDS), size=SIZES, more=st.floats(1, 100), members=st.integers(2, 72))
def test_more_bytes_never_take_less_time(link: Link, kind: str, size: float, more: float, members: int) -> None:
    protocols = getattr(link, kind)
    assert collective_s(protocols, size, members) <= collective_s(protocols, more * size, members)
    for kernels in (False, True):
        first_s, second_s = (link.all_reduce_s(n, members, kernels=kernels) for n in (size, more * size))
        assert first_s <= second_s


@given(link=LINKS, size=SIZES, members=st.integers(2, 72), factor=st.floats(1, 10))
def test_a_faster_link_starts_alike_and_sends_faster(link: Link, size: float, members: int, factor: float) -> None:
    faster = link.at(factor * link.nominal_bytes_per_s)
    for kind in KINDS:
        found_s, faster_s = (collective_s(getattr(kind_of, kind), size, members) for kind_of in (link, faster))
        start_s = collective_s(getattr(link, kind), 0.0, members)
        assert start_s == collective_s(getattr(faster, kind), 0.0, members)
        assert found_s >= faster_s >= found_s / factor
    assert faster.send_s(size) - link.latency_s == pytest.approx((link.send_s(size) - link.latency_s) / factor)


@given(name=st.sampled_from(MEASURED), size=SIZES, members=st.integers(3, 7))
def test_sizes_of_groups_between_the_measured_ones_lie_between(name: str, size: float, members: int) -> None:
    link = catalog.link(name)
    low, high = (2, 4) if members < 4 else (4, 8)
    ends_s = [collective_s(link.gather, size, n) for n in (low, high)]
    # The faster protocol of both ends may differ, so a mean of two lines may be above both minima.
    slowest_s = max(max(collective_s((line,), size, n) for line in link.gather) for n in (low, high))
    assert min(ends_s) * (1 - 1e-9) <= collective_s(link.gather, size, members) <= slowest_s * (1 + 1e-9)


@given(link=LINKS, size=SIZES, members=st.integers(2, 8))
def test_kernels_of_engines_only_help_and_only_below_8_mib(link: Link, size: float, members: int) -> None:
    by_nccl_s, best_s = (link.all_reduce_s(size, members, kernels=kernels) for kernels in (False, True))
    assert best_s <= by_nccl_s
    assert size < 2**23 or best_s == by_nccl_s


@pytest.mark.parametrize("name", ["nvlink3", "nvlink4", "nvlink5"])
@pytest.mark.parametrize("members", [2, 4, 8])
def test_all_reduces_of_16_kib_take_as_long_as_measured(name: str, members: int) -> None:
    """Engines' kernels take 3 to 10 us, and NCCL 7 to 28."""
    by_nccl_s, best_s = (catalog.link(name).all_reduce_s(2**14, members, kernels=kernels) for kernels in (False, True))
    assert 3e-6 < best_s < 1e-5
    assert 6e-6 < by_nccl_s < 2.8e-5


def test_a_link_may_use_the_collectives_of_another_at_its_own_speed() -> None:
    slow, fast = catalog.link("nvlink2"), catalog.link("nvlink3")
    assert slow.all_reduce == fast.at(slow.nominal_bytes_per_s).all_reduce
    assert slow.gather != fast.gather
