"""Every exchange gives every member the results of one device, and sends exactly the bytes of its formula.

Members are threads with mailboxes. Each holds its keys in scattered blocks. The formulas are in docs/exchanges.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transports import FaultyTransport, Wires, run_members

from longspan.attn.check import EXCHANGES, Request, attend, member_call
from longspan.attn.comm import ALONE, Group, Transport, hidden_hops
from longspan.attn.exchanges.chain import chain, chain_start
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import CHAIN, LOCAL
from longspan.core.layouts import shard_span
from longspan.core.owners import Rotation
from longspan.core.runs import Run, SpanShards, clip, coalesce, positions
from longspan.core.splits import split_heads, spread_heads
from longspan.core.steps import Link

pytestmark = pytest.mark.usefixtures("one_thread")
LAW = settings(derandomize=True, deadline=None, max_examples=60)
BLOCK = 8
ALL = pytest.mark.parametrize("name", EXCHANGES)
HEADS = ((6, 2), (4, 4), (5, 1), (9, 3))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch and the hosts of the members that share it."""

    hosts: tuple[int, ...]
    batch: tuple[Request, ...]
    spec: AttnSpec

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def token_bytes(self) -> int:
        """The key and the value of one token."""
        return 2 * self.spec.num_kv_heads * self.spec.head_dim * 4


def outputs(name: str, group: Group, batch: Sequence[Request], spec: AttnSpec) -> list[Tensor]:
    """One output per request, of one member."""
    call = member_call(EXCHANGES[name], group, batch, spec, block_size=BLOCK, seed=len(batch))
    out = attend(call)
    return [out[:, part.rows] for part in call.parts]


@st.composite
def shards(draw: st.DrawFn, start: int, stop: int, num_members: int) -> SpanShards:
    """Zigzag, all to one member, or cut anywhere and sharded anyhow."""
    layout = draw(st.sampled_from(("zigzag", "single", "random", "random")))
    if layout == "zigzag":
        return shard_span("zigzag", start, stop, num_members)
    if layout == "single":
        return shard_span("single", start, stop, num_members, head=draw(st.integers(0, num_members - 1)))
    bounds = sorted({start, stop, *draw(st.lists(st.integers(start, stop), max_size=6))})
    runs: list[list[Run]] = [[] for _ in range(num_members)]
    for a, b in itertools.pairwise(bounds):
        runs[draw(st.integers(0, num_members - 1))].append(Run(a, b))
    return tuple(coalesce(member_runs) for member_runs in runs)


@st.composite
def shards_in_order(draw: st.DrawFn, start: int, stop: int, num_members: int) -> SpanShards:
    """Neighbouring runs, some of them maybe empty."""
    inner = st.lists(st.integers(start, stop), min_size=num_members - 1, max_size=num_members - 1)
    bounds = [start, *sorted(draw(inner)), stop]
    return tuple(coalesce([Run(a, b)]) for a, b in itertools.pairwise(bounds))


@st.composite
def requests(draw: st.DrawFn, num_members: int, *, in_order: bool = False) -> Request:
    start = draw(st.one_of(st.just(0), st.integers(0, 120)))
    stop = start + draw(st.one_of(st.just(1), st.just(0), st.integers(1, 90)))
    q_runs = draw((shards_in_order if in_order else shards)(start, stop, num_members))
    cached = draw(shards(0, start, num_members))
    new = draw(st.one_of(st.just(q_runs), shards(start, stop, num_members)))
    kv_runs = tuple(coalesce([*old, *more]) for old, more in zip(cached, new, strict=True))
    if stop == start + 1 and draw(st.booleans()):
        kv_runs = rotated(kv_runs, draw(st.integers(0, start)), stop)
    return Request(q_runs=q_runs, kv_runs=kv_runs, seed=draw(st.integers(0, 99)))


def rotated(kv_runs: SpanShards, start: int, stop: int) -> SpanShards:
    """Return the same runs up to `start`. From there on the owner rotates by token."""
    before = [clip(runs, 0, start) for runs in kv_runs]
    rotation = Rotation(start=start, held=tuple(len(positions(runs)) for runs in before))
    return tuple((*runs, *rotation.runs(member, stop)) for member, runs in enumerate(before))


def spec_of(
    window: int | None = None,
    softcap: float | None = None,
    heads: tuple[int, int] = HEADS[0],
    chunk: int | None = None,
    *,
    has_sinks: bool = False,
) -> AttnSpec:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 16, "scale": 0.25}
    return AttnSpec(**sizes, window=window, softcap=softcap, chunk=chunk, has_sinks=has_sinks)


@st.composite
def cases(draw: st.DrawFn, *, in_order: bool) -> Case:
    hosts = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    limit, softcap = draw(st.integers(1, 130)), draw(st.sampled_from((None, None, 5.0)))
    window, chunk = draw(st.sampled_from(((None, None), (limit, None), (None, limit))))
    batch = draw(st.lists(requests(len(hosts), in_order=in_order), min_size=1, max_size=4))
    heads, has_sinks = draw(st.sampled_from(HEADS)), draw(st.booleans())
    spec = spec_of(window, softcap, heads, chunk, has_sinks=has_sinks)
    return Case(hosts=tuple(hosts), batch=tuple(batch), spec=spec)


def exchange(
    name: str, case: Case, faults: Callable[[int, Transport], FaultyTransport] | None = None
) -> tuple[list[list[Tensor]], Counter[Link], int]:
    """Return the outputs of every member, the payload bytes sent by all, and the number of unreceived messages."""
    sent: list[Counter[tuple[str, Link]]] = [Counter() for _ in case.hosts]
    wires = Wires()

    def member(rank: int, transport: Transport) -> list[Tensor]:
        group = Group(
            transport,
            range(case.size),
            rank,
            hosts=case.hosts,
            name="x",
            tags=range(7, 7 + hidden_hops(case.size)),
            sent=sent[rank],
        )
        return outputs(name, group, case.batch, case.spec)

    found = run_members(case.size, member, wires=wires, faults=faults)
    for output in found:
        if isinstance(output, Exception):
            raise output
    links: Counter[Link] = Counter()
    for counter in sent:
        for (_, link), num_bytes in counter.items():
            links[link] += num_bytes
    return found, links, wires.left()


def assert_attention(outputs: list[list[Tensor]], case: Case) -> None:
    for member, member_outputs in enumerate(outputs):
        for output, request in zip(member_outputs, case.batch, strict=True):
            torch.testing.assert_close(output.double(), request.wanted(member, case.spec), atol=1e-5, rtol=0)


def seen(request: Request, member: int, spec: AttnSpec, asker: int | None = None, *, cached: bool = False) -> int:
    """Count the keys of a member, or only `cached` ones, that some query of `asker`, or of any, may still see."""
    span = sorted(position for runs in request.q_runs for position in positions(runs))
    queries = span if asker is None else positions(request.q_runs[asker])
    if not queries:
        return 0
    return sum(
        (spec.window is None or min(queries) - p < spec.window)
        and (spec.chunk is None or p // spec.chunk >= min(queries) // spec.chunk)
        and (not cached or p < span[0])
        for p in positions(request.kv_runs[member])
    )


def pairs(case: Case) -> list[tuple[Request, int, int]]:
    """Each request with each two members."""
    return [(r, a, b) for r in case.batch for a, b in itertools.permutations(range(case.size), 2)]


def bytes_of_all_keys(case: Case) -> int:
    """Each member's keys go to every other: around the ring, or gathered."""
    return sum(seen(request, holder, case.spec) for request, holder, _ in pairs(case)) * case.token_bytes


def bytes_of_ring_q(case: Case) -> int:
    asked = [(r, asker) for r, asker, holder in pairs(case) if seen(r, holder, case.spec)]
    visits = sum(len(positions(request.q_runs[asker])) for request, asker in asked)
    return visits * case.spec.num_heads * (2 * case.spec.head_dim + 1) * 4


def bytes_of_alltoall(case: Case) -> int:
    shares = spread_heads(case.spec.num_heads, case.spec.num_kv_heads, case.size)
    vectors = sum(
        2 * len(shares[other].heads) * len(positions(request.q_runs[member]))
        + 2 * len(shares[other].kv_heads) * seen(request, member, case.spec)
        for request, member, other in pairs(case)
    )
    return vectors * case.spec.head_dim * 4


def bytes_of_chain(case: Case) -> int:
    new = sum(
        len(positions(runs)) * (case.size - 1 - member)
        for request in case.batch
        for member, runs in enumerate(request.q_runs)
    )
    cached = sum(seen(request, holder, case.spec, asker, cached=True) for request, holder, asker in pairs(case))
    return (new + cached) * case.token_bytes


def bytes_of_gather_hidden(case: Case) -> int:
    """Hidden states are as wide as queries, keys and values together here, and outputs as wide as queries."""
    spec = case.spec
    shares = split_heads(spec.num_heads, spec.num_kv_heads, case.size)
    makers = [min(m for m, share in enumerate(shares) if head in share.kv_heads) for head in range(spec.num_kv_heads)]
    vectors = 0
    for request, member, other in pairs(case):
        num_tokens = len(positions(request.q_runs[member]))
        vectors += num_tokens * (2 * spec.num_heads + 2 * spec.num_kv_heads)  # to the other, and from it
        vectors += num_tokens * 2 * makers.count(other)
        vectors += 2 * len(shares[other].kv_heads) * seen(request, member, spec, cached=True)
    return vectors * spec.head_dim * 4


FORMULAS: dict[str, Callable[[Case], int]] = {
    "ring_kv": bytes_of_all_keys,
    "ring_q": bytes_of_ring_q,
    "gather_kv": bytes_of_all_keys,
    "gather_kv, dense": bytes_of_all_keys,
    "alltoall": bytes_of_alltoall,
    "gather_hidden": bytes_of_gather_hidden,
    "gather_hidden, x4": bytes_of_gather_hidden,
    "chain": bytes_of_chain,
}


@ALL
@LAW
@given(data=st.data())
def test_exact_and_to_the_byte(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(in_order=EXCHANGES[name].traits.in_order))
    found, sent, left = exchange(name, case)
    assert_attention(found, case)
    assert sent.total() == FORMULAS[name](case)
    assert left == 0
    if name.startswith("gather_kv"):  # each byte goes to every other host once
        num_hosts = len(set(case.hosts))
        assert sent["other_host"] * (case.size - 1) == sent.total() * (num_hosts - 1)


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_chain_sends_half_of_the_bytes_of_gather_kv(num_members: int) -> None:
    """With even partitions and nothing cached, as the paper has it (equations 5 and 7)."""
    runs = shard_span("contiguous", 0, 24 * num_members, num_members)
    case = Case(hosts=(0,) * num_members, batch=(Request(q_runs=runs, kv_runs=runs, seed=0),), spec=spec_of())
    halves = exchange("chain", case)[1].total()
    assert exchange("gather_kv", case)[1].total() == 2 * halves
    assert halves == (num_members - 1) * 24 * num_members // 2 * case.token_bytes


def test_chain_gives_the_last_member_all_new_keys_and_may_start_layers_ahead() -> None:
    """Every member begins to receive the second layer before it computes the first."""
    q_runs, cached = shard_span("contiguous", 20, 77, 3), shard_span("zigzag", 0, 20, 3)
    kv_runs = tuple(coalesce([*old, *new]) for old, new in zip(cached, q_runs, strict=True))
    layers = [Request(q_runs=q_runs, kv_runs=kv_runs, seed=seed) for seed in range(2)]
    spec = spec_of(window=30)

    def member(rank: int, transport: Transport) -> list[tuple[Tensor, Tensor]]:
        groups = [Group(transport, range(3), rank, tags=range(10 * layer, 10 * layer + 10)) for layer in range(2)]
        calls = [member_call(CHAIN, group, [request], spec) for group, request in zip(groups, layers, strict=True)]
        started = [chain_start(call.group, call.parts, call.kv, spec) for call in calls]
        found = []
        for layer, call in enumerate(calls):
            found += chain(replace(call, started=started[layer]))
            torch.testing.assert_close(call.out.double(), layers[layer].wanted(rank, spec), atol=1e-5, rtol=0)
        return found

    faults = lambda rank, inner: FaultyTransport(inner, seed=rank, max_delay_s=0.01)  # noqa: E731
    for rank, result in enumerate(run_members(3, member, faults=faults)):
        assert not isinstance(result, Exception), result
        new = slice(20, q_runs[rank][-1].stop)
        for request, (k, v) in zip(layers, result, strict=True):
            _, keys, values = request.tensors(spec)
            assert torch.equal(k, keys[:, new])
            assert torch.equal(v, values[:, new])


def test_dense_masks_whole_blocks_of_keys() -> None:
    """More keys than a kernel takes at a time, all of them hidden from the first queries."""
    runs = shard_span("zigzag", 0, 1500, 2)
    for spec in (spec_of(), spec_of(window=40), spec_of(softcap=5.0), spec_of(has_sinks=True)):
        case = Case(hosts=(0, 1), batch=(Request(q_runs=runs[::-1], kv_runs=runs, seed=0),), spec=spec)
        assert_attention(exchange("gather_kv, dense", case)[0], case)


@LAW
@given(
    st.lists(requests(1), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 130)),
    st.sampled_from((None, 5.0)),
    st.booleans(),
    st.integers(0, 99),
)
def test_local(batch: list[Request], window: int | None, softcap: float | None, has_sinks: bool, seed: int) -> None:
    spec = spec_of(window, softcap, has_sinks=has_sinks)
    call = member_call(LOCAL, ALONE, batch, spec, block_size=BLOCK, seed=seed)
    out = attend(call)
    outputs = [[out[:, part.rows] for part in call.parts]]
    assert_attention(outputs, Case(hosts=(0,), batch=tuple(batch), spec=spec))


@ALL
def test_no_message_without_payload(name: str) -> None:
    """One member has all keys and queries, so its peers send nothing and wait for nothing."""

    class Counting(FaultyTransport):
        def start(self, sends, receives, tag):
            started.extend([*sends, *receives])
            return super().start(sends, receives, tag)

    started: list[object] = []
    everything = (Run(0, 20),)
    alone = Request(q_runs=((), (), everything), kv_runs=((), (), everything), seed=0)
    case = Case(hosts=(0, 0, 0), batch=(alone,), spec=spec_of())
    found, sent, _ = exchange(name, case, lambda _, transport: Counting(transport))
    assert_attention(found, case)
    quiet = name in ("ring_q", "chain")  # other exchanges send keys to members without queries, which have heads
    assert (sent.total() == 0 and not started) == quiet
    nobody = replace(case, batch=(replace(alone, q_runs=((), (), ())),))
    started.clear()
    assert exchange(name, nobody, lambda _, transport: Counting(transport))[1].total() == len(started) == 0
