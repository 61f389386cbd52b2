"""Forwards whose parts differ in group and exchange, through the KV pools of three ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from cluster import rank_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchanges import LAW, spec_of
from torch import Tensor
from transports import Wires, run_members

from longspan.attn.backends import backend_of
from longspan.attn.check import random_qkv, random_sinks, reference
from longspan.attn.comm import NO_PEERS, Calls, Pending, Transport
from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.exchange import CHAIN, LOCAL, RING_KV, RING_Q
from longspan.core.layouts import shard_span
from longspan.core.runs import positions
from longspan.core.steps import Forward, Free, Part, Sample, Sampling
from longspan.runtime import timing
from longspan.runtime.attention import StepAttention
from longspan.runtime.batch import pack
from longspan.runtime.block_records import kv_record
from longspan.runtime.pool import KvPool
from longspan.runtime.step_comm import StepComm, StepLanes
from longspan.runtime.timing import Stopwatch, TimedTransport

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 8
CLUSTER = Cluster.of("3")
CPU = torch.device("cpu")
BACKEND = backend_of(CPU)


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
            sharded = shard_span(layout, start, stop, len(chat.group), align=BLOCK, head=head)
            for block in range(first, -(-stop // BLOCK)):
                member = next(m for m, runs in enumerate(sharded) if block * BLOCK in positions(runs))
                table.append(BlockRef(chat.group[member], blocks[chat.group[member]].pop()))
            kind = LOCAL if len(chat.group) == 1 else RING_Q if stop - start == 1 else RING_KV
            parts.append(
                Part(
                    request_id=index,
                    start=start,
                    stop=stop,
                    tokens=tuple(range(start, stop)),
                    group=chat.group,
                    runs=sharded,
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
    """In layers without a limit, with a window, with sinks and with chunks."""
    specs = [spec_of(), spec_of(window=20), spec_of(has_sinks=True), spec_of(chunk=14)]
    sinks = {2: random_sinks(specs[2])}
    tensors = [
        [random_qkv(spec, chat.stops[-1], chat.stops[-1], torch.float32, chat.seed + layer) for chat in chats]
        for layer, spec in enumerate(specs)
    ]
    forwards = steps_of(chats, draw)
    found: dict[tuple[int, int, int], Tensor] = {}

    def rank(instance: int, transport: Transport) -> None:
        pool = KvPool(
            kv_record(specs, BLOCK, torch.float32), num_blocks=64, block_size=BLOCK, dtype=torch.float32, device=CPU
        )
        tables = rank_requests()
        for forward in forwards:
            packed = pack(forward, tables, instance=instance, block_size=BLOCK, device=CPU, backend=BACKEND)
            lanes = StepLanes.one(transport)
            comm = StepComm(lanes, forward.number, cluster=CLUSTER, rank=instance, num_layers=len(specs))
            watch = Stopwatch(enabled=False, device=CPU)
            attention = StepAttention(packed, comm, pool=pool, specs=specs, sinks=sinks, watch=watch)
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

    for result in run_members(3, rank, wires=Wires(timeout_s=60)):
        if isinstance(result, Exception):
            raise result
    for layer, index in itertools.product(range(len(specs)), range(len(chats))):
        q, k, v = tensors[layer][index]
        every = range(chats[index].stops[-1])
        out = torch.stack([found[layer, index, position] for position in every], dim=1)
        torch.testing.assert_close(out.double(), reference(q, every, k, v, every, specs[layer])[0], atol=1e-5, rtol=0)


class Counted:
    """Counts the receives that have started. It may claim to match no tags."""

    sums = None

    def __init__(self, inner: Transport, *, tagged: bool) -> None:
        self._inner, self.tagged, self.num_receives = inner, tagged, 0

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        self.num_receives += len(receives)
        return self._inner.start(sends, receives, tag)

    def complete_sends(self) -> None:
        self._inner.complete_sends()


@pytest.mark.parametrize(("tagged", "counts"), [(True, [2, 3, 4, 4, 4]), (False, [0, 1, 2, 3, 4])])
def test_a_chain_receives_a_layer_ahead_if_messages_have_tags(tagged: bool, counts: list[int]) -> None:
    """A message waits until its receiver has started to receive. So this hides it behind a whole layer."""
    specs = [spec_of()] * 4
    q, k, v = random_qkv(specs[0], 32, 32, torch.float32, 0)
    part = Part(
        request_id=0,
        start=0,
        stop=32,
        tokens=tuple(range(32)),
        group=(0, 1),
        runs=shard_span("contiguous", 0, 32, 2, align=BLOCK, head=0),
        exchange=CHAIN,
        first_block=0,
        blocks=tuple(BlockRef(1, block) for block in range(4)),
        sample=None,
        sampling=Sampling(seed=0),
    )
    forward = Forward(number=0, parts=(part,))
    started: list[int] = []

    def rank(instance: int, transport: Transport) -> None:
        pool = KvPool(
            kv_record(specs, BLOCK, torch.float32), num_blocks=8, block_size=BLOCK, dtype=torch.float32, device=CPU
        )
        packed = pack(forward, rank_requests(), instance=instance, block_size=BLOCK, device=CPU, backend=BACKEND)
        counted = Counted(transport, tagged=tagged)
        comm = StepComm(StepLanes.one(counted), 0, cluster=CLUSTER, rank=instance, num_layers=len(specs))
        attention = StepAttention(packed, comm, pool=pool, specs=specs, watch=Stopwatch(enabled=False, device=CPU))
        own = positions(part.runs[instance])
        if instance == 1:
            started.append(counted.num_receives)
        for layer in range(len(specs)):
            attention(layer, q[:, own], k[:, own], v[:, own])
            if instance == 1:
                started.append(counted.num_receives)

    for result in run_members(2, rank, wires=Wires(timeout_s=60)):
        if isinstance(result, Exception):
            raise result
    assert started == counts


# ---------------------------------------------------------------- steps that are computed as a whole


def part_of(number: int, stop: int = 6, *, group: tuple[int, ...] = (0,), is_sampled: bool = True) -> Part:
    """Tokens of a request from position 5 on, whose block is on the first instance of the group."""
    return Part(
        request_id=number,
        start=5,
        stop=stop,
        tokens=tuple(range(5, stop)),
        group=group,
        runs=shard_span("single", 5, stop, len(group), head=0),
        exchange=LOCAL if len(group) == 1 else RING_Q,
        first_block=0,
        blocks=(BlockRef(group[0], number),),
        sample=Sample(instance=group[0], position=stop) if is_sampled else None,
        sampling=Sampling(seed=0),
    )


@pytest.mark.parametrize(
    ("parts", "record_times", "moves", "is_whole"),
    [
        ((part_of(0), part_of(1)), False, False, True),
        ((part_of(0), part_of(1, is_sampled=False)), False, False, False),
        ((part_of(0), part_of(1, 7)), False, False, False),
        ((part_of(0), part_of(1, group=(0, 1))), False, False, False),
        ((part_of(0),), True, False, False),
        ((part_of(0),), False, True, False),
    ],
    ids=["decodes", "one is not sampled", "two tokens", "an exchange", "times are recorded", "KV moves"],
)
def test_which_steps_are_computed_as_a_whole(
    parts: tuple[Part, ...], *, record_times: bool, moves: bool, is_whole: bool
) -> None:
    specs = [spec_of(), spec_of(window=4)]
    pool = KvPool(
        kv_record(specs, BLOCK, torch.float32), num_blocks=8, block_size=BLOCK, dtype=torch.float32, device=CPU
    )
    forward = Forward(number=0, parts=parts)
    packed = pack(forward, rank_requests(), instance=0, block_size=BLOCK, device=CPU, backend=BACKEND)
    comm = StepComm(StepLanes.one(NO_PEERS), 0, cluster=CLUSTER, rank=0, num_layers=len(specs))
    attention = StepAttention(
        packed,
        comm,
        pool=pool,
        specs=specs,
        watch=Stopwatch(enabled=record_times, device=CPU),
        moves=SimpleNamespace() if moves else None,  # type: ignore[arg-type]  # not used
    )
    found = attention.single_tokens()
    assert (found is not None and found.plans is not None) == is_whole
    if is_whole:
        assert found is not None and found.plans is not None
        assert found.kv is pool.kv and found.blocks.tolist() == [0, 1] and found.offsets.tolist() == [5, 5]
        assert [plan.items.low.tolist() for plan in found.plans] == [[0, 0], [2, 2]]  # the second has a window


def test_a_step_is_on_the_host_until_it_writes() -> None:
    """Then its slots are copied once for all layers. The device has no memory."""
    device, written = torch.device("meta"), []
    forward = Forward(number=0, parts=(part_of(0), part_of(1)))
    packed = pack(forward, rank_requests(), instance=0, block_size=BLOCK, device=device, backend=BACKEND)
    slots = packed.slots
    row = packed.tokens, packed.positions, packed.rope_lengths, packed.keep, slots.rows, slots.blocks, slots.offsets
    assert {one.device.type for one in row} == {"cpu"}
    pool: Any = SimpleNamespace(write=lambda _layer, *where_and_what: written.append(where_and_what))
    k, v = torch.empty(2, 1, 2, 4, device=device)
    for layer in range(2):
        slots.write(pool, layer, k, v)
    (blocks, offsets, *_), second = written
    assert blocks.device == offsets.device == device
    assert blocks is second[0] and offsets is second[1]


# ---------------------------------------------------------------- where the time goes


class Ticking:
    """A clock that moves when told to, in place of `time`, and that of a thread, which stops while it has no core."""

    def __init__(self) -> None:
        self.now_s, self.core_s = 100.0, 7.0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.core_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.core_s += seconds

    def idle(self, seconds: float) -> None:
        self.now_s += seconds

    def fail_after(self, seconds: float) -> NoReturn:
        self.work(seconds)
        raise KeyError


class SlowTransport:
    """Takes 1 s to start, 2 s to wait for, 4 s to complete, and 512 s for a sum. Sends nothing."""

    tagged = True

    def __init__(self, clock: Ticking) -> None:
        self._clock = clock

    def sums(self, _: object, tensor: Tensor) -> Tensor:
        self._clock.idle(512.0)
        return tensor

    def start(self, *_: object) -> SlowTransport:
        self._clock.idle(1.0)
        return self

    def wait(self) -> None:
        self._clock.idle(2.0)

    def complete_sends(self) -> None:
        self._clock.idle(4.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    found = Ticking()
    monkeypatch.setattr(timing, "time", found)
    return found


def test_an_inner_category_stops_the_clock_of_the_outer_one(clock: Ticking) -> None:
    watch = Stopwatch(enabled=True, device=CPU)
    messages = TimedTransport(SlowTransport(clock), watch)
    clock.work(0.5)
    watch.switch("other")
    clock.work(16.0)
    with watch.during("attention"):
        clock.work(8.0)
        messages.start([], [], 0).wait()
        clock.idle(256.0)
        clock.work(8.0)
    with pytest.raises(KeyError), watch.during("attention"):
        clock.fail_after(32.0)
    messages.complete_sends()
    assert messages.sums is not None and messages.sums((0, 1), torch.ones(2)).sum() == 2
    clock.work(64.0)
    watch.switch("controller")
    clock.idle(128.0)
    assert watch.seconds() == {"attention": 48.0, "linear": 0.0, "other": 80.0, "messages": 519.0, "controller": 0.5}, (
        "and no time of calls in flight"
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_linear_layers_count_for_themselves_if_anything_does(enabled: bool, clock: Ticking) -> None:
    class Slow(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            clock.work(3.0)
            return super().forward(x)

    model = torch.nn.Sequential(Slow(2, 2), torch.nn.Tanh(), Slow(2, 2))
    watch = Stopwatch(enabled=enabled, device=CPU)
    watch.watch_linear(model)
    watch.switch("other")
    clock.work(1.0)
    model(torch.zeros(1, 2))
    clock.work(1.0)
    watch.switch("controller")
    found = watch.seconds()
    assert found == ({**dict.fromkeys(found, 0.0), "linear": 6.0, "other": 2.0} if enabled else {})
