"""All-gather and reduce-scatter: every member has all blocks, and each byte is sent between hosts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transports import FaultyTransport, Wires, run_members

from longspan.attn.collectives import all_gather, reduce_scatter
from longspan.attn.comm import Group, Message, Transport, gather_hops

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
WIDTH = 3
CASES = st.integers(1, 6).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(0, 2), min_size=size, max_size=size),
        st.lists(st.sampled_from((0, 1, 2, 7)), min_size=size, max_size=size),
    )
)


def run_group(
    hosts: Sequence[int], work: Callable[[Group], list[Tensor]], seed: int
) -> tuple[list[list[Tensor]], Counter[str]]:
    """Return the results of the members, and all bytes by link. Messages are late and overtake each other."""
    sent: list[Counter[tuple[str, str]]] = [Counter() for _ in hosts]
    wires = Wires()

    def member(rank: int, transport: Transport) -> list[Tensor]:
        return work(Group(transport, range(len(hosts)), rank, hosts=hosts, tags=range(5, 5 + 20), sent=sent[rank]))

    faults = None if not seed else lambda rank, inner: FaultyTransport(inner, seed=seed + rank, max_delay_s=0.005)
    found = run_members(len(hosts), member, wires=wires, faults=faults)
    for result in found:
        if isinstance(result, Exception):
            raise result
    assert wires.left() == 0
    links: Counter[str] = Counter()
    for counter in sent:
        for (_, link), num_bytes in counter.items():
            links[link] += num_bytes
    return found, links


def assert_crossings(links: Counter[str], hosts: Sequence[int], num_bytes: int) -> None:
    """Each of `num_bytes` goes to every other host once, and to every other member once."""
    num_hosts = len(set(hosts))
    assert links["other_host"] == num_bytes * (num_hosts - 1)
    assert links["same_host"] == num_bytes * (len(hosts) - num_hosts)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(CASES, st.integers(0, 9))
def test_all_gather(case: tuple[list[int], list[int]], seed: int) -> None:
    hosts, lengths = case

    def gather(group: Group) -> list[Tensor]:
        blocks = [
            Message([((length, WIDTH), torch.float32), ((1,), torch.int16)][: 1 + length], CPU) for length in lengths
        ]
        for tensor in blocks[group.rank].tensors:
            tensor.fill_(group.rank)
        all_gather(group, blocks, hop=2)
        return [tensor for block in blocks for tensor in block.tensors]

    found, links = run_group(hosts, gather, seed)
    for tensors in found:
        owners = [owner for owner, length in enumerate(lengths) for _ in range(min(2, 1 + length))]
        assert all((tensor == owner).all() for tensor, owner in zip(tensors, owners, strict=True))
    assert_crossings(links, hosts, sum(length * WIDTH * 4 + (2 if length else 0) for length in lengths))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(CASES, st.integers(0, 9), st.sampled_from((torch.float32, torch.bfloat16)))
def test_reduce_scatter(case: tuple[list[int], list[int]], seed: int, dtype: torch.dtype) -> None:
    hosts, lengths = case
    draw = torch.Generator().manual_seed(seed)
    terms = [[torch.randn(length, WIDTH, generator=draw).to(dtype) for length in lengths] for _ in hosts]
    found, links = run_group(hosts, lambda group: [reduce_scatter(group, terms[group.rank], hop=2)], seed)
    for member, [total] in enumerate(found):
        assert total.dtype == dtype
        exact = torch.stack([term[member].double() for term in terms]).sum(dim=0)
        size = torch.stack([term[member].double().abs() for term in terms]).sum(dim=0)
        roundings = 0.5 + 0.5 * (len(set(hosts)) > 1)  # at the end, and before a sum goes to another host
        bound = size * torch.finfo(dtype).eps * roundings + size * 1e-6
        assert ((total.double() - exact).abs() <= bound).all()
    assert_crossings(links, hosts, sum(length * WIDTH * dtype.itemsize for length in lengths))


def test_members_of_a_host_share_the_sends_between_hosts() -> None:
    hosts = (0, 0, 1, 1)
    sent: list[Counter[tuple[str, str]]] = [Counter() for _ in hosts]

    def both(rank: int, transport: Transport) -> None:
        group = Group(transport, range(4), rank, hosts=hosts, sent=sent[rank])
        all_gather(group, [Message([((4,), torch.float32)], CPU) for _ in hosts])
        reduce_scatter(group, [torch.ones(4) for _ in hosts], hop=gather_hops(4))

    assert run_members(4, both) == [None] * 4
    assert [counter["", "other_host"] for counter in sent] == [16 + 16] * 4


def test_hops_of_two_gathers_in_a_row_do_not_meet() -> None:
    hosts = (0, 1, 0, 1, 1)

    def twice(group: Group) -> list[Tensor]:
        found = []
        for number in range(2):
            blocks = [Message([((4,), torch.float32)], CPU) for _ in hosts]
            blocks[group.rank].tensors[0].fill_(10 * number + group.rank)
            all_gather(group, blocks, hop=number * gather_hops(group.size))
            found += [block.tensors[0] for block in blocks]
        return found

    for tensors in run_group(hosts, twice, seed=3)[0]:
        assert [tensor[0].item() for tensor in tensors] == [*range(5), *range(10, 15)]
