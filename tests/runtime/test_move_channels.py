"""The computing thread raises the errors of the threads of a channel."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from longspan.attn.comm import CommError, Pending
from longspan.attn.spec import AttnSpec
from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.steps import MoveKV
from longspan.runtime.block_messages import BlockMessages
from longspan.runtime.block_records import kv_record
from longspan.runtime.messages import Sent
from longspan.runtime.moves import Moves
from longspan.runtime.pool import KvPool

MOVE = MoveKV(number=1, request_id=1, copies=((BlockRef(0, 3), BlockRef(1, 2)),))
NO_MEMORY = torch.OutOfMemoryError("out of memory")


class Failing:
    """A transport and its pending calls, of which one of two methods raises."""

    tagged = True
    sums = None

    def __init__(self, *, start: Exception | None = None, wait: Exception | None = None) -> None:
        self._start, self._wait = start, wait

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int) -> Pending:
        assert bool(sends) != bool(receives) and tag
        if self._start is not None:
            raise self._start
        return self

    def wait(self) -> None:
        assert self._wait is not None
        raise self._wait

    def complete_sends(self) -> None:
        pass


def moves_of(rank: int, transport: Failing) -> Moves:
    """Of one of two instances."""
    specs = [AttnSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, window=None, softcap=None)] * 2
    record = kv_record(specs, 4, torch.float32)
    pool = KvPool(record, num_blocks=4, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    messages = BlockMessages(pool, Cluster.of("2").with_layers(len(specs), 0.0), rank)
    return Moves(messages, transport)


def await_wakeup(moves: Moves) -> None:
    waiting = select.poll()  # and not select(), whose descriptors end at 1,023
    waiting.register(moves.wakeup, select.POLLIN)
    assert waiting.poll(60_000), "the computing thread is not woken"


def take_all(moves: Moves) -> None:
    """Return the reports of a move by the computing thread and by its channel."""
    for _ in range(2):
        await_wakeup(moves)
        moves.take_arrived()


@pytest.mark.parametrize("rank", [0, 1], ids=["source", "target"])
@pytest.mark.parametrize(
    ("transport", "error"),
    [
        (Failing(start=NO_MEMORY), torch.OutOfMemoryError),
        (Failing(start=CommError("a peer is gone")), CommError),
        (Failing(wait=NO_MEMORY), torch.OutOfMemoryError),
        (Failing(wait=CommError("a peer is gone")), CommError),
    ],
    ids=["no memory to begin", "no peer to begin with", "no memory to end", "no peer to end with"],
)
def test_any_error_of_a_channel_is_raised(rank: int, transport: Failing, error: type[Exception]) -> None:
    moves = moves_of(rank, transport)
    if rank == 0:
        list(moves.send([MOVE]))
    else:
        moves.expect([MOVE])
    with pytest.raises(error):
        take_all(moves)


class Slow(Failing):
    """Its calls end when `leave` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = threading.Event()

    def wait(self) -> None:
        self.leave.wait()


def test_a_send_is_reported_when_it_has_left() -> None:
    """Not when it was begun."""
    transport = Slow()
    moves = moves_of(0, transport)
    [begun] = moves.send([MOVE])
    assert begun.bytes_sent == {("kv_transfer", "same_host"): 2 * 2 * 2 * 4 * 8 * 4}
    time.sleep(0.1)
    assert moves.take_arrived() == [] and not moves.is_idle
    transport.leave.set()
    await_wakeup(moves)
    assert moves.take_arrived() == [Sent(rank=0, number=MOVE.number)] and moves.is_idle
