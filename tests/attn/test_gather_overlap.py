"""`gather_hidden` gathers, attends and scatters different micro-partitions at the same time, on every member.

No clock decides. Each message is held until the computation that it is to overlap has begun. That computation ends only
when the message has arrived. An exchange in another order never ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transports import run_members

from longspan.attn.backends import Partial
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.check import EXCHANGES, Request, attend, member_call
from longspan.attn.comm import Group, Pending, Transport, gather_hops, hidden_hops
from longspan.attn.member import MemberParts
from longspan.attn.spec import AttnSpec
from longspan.core.layouts import shard_span
from longspan.core.runs import Layout, positions

pytestmark = pytest.mark.usefixtures("one_thread")
PIECES = 4
NAME = f"gather_hidden, x{PIECES}"
TIMEOUT_S = 10.0
SPEC = AttnSpec(num_heads=4, num_kv_heads=4, head_dim=16, scale=0.25, window=None, softcap=None)
Events = dict[tuple[str, int, int], threading.Event]
"""Events by kind, member and micro-partition."""


def await_event(event: threading.Event, words: str) -> None:
    assert event.wait(TIMEOUT_S), words


class HeldTransport:
    """Holds each gathered or summed micro-partition until its receiver attends another one.

    Messages of the gather of piece m arrive during the attention of piece m - 1, those of the sum during piece m + 1.
    """

    def __init__(self, inner: Transport, rank: int, size: int, events: Events) -> None:
        self.tagged, self.sums = inner.tagged, inner.sums
        self._inner, self._rank, self._size, self._events = inner, rank, size, events

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int) -> Pending:
        pending = self._inner.start([], receives, tag)
        for peer, buffer in sends:
            threading.Thread(target=self._deliver, args=(peer, buffer, tag), daemon=True).start()
        return pending

    def complete_sends(self) -> None: ...

    def _deliver(self, peer: int, buffer: Tensor, tag: int) -> None:
        number, hop = divmod(tag - 1, gather_hops(self._size) + 3)
        is_gather = tag > 0 and hop < gather_hops(self._size)
        is_sum = hop > gather_hops(self._size)
        during = number - 1 if is_gather else number + 1
        is_held = (is_gather or is_sum) and 0 <= during < PIECES
        if is_held and not self._events["begun", peer, during].wait(TIMEOUT_S):
            return  # the receiver computes nothing meanwhile, and never gets the message
        self._inner.start([(peer, buffer)], [], tag)
        if is_held:
            self._events["gathered" if is_gather else "summed", peer, number].set()


class WatchedBackend(TorchCpu):
    """Ends the attention of a micro-partition when the messages that it overlaps have arrived at its member."""

    def __init__(self, rank: int, events: Events, is_received: Callable[[str, int], bool]) -> None:
        super().__init__()
        self._rank, self._events, self._number, self._is_received = rank, events, 0, is_received

    def attend(self, *arguments, **options) -> Partial:
        number, self._number = self._number, self._number + 1
        self._events["begun", self._rank, number].set()
        partial = super().attend(*arguments, **options)
        for kind, other in (("gathered", number + 1), ("summed", number - 1)):
            if 0 <= other < PIECES and self._is_received(kind, other):
                await_event(self._events[kind, self._rank, other], f"{self._rank} attends {number}, {other} not {kind}")
        return partial


@pytest.mark.parametrize(
    ("hosts", "layout"),
    [
        ((0, 0), "zigzag"),
        ((0, 0), "contiguous"),
        ((0, 1), "striped"),
        ((0, 0, 0), "zigzag"),
        ((0, 0, 0, 0), "striped"),
        ((0, 0, 1, 1), "striped"),
    ],
)
def test_messages_of_a_micro_partition_overlap_the_attention_of_another(hosts: tuple[int, ...], layout: Layout) -> None:
    size = len(hosts)
    runs = shard_span(layout, 0, 24 * PIECES, size, align=4)
    request = Request(q_runs=runs, kv_runs=runs, seed=0)
    kinds = ("begun", "gathered", "summed")
    events = {
        (kind, rank, number): threading.Event() for kind in kinds for rank in range(size) for number in range(PIECES)
    }

    def tokens(rank: int, number: int) -> int:
        """Count the tokens of a member in a micro-partition."""
        return sum(24 * number <= position < 24 * (number + 1) for position in positions(runs[rank]))

    def member(rank: int, transport: Transport) -> Tensor:
        def is_received(kind: str, number: int) -> bool:
            if kind == "summed":
                return tokens(rank, number) > 0
            return tokens(rank, number) < 24

        held = HeldTransport(transport, rank, size, events)
        group = Group(held, range(size), rank, tags=range(hidden_hops(size)), hosts=hosts)
        call = member_call(EXCHANGES[NAME], group, [request], SPEC)
        watched = MemberParts([*call.parts], WatchedBackend(rank, events, is_received))
        return attend(replace(call, parts=watched))

    for rank, result in enumerate(run_members(size, member)):
        assert not isinstance(result, Exception), result
        torch.testing.assert_close(result.double(), request.wanted(rank, SPEC), atol=1e-5, rtol=0)
    overlapped = [key for key, event in events.items() if event.is_set() and key[0] != "begun"]
    for rank in range(size):
        found = {kind for kind, at, _ in overlapped if at == rank}
        assert found == {"gathered", "summed"}, f"member {rank}"
