"""Every exchange gives every member what one device would compute, and sends just the bytes that arithmetic says.

Members are threads with mailboxes; each holds its keys in a KV pool with scattered blocks.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from attention import random_qkv, reference
from cluster import rank_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transports import FaultyTransport, Wires, run_members

from longspan.attn.comm import Group, Transport
from longspan.attn.local import local
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.ring_kv import ring_kv
from longspan.attn.ring_q import ring_q
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Deal, Run, coalesce, deal
from longspan.core.steps import BlockRef, Forward, Free, Link, Part, Sampling
from longspan.kv.pool import KvPool
from longspan.runtime.batch import pack
from longspan.runtime.exchange import StepAttention, StepComm
from longspan.runtime.timing import Stopwatch

pytestmark = pytest.mark.usefixtures("one_thread")
LAW = settings(derandomize=True, deadline=None, max_examples=60)
BLOCK = 8
CPU = torch.device("cpu")
Exchange = Callable[[Group, MemberParts, Tensor, PagedKv, AttnSpec, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A span of a request: who computes its queries, and who holds which keys of everything up to its end."""

    q_runs: Deal
    kv_runs: Deal
    seed: int

    @property
    def num_tokens(self) -> int:
        return max(run.stop for runs in self.kv_runs for run in runs)

    def tensors(self, spec: AttnSpec) -> list[Tensor]:
        return random_qkv(spec, self.num_tokens, self.num_tokens, torch.float32, self.seed)

    def wanted(self, member: int, spec: AttnSpec) -> Tensor:
        q, k, v = self.tensors(spec)
        rows = positions(self.q_runs[member])
        return reference(q[:, rows], rows, k, v, range(self.num_tokens), spec)[0]


def positions(runs: Sequence[Run]) -> list[int]:
    return [position for run in runs for position in run.positions]


def member_of(
    batch: Sequence[Request], member: int, spec: AttnSpec, seed: int = 0
) -> tuple[MemberParts, Tensor, PagedKv]:
    """What one member has of some requests: keys in random blocks of a pool, where other slots hold large numbers."""
    draw = random.Random(seed)
    num_blocks = [-(-len(positions(request.kv_runs[member])) // BLOCK) for request in batch]
    pool = KvPool([spec], num_blocks=sum(num_blocks) + 3, block_size=BLOCK, dtype=torch.float32, device=CPU)
    pool.layer(0).keys.fill_(1e4)
    pool.layer(0).values.fill_(1e4)
    free = list(range(sum(num_blocks) + 3))
    if draw.random() < 0.5:
        draw.shuffle(free)
    parts, queries = [], []
    for request, number in zip(batch, num_blocks, strict=True):
        q, k, v = request.tensors(spec)
        held, asked = positions(request.kv_runs[member]), positions(request.q_runs[member])
        blocks, free = free[:number], free[number:]
        token = torch.arange(len(held))
        pool.write(0, torch.tensor(blocks, dtype=torch.int64)[token // BLOCK], token % BLOCK, k[:, held], v[:, held])
        first = sum(rows.shape[1] for rows in queries)
        queries.append(q[:, asked])
        rows = slice(first, first + len(asked))
        parts.append(MemberPart(rows=rows, q_runs=request.q_runs, kv_runs=request.kv_runs, blocks=blocks))
    return MemberParts(parts), torch.cat(queries, dim=1), pool.layer(0)


def outputs(function: Exchange, group: Group, batch: Sequence[Request], spec: AttnSpec) -> list[Tensor]:
    """One output per request, of one member."""
    parts, q, kv = member_of(batch, group.rank, spec, seed=len(batch))
    out = torch.full_like(q, torch.nan)
    function(group, parts, q, kv, spec, out)
    return [out[:, part.rows] for part in parts]


@st.composite
def deals(draw: st.DrawFn, start: int, stop: int, num_members: int) -> Deal:
    """Zigzag, all to one member, or cut anywhere and dealt anyhow."""
    layout = draw(st.sampled_from(("zigzag", "single", "random", "random")))
    if layout == "zigzag":
        return deal("zigzag", start, stop, num_members)
    if layout == "single":
        return deal("single", start, stop, num_members, head=draw(st.integers(0, num_members - 1)))
    bounds = sorted({start, stop, *draw(st.lists(st.integers(start, stop), max_size=6))})
    runs: list[list[Run]] = [[] for _ in range(num_members)]
    for a, b in itertools.pairwise(bounds):
        runs[draw(st.integers(0, num_members - 1))].append(Run(a, b))
    return tuple(coalesce(member_runs) for member_runs in runs)


@st.composite
def requests(draw: st.DrawFn, num_members: int) -> Request:
    start = draw(st.one_of(st.just(0), st.integers(0, 120)))
    stop = start + draw(st.one_of(st.just(1), st.integers(1, 90)))
    q_runs, cached = draw(deals(start, stop, num_members)), draw(deals(0, start, num_members))
    new = draw(st.one_of(st.just(q_runs), deals(start, stop, num_members)))
    kv_runs = tuple(coalesce([*old, *more]) for old, more in zip(cached, new, strict=True))
    return Request(q_runs=q_runs, kv_runs=kv_runs, seed=draw(st.integers(0, 99)))


def spec_of(window: int | None = None, softcap: float | None = None) -> AttnSpec:
    return AttnSpec(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, window=window, softcap=softcap)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[Request], AttnSpec]:
    num_members = draw(st.integers(1, 5))
    window, softcap = draw(st.one_of(st.none(), st.integers(1, 130))), draw(st.sampled_from((None, None, 5.0)))
    return num_members, draw(st.lists(requests(num_members), min_size=1, max_size=4)), spec_of(window, softcap)


def exchange(
    function: Exchange,
    num_members: int,
    batch: Sequence[Request],
    spec: AttnSpec,
    faults: Callable[[int, Transport], FaultyTransport] | None = None,
) -> tuple[list[list[Tensor]], int, int]:
    """Every member's outputs, the payload bytes sent by all, and the number of messages that nobody received."""
    sent: Counter[tuple[str, Link]] = Counter()
    wires = Wires()

    def member(rank: int, transport: Transport) -> list[Tensor]:
        group = Group(transport, range(num_members), rank, name="x", first_tag=7, sent=sent)
        return outputs(function, group, batch, spec)

    found = run_members(num_members, member, wires=wires, faults=faults)
    for output in found:
        if isinstance(output, Exception):
            raise output
    return found, sent["x", "same_host"], wires.left()


def assert_attention(outputs: list[list[Tensor]], batch: Sequence[Request], spec: AttnSpec) -> None:
    for member, member_outputs in enumerate(outputs):
        for output, request in zip(member_outputs, batch, strict=True):
            torch.testing.assert_close(output.double(), request.wanted(member, spec), atol=1e-5, rtol=0)


def still_seen(request: Request, member: int, spec: AttnSpec) -> int:
    """How many of the member's keys the first query of the span, and so any, may still see."""
    first = min(position for runs in request.q_runs for position in positions(runs))
    return sum(spec.window is None or first - p < spec.window for p in positions(request.kv_runs[member]))


@LAW
@given(cases())
def test_ring_kv(case: tuple[int, list[Request], AttnSpec]) -> None:
    num_members, batch, spec = case
    found, sent, left = exchange(ring_kv, num_members, batch, spec)
    assert_attention(found, batch, spec)
    tokens = sum(still_seen(request, member, spec) for request in batch for member in range(num_members))
    assert sent == tokens * spec.num_kv_heads * spec.head_dim * 2 * 4 * (num_members - 1)
    assert left == 0


@LAW
@given(cases())
def test_ring_q(case: tuple[int, list[Request], AttnSpec]) -> None:
    num_members, batch, spec = case
    found, sent, left = exchange(ring_q, num_members, batch, spec)
    assert_attention(found, batch, spec)
    visits = sum(
        len(positions(request.q_runs[asker]))
        for request in batch
        for asker, holder in itertools.permutations(range(num_members), 2)
        if still_seen(request, holder, spec)
    )
    assert sent == visits * spec.num_heads * (2 * spec.head_dim + 1) * 4
    assert left == 0


@LAW
@given(
    st.lists(requests(1), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 130)),
    st.sampled_from((None, 5.0)),
    st.integers(0, 99),
)
def test_local(batch: list[Request], window: int | None, softcap: float | None, seed: int) -> None:
    spec = spec_of(window, softcap)
    parts, q, kv = member_of(batch, 0, spec, seed)
    out = torch.full_like(q, torch.nan)
    local(parts, q, kv, spec, out)
    assert_attention([[out[:, part.rows] for part in parts]], batch, spec)


@pytest.mark.parametrize("function", [ring_kv, ring_q])
def test_no_message_without_payload(function: Exchange) -> None:
    """One member has all keys and queries: the others have nothing to send, and nothing to wait for."""

    class Counting(FaultyTransport):
        def start(self, sends, receives, tag):
            started.extend([*sends, *receives])
            return super().start(sends, receives, tag)

    started: list[object] = []
    everything = (Run(0, 20),)
    alone = Request(q_runs=((), everything, ()), kv_runs=((), everything, ()), seed=0)
    found, sent, _ = exchange(function, 3, [alone], spec_of(), lambda _, transport: Counting(transport))
    assert_attention(found, [alone], spec_of())
    assert (sent == 0 and not started) == (function is ring_q)  # around the ring, keys visit those without queries too


@dataclass
class Chat:
    """A request of the steps below: its group, and a span per step."""

    group: tuple[int, ...]
    stops: tuple[int, ...]
    seed: int


def steps_of(chats: Sequence[Chat], draw: random.Random) -> list[Forward | Free]:
    """Three Forwards that mix parts of all kinds: first chunk, second chunk, one more token."""
    owned: list[list[BlockRef]] = [[] for _ in chats]
    blocks = [draw.sample(range(64), 64) for _ in range(3)]
    forwards = []
    for number in range(3):
        parts = []
        for index, chat in enumerate(chats):
            start, stop = (0, *chat.stops)[number : number + 2]
            first, table = len(owned[index]), owned[index]
            head = chat.group.index(table[-1].instance) if start % BLOCK else draw.randrange(len(chat.group))
            layout = "single" if stop - start == 1 or len(chat.group) == 1 else "zigzag"
            dealt = deal(layout, start, stop, len(chat.group), align=BLOCK, head=head)
            for block in range(first, -(-stop // BLOCK)):
                member = next(m for m, runs in enumerate(dealt) if block * BLOCK in positions(runs))
                table.append(BlockRef(chat.group[member], blocks[chat.group[member]].pop()))
            kind = "local" if len(chat.group) == 1 else "ring_q" if stop - start == 1 else "ring_kv"
            parts.append(
                Part(
                    request_id=index,
                    start=start,
                    stop=stop,
                    tokens=tuple(range(start, stop)),
                    group=chat.group,
                    runs=dealt,
                    exchange=kind,
                    first_block=first,
                    blocks=tuple(table[first:]),
                    sample=None,
                    sampling=Sampling(seed=0) if first == 0 else None,
                )
            )
        draw.shuffle(parts)
        forwards.append(Forward(number=number, parts=tuple(parts)))
    return forwards


@settings(LAW, max_examples=25)
@given(
    st.lists(
        st.builds(
            lambda group, first, second, seed: Chat(group, (first, first + second, first + second + 1), seed),
            st.sampled_from([g for n in (1, 2, 3) for g in itertools.permutations(range(3), n)]),
            st.integers(1, 60),
            st.integers(1, 40),
            st.integers(0, 99),
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_steps_of_mixed_groups(chats: list[Chat], draw: random.Random) -> None:
    """Forwards whose parts differ in group and exchange, through the pools of three ranks, in two layers."""
    specs = [spec_of(), spec_of(window=20)]
    tensors = [
        [random_qkv(spec, chat.stops[-1], chat.stops[-1], torch.float32, chat.seed + layer) for chat in chats]
        for layer, spec in enumerate(specs)
    ]
    forwards = steps_of(chats, draw)
    found: dict[tuple[int, int, int], Tensor] = {}

    def rank(instance: int, transport: Transport) -> None:
        pool = KvPool(specs, num_blocks=64, block_size=BLOCK, dtype=torch.float32, device=CPU)
        tables = rank_requests()
        for forward in forwards:
            packed = pack(forward, tables, instance=instance, block_size=BLOCK, device=CPU)
            comm = StepComm(transport, forward.number, rank=instance, hosts=(0, 0, 0), num_layers=len(specs))
            attention = StepAttention(packed, comm, pool=pool, specs=specs, watch=Stopwatch(enabled=False, device=CPU))
            if not len(packed.tokens):
                attention.without_tokens(torch.float32, CPU)
                continue
            owners = [
                (part.request_id, position)
                for part in forward.parts
                if instance in part.group
                for position in positions(part.runs[part.group.index(instance)])
            ]
            for layer in range(len(specs)):
                rows = [[tensors[layer][i][x][:, p] for i, p in owners] for x in range(3)]
                out = attention(layer, *(torch.stack(row, dim=1) for row in rows))
                found.update({(layer, *owner): out[:, row] for row, owner in enumerate(owners)})

    for result in run_members(3, rank, wires=Wires(timeout_s=5)):
        if isinstance(result, Exception):
            raise result
    for layer, index in itertools.product(range(len(specs)), range(len(chats))):
        q, k, v = tensors[layer][index]
        every = range(chats[index].stops[-1])
        out = torch.stack([found[layer, index, position] for position in every], dim=1)
        torch.testing.assert_close(out.double(), reference(q, every, k, v, every, specs[layer])[0], atol=1e-5, rtol=0)
